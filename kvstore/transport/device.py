"""Device: the interface of a GPU whose memory holds a worker's KV blocks, as transports use it:
page-lock host memory, copy by DMA on a queue of its own, and share memory with another process of
this host (`Shared`).

The one real implementation is cuda_device.py; tests have one in plain memory. Knows no CUDA.

Rules that transports keep, whatever the device:
- host memory is copied from or to only after `register`: without it a copy is many times slower,
  without an error;
- a copy that was given to a queue cannot be taken back: its caller waits for its end.

And one for the owner of the blocks: kernels are asynchronous, and copies do not wait
for them, so those that read or write the blocks must be over by then (`compute_mark`).

Every method may be called from any thread; one `CopyQueue` serves one thread at a time.
"""

from __future__ import annotations

import mmap
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvstore import block_hash
from kvstore.errors import TransferFailed
from process.deadline import Deadline

Copies = npt.NDArray[np.uint64]
"""Copies to queue: uint64 [N, 3], rows of (device address, host address, bytes)."""


@dataclass(frozen=True)
class Shared:
    """Memory of a device as another process of this host can map it. A process that knows the
    handle can read and write the whole allocation, so it is a secret: kept out of reprs and
    logs."""

    handle: bytes
    offset_bytes: int
    """Offset of the shared memory from the start of its allocation."""

    def __repr__(self) -> str:
        return f"Shared({len(self.handle)} bytes)"


@dataclass(frozen=True)
class PeerCopies:
    """Sizes and times of a device's copies out of another device's memory that it has mapped. The
    defaults are measured for NVLink."""

    piece_bytes: int = 128 * 1024 * 1024
    """Bytes of one piece of a copy: 0.35 ms of NVLink, long against what queueing it and its
    checksums costs."""

    least_piece_bytes: int = 32 * 1024 * 1024
    """Least bytes of the last pieces, which get smaller since nothing hides the checksums of the
    very last one. To queue a piece takes about as long as this many bytes take to come, and a
    smaller batch of checksums than 16 blocks saves nothing."""

    max_copies_at_once: int = 128
    """Most copies that the event loop itself queues: each costs 2 to 4 us where the driver has no
    batches. As many as two pieces of blocks of 2 MiB that lie anywhere: a thread comes to the copy
    before they are here."""

    ask_early_bytes: int = 256 * 1024 * 1024
    """Size of a copy from which on the lender is asked to hold the blocks (Hold) while the copy
    still runs, which takes about as long as its answer (0.7 to 0.9 ms). After a smaller copy it is
    only asked whether they were still valid."""

    hold_s: float = 0.05
    """Time for which the lender is asked to hold the blocks while they are copied; if the copy
    takes longer, it is asked again at the end. Guessed: fifteen times what a chunk's blocks take,
    and half of what a request that is given up may keep its blocks."""


PEER_COPIES = PeerCopies()


SPINS = 30
"""Looks at a mark before the first nap: about 30 us, what a small copy takes."""
LAST_SPINS = 150
"""Looks at the last mark of a copy before the first nap: nothing runs after it, and a nap takes 55
us more than it is told to."""
_NAP_S = 50e-6


class DeviceMark(Protocol):
    """A point in a queue of the device, as a CUDA event is one in a stream."""

    def is_over(self) -> bool:
        """Whether everything queued before the mark has ended. Raises: TransferFailed when the
        device failed."""

    def wait(self) -> None:
        """Block the thread until everything before it has ended, without the interpreter's lock: a
        thread that looks again and again takes the lock from the engine's each time. It wakes some
        50 us late. Raises: TransferFailed when the device failed."""

    def before(self, stream: int) -> None:
        """Make a stream wait on the device for this mark, as cuStreamWaitEvent does: work queued on
        it later starts after the mark. stream: the driver's handle, of this process.

        Raises: TransferFailed.
        """


