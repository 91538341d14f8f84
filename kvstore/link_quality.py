"""The link between a worker and a store or lender: its bandwidth and latency, measured with each
attachment, and whether it is degraded.

A transfer path that falls back to something slow, or a network that is not the one meant, works and
is a hundred times too slow, without an error. So each attachment is measured (`measure`), and
judged (`judge`) against what the operator expects and, through mapped memory, against a plain copy
in the same process at the same time.

A measurement moves real bytes: private frames at the store, blocks that the worker gives for it.
The blocks written have no chain hash and are in no index, the store counts none of their bytes, and
the frames are free again when the lease ends. A lender takes no writes: it is asked for a few of
its free blocks, and they are read. At most MAX_BYTES go each way, within the caller's deadline;
blocks that a transfer may still touch are named by the error (`kvstore.errors`).
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvstore.block_refs import Block, PackedBlocks
from kvstore.errors import Quarantine, TransferCancelled, TransferFailed, TransferTimeout
from kvstore.node_ids import PROBE_HASH, is_lender
from kvstore.transport.base import GetItems, PutItem, PutUnsettled
from process.deadline import Deadline
from process.rpc_errors import NoCapacity

if TYPE_CHECKING:
    from kvstore.client import KvStoreClient

SHM_FLOOR_SHARE = 1 / 50
"""Least rate of a link through mapped memory, as a share of a plain copy's rate. Through shared
memory 1/2 is usual and 1/10 a bad day (measured), between GPUs ten times as much."""


@dataclass(frozen=True)
class LinkRates:
    """The measured speed of a link in bytes/s, for one transfer of `num_bytes`, best of a few.

    latency_s: of reading one block, checksum included, best of a few. copy_bytes_per_s: of a plain
    copy of as many bytes on a thread of this process. A lender takes no writes: there
    write_bytes_per_s is 0.
    """

    num_bytes: int
    write_bytes_per_s: float
    read_bytes_per_s: float
    latency_s: float
    copy_bytes_per_s: float


@dataclass(frozen=True)
class Link:
    """A worker's link to one store or lender. rates: None: `problem` says why it was not measured.
    is_fault: that is the link's own fault (too slow to measure, wrong bytes), not for instance a
    full store's."""

    node_id: str
    address: str
    transport: str
    measured_unix_ms: int
    rates: LinkRates | None = None
    problem: str = ""
    is_fault: bool = False


@dataclass(frozen=True)
class Verdict:
    """Whether a link is fast enough. floor_bytes_per_s: what was demanded of each direction that is
    used; 0: nothing."""

    floor_bytes_per_s: float
    degraded: bool


def judge(link: Link, floor_bytes_per_s: float) -> Verdict:
    """Decide whether the link is as fast as it has to be. Pure. Source: ours.

    Args: floor_bytes_per_s: the operator's; 0: none.
    """
    rates = link.rates
    if rates is None:
        return Verdict(floor_bytes_per_s, link.is_fault)
    floor = floor_bytes_per_s
    if link.transport in ("shm", "cuda_ipc"):
        floor = max(floor, rates.copy_bytes_per_s * SHM_FLOOR_SHARE)
    slowest = min(rates.write_bytes_per_s or rates.read_bytes_per_s, rates.read_bytes_per_s)
    return Verdict(floor, slowest < floor)


MAX_BYTES = 32 * 1024 * 1024
MAX_ROUNDS = 3
NUM_LATENCY_ROUNDS = 9
"""Rounds of the latency measurement: more than for the rates, since a round is short and other work
of the loop distorts it more."""
MAX_BLOCKS = 16
"""Most frames of a measurement."""
MAX_SHARE = 1 / 8
"""Largest share of a store's frames that a measurement takes: the blocks in a small store are worth
more than a measurement."""

_TTL_S = 10.0


