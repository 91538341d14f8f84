"""KV blocks from one GPU to another over the direct path, against torch's own copy between the two
in the same run: what of NVLink is left after leases, checksums and control.

    python -m benchmarks.gpu_peers read --out benchmarks/results/<date>-peer-copy.json
"""

from __future__ import annotations

import asyncio
import json
import random
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import click
import numpy as np
import torch
import uvloop

from benchmarks import harness
from benchmarks.harness import Several, median_s
from kvstore.block_lender import BlockLender
from kvstore.block_refs import Block, PackedBlocks, PackedItems, Tier
from kvstore.client import KvStoreClient
from kvstore.exported_blocks import ExportedBlocks, ExportOffer
from kvstore.node_ids import lender_node_id
from kvstore.service import KvStoreServicer
from kvstore.transport import cuda_ipc
from kvstore.transport.base import BlockMemory
from kvstore.transport.cuda_device import CudaDevice, CudaQueue
from kvstore.transport.cuda_ipc import CudaIpcTransport
from kvstore.transport.device import wait_for
from process import entrypoint, grpc_server
from process.deadline import Deadline
from services.worker.device_checksums import CudaChecksums

SHAPES = {"llama-8b": 2 * 2**20, "qwen3-0.6b": 28 * 8 * 2 * 16 * 128 * 2}
"""Bytes of a block of 16 tokens in bfloat16, by model."""
NUM_MOVED = 512
"""Number of blocks that are moved: those of 8,192 tokens."""
NUM_BLOCKS = 2 * NUM_MOVED
TRANSPORTS = ("cuda_ipc", "nixl", "grpc")
PARTS = ("before", "copies", "after")
LAST_PIECES_MIB = (16, 32, 64, 128)
"""Least MiB of a copy's last pieces that are tried. The largest is that of all pieces: then none is
shorter."""
FINGERPRINT = "ab" * 16
TTL_S = 600.0
BUDGET_S = 60.0
SEED = 7


def memory_on(device_id: int, block_bytes: int, seed: int) -> tuple[torch.Tensor, BlockMemory]:
    """Make a KV cache of random bytes on a device."""
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
        CudaChecksums(cache),
    )
    return cache, memory


# -- the lender's process


async def serve(device_id: int, block_bytes: int) -> None:
    """Lend blocks that are named on stdin, a JSON list a line; print them as JSON lines."""

    async def no_free(num_blocks: int, budget_s: float) -> Sequence[int]:
        return ()

    _cache, memory = memory_on(device_id, block_bytes, SEED)
    loans = ExportedBlocks(NUM_BLOCKS, block_bytes, TTL_S, lambda block_ids: None)
    lender = BlockLender(
        lender_node_id("lender"),
        secrets.token_bytes(16),
        memory,
        loans,
        no_free,
        fingerprint=bytes.fromhex(FINGERPRINT),
        lets_map=True,
    )
    server, address = await grpc_server.listen("127.0.0.1:0", [KvStoreServicer(lender).add_to])
    lender.start()
    _say({"address": address})
    while line := await asyncio.to_thread(sys.stdin.readline):
        block_ids = json.loads(line)
        lease_id = lender.enter(
            ExportOffer(block_id, b"%16d" % block_id, None, 16) for block_id in block_ids
        )
        refs = await lender.seal(lease_id)
        loans.hand_over(lease_id, TTL_S, lender.now_s())
        found = [[ref.frame, ref.generation, ref.checksum] for ref in refs]
        _say({"lease_id": lease_id, "refs": found})
    await server.stop(0)
    await lender.stop(1.0)


def _say(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)  # noqa: T201


@click.command("serve", hidden=True)
@click.option("--device-id", type=int)
@click.option("--block-bytes", type=int)
def lender(device_id: int, block_bytes: int) -> None:
    """Lend blocks to a reader: the process that LenderProcess starts."""
    entrypoint.die_with_parent()
    uvloop.run(serve(device_id, block_bytes))


class LenderProcess:
    """The process that runs `serve` on a device."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.address: str = self._line()["address"]

    @classmethod
    @contextmanager
    def running(cls, device_id: int, block_bytes: int) -> Iterator[LenderProcess]:
        options = ("--device-id", f"{device_id}", "--block-bytes", f"{block_bytes}")
        argv = harness.module("benchmarks.gpu_peers", "serve", *options)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with harness.child(*argv, **pipes) as process:
            yield cls(process)

    def lend(self, block_ids: Sequence[int]) -> tuple[str, list[Block]]:
        """Have the process lend blocks. Returns: the lease, and the blocks."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(list(block_ids)) + "\n")
        self._process.stdin.flush()
        found = self._line()
        refs = [
            Block(b"%16d" % frame, frame, generation, checksum, 16, Tier.DEVICE)
            for frame, generation, checksum in found["refs"]
        ]
        return found["lease_id"], refs

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


