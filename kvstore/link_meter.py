"""LinkMeter: measures a client's own transport with real bytes: private frames at the store, blocks
that the worker lends for it. What it writes has no chain hash and is in no index, the store counts
none of its bytes, and the frames are free again when its lease ends. A lender takes no writes: it
is asked for a few of its free blocks, and they are read.

At most MAX_BYTES go each way. The caller's deadline bounds it; blocks that a transfer may still
touch are named by the error, as everywhere (`kvstore.errors`). One asyncio loop.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import numpy as np

from kvstore.block import Block
from kvstore.errors import Quarantine, TransferCancelled, TransferFailed, TransferTimeout
from kvstore.finishing import Background
from kvstore.getting import Getter
from kvstore.lease_calls import LeaseCalls
from kvstore.lending import PROBE_HASH, is_lender
from kvstore.link import Rates
from kvstore.putting import Putter, Wanted
from kvstore.rpc import Attached
from kvstore.transport.base import BlockMemory, GetItems, PutItem, PutUnsettled, Transport
from process.deadline import Deadline
from process.errors import NoCapacity

MAX_BYTES = 32 * 1024 * 1024
MAX_ROUNDS = 3
NUM_LATENCY_ROUNDS = 9
"""More, since one is short: whatever else the loop does in it counts for more."""
MAX_BLOCKS = 16
"""More frames than that cost more control calls than they are worth."""
MAX_SHARE = 1 / 8
"""Of a store's frames: what others keep in a small one is worth more than a measurement."""

_TTL_S = 10.0
_RELEASE_S = 2.0


