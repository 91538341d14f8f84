"""StagedTransport: blocks on a device, for a transport that moves host memory: through page-locked
rows of this process, a batch of rows at a time.

Only for transports without one-sided writes (grpc): when a call of the inner one is over, nothing
moves into the rows any more. Checksums are the inner transport's, over the rows. Puts take turns,
and so do gets: each direction has one set of rows. One asyncio loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from kvstore.transport.base import BlockMemory, GetItems, GetResult, PutItem, Transport
from kvstore.transport.copy_job import IsStopped, Unsettled, run_copy
from kvstore.transport.staging import PinnedStaging
from process.deadline import Deadline
from process.errors import DeadlineExceeded


class StagedTransport:
    """See the module."""

    def __init__(
        self,
        memory: BlockMemory,
        outgoing: PinnedStaging,
        incoming: PinnedStaging,
        make_inner: Callable[[BlockMemory], Transport],
    ) -> None:
        self._block_bytes = memory.block_bytes
        self._outgoing, self._incoming = outgoing, incoming
        self._put_inner = make_inner(BlockMemory.of(outgoing.rows))
        self._get_inner = make_inner(BlockMemory.of(incoming.rows))
        self._put_turn, self._get_turn = _Turn(), _Turn()

    @classmethod
    async def over(
        cls, memory: BlockMemory, make_inner: Callable[[BlockMemory], Transport]
    ) -> StagedTransport:
        """make_inner: the transport of a host memory.

        Raises: FailedPrecondition when the device cannot use host memory of this process.
        """
        device = memory.device
        if device is None:
            raise TypeError("the blocks lie in host memory: no staging")
        shape = (device, memory.address, memory.block_bytes, memory.num_blocks)
        stagings = PinnedStaging(*shape), PinnedStaging(*shape)
        await asyncio.to_thread(lambda: [staging.rows for staging in stagings])
        return cls(memory, *stagings, make_inner)

    @property
    def name(self) -> str:
        """Of the transport inside."""
        return self._put_inner.name

    @property
    def counts_own_reads(self) -> bool:
        """Of the transport inside."""
        return self._get_inner.counts_own_reads

    async def put(
        self, lease_id: str, items: Sequence[PutItem], deadline: Deadline
    ) -> Sequence[int]:
        """See Transport."""
        staging = self._outgoing
        checksums: list[int] = []
        await self._put_turn.take(deadline)
        settled: asyncio.Future[None] | None = None
        try:
            for start in range(0, len(items), staging.num_rows):
                batch = items[start : start + staging.num_rows]

                def fetch(is_stopped: IsStopped, batch: Sequence[PutItem] = batch) -> None:
                    _stop_here(is_stopped)
                    staging.fetch([item.block_id for item in batch])

                await run_copy(fetch, deadline)
                rows = [PutItem(row, item.frame, item.generation) for row, item in enumerate(batch)]
                checksums += await self._put_inner.put(lease_id, rows, deadline)
        except Unsettled as error:
            # The device writes into our rows, not into frames: nothing to quarantine at the store.
            settled = error.settled
            raise error.cause from error
        finally:
            self._put_turn.end(settled)
        return checksums

    async def get(self, lease_id: str, items: GetItems, deadline: Deadline) -> GetResult:
        """See Transport."""
        failed: dict[int, str] = {}
        checksums: dict[int, int] = {}
        await self._get_turn.take(deadline)
        settled: asyncio.Future[None] | None = None
        try:
            for start in range(0, len(items), self._incoming.num_rows):
                batch = items[start : start + self._incoming.num_rows]
                await self._get_batch(lease_id, start, batch, deadline, failed, checksums)
        except Unsettled as error:
            settled = error.settled
            raise error.with_quarantine(items.block_ids) from error
        finally:
            self._get_turn.end(settled)
        return GetResult(len(checksums) * self._block_bytes, failed, checksums)

    async def close(self) -> None:
        """Waits for whatever still moves, however long: the caller bounds its own patience."""
        for turn in (self._put_turn, self._get_turn):
            await turn.quiet()
        await self._put_inner.close()
        await self._get_inner.close()
        for staging in (self._outgoing, self._incoming):
            await asyncio.to_thread(staging.close)

    async def _get_batch(
        self,
        lease_id: str,
        start: int,
        batch: GetItems,
        deadline: Deadline,
        failed: dict[int, str],
        checksums: dict[int, int],
    ) -> None:
        staging = self._incoming
        rows = GetItems([(ref, row) for row, (ref, _) in enumerate(batch)])
        got = await self._get_inner.get(lease_id, rows, deadline)
        failed |= {start + row: why for row, why in got.failed.items()}
        came = [row for row in range(len(batch)) if row not in got.failed]
        block_ids = batch.block_ids

        def store(is_stopped: IsStopped) -> None:
            _stop_here(is_stopped)
            staging.store(came, [block_ids[row] for row in came])

        if came:
            await run_copy(store, deadline)
            checksums |= {start + row: got.checksums[row] for row in came}


def _stop_here(is_stopped: IsStopped) -> None:
    if is_stopped():
        raise DeadlineExceeded("copy: the time for it ran out")


class _Turn:
    """Who uses one set of rows. One asyncio loop."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def take(self, deadline: Deadline) -> None:
        """Raises: DeadlineExceeded."""
        async with deadline.timeout("copy: waiting for its turn"):
            await self._lock.acquire()

    def end(self, settled: asyncio.Future[None] | None) -> None:
        """Let the next one in; not before the device is done with the rows."""
        if settled is None:
            self._lock.release()
        else:
            settled.add_done_callback(lambda _: self._lock.release())

    async def quiet(self) -> None:
        """Wait until nobody uses them; nobody may from then on."""
        await self._lock.acquire()