# -- where the time of a whole read goes


async def by_last_piece(
    transport: CudaIpcTransport, read: Callable[[], Awaitable[float]], repeats: int
) -> dict[str, float]:
    """Medians in milliseconds of `read`, which returns its seconds, by the least MiB of a copy's
    last pieces; all sizes in turn, so that none has a quieter machine."""
    pipeline: Any = transport._pipeline  # noqa: SLF001  a policy of the transport, which is left as it was
    block_bytes, kept = transport._memory.block_bytes, pipeline._least_items  # noqa: SLF001
    seconds: dict[int, list[float]] = {mib: [] for mib in LAST_PIECES_MIB}
    for _ in range(repeats):
        for mib, found in seconds.items():
            pipeline._least_items = max(1, mib * 2**20 // block_bytes)  # noqa: SLF001
            found.append(await read())
    pipeline._least_items = kept  # noqa: SLF001
    return {f"last pieces of {mib} MiB": statistics.median(s) * 1e3 for mib, s in seconds.items()}


@dataclass
class ReadParts:
    """The parts of reads through a mapped cache, one after another, in seconds: until the first
    copy is queued, while nothing overlaps it; while copies run; and from the last byte to the
    result. The reader calls `done` after each read."""

    before: list[float] = field(default_factory=list)
    copies: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)
    _given_s: float = 0.0
    _here_s: float = 0.0

    def done(self, began_s: float, end_s: float) -> float:
        """End one read that began at `began_s` of `time.perf_counter`. Returns: seconds of all of
        it."""
        self.before.append(self._given_s - began_s)
        self.copies.append(self._here_s - self._given_s)
        self.after.append(end_s - self._here_s)
        self._given_s = self._here_s = 0.0
        return end_s - began_s

    def row(self, first: int) -> dict[str, float]:
        """Medians in milliseconds of all reads from the `first` on."""
        seconds: dict[str, list[float]] = {part: getattr(self, part) for part in PARTS}
        return {f"{part}_ms": statistics.median(s[first:]) * 1e3 for part, s in seconds.items()}

    @contextmanager
    def of(self, transport: CudaIpcTransport) -> Iterator[None]:
        """Context in which the transport's steps are timed."""
        names = ("_copies_between", "_copy_in")
        give, copy_in = (getattr(transport, name) for name in names)

        def given(*arguments: Any) -> Any:
            self._given_s = self._given_s or time.perf_counter()
            return give(*arguments)

        def copied(flight: Any, blocks: Any, is_stopped: Any, on_here: Any) -> Any:
            def here() -> None:
                self._here_s = time.perf_counter()
                on_here()

            return copy_in(flight, blocks, is_stopped, here)

        for name, instead in zip(names, (given, copied), strict=True):
            setattr(transport, name, instead)
        try:
            yield
        finally:
            for name in names:
                delattr(transport, name)


# -- copies alone


def copies_of(transport: CudaIpcTransport, sources: Any, targets: Any) -> Any:
    """The copies that the transport would queue on its device."""
    edges = np.flatnonzero(cuda_ipc._breaks(sources, targets))  # noqa: SLF001
    return transport._copies_between(edges, sources, targets)  # noqa: SLF001


def copies_alone(
    transport: CudaIpcTransport, where: tuple[list[int], list[int]], num_bytes: int, repeats: int
) -> float:
    """Rate in bytes/s of the copies that the transport queues on its device, with nothing else."""
    sources, targets = (np.array(ids, dtype=np.int64) for ids in where)

    def move() -> None:
        transport._pipeline.run(  # noqa: SLF001  a part of what is measured as a whole beside it
            len(sources),
            lambda queue, part: queue.between(copies_of(transport, sources[part], targets[part])),
            lambda: False,
        )

    return num_bytes / median_s(move, repeats)


def ways_to_copy(
    transport: CudaIpcTransport, where: tuple[list[int], list[int]], num_bytes: int, repeats: int
) -> dict[str, float]:
    """Rates in bytes/s by how the same copies are queued: on how many queues, one by one or in
    batches."""
    sources, targets = (np.array(ids, dtype=np.int64) for ids in where)
    copies = copies_of(transport, sources, targets)
    device = transport._device  # noqa: SLF001
    found = {}
    for num_queues in (1, 2, 4):
        queues = [device.new_queue() for _ in range(num_queues)]
        parts = np.array_split(copies, num_queues) if len(copies) >= num_queues else [copies]
        has_batches = isinstance(queues[0], CudaQueue) and queues[0].uses_batches
        for name, batches in (("one by one", False), ("batched", True)):
            if batches and not has_batches:
                continue
            for queue in queues:
                queue.uses_batches = batches  # type: ignore[attr-defined]

            def move(queues: Any = queues, parts: Any = parts) -> None:
                for queue, part in zip(queues, parts, strict=False):
                    queue.between(part)
                for queue in queues:
                    wait_for(queue.mark())

            found[f"{num_queues} queues, {name}"] = num_bytes / median_s(move, repeats)
        for queue in queues:
            queue.close()
    return found


