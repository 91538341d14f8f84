"""KV blocks between GPUs: device -> store -> device through the store's page-locked slab, and
device -> device by NIXL, against torch's own copies in the same run; and how much of it hides
behind the prefill's chunks.

A real store process and two GPU workers (on two GPUs, or both on one) in processes of their own.
The parts of a transfer are measured one by one: the copies alone, the checksums alone, the
transport (both), and whole calls (with the store's reservation and commit). The last line printed
is one JSON object; beside it lies a drawing of the timeline.

    python -m benchmarks.device_transfer --out benchmarks/results/<date>-device-transfer.json
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.device_timeline import Bar, Lane, draw
from benchmarks.harness import context, publish

KIB, MIB, GB = 1024, 1024 * 1024, 1e9
BLOCK_BYTES = (64 * KIB, 256 * KIB, 2 * MIB)
CACHE_BYTES = 1024 * MIB
MOVED_BYTES = 256 * MIB
TIMELINE_BLOCK_BYTES = 2 * MIB
NUM_CHUNKS = 8
CHUNK_BLOCKS = 64
CHUNK_MS = 10.0
SEED = 7
console = Console(stderr=True)


class Child:
    """A process that answers JSON lines on stdout (or stderr, for the store's log)."""

    def __init__(self, *arguments: str, answers_on: str = "stdout") -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            stdin=subprocess.PIPE,
            text=True,
            **{answers_on: subprocess.PIPE},  # type: ignore[call-overload]
        )
        self._answers = getattr(self._process, answers_on)

    def line(self) -> dict[str, Any]:
        """The next JSON line. Raises: RuntimeError when there is none any more."""
        for line in self._answers:
            try:
                answer: dict[str, Any] = json.loads(line)
            except ValueError:
                sys.stderr.write(line)  # a library's own words
                continue
            if "error" in answer:
                raise RuntimeError(answer["error"])
            return answer
        raise RuntimeError(f"process ended: {self._process.args}")

    def tell(self, do: str, **arguments: Any) -> None:
        """Send a command without waiting for its answer."""
        if self._process.stdin is None:
            raise RuntimeError("no stdin")
        self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self._process.stdin.flush()

    def done(self) -> dict[str, Any]:
        """The answer of the oldest command, other lines passed over."""
        while "done" not in (answer := self.line()):
            continue
        found: dict[str, Any] = answer["done"]
        return found

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """A command and its answer."""
        self.tell(do, **arguments)
        return self.done()

    def end(self) -> None:
        """Let it go; killed if it does not."""
        try:
            if self._process.stdin is not None:
                self._process.stdin.close()
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(15)


class Store(Child):
    """A store process, its log read away once it is ready."""

    def __init__(self, slab_dir: str) -> None:
        super().__init__(
            "kvstore",
            f"--set=capacity_bytes={CACHE_BYTES}",
            f"--set=slab_dir={slab_dir}",
            answers_on="stderr",
        )
        while (ready := self.line()).get("event") != "ready":
            continue
        self.address: str = ready["address"]
        threading.Thread(target=lambda: list(self._answers), daemon=True).start()

    def end(self) -> None:
        """As an operator does."""
        self._process.terminate()
        super().end()


def through_store(
    one: Child, two: Child, slab_dir: str, block_bytes: int, repeats: int
) -> dict[str, Any]:
    """Device -> store -> device for one block size."""
    num_blocks, num_moved = CACHE_BYTES // block_bytes, MOVED_BYTES // block_bytes
    order = random.Random(SEED).sample(range(num_blocks), num_blocks)
    places = {"neighbours": list(range(num_moved)), "scattered": order[:num_moved]}
    store = Store(slab_dir)
    try:
        one.ask("cache", total_bytes=CACHE_BYTES, block_bytes=block_bytes, seed=SEED)
        two.ask("cache", total_bytes=CACHE_BYTES, block_bytes=block_bytes, seed=SEED + 1)
        attach_s = one.ask("attach", address=store.address)["seconds"]
        attach_again_s = two.ask("attach", address=store.address)["seconds"]
        found: dict[str, Any] = {
            "block_bytes": block_bytes,
            "attach_s": [round(attach_s, 3), round(attach_again_s, 3)],
        }
        for name, block_ids in places.items():
            found[name] = _there_and_back(one, two, f"{name} {block_bytes}", block_ids, repeats)
        found["parts"] = one.ask("dma", block_ids=places["scattered"], repeats=repeats)
        return found
    finally:
        one.ask("detach")
        two.ask("detach")
        store.end()


