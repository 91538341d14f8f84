"""Bytes per second into and out of a KV store, against a memcpy and a plain TCP stream in the same
run; the fixed latency of one block; what verification costs.

A real store in a process of its own, a client as workers have it. Each figure is the median of
rounds in which memcpy, TCP and store alternate, so that drift of the machine hits all. `write` is a
whole put (reserve, copy, checksum, commit), `read` a whole get (copy, generations, checksum).
Verification is the difference to transfers in the same rounds whose checksums cost nothing: of the
time until it is over, and of the client's CPU time (`_cpu`), which other load disturbs less. The
last line printed is one JSON object.

    python -m benchmarks.kv_transfer --batch-mib 64 --rounds 9

Nothing is written unless --out says where.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from benchmarks import store_process
from benchmarks.context import context, publish
from benchmarks.tcp_stream import TcpStream
from kvstore import block_hash
from kvstore.blocks import Block
from kvstore.client import KvStoreClient
from kvstore.transport import base, grpc, shm
from kvstore.transport.base import BlockMemory
from process.deadline import Deadline

KIB, MIB = 1024, 1024 * 1024
BLOCK_BYTES = (64 * KIB, 256 * KIB, 2 * MIB)
TRANSPORTS = ("shm", "nixl", "grpc")
FINGERPRINT = "ab" * 32
BLOCK_SIZE = 16
CALL_S = 120.0
TTL_S = 300.0

_HASHING: tuple[Any, ...] = (base, shm, grpc)
"""The modules in which host transports compute checksums."""

Bytes2D = npt.NDArray[np.uint8]
Refs = tuple[Block, ...]


class _FreeChecksum:
    """A running checksum that costs nothing and is always the same."""

    value = 0

    def update(self, piece: object) -> None:
        """Nothing."""


@contextmanager
def unverified() -> Iterator[None]:
    """Transports of this process compute no checksums inside: what verification costs is the
    difference."""
    free = SimpleNamespace(checksum=lambda view: 0, RunningChecksum=_FreeChecksum)
    for module in _HASHING:
        module.block_hash = free
    try:
        yield
    finally:
        for module in _HASHING:
            module.block_hash = block_hash


class Bench:
    """One client of one store over one transport; its lower half of blocks is written, its upper
    half read into."""

    def __init__(self, client: KvStoreClient, num_blocks: int) -> None:
        self._client = client
        self._num_blocks = num_blocks

    async def write(self, num_blocks: int) -> tuple[float, Refs, str]:
        """Store that many fresh blocks. Returns: seconds, where they lie, their lease."""
        chain = [secrets.token_bytes(16) for _ in range(num_blocks)]
        began = time.perf_counter()
        put = await self._client.put_blocks(
            None,
            b"",
            list(zip(chain, range(num_blocks), strict=True)),
            None,
            TTL_S,
            Deadline.after(CALL_S),
            num_tokens=BLOCK_SIZE,
        )
        seconds = time.perf_counter() - began
        if put.not_stored:
            raise RuntimeError(f"{put.not_stored} blocks had no room: the store is too small")
        return seconds, put.refs, put.lease_id

    async def read(self, refs: Refs, lease_id: str) -> float:
        """Returns: seconds. Raises: RuntimeError when something did not verify."""
        items = [(ref, self._num_blocks + at) for at, ref in enumerate(refs)]
        began = time.perf_counter()
        got = await self._client.get_blocks(lease_id, items, Deadline.after(CALL_S))
        seconds = time.perf_counter() - began
        if got.failed:
            raise RuntimeError(f"blocks did not arrive: {got.failed}")
        return seconds

    async def ask(self) -> float:
        """One call that moves nothing. Returns: seconds."""
        began = time.perf_counter()
        await self._client.match(
            [secrets.token_bytes(16)], pin=False, ttl_s=1.0, deadline=Deadline.after(CALL_S)
        )
        return time.perf_counter() - began

    async def release(self, lease_id: str) -> None:
        await self._client.release([lease_id], deadline=Deadline.after(CALL_S))


@asynccontextmanager
async def attached(address: str, transport: str, memory: BlockMemory) -> AsyncIterator[Bench]:
    """A client of the store, from its handshake to its goodbye."""
    client = await KvStoreClient.attach(
        address,
        worker_id=f"bench-{secrets.token_hex(4)}",
        worker_incarnation=secrets.token_bytes(16),
        fingerprint=FINGERPRINT,
        memory=memory,
        transport=transport,
        timeout_s=CALL_S,
    )
    try:
        yield Bench(client, memory.num_blocks // 2)
    finally:
        await client.close()


def measure(
    transport: str, block_bytes: int, num_blocks: int, rounds: int, stream: TcpStream
) -> dict[str, Any]:
    """One transport at one block size."""
    view = np.empty((2 * num_blocks, block_bytes), dtype=np.uint8)
    view[:] = np.frombuffer(secrets.token_bytes(block_bytes), dtype=np.uint8)
    view[:, :8] = np.arange(2 * num_blocks, dtype=np.uint64).view(np.uint8).reshape(-1, 8)
    source, target = view[:num_blocks], np.zeros((num_blocks, block_bytes), dtype=np.uint8)
    seconds: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        seconds.setdefault(name, []).append(value)

    def memcpy() -> float:
        began = time.perf_counter()
        np.copyto(target, source)
        return time.perf_counter() - began

    def checksums() -> float:
        began = time.perf_counter()
        for row in source:
            block_hash.checksum(row)
        return time.perf_counter() - began

    async def rounds_of(bench: Bench) -> None:
        for at in range(rounds + 2):
            figures = _ceilings(memcpy, checksums, stream, source, target)
            kinds = [("", nullcontext), ("_unverified", unverified)]
            for name, kind in reversed(kinds) if at % 2 else kinds:
                with kind():
                    figures |= await _moved(bench, num_blocks, name)
            if at >= 2:  # the first two touch the memory
                for name, value in figures.items():
                    note(name, value)

    async def latencies(bench: Bench) -> None:
        for _ in range(20 * rounds):
            note("one_call", await bench.ask())
            one_write, refs, lease_id = await bench.write(1)
            note("one_write", one_write)
            note("one_read", await bench.read(refs, lease_id))
            await bench.release(lease_id)

    async def all_of(address: str) -> None:
        async with attached(address, transport, BlockMemory.of(view)) as bench:
            await rounds_of(bench)
            await latencies(bench)

    capacity_bytes = 3 * num_blocks * block_bytes
    with store_process.running(capacity_bytes=capacity_bytes) as store:
        asyncio.run(all_of(store.address))
    return _figures(transport, block_bytes, num_blocks, seconds)


async def _moved(bench: Bench, num_blocks: int, name: str) -> dict[str, float]:
    """Seconds of one write and one read, and of this process' CPU in them."""
    began = time.process_time()
    write_s, refs, lease_id = await bench.write(num_blocks)
    written = time.process_time()
    read_s = await bench.read(refs, lease_id)
    read = time.process_time()
    await bench.release(lease_id)
    return {
        f"write{name}": write_s,
        f"write{name}_cpu": written - began,
        f"read{name}": read_s,
        f"read{name}_cpu": read - written,
    }