class CopyQueue(Protocol):
    """A queue of copies that run in order, beside the device's kernels."""

    def to_host(self, copies: Copies) -> None:
        """Start to copy from the device into registered host memory. Raises: TransferFailed."""

    def to_device(self, copies: Copies) -> None:
        """Start to copy registered host memory into the device's. Raises: TransferFailed."""

    def between(self, copies: Copies) -> None:
        """Start to copy between devices: rows of (target address, source address, bytes), each side
        this device's own or mapped by `map_shared`. Raises: TransferFailed."""

    def mark(self) -> DeviceMark:
        """Make a mark after all copies queued until now."""

    def close(self) -> None:
        """Destroy the queue. None of its copies may be under way."""


class PendingChecksums(Protocol):
    """Checksums of blocks that a device is computing."""

    def result(self) -> list[int]:
        """Wait for the checksum of each block, in order; call it once. Blocks the thread. Raises:
        TransferFailed."""


class DeviceChecksums(Protocol):
    """Computes `block_hash.checksum` of blocks on the device where they lie."""

    def begin(self, block_ids: Sequence[int], after: DeviceMark | None = None) -> PendingChecksums:
        """Start to compute the checksums of blocks as they are now, or as they are after the mark
        `after`. Raises: TransferFailed."""


class Device(Protocol):
    """A GPU whose memory holds a worker's KV blocks, as transports use it."""

    @property
    def device_id(self) -> int:
        """The GPU's number in this process."""

    @property
    def memory(self) -> str:
        """The name that NIXL has for the device's memory: VRAM."""

    @property
    def peer_copies(self) -> PeerCopies:
        """The sizes and times of copies out of other devices' memory that this one has mapped."""

    def register(self, address: int, num_bytes: int) -> None:
        """Page-lock host memory of this process for DMA. Blocks the thread.

        Raises: FailedPrecondition saying why it cannot be.
        """

    def unregister(self, address: int) -> None:
        """Unlock host memory that `register` locked. No copy from or to it may be under way."""

    def compute_mark(self) -> DeviceMark:
        """Make a mark after all kernels that the engine queued until now."""

    def new_queue(self) -> CopyQueue:
        """Make a queue for copies."""

    def use_in_this_thread(self) -> None:
        """Make the device the calling thread's; libraries such as NIXL look at that."""

    def share(self, address: int) -> Shared:
        """Let other processes map the allocation that holds `address`. Raises: FailedPrecondition
        where it cannot be shared."""

    def map_shared(self, shared: Shared) -> int:
        """Map memory that another process shares. Blocks the thread. Returns: its address in this
        process.

        Raises: FailedPrecondition where this device cannot reach it.
        """

    def unmap_shared(self, shared: Shared, address: int) -> None:
        """Unmap memory that `map_shared` mapped, also where its owner is gone. No copy from or to
        it may be under way."""


def wait_for(
    mark: DeviceMark, is_stopped: Callable[[], bool] = lambda: False, *, num_spins: int = SPINS
) -> bool:
    """Look at a mark until it is over, `num_spins` times without a nap. Returns: False when
    `is_stopped` came first."""
    for _ in range(num_spins):
        if mark.is_over():
            return True
    while not mark.is_over():
        if is_stopped():
            return False
        time.sleep(_NAP_S)
    return True


STAGING_BYTES = 16 * 1024 * 1024
"""Bytes of all rows of one PinnedStaging together (one row at least): 0.3 ms of a 55 GB/s bus."""
STALL_S = 10.0
"""Time after which a device that has not moved STAGING_BYTES has failed."""

_never_freed: list[npt.NDArray[np.uint8]] = []
"""Rows that a device may still write into: kept until the process ends."""