def _there_and_back(
    one: Child, two: Child, name: str, block_ids: Sequence[int], repeats: int
) -> dict[str, float]:
    """bytes/s, medians. Fresh chains each time: nothing is there already."""
    seconds: dict[str, list[float]] = {}
    for repeat in range(repeats + 1):
        chain = f"{name} {repeat}"
        put = one.ask("put", chain=chain, block_ids=block_ids)
        got = two.ask("get", chain=chain, block_ids=block_ids)
        if repeat == 0:  # connections, first touches
            same = two.ask("same", seed=SEED, sources=block_ids, targets=block_ids)["same"]
            if not same:
                raise RuntimeError(f"{name}: other bytes arrived than were sent")
            continue
        for key, took in (
            ("put", put["ended"] - put["began"]),
            ("put_transport", put["transport_s"]),
            ("get", got["ended"] - got["began"]),
            ("get_transport", got["transport_s"]),
            ("match", got["match_s"]),
        ):
            seconds.setdefault(key, []).append(took)
    rates = {key: MOVED_BYTES / statistics.median(each) for key, each in seconds.items()}
    rates["match_s"] = statistics.median(seconds["match"])
    del rates["match"]
    return rates


def by_nixl(one: Child, two: Child, block_bytes: int, repeats: int) -> dict[str, Any]:
    """Device -> device for one block size, pushed."""
    num_blocks, num_moved = CACHE_BYTES // block_bytes, MOVED_BYTES // block_bytes
    draw_order = random.Random(SEED)
    places = {
        "neighbours": (list(range(num_moved)), list(range(num_moved))),
        "scattered": (
            draw_order.sample(range(num_blocks), num_moved),
            draw_order.sample(range(num_blocks), num_moved),
        ),
    }
    found: dict[str, Any] = {"block_bytes": block_bytes}
    for name, (sources, targets) in places.items():
        one.ask("cache", total_bytes=CACHE_BYTES, block_bytes=block_bytes, seed=SEED)
        two.ask("cache", total_bytes=CACHE_BYTES, block_bytes=block_bytes, seed=SEED + 1)
        one.ask("nixl")
        there = two.ask("nixl")
        found[name] = one.ask(
            "nixl_write",
            metadata=there["metadata"],
            region=there["region"],
            sources=sources,
            targets=targets,
            repeats=repeats,
        )
        if not two.ask("same", seed=SEED, sources=sources, targets=targets)["same"]:
            raise RuntimeError(f"NIXL, {name}: other bytes arrived than were sent")
    return found


def timeline(one: Child, two: Child, slab_dir: str) -> tuple[dict[str, Any], list[Lane]]:
    """A prefill in chunks whose blocks travel on while it computes, and the same without overlap.

    Returns: figures, and the lanes to draw.
    """
    block_bytes = TIMELINE_BLOCK_BYTES
    chunks = [
        list(range(first, first + CHUNK_BLOCKS))
        for first in range(0, NUM_CHUNKS * CHUNK_BLOCKS, CHUNK_BLOCKS)
    ]
    store = Store(slab_dir)
    figures: dict[str, Any] = {
        "num_chunks": NUM_CHUNKS,
        "chunk_bytes": CHUNK_BLOCKS * block_bytes,
        "block_bytes": block_bytes,
    }
    lanes: list[Lane] = []
    try:
        one.ask("cache", total_bytes=CACHE_BYTES, block_bytes=block_bytes, seed=SEED)
        two.ask("cache", total_bytes=CACHE_BYTES, block_bytes=block_bytes, seed=SEED + 1)
        for worker in (one, two):
            worker.ask("attach", address=store.address)
        products = one.ask("products", target_ms=CHUNK_MS)["num_products"]
        _prefill(one, two, "warm-up", chunks, products, True)
        for number, overlapped in enumerate((True, False)):
            name = "overlapped" if overlapped else "one after another"
            bars, figure = _prefill(one, two, name, chunks, products, overlapped)
            every = [block_id for chunk in chunks for block_id in chunk]
            flips = number + 2
            if not two.ask("same", seed=SEED, sources=every, targets=every, flips=flips)["same"]:
                raise RuntimeError(f"timeline, {name}: other bytes arrived than were computed")
            figures[name.replace(" ", "_")] = figure
            lanes += [Lane(f"{name}: {what}", bars[what]) for what in bars]
    finally:
        one.ask("detach")
        two.ask("detach")
        store.end()
    alone, hidden = figures["one_after_another"]["exposed_ms"], figures["overlapped"]["exposed_ms"]
    figures["hidden_share"] = round(1 - hidden / alone, 3)
    return figures, lanes