def _ceilings(
    memcpy: Callable[[], float],
    checksums: Callable[[], float],
    stream: TcpStream,
    source: Bytes2D,
    target: Bytes2D,
) -> dict[str, float]:
    return {
        "memcpy": memcpy(),
        "checksum": checksums(),
        "tcp_write": stream.write(source),
        "tcp_read": stream.read(target),
    }


def _figures(
    transport: str, block_bytes: int, num_blocks: int, seconds: dict[str, list[float]]
) -> dict[str, Any]:
    median = {name: statistics.median(values) for name, values in seconds.items()}
    num_bytes = num_blocks * block_bytes

    def rate(name: str) -> float:
        return round(num_bytes / median[name] / 1e9, 3)

    def over(name: str, ceiling: str) -> float:
        # Round by round: both met the same state of the machine.
        pairs = zip(seconds[ceiling], seconds[name], strict=True)
        return round(statistics.median(top / own for top, own in pairs), 3)

    def cost(name: str, clock: str = "") -> float:
        """Of the whole transfer, verification included; chance may put it below nothing."""
        bare = seconds[f"{name}_unverified{clock}"]
        pairs = zip(seconds[f"{name}{clock}"], bare, strict=True)
        return round(statistics.median((own - bare) / own for own, bare in pairs), 3)

    def p99(name: str) -> float:
        return round(statistics.quantiles(seconds[name], n=100)[98] * 1e6, 1)

    return {
        "transport": transport,
        "block_bytes": block_bytes,
        "num_blocks": num_blocks,
        **{
            f"{name}_gb_per_s": rate(name)
            for name in ("memcpy", "tcp_write", "tcp_read", "checksum", "write", "read")
        },
        "write_of_memcpy": over("write", "memcpy"),
        "read_of_memcpy": over("read", "memcpy"),
        "write_of_tcp": over("write", "tcp_write"),
        "read_of_tcp": over("read", "tcp_read"),
        "verification_share_of_write": cost("write"),
        "verification_share_of_read": cost("read"),
        "verification_share_of_write_cpu": cost("write", "_cpu"),
        "verification_share_of_read_cpu": cost("read", "_cpu"),
        "one_call_p50_us": round(median["one_call"] * 1e6, 1),
        "one_block_write_p50_us": round(median["one_write"] * 1e6, 1),
        "one_block_write_p99_us": p99("one_write"),
        "one_block_read_p50_us": round(median["one_read"] * 1e6, 1),
        "one_block_read_p99_us": p99("one_read"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch-mib", type=int, default=64, help="moved at once")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--transports", nargs="+", default=list(TRANSPORTS), choices=TRANSPORTS)
    parser.add_argument("--block-bytes", nargs="+", type=int, default=list(BLOCK_BYTES))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    console = Console(stderr=True, width=None if sys.stderr.isatty() else 160)
    table = Table("transport", "block", "write GB/s", "read GB/s", "of memcpy", "of TCP")
    table.add_column("verification")
    table.add_column("one block us")
    figures = []
    with TcpStream() as stream:
        for block_bytes in arguments.block_bytes:
            for transport in arguments.transports:
                num_blocks = max(1, arguments.batch_mib * MIB // block_bytes)
                one = measure(transport, block_bytes, num_blocks, arguments.rounds, stream)
                figures.append(one)
                table.add_row(*_row(one))
    console.print(table)
    result = {
        "benchmark": "kv_transfer",
        **context(),
        "num_cores": len(os.sched_getaffinity(0)),
        "batch_mib": arguments.batch_mib,
        "rounds": arguments.rounds,
        "figures": figures,
    }
    publish(result, arguments.out)
    return 0


def _row(one: dict[str, Any]) -> list[str]:
    return [
        one["transport"],
        f"{one['block_bytes'] // KIB} KiB",
        f"{one['write_gb_per_s']:.2f}",
        f"{one['read_gb_per_s']:.2f}",
        f"{100 * one['write_of_memcpy']:.0f} / {100 * one['read_of_memcpy']:.0f} %",
        f"{100 * one['write_of_tcp']:.0f} / {100 * one['read_of_tcp']:.0f} %",
        f"{100 * one['verification_share_of_write']:.0f} / "
        f"{100 * one['verification_share_of_read']:.0f} % "
        f"({100 * one['verification_share_of_write_cpu']:.0f} / "
        f"{100 * one['verification_share_of_read_cpu']:.0f} % CPU)",
        f"{one['one_block_write_p50_us']:.0f} / {one['one_block_read_p50_us']:.0f}",
    ]


if __name__ == "__main__":
    raise SystemExit(main())