# -- measuring


def ceiling(own: int, other: int, num_bytes: int, repeats: int) -> float:
    """Rate of torch's copy of so many bytes from one device to the other, in bytes/s."""
    source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device=f"cuda:{other}")
    target = torch.zeros(num_bytes, dtype=torch.uint8, device=f"cuda:{own}")

    def copy() -> None:
        target.copy_(source)
        torch.cuda.synchronize(own)
        torch.cuda.synchronize(other)

    return num_bytes / median_s(copy, repeats)


def places() -> dict[str, tuple[list[int], list[int]]]:
    """The blocks that are read and those that are written, by how they lie: side by side, or
    anywhere."""
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
    """Rate of whole, verified reads over one transport, in bytes/s."""
    sources, targets = where
    lease_id, refs = lender.lend(sources)
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
    }


async def measured(
    shape: str, own: int, other: int, transports: Sequence[str], repeats: int
) -> dict[str, Any]:
    """Measure one shape over every transport."""
    block_bytes = SHAPES[shape]
    num_bytes = NUM_MOVED * block_bytes
    found: dict[str, Any] = {"num_bytes": num_bytes, "block_bytes": block_bytes}
    found["peer_copy"] = ceiling(own, other, num_bytes, repeats)
    cache, memory = memory_on(own, block_bytes, SEED + 1)
    checksums_s = median_s(lambda: memory.checksums(range(NUM_MOVED)), repeats)
    found["checksums"] = num_bytes / checksums_s
    with ExitStack() as stack:
        lender = stack.enter_context(LenderProcess.running(other, block_bytes))
        for name in transports:
            client = await KvStoreClient.attach(
                lender.address,
                worker_id=f"reader-{name}",
                worker_incarnation=secrets.token_bytes(16),
                fingerprint=FINGERPRINT,
                memory=memory,
                transport=name,
                timeout_s=BUDGET_S,
            )
            found[name] = {}
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
    return found


def _rows(found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A table of one shape."""
    peer = found["peer_copy"]
    yield {"": "torch's copy", "GB/s": peer / 1e9}
    yield {"": "checksums", "GB/s": found["checksums"] / 1e9}
    for name in TRANSPORTS:
        for place, row in found.get(name, {}).items():
            for what in ("moved", "verified"):
                if what in row:
                    share = f"{row[what] / peer:.0%}"
                    yield {"": f"{name}, {place}, {what}", "GB/s": row[what] / 1e9} | {
                        "of torch's copy": share
                    }
            yield {"": "    verified", "ms": row["verified_ms"]}
            for part in PARTS if "before_ms" in row else ():
                yield {"": f"    {part}", "ms": row[f"{part}_ms"]}
            for what, ms in row["also_ms"].items():
                yield {"": f"    {what}", "ms": ms}
            for way, rate in row.get("ways", {}).items():
                yield {"": f"    {way}", "GB/s": rate / 1e9}


@harness.case
@click.option("--shapes", type=Several(click.Choice(list(SHAPES))), default=",".join(SHAPES))
@click.option("--transports", type=Several(click.Choice(TRANSPORTS)), default="cuda_ipc,nixl")
@click.option("--repeats", default=9)
def read(shapes: Sequence[str], transports: Sequence[str], repeats: int) -> dict[str, Any]:
    """Reads of 512 blocks from another process's GPU, bytes/s.

    A lender in a process of its own and a reader in this one, over real gRPC: the very transports
    that a decode worker uses. Blocks of 8,192 tokens of each shape lie side by side, as a fresh
    prompt's do, or anywhere. `moved`: the bytes alone, by cuda_ipc's own copies; `verified`: a
    whole read of packed blocks, as a handle has them, with checksums and the lender's confirmation,
    and its parts. `by values`: of blocks that are one Python value each. Needs two CUDA devices; on
    one, both processes share it, and the ceiling is a copy within it.
    """
    harness.needs_cuda()
    own, other = (1, 0) if torch.cuda.device_count() > 1 else (0, 0)
    found = {}
    for shape in shapes:
        found[shape] = uvloop.run(measured(shape, own, other, transports, repeats))
        harness.show(shape, list(_rows(found[shape])))
    return {**harness.device_context(), "shapes": found}


main = harness.program(__doc__, read, lender)

if __name__ == "__main__":
    main()
