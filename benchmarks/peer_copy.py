"""KV blocks from one GPU to another over the direct path, against torch's own copy between the two
in the same run: what of NVLink is left after leases, checksums and control.

A lender in a process of its own (`--serve`) and a reader in this one, over real gRPC: the very
transports that a decode worker uses. For 8,192 tokens of each shape, whose blocks lie side by side,
as a fresh prompt's do, or anywhere. `moved`: the bytes alone, by cuda_ipc's own copies; `verified`:
a whole read of packed blocks, as a handle has them, on the workers' loop, with checksums and the
lender's word, and its parts (read_parts.py). `by values`: of blocks that are one Python value each.
The last line printed is one JSON object.

    python -m benchmarks.peer_copy --out benchmarks/results/<date>-peer-copy.json

Needs two CUDA devices; on one, both processes share it, and the ceiling is a copy within it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.bare_copies import copies_alone, median_s, ways_to_copy
from benchmarks.context import context, publish
from benchmarks.read_parts import PARTS, ReadParts, by_last_piece
from kvstore.blocks import Block, PackedBlocks, PackedItems, Tier
from kvstore.client import KvStoreClient
from kvstore.lending import lender_node_id
from kvstore.lending.lender import Lender, LenderIdentity
from kvstore.lending.loans import LoanTable, Offer
from kvstore.lending.server import LenderServicer
from kvstore.transport.base import BlockMemory
from kvstore.transport.cuda import CudaDevice
from kvstore.transport.cuda_ipc import CudaIpcTransport
from process import entrypoint, grpc_server
from process.deadline import Deadline
from services.worker.device_checksums import DeviceChecksums

SHAPES = {"llama-8b": 2 * 2**20, "qwen3-0.6b": 28 * 8 * 2 * 16 * 128 * 2}
"""Bytes of a block of 16 tokens in bfloat16."""
NUM_MOVED = 512
"""Blocks of 8,192 tokens."""
NUM_BLOCKS = 2 * NUM_MOVED
TRANSPORTS = ("cuda_ipc", "nixl", "grpc")
FINGERPRINT = "ab" * 16
TTL_S = 600.0
BUDGET_S = 60.0
SEED = 7


def memory_on(device_id: int, block_bytes: int, seed: int) -> tuple[torch.Tensor, BlockMemory]:
    """A cache of random bytes."""
    torch.cuda.set_device(device_id)
    device = f"cuda:{device_id}"
    generator = torch.Generator(device).manual_seed(seed)
    cache = torch.randint(
        0, 256, (NUM_BLOCKS, block_bytes), dtype=torch.uint8, device=device, generator=generator
    )
    torch.cuda.synchronize(device_id)
    memory = BlockMemory.on_device(
        CudaDevice.open(device_id),
        cache.data_ptr(),
        block_bytes,
        NUM_BLOCKS,
        DeviceChecksums(cache),
    )
    return cache, memory


# ---- the lender's process


async def serve(device_id: int, block_bytes: int) -> None:
    """Lend blocks that are named on stdin, a JSON list a line; tell them as JSON on stdout."""

    async def no_free(num_blocks: int, budget_s: float) -> Sequence[int]:
        return ()

    _cache, memory = memory_on(device_id, block_bytes, SEED)
    loans = LoanTable(NUM_BLOCKS, block_bytes, TTL_S, lambda block_ids: None)
    identity = LenderIdentity(
        lender_node_id("lender"), secrets.token_bytes(16), bytes.fromhex(FINGERPRINT)
    )
    lender = Lender(identity, memory, loans, no_free, lets_map=True)
    server, address = await grpc_server.listen("127.0.0.1:0", [LenderServicer(lender).add_to])
    lender.start()
    _tell({"address": address})
    while line := await asyncio.to_thread(sys.stdin.readline):
        block_ids = json.loads(line)
        began = time.perf_counter()
        lease_id = lender.enter(
            Offer(block_id, b"%16d" % block_id, None, 16) for block_id in block_ids
        )
        refs = await lender.seal(lease_id)
        seconds = time.perf_counter() - began
        loans.hand_over(lease_id, TTL_S, lender.now_s())
        found = [[ref.frame, ref.generation, ref.checksum] for ref in refs]
        _tell({"lease_id": lease_id, "refs": found, "seconds": seconds})
    await server.stop(0)
    await lender.stop(1.0)


def _tell(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


class LenderProcess:
    """`serve` on a device."""

    def __init__(self, device_id: int, block_bytes: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.peer_copy", "--serve", str(device_id),
             "--block-bytes", str(block_bytes)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | {"BATON_PARENT_PID": str(os.getpid())},
        )  # fmt: skip
        self.address: str = self._line()["address"]

    def lend(self, block_ids: Sequence[int]) -> tuple[str, list[Block], float]:
        """Returns: the lease, the blocks, and how long lending them took."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(list(block_ids)) + "\n")
        self._process.stdin.flush()
        told = self._line()
        refs = [
            Block(b"%16d" % frame, frame, generation, checksum, 16, Tier.DEVICE)
            for frame, generation, checksum in told["refs"]
        ]
        return told["lease_id"], refs, told["seconds"]

    def _line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                found: dict[str, Any] = json.loads(line)
            except ValueError:
                sys.stderr.write(line)  # a library's own words
                continue
            return found
        raise RuntimeError("the lender's process ended")

    def end(self) -> None:
        """Killed if it does not go."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(15)


# ---- measuring


def ceiling(own: int, other: int, num_bytes: int, repeats: int) -> float:
    """torch's copy of so many bytes from one device to the other, in bytes/s."""
    source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device=f"cuda:{other}")
    target = torch.zeros(num_bytes, dtype=torch.uint8, device=f"cuda:{own}")

    def copy() -> None:
        target.copy_(source)
        torch.cuda.synchronize(own)
        torch.cuda.synchronize(other)

    return num_bytes / median_s(copy, repeats)


