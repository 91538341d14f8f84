"""Shared memory: the worker copies into and out of the store's mapped slab, under a lease.

For worker and store on one host. The store moves no byte. Copies run in an executor's thread (NumPy
releases the GIL) and compute checksums on their way. They run in rounds, so that a cancelled or
late transfer ends within milliseconds: when `put` or `get` is over, for whatever reason, nothing is
being copied any more. So there is never a quarantine on the worker's side. (A worker that is
stopped or killed inside a copy is what the store's own quarantine is for.)
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from kvstore.connection import StoreInfo
from kvstore.errors import GENERATION, MISSING, LeaseLapsed
from kvstore.slab import FAULT_AROUND_BYTES, Slab
from kvstore.transport.base import BlockMemory, GetItems, GetResult, PutItem
from kvstore.transport.checked_copy import CheckedCopy, Ids
from kvstore.transport.copy_job import IsStopped
from process.deadline import Deadline
from process.errors import DeadlineExceeded, FailedPrecondition
from process.tasks import complete_despite_cancel

ROUND_BYTES = 4 * 1024 * 1024
"""Bytes copied between two looks at generations, deadline and cancellation: under 1 ms (6 GB/s,
measured)."""

Result = TypeVar("Result")


class ShmTransport:
    """See the module."""

    name = "shm"
    counts_own_reads = True

    def __init__(self, memory: BlockMemory, slab: Slab, attachment_id: str) -> None:
        self._memory = memory
        self._slab = slab
        self._attachment_id = attachment_id
        self._checked = CheckedCopy(memory.view, slab.frames)
        self._round_frames = max(1, ROUND_BYTES // slab.layout.stride_bytes)
        self._is_mapped = np.zeros(slab.layout.num_frames, dtype=np.bool_)

    @classmethod
    async def connect(cls, memory: BlockMemory, store: StoreInfo) -> ShmTransport:
        """Map the store's slab and show the store that this process lives.

        Raises: FailedPrecondition when the file cannot be mapped here; there is no other way then.
        """
        slab = await asyncio.to_thread(Slab.open, Path(store.slab_path), store.incarnation)
        if slab.layout.frame_bytes != memory.block_bytes:
            slab.close()
            raise FailedPrecondition(
                f"transport shm: the slab's frames have {slab.layout.frame_bytes} bytes, "
                f"the worker's blocks {memory.block_bytes}"
            )
        slab.lock_byte(store.attachment_id)
        return cls(memory, slab, store.attachment_id)

    async def put(
        self, lease_id: str, items: Sequence[PutItem], deadline: Deadline
    ) -> Sequence[int]:
        frames = np.array([item.frame for item in items], dtype=np.int64)
        blocks = np.array([item.block_id for item in items], dtype=np.int64)
        expected = np.array([item.generation for item in items], dtype=np.uint64)

        def copy(is_stopped: IsStopped) -> list[int]:
            checksums: list[int] = []
            for part in self._rounds(len(items)):
                if is_stopped():
                    raise DeadlineExceeded("put: the time for it ran out")
                if not np.array_equal(self._slab.generations[frames[part]], expected[part]):
                    raise LeaseLapsed("put: the reservation is over")
                self._map(frames[part])
                checksums += self._copy_out(frames[part], blocks[part])
            return checksums

        return await self._in_thread(copy, deadline)

    async def get(self, lease_id: str, items: GetItems, deadline: Deadline) -> GetResult:
        frames, blocks, expected = items.columns()
        exists = frames < self._slab.layout.num_frames
        wanted = np.flatnonzero(exists).tolist()
        failed = dict.fromkeys(np.flatnonzero(~exists).tolist(), MISSING)
        frames, blocks, expected = frames[wanted], blocks[wanted], expected[wanted]
        held = np.zeros(len(wanted), dtype=np.bool_)

        def copy(is_stopped: IsStopped) -> list[int]:
            checksums: list[int] = []
            for part in self._rounds(len(wanted)):
                if is_stopped():
                    raise DeadlineExceeded("get: the time for it ran out")
                # The seqlock: even and as expected before the copy, and the same after it.
                before = (self._slab.generations[frames[part]] == expected[part]) & (
                    expected[part] % 2 == 0
                )
                checksums += self._copy_in(blocks[part], frames[part])
                held[part] = before & (self._slab.generations[frames[part]] == expected[part])
            return checksums

        checksums = await self._in_thread(copy, deadline)
        failed |= {wanted[i]: GENERATION for i in np.flatnonzero(~held).tolist()}
        num_bytes = int(held.sum()) * self._memory.block_bytes
        return GetResult(num_bytes, failed, dict(zip(wanted, checksums, strict=True)))

    async def close(self) -> None:
        self._slab.close()

    # -- on the executor's thread

    def _rounds(self, num_items: int) -> Iterator[slice]:
        """Items by the few that are copied between two looks at generations and the clock."""
        for start in range(0, num_items, self._round_frames):
            yield slice(start, start + self._round_frames)

    def _map(self, frames: Ids) -> None:
        """Have frames that this process never wrote mapped here, many pages at a time."""
        for frame in frames[~self._is_mapped[frames]].tolist():
            self._slab.touch(frame, frame + 1, FAULT_AROUND_BYTES)
        self._is_mapped[frames] = True

    def _copy_out(self, frames: Ids, blocks: Ids) -> list[int]:
        return self._checked.put(frames, blocks)

    def _copy_in(self, blocks: Ids, frames: Ids) -> list[int]:
        return self._checked.get(blocks, frames)

    async def _in_thread(self, copy: Callable[[IsStopped], Result], deadline: Deadline) -> Result:
        """Run a copy in an executor's thread; a cancellation stops it and waits for its end."""
        cancelled = threading.Event()

        def is_stopped() -> bool:
            return cancelled.is_set() or deadline.expired

        job = asyncio.get_running_loop().run_in_executor(None, copy, is_stopped)
        try:
            await finish_or_stop(job, cancelled)
        except asyncio.CancelledError:
            if not job.cancelled():
                job.exception()  # it ended because we told it to
            raise
        return job.result()


async def finish_or_stop(job: asyncio.Future[Any], stop: threading.Event) -> None:
    """Wait for the job; when cancelled, tell it to stop, wait for its end, then be cancelled."""
    try:
        await asyncio.wait([job])
    except asyncio.CancelledError:
        stop.set()
        await complete_despite_cancel(job)
        raise
