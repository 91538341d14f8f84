"""Shared memory for blocks on a device: the store's slab, mapped here and page-locked, is copied to
and from by DMA, under a lease. The store moves no byte.

Why: NIXL between a device and another process' host memory ran 100 times below the bus (measured);
copies of unlocked memory several times below it. Neither is ever used in silence: a slab that
cannot be locked is refused (registered_slab.py).

A copy goes in pieces (pump.py). Checksums are computed over the slab's bytes, while the lease
holds, on threads beside the copy: of what is read while it is copied, of what was written when it
lies there. So nobody copies bytes back from the device to verify them. Generations are looked at
before the first and after the last of copies and checksums.

After the deadline or a cancellation nothing more is given, and the transfer ends with the pieces
under way, within milliseconds. If the device does not end those, the blocks are quarantined.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvstore import block_hash
from kvstore.connection import StoreInfo
from kvstore.errors import GENERATION, MISSING, LeaseLapsed
from kvstore.slab import Slab
from kvstore.transport.base import BlockMemory, GetItems, GetResult, PutItem, PutUnsettled
from kvstore.transport.copy_job import IsStopped, Unsettled, run_copy
from kvstore.transport.device import Copies, CopyQueue, Device
from kvstore.transport.pump import Pump, stop_here
from kvstore.transport.registered_slab import close_registered, open_registered
from process.deadline import Deadline
from process.errors import FailedPrecondition

PIECE_BYTES = 8 * 1024 * 1024
"""Bytes of one piece: 0.15 ms of a 55 GB/s bus, long against what giving it costs."""
HASH_THREADS = 4
"""One thread hashes 14 to 20 GB/s, four 60 to 80, the bus moves 55 (measured)."""
HASH_BYTES = 2 * 1024 * 1024
"""What a thread hashes before it looks for the next: a tenth of a millisecond."""

Ids = npt.NDArray[np.int64]
Generations = npt.NDArray[np.uint64]


class DeviceShmTransport:
    """See the module."""

    name = "shm"
    counts_own_reads = True

    def __init__(self, memory: BlockMemory, device: Device, slab: Slab) -> None:
        self._memory = memory
        self._device = device
        self._slab = slab
        self._bytes = slab.frames.data.cast("B")
        self._pump = Pump(device, max(1, PIECE_BYTES // slab.layout.stride_bytes))
        self._hash_frames = max(1, HASH_BYTES // slab.layout.stride_bytes)
        self._hashing = ThreadPoolExecutor(
            min(HASH_THREADS, os.cpu_count() or 1), thread_name_prefix="slab-checksums"
        )
        self._unsettled: set[asyncio.Future[None]] = set()

    @classmethod
    async def connect(cls, memory: BlockMemory, store: StoreInfo) -> DeviceShmTransport:
        """Map the store's slab, lock it for the device, show the store that this process lives.

        Raises: FailedPrecondition when that cannot be done here; there is no other way then.
        """
        device = memory.device
        if device is None:
            raise TypeError("the blocks lie in host memory: ShmTransport")
        slab = await open_registered(device, Path(store.slab_path), store.incarnation)
        if slab.layout.frame_bytes != memory.block_bytes:
            await asyncio.to_thread(close_registered, device, slab)
            raise FailedPrecondition(
                f"transport shm: the slab's frames have {slab.layout.frame_bytes} bytes, "
                f"the worker's blocks {memory.block_bytes}"
            )
        slab.lock_byte(store.attachment_id)
        return cls(memory, device, slab)

    async def put(
        self, lease_id: str, items: Sequence[PutItem], deadline: Deadline
    ) -> Sequence[int]:
        """See Transport."""
        if not items:
            return []
        frames = np.array([item.frame for item in items], dtype=np.int64)
        blocks = np.array([item.block_id for item in items], dtype=np.int64)
        expected = np.array([item.generation for item in items], dtype=np.uint64)

        def copy(is_stopped: IsStopped) -> list[int]:
            return self._copy_out(frames, blocks, expected, is_stopped)

        try:
            return await run_copy(copy, deadline)
        except Unsettled as error:
            self._remember(error.settled)
            raise PutUnsettled(error.cause, error.settled) from error

    async def get(self, lease_id: str, items: GetItems, deadline: Deadline) -> GetResult:
        """See Transport."""
        frames, blocks, expected = items.columns()
        exists = frames < self._slab.layout.num_frames
        wanted = np.flatnonzero(exists).tolist()
        failed = dict.fromkeys(np.flatnonzero(~exists).tolist(), MISSING)
        if not wanted:
            return GetResult(0, failed)
        frames, blocks, expected = frames[wanted], blocks[wanted], expected[wanted]

        def copy(is_stopped: IsStopped) -> tuple[npt.NDArray[np.bool_], list[int]]:
            return self._copy_in(frames, blocks, expected, is_stopped)

        try:
            held, checksums = await run_copy(copy, deadline)
        except Unsettled as error:
            self._remember(error.settled)
            raise error.with_quarantine(items.block_ids) from error
        failed |= {wanted[i]: GENERATION for i in np.flatnonzero(~held).tolist()}
        found = {wanted[i]: checksums[i] for i in np.flatnonzero(held).tolist()}
        return GetResult(len(found) * self._memory.block_bytes, failed, found)

    async def close(self) -> None:
        """Waits for whatever still moves, however long: the caller bounds its own patience."""
        while self._unsettled:
            await asyncio.wait(self._unsettled)
        await asyncio.to_thread(self._close)

    # -- on the executor's thread

    def _close(self) -> None:
        self._hashing.shutdown()
        self._pump.close()
        close_registered(self._device, self._slab)

    def _copy_out(
        self, frames: Ids, blocks: Ids, expected: Generations, is_stopped: IsStopped
    ) -> list[int]:
        """Device to slab; then the checksums of what lies there."""
        checksums: list[Future[list[int]]] = []

        def give(queue: CopyQueue, part: slice) -> None:
            if not np.array_equal(self._slab.generations[frames[part]], expected[part]):
                raise LeaseLapsed("put: the reservation is over")
            queue.to_host(self._copies(frames[part], blocks[part]))

        def landed(part: slice) -> None:
            checksums.extend(self._hash(frames[part], is_stopped))

        self._pump.run(len(frames), give, is_stopped, landed)
        found = [checksum for part in checksums for checksum in part.result()]
        # The checksums vouch for the bytes only while nobody else may write there.
        if not np.array_equal(self._slab.generations[frames], expected):
            raise LeaseLapsed("put: the reservation is over")
        return found

    def _copy_in(
        self, frames: Ids, blocks: Ids, expected: Generations, is_stopped: IsStopped
    ) -> tuple[npt.NDArray[np.bool_], list[int]]:
        """Slab to device. Returns: whose generation held, and all checksums."""
        # The seqlock: even and as expected before the copy, and the same after it.
        held = (self._slab.generations[frames] == expected) & (expected % 2 == 0)
        hashing = self._hash(frames, is_stopped)

        def give(queue: CopyQueue, part: slice) -> None:
            queue.to_device(self._copies(frames[part], blocks[part]))

        self._pump.run(len(frames), give, is_stopped)
        checksums = [checksum for part in hashing for checksum in part.result()]
        held &= self._slab.generations[frames] == expected
        return held, checksums

    def _copies(self, frames: Ids, blocks: Ids) -> Copies:
        """The copies of a piece; neighbours that continue one another on both sides are one."""
        num_bytes = self._memory.block_bytes
        devices = self._memory.address + blocks.astype(np.uint64) * num_bytes
        hosts = (
            self._slab.frames_address + frames.astype(np.uint64) * self._slab.layout.stride_bytes
        )
        starts = np.arange(len(frames))
        if self._slab.layout.stride_bytes == num_bytes:
            breaks = (np.diff(frames) != 1) | (np.diff(blocks) != 1)
            starts = np.concatenate([[0], np.flatnonzero(breaks) + 1])
        copies: Copies = np.empty((len(starts), 3), dtype=np.uint64)
        copies[:, 0], copies[:, 1] = devices[starts], hosts[starts]
        copies[:, 2] = np.diff(starts, append=len(frames)) * num_bytes
        return copies

    def _hash(self, frames: Ids, is_stopped: IsStopped) -> list[Future[list[int]]]:
        """Start to compute the checksums of frames; in order, a few frames in each."""
        stride, num_bytes = self._slab.layout.stride_bytes, self._memory.block_bytes

        def some(frames: Ids) -> list[int]:
            stop_here(is_stopped)
            starts = (frames * stride).tolist()
            return [block_hash.checksum(self._bytes[at : at + num_bytes]) for at in starts]

        return [
            self._hashing.submit(some, frames[first : first + self._hash_frames])
            for first in range(0, len(frames), self._hash_frames)
        ]

    def _remember(self, settled: asyncio.Future[None]) -> None:
        self._unsettled.add(settled)
        settled.add_done_callback(self._unsettled.discard)