def places() -> dict[str, tuple[list[int], list[int]]]:
    """Where blocks come from and go to."""
    draw = random.Random(SEED)
    return {
        "neighbours": (list(range(NUM_MOVED)), list(range(NUM_MOVED, NUM_BLOCKS))),
        "scattered": (
            draw.sample(range(NUM_BLOCKS), NUM_MOVED),
            draw.sample(range(NUM_BLOCKS), NUM_MOVED),
        ),
    }


async def through(
    client: KvStoreClient,
    lender: LenderProcess,
    cache: torch.Tensor,
    where: tuple[list[int], list[int]],
    repeats: int,
) -> dict[str, Any]:
    """bytes/s of whole, verified reads over one transport."""
    sources, targets = where
    lease_id, refs, lend_s = lender.lend(sources)
    transport: Any = client.transport
    parts, is_mapped = ReadParts(), isinstance(transport, CudaIpcTransport)

    async def read(items: Sequence[tuple[Block, int]]) -> float:
        cache.zero_()
        torch.cuda.synchronize()
        began = time.perf_counter()
        got = await client.get_blocks(lease_id, items, Deadline.after(BUDGET_S))
        took_s = parts.done(began, time.perf_counter())
        if got.failed:
            raise RuntimeError(f"blocks that did not come: {got.failed}")
        return took_s

    values = list(zip(refs, targets, strict=True))
    packed = PackedItems(PackedBlocks.of(refs), targets)
    with parts.of(transport) if is_mapped else nullcontext():
        seconds = [await read(packed) for _ in range(repeats + 2)]
        row: dict[str, Any] = parts.row(2) if is_mapped else {}
        by_values = [await read(values) for _ in range(repeats)]
    also = await by_last_piece(transport, lambda: read(packed), repeats) if is_mapped else {}
    await client.release([lease_id], deadline=Deadline.after(BUDGET_S))
    median = statistics.median(seconds[2:])
    return row | {
        "verified": len(values) * cache.shape[1] / median,
        "verified_ms": median * 1e3,
        "also_ms": {"by values": statistics.median(by_values) * 1e3} | also,
        "first_ms": seconds[0] * 1e3,
        "lend_ms": lend_s * 1e3,
    }


