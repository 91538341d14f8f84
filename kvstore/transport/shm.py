"""ShmTransport (`shm`): shared memory. The worker copies KV blocks into and out of the store's
mapped slab, under a lease.

For worker and store on one host; the store moves no byte. `ShmTransport` is for blocks in host
memory, `DeviceShmTransport` for blocks on a device, whose copies go by DMA. Both look at a frame's
generation before and after a copy (a seqlock), and copy in pieces, so that a cancelled or late
transfer ends within milliseconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from kvstore import block_hash
from kvstore.block_source import StoreInfo
from kvstore.errors import GENERATION, MISSING, LeaseLapsed
from kvstore.slab import FAULT_AROUND_BYTES, Slab
from kvstore.transport.base import (
    BlockMemory,
    Bytes2D,
    Generations,
    GetItems,
    GetResult,
    Ids,
    PutItem,
    PutUnsettled,
    UnsettledTransfers,
)
from kvstore.transport.copy_pipeline import (
    CopyPipeline,
    IsStopped,
    Unsettled,
    raise_if_stopped,
    run_copy,
)
from kvstore.transport.device import Copies, CopyQueue, Device
from process.background_tasks import complete_despite_cancel
from process.deadline import Deadline
from process.rpc_errors import DeadlineExceeded, FailedPrecondition

ROUND_BYTES = 4 * 1024 * 1024
"""Bytes copied between two looks at generations, deadline and cancellation: under 1 ms (6 GB/s,
measured)."""

Result = TypeVar("Result")


class ShmTransport:
    """The transport `shm` for blocks in host memory: copies between the worker's memory and the
    mapped slab.

    Copies run in an executor's thread (NumPy releases the GIL) and compute checksums on their way.
    When `put` or `get` is over, for whatever reason, nothing is being copied any more, so there is
    never a quarantine on the worker's side. The store's own quarantine is for a worker that is
    stopped or killed inside a copy.
    """

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
        """Copy blocks into reserved frames, as Transport.put. Raises: LeaseLapsed when a
        reservation was over meanwhile."""
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
        """Copy frames into the worker's blocks, as Transport.get."""
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
        """Close the slab's file. The mapping stays as long as the process lives."""
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
                job.exception()  # it ended because it was told to stop
            raise
        return job.result()


async def finish_or_stop(job: asyncio.Future[Any], stop: threading.Event) -> None:
    """Wait for a job on a thread. A caller that is cancelled stops the job, waits for its end,
    and is cancelled then."""
    try:
        await asyncio.wait([job])
    except asyncio.CancelledError:
        stop.set()
        await complete_despite_cancel(job)
        raise


PIECE_BYTES = 256 * 1024
"""Bytes that are copied and hashed in turn: both sides of a piece fit into a core's second-level
cache. Best of 64 KiB to 1 MiB for blocks of 64 KiB, 256 KiB and 2 MiB (measured)."""