class PinnedStaging:
    """A few rows of page-locked host memory through which a device's blocks pass, for code that
    cannot reach the device itself: checksums, and transports that move host memory.

    Memory is taken when it is first used, and kept. One user at a time: `checksums` waits for its
    turn on a lock; `StagedTransport` has stagings of its own. A device that does not fill rows
    within STALL_S fails the staging for good, since it may still write into them. A device that
    does not empty them in time is noticed by the caller (copy_pipeline.py), since blocks are at
    stake there. Any thread; calls block.
    """

    def __init__(
        self,
        device: Device,
        address: int,
        block_bytes: int,
        num_blocks: int,
        stall_s: float = STALL_S,
    ) -> None:
        """Args: address: of the blocks on the device. stall_s: a device that has not filled the
        rows after that long has failed."""
        self.device = device
        self._address = address
        self._block_bytes = block_bytes
        self._stall_s = stall_s
        self.num_rows = max(1, min(num_blocks, STAGING_BYTES // block_bytes))
        self._rows: npt.NDArray[np.uint8] | None = None
        self._queue: CopyQueue | None = None
        self._unlock: weakref.finalize[[Device, npt.NDArray[np.uint8]], Any] | None = None
        self._failed = False
        self._lock = threading.Lock()
        self._taking = threading.Lock()

    @property
    def rows(self) -> npt.NDArray[np.uint8]:
        """The page-locked rows, uint8 [num_rows, block_bytes]; the memory is taken and locked when
        they are first asked for.

        Raises: FailedPrecondition when the device cannot use host memory of this process.
        """
        with self._taking:
            if self._rows is None:
                buffer = mmap.mmap(-1, self.num_rows * self._block_bytes)
                rows = np.frombuffer(buffer, dtype=np.uint8).reshape(self.num_rows, -1)
                self.device.register(rows.ctypes.data, rows.nbytes)
                # Memory that is freed while it is locked poisons its address for the next one.
                self._unlock = weakref.finalize(self, _unlock, self.device, rows)
                self._unlock.atexit = False  # the driver may be gone by then
                self._rows = rows
            return self._rows

    def fetch(self, block_ids: Sequence[int]) -> None:
        """Copy blocks into rows 0, 1, ... (at most num_rows). Raises: TransferFailed."""
        queue = self._ready()
        queue.to_host(self._copies(range(len(block_ids)), block_ids))
        mark, deadline = queue.mark(), Deadline.after(self._stall_s)
        if not wait_for(mark, lambda: deadline.expired):
            self._failed = True
            _never_freed.append(self.rows)
            if self._unlock is not None:
                self._unlock.detach()
            raise TransferFailed(f"the device did not copy within {self._stall_s} s")

    def store(self, rows: Sequence[int], block_ids: Sequence[int]) -> None:
        """Copy rows into blocks; returns when that is over. Raises: TransferFailed."""
        queue = self._ready()
        queue.to_device(self._copies(rows, block_ids))
        wait_for(queue.mark())

    def checksums(self, block_ids: Sequence[int]) -> list[int]:
        """Checksums of blocks as they lie on the device, in order. Raises: TransferFailed."""
        found: list[int] = []
        with self._lock:  # its holder is bounded by `stall_s`
            for start in range(0, len(block_ids), self.num_rows):
                batch = block_ids[start : start + self.num_rows]
                self.fetch(batch)
                found += [block_hash.checksum(row) for row in self.rows[: len(batch)]]
        return found

    def close(self) -> None:
        """Unlock the memory and destroy the queue. No copy may be under way; later ones fail."""
        if self._queue is not None:
            self._queue.close()
        if self._unlock is not None:
            self._unlock()  # nothing, when it was detached
        self._failed = True

    def _ready(self) -> CopyQueue:
        if self._failed:
            raise TransferFailed("the device did not answer before: its staging is out of use")
        if self._queue is None:
            self._queue = self.device.new_queue()
        return self._queue

    def _copies(self, rows: Sequence[int], block_ids: Sequence[int]) -> Copies:
        copies: Copies = np.empty((len(block_ids), 3), dtype=np.uint64)
        ids = np.asarray(block_ids, dtype=np.uint64)
        copies[:, 0] = self._address + ids * self._block_bytes
        copies[:, 1] = self.rows.ctypes.data + np.asarray(rows, np.uint64) * self._block_bytes
        copies[:, 2] = self._block_bytes
        return copies


def _unlock(device: Device, rows: npt.NDArray[np.uint8]) -> None:
    device.unregister(rows.ctypes.data)
