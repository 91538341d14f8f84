"""PinnedStaging: a few rows of page-locked host memory through which a device's blocks pass, for
whoever cannot reach the device itself: checksums, and transports that move host memory.

Memory is taken when it is first used, and kept. One user at a time: `checksums` waits for its
turn on a lock; `StagedTransport` has stagings of its own. A device that does not fill rows within
STALL_S fails the staging for good, since it may still write into them. That it does not empty them
in time is for the caller to notice (copy_job.py), since blocks are at stake there.

Any thread; calls block.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore import block_hash
from kvstore.errors import TransferFailed
from kvstore.transport.device import Copies, CopyQueue, Device, wait_for
from process.deadline import Deadline

STAGING_BYTES = 16 * 1024 * 1024
"""Rows together, and one row at least: 0.3 ms of a 55 GB/s bus."""
STALL_S = 10.0
"""A device that has not moved STAGING_BYTES after that long has failed."""

_never_freed: list[npt.NDArray[np.uint8]] = []
"""Rows that a device may still write into when everybody else has forgotten them."""


class PinnedStaging:
    """See the module."""

    def __init__(
        self,
        device: Device,
        address: int,
        block_bytes: int,
        num_blocks: int,
        stall_s: float = STALL_S,
    ) -> None:
        """stall_s: a device that has not filled the rows after that long has failed."""
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
        """uint8 [num_rows, block_bytes], page-locked."""
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
        """Of blocks as they lie on the device. Raises: TransferFailed."""
        found: list[int] = []
        with self._lock:  # whoever holds it is bounded by `stall_s`
            for start in range(0, len(block_ids), self.num_rows):
                batch = block_ids[start : start + self.num_rows]
                self.fetch(batch)
                found += [block_hash.checksum(row) for row in self.rows[: len(batch)]]
        return found

    def close(self) -> None:
        """Nothing may be under way, and nothing comes any more."""
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