def _prefill(
    one: Child,
    two: Child,
    chain: str,
    chunks: Sequence[Sequence[int]],
    num_products: int,
    overlapped: bool,
) -> tuple[dict[str, list[Bar]], dict[str, Any]]:
    one.tell(
        "prefill", chain=chain, chunks=chunks, num_products=num_products, overlapped=overlapped
    )
    stored: list[dict[str, Any]] = []

    def pull(answer: dict[str, Any]) -> None:
        two.tell("pull", refs=answer["refs"], block_ids=chunks[answer["stored"]])

    while "done" not in (answer := one.line()):
        stored.append(answer)
        if overlapped:
            pull(answer)
    told = answer["done"]
    if not overlapped:
        for each in stored:
            pull(each)
    gets = [two.done() for _ in chunks]
    began = told["began"]

    def bars(spans: Sequence[Sequence[float]]) -> list[Bar]:
        return [Bar((start - began) * 1e3, (end - began) * 1e3) for start, end in spans]

    lanes = {
        "compute": bars(told["computes"]),
        "device to store": bars(told["puts"]),
        "store to device": bars([(got["began"], got["ended"]) for got in gets]),
    }
    total_ms = lanes["store to device"][-1].end_ms
    compute_ms = lanes["compute"][-1].end_ms
    figure = {
        "total_ms": round(total_ms, 2),
        "compute_ms": round(compute_ms, 2),
        "exposed_ms": round(total_ms - compute_ms, 2),
        "spans_ms": {
            what: [[round(bar.start_ms, 2), round(bar.end_ms, 2)] for bar in lane]
            for what, lane in lanes.items()
        },
    }
    return lanes, figure


def report(result: dict[str, Any]) -> Table:
    """For people."""
    ceilings = result["ceilings"]
    table = Table("GB/s", "neighbours", "scattered", "ceiling")
    for found in result["through_store"]:
        size = f"{found['block_bytes'] // KIB} KiB"
        for key, ceiling in (
            ("put_transport", ceilings["to_pinned_host"]),
            ("put", ceilings["to_pinned_host"]),
            ("get_transport", ceilings["from_pinned_host"]),
            ("get", ceilings["from_pinned_host"]),
        ):
            cells = [f"{found[name][key] / GB:.1f}" for name in ("neighbours", "scattered")]
            table.add_row(f"{size} {key}", *cells, f"{ceiling / GB:.1f}")
    for found in result["nixl"]:
        cells = [f"{found[name]['rate'] / GB:.1f}" for name in ("neighbours", "scattered")]
        name = f"{found['block_bytes'] // KIB} KiB NIXL"
        table.add_row(name, *cells, f"{ceilings['peer_copy'] / GB:.1f}")
    return table


def main() -> int:
    """Run it all; see the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--slab-dir", default="/dev/shm")
    parser.add_argument("--no-nixl", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    repeats, slab_dir = arguments.repeats, arguments.slab_dir
    one = Child("benchmarks.device_worker", "0")
    one.line()
    hello = one.ask("hello")
    two = Child("benchmarks.device_worker", "1" if hello["num_devices"] > 1 else "0")
    two.line()
    result: dict[str, Any] = {"benchmark": "device_transfer", **context(), **hello}
    try:
        result["ceilings"] = one.ask("ceilings", num_bytes=MOVED_BYTES, repeats=repeats)
        console.print(result["ceilings"])
        result["through_store"] = []
        for block_bytes in BLOCK_BYTES:
            result["through_store"].append(through_store(one, two, slab_dir, block_bytes, repeats))
            console.print(result["through_store"][-1])
        figures, lanes = timeline(one, two, slab_dir)
        result["timeline"] = figures
        result["nixl"] = []
        for block_bytes in () if arguments.no_nixl else BLOCK_BYTES:
            result["nixl"].append(by_nixl(one, two, block_bytes, repeats))
            console.print(result["nixl"][-1])
    finally:
        for child in (one, two):
            child.end()
    console.print(report(result))
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.with_suffix(".svg").write_text(
            draw(lanes, f"{hello['device']}: prefill in chunks, blocks travelling on"),
            encoding="utf-8",
        )
    publish(result, arguments.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