async def measured(
    shape: str, own: int, other: int, transports: Sequence[str], repeats: int
) -> dict[str, Any]:
    """One shape, over every transport."""
    block_bytes = SHAPES[shape]
    num_bytes = NUM_MOVED * block_bytes
    found: dict[str, Any] = {"num_bytes": num_bytes, "block_bytes": block_bytes}
    found["peer_copy"] = ceiling(own, other, num_bytes, repeats)
    cache, memory = memory_on(own, block_bytes, SEED + 1)
    checksums_s = median_s(lambda: memory.checksums(range(NUM_MOVED)), repeats)
    found["checksums"] = num_bytes / checksums_s
    lender = LenderProcess(other, block_bytes)
    try:
        for name in transports:
            began = time.perf_counter()
            client = await KvStoreClient.attach(
                lender.address,
                worker_id=f"reader-{name}",
                worker_incarnation=secrets.token_bytes(16),
                fingerprint=FINGERPRINT,
                memory=memory,
                transport=name,
                timeout_s=BUDGET_S,
            )
            found[name] = {"attach_ms": (time.perf_counter() - began) * 1e3}
            for place, where in places().items():
                row = await through(client, lender, cache, where, repeats)
                transport = client.transport
                if isinstance(transport, CudaIpcTransport):
                    row["moved"] = copies_alone(transport, where, num_bytes, repeats)
                    row["ways"] = ways_to_copy(transport, where, num_bytes, repeats)
                for key in ("verified", "moved"):
                    if key in row:
                        row[f"{key}_of_peer_copy"] = round(row[key] / found["peer_copy"], 3)
                found[name][place] = row
            await client.close()
    finally:
        lender.end()
    return found


def report(result: dict[str, Any]) -> Table:
    """For people."""
    table = Table("", "", "moved GB/s", "verified GB/s", "ms", "of torch's copy")
    for shape, found in result["shapes"].items():
        table.add_row(shape, "torch's copy", f"{found['peer_copy'] / 1e9:.0f}", "", "", "")
        table.add_row("", "checksums", f"{found['checksums'] / 1e9:.0f}", "", "", "")
        for name in TRANSPORTS:
            for place in places() if name in found else ():
                row = found[name][place]
                share = row.get("moved_of_peer_copy", row["verified_of_peer_copy"])
                table.add_row(
                    "", f"{name}, {place}",
                    f"{row['moved'] / 1e9:.0f}" if "moved" in row else "",
                    f"{row['verified'] / 1e9:.0f}", f"{row['verified_ms']:.2f}",
                    f"{100 * share:.0f} % ({100 * row['verified_of_peer_copy']:.0f} % verified)",
                )  # fmt: skip
                if "before_ms" in row:
                    spent = " + ".join(f"{row[f'{part}_ms']:.2f}" for part in PARTS)
                    table.add_row("", f"    {', '.join(PARTS)}", "", "", spent, "")
                for what, ms in row["also_ms"].items():
                    table.add_row("", f"    {what}", "", "", f"{ms:.2f}", "")
                for way, rate in row.get("ways", {}).items():
                    table.add_row("", f"    {way}", f"{rate / 1e9:.0f}", "", "", "")
    return table


def main() -> int:
    """Run it all; see the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=["cuda_ipc", "nixl"])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--serve", type=int, default=-1, help="of a process that this starts")
    parser.add_argument("--block-bytes", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.serve >= 0:
        entrypoint.die_with_parent()
        uvloop.run(serve(arguments.serve, arguments.block_bytes))
        return 0
    num_devices = torch.cuda.device_count()
    own, other = (1, 0) if num_devices > 1 else (0, 0)
    result: dict[str, Any] = {
        "benchmark": "peer_copy",
        **context(),
        "device": torch.cuda.get_device_name(own),
        "num_devices": num_devices,
        "torch": torch.__version__,
        "shapes": {},
    }
    for shape in arguments.shapes:
        result["shapes"][shape] = uvloop.run(
            measured(shape, own, other, arguments.transports, arguments.repeats)
        )
    Console(stderr=True, width=120).print(report(result))
    publish(result, arguments.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