def num_blocks_wanted(block_bytes: int) -> int:
    """How many blocks to lend: half of them are sent, half received into."""
    return 2 * max(1, min(MAX_BLOCKS, MAX_BYTES // (2 * MAX_ROUNDS * block_bytes)))


class Probe(Protocol):
    """What a lender lends to be measured with."""

    @property
    def blocks(self) -> tuple[Block, ...]: ...
    @property
    def lease_id(self) -> str: ...


class Match(Protocol):
    """StoreClient.match."""

    def __call__(
        self, chain_hashes: Sequence[bytes], *, ttl_s: float, deadline: Deadline
    ) -> Awaitable[Probe]: ...


class LinkMeter:
    """See the module."""

    def __init__(
        self,
        attached: Attached,
        memory: BlockMemory,
        transport: Transport,
        leases: LeaseCalls,
        putter: Putter,
        getter: Getter,
        background: Background,
        match: Match,
    ) -> None:
        """match: of the client that this is a part of."""
        self._max_blocks = max(1, int(attached.num_frames * MAX_SHARE))
        self._is_lender = is_lender(attached.node_id)
        self._match = match
        self._memory = memory
        self._transport = transport
        self._leases = leases
        self._putter = putter
        self._getter = getter
        self._background = background

    async def measure(self, block_ids: Sequence[int], deadline: Deadline) -> Rates:
        """See StoreClient.measure."""
        if self._is_lender:
            return await self._measure_lender(block_ids, deadline)
        half = min(len(block_ids) // 2, self._max_blocks)
        if half < 1:
            raise NoCapacity("the engine has no free blocks to measure with")
        sources, targets = list(block_ids[:half]), list(block_ids[half : 2 * half])
        name = f"link/{secrets.token_hex(16)}"
        lease_id, block = await self._store_one(f"{name}/first", sources[0], deadline)
        try:
            # The first time pays for connections and memory; every block has real bytes after it.
            every = [(block, block_id) for block_id in (*sources, *targets)]
            await self._fetch(lease_id, every, deadline)
            latency_s = await self._latency(lease_id, block, targets[0], deadline)
            write_s, blocks = await self._write(lease_id, name, sources, deadline)
            read_s = await self._read(lease_id, blocks, targets, deadline)
        finally:
            releasing = self._release_later(lease_id)
        await asyncio.wait([releasing])
        num_bytes = half * self._memory.block_bytes
        copy_s = await _copy(num_bytes, deadline)
        return Rates(
            num_bytes, num_bytes / write_s, num_bytes / read_s, latency_s, num_bytes / copy_s
        )

    async def _measure_lender(self, block_ids: Sequence[int], deadline: Deadline) -> Rates:
        """Reading only, of what it lends for that."""
        if not block_ids:
            raise NoCapacity("the engine has no free blocks to measure with")
        asked = [PROBE_HASH] * min(len(block_ids), num_blocks_wanted(self._memory.block_bytes) // 2)
        probe = await self._match(asked, ttl_s=_TTL_S, deadline=deadline)
        lease_id, blocks = probe.lease_id, probe.blocks
        if not blocks:
            raise NoCapacity("the lender has no free blocks to measure with")
        num_blocks = len(blocks)
        try:
            targets = list(block_ids[:num_blocks])
            await self._fetch(lease_id, list(zip(blocks, targets, strict=True)), deadline)
            latency_s = await self._latency(lease_id, blocks[0], targets[0], deadline)
            read_s = await self._read(lease_id, blocks, targets, deadline)
        finally:
            releasing = self._release_later(lease_id)
        await asyncio.wait([releasing])
        num_bytes = num_blocks * self._memory.block_bytes
        copy_s = await _copy(num_bytes, deadline)
        return Rates(num_bytes, 0.0, num_bytes / read_s, latency_s, num_bytes / copy_s)

    def _release_later(self, lease_id: str) -> asyncio.Task[int]:
        """With all that was written under it. If nobody hears it, it lapses by itself."""
        return self._background.spawn(self._leases.release([lease_id], Deadline.after(_RELEASE_S)))

    async def _store_one(self, name: str, block_id: int, deadline: Deadline) -> tuple[str, Block]:
        """Under a new lease, which it returns, too."""
        put = await self._putter.put(
            None,
            b"",
            [],
            (name, block_id, 1),
            _TTL_S,
            deadline,
            num_tokens=1,
            tenant="",
            is_probe=True,
        )
        if put.tail is None:
            self._release_later(put.lease_id)
            raise NoCapacity("the store has no free frame to measure with")
        return put.lease_id, put.tail

    async def _fetch(
        self, lease_id: str, items: Sequence[tuple[Block, int]], deadline: Deadline
    ) -> None:
        got = await self._getter.get(lease_id, items, deadline, None)
        if got.failed:
            raise TransferFailed(f"blocks did not come back: {sorted(set(got.failed.values()))}")

    async def _latency(self, lease_id: str, block: Block, target: int, deadline: Deadline) -> float:
        """Seconds of reading one block as requests do, verified."""
        return await _best(
            lambda: self._fetch(lease_id, [(block, target)], deadline), deadline, NUM_LATENCY_ROUNDS
        )

    async def _write(
        self, lease_id: str, name: str, sources: Sequence[int], deadline: Deadline
    ) -> tuple[float, list[Block]]:
        """Seconds of one transfer of all sources, and where they lie then."""
        wanted: list[Wanted] = []
        try:
            for index, block_id in enumerate(sources):
                wanted += await self._putter.reserve_tail(
                    lease_id, (f"{name}/{index}", block_id, 1), _TTL_S, deadline
                )
            if len(wanted) < len(sources):
                raise NoCapacity("the store has too few free frames to measure with")
            items = [PutItem(each.block_id, each.frame, each.generation) for each in wanted]
            seconds = await _best(lambda: self._transport.put(lease_id, items, deadline), deadline)
            checksums = await asyncio.to_thread(self._memory.checksums, sources)
            committed = await self._putter.commit(lease_id, wanted, checksums, deadline)
        except BaseException as error:
            cause = self._putter.undo_later(lease_id, wanted, error, owns_lease=False)
            if not isinstance(error, PutUnsettled):
                raise
            # It reads the sources until it is over: nobody else shall have them before.
            held = Quarantine(tuple(sources), error.settled)
            if isinstance(cause, asyncio.CancelledError):
                raise TransferCancelled("measuring: a put is not over", held) from error
            raise TransferTimeout("measuring: a put is not over", held) from error
        return seconds, [committed[each.frame] for each in wanted]

    async def _read(
        self, lease_id: str, blocks: Sequence[Block], targets: Sequence[int], deadline: Deadline
    ) -> float:
        items = GetItems(list(zip(blocks, targets, strict=True)))

        async def once() -> None:
            got = await self._transport.get(lease_id, items, deadline)
            if got.failed:
                raise TransferFailed(f"blocks did not come: {sorted(set(got.failed.values()))}")

        seconds = await _best(once, deadline)
        found = await asyncio.to_thread(self._memory.checksums, targets)
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