class CheckedCopy:
    """Copies blocks between a worker's memory, uint8 [num_blocks, block_bytes], and a slab's
    frames, uint8 [num_frames, stride_bytes], and hashes the worker's bytes on the way.

    Copying and hashing take turns, a piece at a time, so that each byte comes out of memory once:
    what was just hashed is copied out of the core's cache, what was just copied is hashed there.
    Hashing 64 MiB in one go after they were copied costs half to three quarters of the copy itself;
    in turns, a fifth to a third (measured).

    Knows no leases, generations or deadlines: the transport looks at these before and after. Blocks
    its thread; releases the GIL in each piece."""

    def __init__(self, own: Bytes2D, frames: Bytes2D) -> None:
        self._own = own
        self._frames = frames
        self._block_bytes = own.shape[1]
        self._flat = own.data.cast("B")
        # Equal strides: neighbouring frames and blocks can be copied as one array.
        can_merge = frames.shape[1] == self._block_bytes
        self._piece_blocks = max(1, PIECE_BYTES // self._block_bytes) if can_merge else 1

    def put(self, frames: Ids, blocks: Ids) -> list[int]:
        """Copy `blocks` into `frames`. Returns: checksums of the blocks, in order, read before the
        copy of the same piece."""
        checksums: list[int] = []
        for frame, block, num in self._pieces(frames, blocks):
            if self._block_bytes > PIECE_BYTES:
                checksums.append(self._put_large(frame, block))
                continue
            checksums += self._checksums(block, num)
            to = self._frames[frame : frame + num, : self._block_bytes]
            np.copyto(to, self._own[block : block + num])
        return checksums

    def get(self, blocks: Ids, frames: Ids) -> list[int]:
        """Copy `frames` into `blocks`. Returns: checksums of the blocks, in order, read after the
        copy of the same piece."""
        checksums: list[int] = []
        for frame, block, num in self._pieces(frames, blocks):
            if self._block_bytes > PIECE_BYTES:
                checksums.append(self._get_large(block, frame))
                continue
            source = self._frames[frame : frame + num, : self._block_bytes]
            np.copyto(self._own[block : block + num], source)
            checksums += self._checksums(block, num)
        return checksums

    # -- inside

    def _pieces(self, frames: Ids, blocks: Ids) -> Iterator[tuple[int, int, int]]:
        """Yield runs of blocks (frame, block, how many) that continue one another on both sides."""
        if not len(frames):
            return
        breaks = np.flatnonzero((np.diff(frames) != 1) | (np.diff(blocks) != 1)) + 1
        edges = [0, *breaks.tolist(), len(frames)]
        for start, end in pairwise(edges):
            frame, block = int(frames[start]), int(blocks[start])
            for at in range(0, end - start, self._piece_blocks):
                yield frame + at, block + at, min(self._piece_blocks, end - start - at)

    def _checksums(self, block: int, num: int) -> list[int]:
        size, flat = self._block_bytes, self._flat
        first = block * size
        return [
            block_hash.checksum(flat[at : at + size])
            for at in range(first, first + num * size, size)
        ]

    def _put_large(self, frame: int, block: int) -> int:
        running = block_hash.RunningChecksum()
        source, target = self._own[block], self._frames[frame]
        for at in range(0, self._block_bytes, PIECE_BYTES):
            end = min(at + PIECE_BYTES, self._block_bytes)
            running.update(source[at:end])
            np.copyto(target[at:end], source[at:end])
        return running.value

    def _get_large(self, block: int, frame: int) -> int:
        running = block_hash.RunningChecksum()
        source, target = self._frames[frame], self._own[block]
        for at in range(0, self._block_bytes, PIECE_BYTES):
            end = min(at + PIECE_BYTES, self._block_bytes)
            np.copyto(target[at:end], source[at:end])
            running.update(target[at:end])
        return running.value


DMA_PIECE_BYTES = 16 * 1024 * 1024
"""Bytes of one piece of a copy between slab and device: 0.3 ms of a 55 GB/s bus, long against what
it costs to queue it and to wake for its end. An engine's copy of sampled tokens waits behind the
pieces under way, 0.9 ms."""
HASH_THREADS = 4
"""Threads that compute checksums beside a copy: one hashes 14 to 20 GB/s, four 60 to 80, the bus
moves 55 (measured)."""
HASH_BYTES = 2 * 1024 * 1024
"""Bytes that a thread hashes before it takes the next part: a tenth of a millisecond."""


class DeviceShmTransport:
    """Blocks on a device: the slab is page-locked, and copied to and from by DMA.

    Why: NIXL between a device and another process' host memory ran 100 times below the bus
    (measured); copies of unlocked memory several times below it. Neither is ever used in silence: a
    slab that cannot be locked is refused (`open_registered`).

    A copy goes in pieces (copy_pipeline.py). Checksums of blocks that are put are computed on the
    device, where it can: threads that hash beside the engine take the interpreter's lock from it,
    and steps of 2,048 tokens that took 53 ms on an H200 took up to 86. So the checksum is that of
    the bytes before the bus, and a reader of the frame finds what the bus has changed. Otherwise,
    and for blocks that are read, they are computed over the slab's bytes, while the lease holds, on
    threads beside the copy: no bytes are copied back from the device to verify them. Generations
    are looked at before the first copy, and after the last copy and checksum.

    After the deadline or a cancellation no more pieces are queued, and the transfer ends with those
    under way, within milliseconds. If the device does not end those, or computes no checksums, the
    blocks are quarantined.
    """

    name = "shm"
    counts_own_reads = True

    def __init__(self, memory: BlockMemory, device: Device, slab: Slab) -> None:
        self._memory = memory
        self._device = device
        self._slab = slab
        self._bytes = slab.frames.data.cast("B")
        self._pipeline = CopyPipeline(device, max(1, DMA_PIECE_BYTES // slab.layout.stride_bytes))
        self._hash_frames = max(1, HASH_BYTES // slab.layout.stride_bytes)
        self._hashing = ThreadPoolExecutor(
            min(HASH_THREADS, os.cpu_count() or 1), thread_name_prefix="slab-checksums"
        )
        self._unsettled = UnsettledTransfers()

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
        """Copy blocks from the device into reserved frames, as Transport.put. Raises: PutUnsettled
        when the device does not end a copy."""
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
            self._unsettled.add(error.settled)
            raise PutUnsettled(error.cause, error.settled) from error

    async def get(self, lease_id: str, items: GetItems, deadline: Deadline) -> GetResult:
        """Copy frames to the device, as Transport.get. Raises: TransferTimeout, TransferCancelled
        with a quarantine when the device does not end a copy."""
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
            self._unsettled.add(error.settled)
            raise error.with_quarantine(items.block_ids) from error
        failed |= {wanted[i]: GENERATION for i in np.flatnonzero(~held).tolist()}
        found = {wanted[i]: checksums[i] for i in np.flatnonzero(held).tolist()}
        return GetResult(len(found) * self._memory.block_bytes, failed, found)

    async def close(self) -> None:
        """Wait until no copy is under way, then unlock and close the slab."""
        await self._unsettled.wait()
        await asyncio.to_thread(self._close)

    # -- on the executor's thread

    def _close(self) -> None:
        self._hashing.shutdown()
        self._pipeline.close()
        close_registered(self._device, self._slab)

    def _copy_out(
        self, frames: Ids, blocks: Ids, expected: Generations, is_stopped: IsStopped
    ) -> list[int]:
        """Device to slab. Returns: the checksums of what was copied."""
        checksums: list[Future[list[int]]] = []
        hasher, pending = self._memory.device_checksums, None
        if hasher is not None:
            pending = hasher.begin(blocks.tolist())

        def queue_piece(queue: CopyQueue, part: slice) -> None:
            if not np.array_equal(self._slab.generations[frames[part]], expected[part]):
                raise LeaseLapsed("put: the reservation is over")
            queue.to_host(self._copies(frames[part], blocks[part]))

        def on_copied(part: slice) -> None:
            if pending is None:
                checksums.extend(self._hash(frames[part], is_stopped))

        self._pipeline.run(len(frames), queue_piece, is_stopped, on_copied)
        if pending is not None:
            found = pending.result()
        else:
            found = [checksum for part in checksums for checksum in part.result()]
        # The checksums vouch for the bytes only while no other worker may write there.
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

        def queue_piece(queue: CopyQueue, part: slice) -> None:
            queue.to_device(self._copies(frames[part], blocks[part]))

        self._pipeline.run(len(frames), queue_piece, is_stopped)
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
            breaks |= np.diff(frames // _locked_frames(self._slab)) != 0
            starts = np.concatenate([[0], np.flatnonzero(breaks) + 1])
        copies: Copies = np.empty((len(starts), 3), dtype=np.uint64)
        copies[:, 0], copies[:, 1] = devices[starts], hosts[starts]
        copies[:, 2] = np.diff(starts, append=len(frames)) * num_bytes
        return copies

    def _hash(self, frames: Ids, is_stopped: IsStopped) -> list[Future[list[int]]]:
        """Start to compute the checksums of frames; in order, a few frames in each."""
        stride, num_bytes = self._slab.layout.stride_bytes, self._memory.block_bytes

        def some(frames: Ids) -> list[int]:
            raise_if_stopped(is_stopped)
            starts = (frames * stride).tolist()
            return [block_hash.checksum(self._bytes[at : at + num_bytes]) for at in starts]

        return [
            self._hashing.submit(some, frames[first : first + self._hash_frames])
            for first in range(0, len(frames), self._hash_frames)
        ]


LOCKED_BYTES = 256 * 1024 * 1024
"""Bytes of a slab that are page-locked in one call: the driver makes every other call of the
process wait for it. A slab of 52 GiB in one call held all steps of a worker for longer than 7 s
(measured on an H200)."""

KEEP_S = 60.0
"""Time for which a mapped and locked slab is kept for the worker's next attempt to attach, which
comes within a few seconds."""

_Key = tuple[int, Device, str, bytes]
_opening: dict[_Key, asyncio.Task[Slab]] = {}


async def open_registered(
    device: Device, path: Path, incarnation: bytes, *, keep_s: float = KEEP_S
) -> Slab:
    """Map a store's slab and page-lock it for a device; the caller ends it by `close_registered`.

    Locking takes long for a large slab (every page is touched and pinned), longer than one attempt
    to attach may take. So an attempt that runs out of time leaves the work going on, and the next
    one to the same start of the store takes its result. One asyncio loop.

    Args: keep_s: after an attempt that ended early, a result that is not taken for so long is given
        back.

    Raises: FailedPrecondition when it cannot be mapped here, or the device cannot use it.
    """
    key = (id(asyncio.get_running_loop()), device, str(path), incarnation)
    while True:
        task = _opening.get(key)
        if task is None:
            task = asyncio.create_task(asyncio.to_thread(_open, device, path, incarnation))
            _opening[key] = task
            task.add_done_callback(lambda done: _expire(key, done, device, keep_s))
        try:
            slab = await asyncio.shield(task)
        except BaseException:
            if task.done() and not task.cancelled() and task.exception() is not None:
                _forget(key, task)
            raise
        if _forget(key, task):
            return slab
        # Several waited for this one and another has it: on to one of our own, by the same way, so
        # that it is kept, or given back, if we do not live to take it.


def close_registered(device: Device, slab: Slab) -> None:
    """Unlock and close a slab that `open_registered` opened. No copy may be under way. Blocks the
    thread."""
    try:
        _unlock(device, list(_locked_parts(slab)))
    finally:
        slab.close()


def _locked_frames(slab: Slab) -> int:
    """The number of frames that are locked in one call; a copy that crosses into the next part's is
    two."""
    return max(1, LOCKED_BYTES // slab.layout.stride_bytes)


def _locked_parts(slab: Slab) -> Iterator[npt.NDArray[np.uint8]]:
    num_frames = _locked_frames(slab)
    for first in range(0, len(slab.frames), num_frames):
        yield slab.frames[first : first + num_frames]


def _unlock(device: Device, parts: Sequence[npt.NDArray[np.uint8]]) -> None:
    """Unlock all parts, whatever becomes of one. Raises: the first error."""
    with contextlib.ExitStack() as stack:
        for part in parts:
            stack.callback(device.unregister, part.ctypes.data)


def _open(device: Device, path: Path, incarnation: bytes) -> Slab:
    slab = Slab.open(path, incarnation)
    locked: list[npt.NDArray[np.uint8]] = []
    try:
        for part in _locked_parts(slab):
            # The driver's lock is not held while the kernel maps the pages, the longer part of it.
            part.reshape(-1)[::FAULT_AROUND_BYTES].max(initial=0)
            device.register(part.ctypes.data, part.nbytes)
            locked.append(part)
    except BaseException as error:
        try:
            _unlock(device, locked)
        finally:
            slab.close()
        if not isinstance(error, FailedPrecondition):
            raise
        raise FailedPrecondition(
            f"transport shm: the store's slab cannot be page-locked for device {device.device_id} "
            f"({error}), and without that copies are many times slower; let the process lock "
            f"{slab.frames.nbytes} bytes (ulimit -l, the container's memory limit), lower the "
            "store's capacity_bytes, or set transport to grpc"
        ) from error
    return slab


def _forget(key: _Key, task: asyncio.Task[Slab]) -> bool:
    """Whether the task's result was still there to take; it is not from now on."""
    if _opening.get(key) is not task:
        return False
    del _opening[key]
    return True


def _expire(key: _Key, task: asyncio.Task[Slab], device: Device, keep_s: float) -> None:
    if _opening.get(key) is task:
        task.get_loop().call_later(keep_s, _drop, key, task, device)


def _drop(key: _Key, task: asyncio.Task[Slab], device: Device) -> None:
    if _forget(key, task) and not task.cancelled() and task.exception() is None:
        task.get_loop().run_in_executor(None, close_registered, device, task.result())