def num_blocks_wanted(block_bytes: int) -> int:
    """The number of worker blocks that a measurement of a link needs: half of them are sent, half
    received into."""
    return 2 * max(1, min(MAX_BLOCKS, MAX_BYTES // (2 * MAX_ROUNDS * block_bytes)))


async def measure(client: KvStoreClient, block_ids: Sequence[int], deadline: Deadline) -> LinkRates:
    """Measure the client's link with worker blocks that are given for it. Raises: as
    KvStoreClient.measure."""
    if is_lender(client.node_id):
        return await _measure_lender(client, block_ids, deadline)
    half = min(len(block_ids) // 2, max(1, int(client.num_frames * MAX_SHARE)))
    if half < 1:
        raise NoCapacity("the engine has no free blocks to measure with")
    sources, targets = list(block_ids[:half]), list(block_ids[half : 2 * half])
    name = f"link/{secrets.token_hex(16)}"
    lease_id, block = await _store_one(client, f"{name}/first", sources[0], deadline)
    try:
        # The first time pays for connections and memory; every block has real bytes after it.
        every = [(block, block_id) for block_id in (*sources, *targets)]
        await _fetch(client, lease_id, every, deadline)
        latency_s = await _latency(client, lease_id, block, targets[0], deadline)
        write_s, blocks = await _write(client, lease_id, name, sources, deadline)
        read_s = await _read(client, lease_id, blocks, targets, deadline)
    finally:
        # With all that was written under it.
        releasing = client.release_later(lease_id)
    await asyncio.wait([releasing])
    num_bytes = half * client.memory.block_bytes
    copy_s = await _copy(num_bytes, deadline)
    return LinkRates(
        num_bytes, num_bytes / write_s, num_bytes / read_s, latency_s, num_bytes / copy_s
    )


async def _measure_lender(
    client: KvStoreClient, block_ids: Sequence[int], deadline: Deadline
) -> LinkRates:
    """Measure reads only, of blocks that the lender lends for it."""
    if not block_ids:
        raise NoCapacity("the engine has no free blocks to measure with")
    asked = [PROBE_HASH] * min(len(block_ids), num_blocks_wanted(client.memory.block_bytes) // 2)
    probe = await client.match(asked, ttl_s=_TTL_S, deadline=deadline)
    lease_id, blocks = probe.lease_id, probe.blocks
    if not blocks:
        raise NoCapacity("the lender has no free blocks to measure with")
    num_blocks = len(blocks)
    try:
        targets = list(block_ids[:num_blocks])
        await _fetch(client, lease_id, list(zip(blocks, targets, strict=True)), deadline)
        latency_s = await _latency(client, lease_id, blocks[0], targets[0], deadline)
        read_s = await _read(client, lease_id, blocks, targets, deadline)
    finally:
        releasing = client.release_later(lease_id)
    await asyncio.wait([releasing])
    num_bytes = num_blocks * client.memory.block_bytes
    copy_s = await _copy(num_bytes, deadline)
    return LinkRates(num_bytes, 0.0, num_bytes / read_s, latency_s, num_bytes / copy_s)


async def _store_one(
    client: KvStoreClient, name: str, block_id: int, deadline: Deadline
) -> tuple[str, Block]:
    """Store one block under a new lease. Returns: the lease's id, the block."""
    tail = (name, block_id, 1)
    put = await client.put_probe(tail, _TTL_S, deadline)
    if put.tail is None:
        client.release_later(put.lease_id)
        raise NoCapacity("the store has no free frame to measure with")
    return put.lease_id, put.tail


async def _fetch(
    client: KvStoreClient, lease_id: str, items: Sequence[tuple[Block, int]], deadline: Deadline
) -> None:
    got = await client.get_unrecorded(lease_id, items, deadline)
    if got.failed:
        raise TransferFailed(f"blocks did not come back: {sorted(set(got.failed.values()))}")


async def _latency(
    client: KvStoreClient, lease_id: str, block: Block, target: int, deadline: Deadline
) -> float:
    """Seconds of reading one block as requests do, verified."""
    return await _best(
        lambda: _fetch(client, lease_id, [(block, target)], deadline), deadline, NUM_LATENCY_ROUNDS
    )


async def _write(
    client: KvStoreClient, lease_id: str, name: str, sources: Sequence[int], deadline: Deadline
) -> tuple[float, list[Block]]:
    """Seconds of one transfer of all sources, and where they lie then."""
    reserved = PackedBlocks()
    try:
        names = [f"{name}/{index}" for index in range(len(sources))]
        reserved = await client.reserve_tails(lease_id, names, _TTL_S, deadline)
        if len(reserved) < len(sources):
            raise NoCapacity("the store has too few free frames to measure with")
        items = [
            PutItem(block_id, frame.frame, frame.generation)
            for block_id, frame in zip(sources, reserved, strict=True)
        ]
        seconds = await _best(lambda: client.transport.put(lease_id, items, deadline), deadline)
        checksums = await asyncio.to_thread(client.memory.checksums, sources)
        committed = await client.commit(lease_id, reserved, checksums, deadline)
    except BaseException as error:
        cause = client.undo_later(lease_id, reserved, error, owns_lease=False)
        if not isinstance(error, PutUnsettled):
            raise
        # The transfer reads the sources until it is over: they stay out of use until then.
        held = Quarantine(tuple(sources), error.settled)
        if isinstance(cause, asyncio.CancelledError):
            raise TransferCancelled("measuring: a put is not over", held) from error
        raise TransferTimeout("measuring: a put is not over", held) from error
    return seconds, list(committed)


async def _read(
    client: KvStoreClient,
    lease_id: str,
    blocks: Sequence[Block],
    targets: Sequence[int],
    deadline: Deadline,
) -> float:
    """Seconds of one transfer of all blocks, whose bytes are compared after it."""
    items = GetItems(list(zip(blocks, targets, strict=True)))

    async def once() -> None:
        got = await client.transport.get(lease_id, items, deadline)
        if got.failed:
            raise TransferFailed(f"blocks did not come: {sorted(set(got.failed.values()))}")

    seconds = await _best(once, deadline)
    found = await asyncio.to_thread(client.memory.checksums, targets)
    if found != [block.checksum for block in blocks]:
        raise TransferFailed("what came is not what was sent")
    return seconds


async def _best(
    once: Callable[[], Awaitable[object]], deadline: Deadline, num_rounds: int = MAX_ROUNDS
) -> float:
    """Seconds of the fastest round, of those that the time allows."""
    best_s = float("inf")
    for _ in range(num_rounds):
        began = time.perf_counter()
        await once()
        took_s = time.perf_counter() - began
        best_s = min(best_s, took_s)
        if took_s * (num_rounds + 1) > deadline.left_s():
            break
    return max(best_s, 1e-9)


async def _copy(num_bytes: int, deadline: Deadline) -> float:
    """Seconds of a plain copy, on a thread like the transports' own."""
    source, target = np.ones(num_bytes, dtype=np.uint8), np.ones(num_bytes, dtype=np.uint8)
    return await _best(lambda: asyncio.to_thread(np.copyto, target, source), deadline)
