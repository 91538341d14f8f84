"""What transports need of a GPU whose memory holds a worker's blocks, as Protocols: page-lock host
memory, copy by DMA on a queue of its own, and let another process of this host in (`Shared`).

The one real implementation is cuda_device.py; tests have one in plain memory. Knows no CUDA.

Rules that transports keep, whatever the device:
- host memory is copied from or to only after `register`: without it a copy is many times slower,
  and nobody would be told;
- a copy that was given to a queue cannot be taken back: whoever gave it waits for its end.

And one for whoever lends blocks to a transport: kernels are asynchronous, and copies do not wait
for them, so those that read or write the blocks must be over by then (`compute_mark`).

Every method may be called from any thread; one `CopyQueue` serves one thread at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Copies = npt.NDArray[np.uint64]
"""[N, 3] rows of (device address, host address, bytes)."""


@dataclass(frozen=True)
class Shared:
    """Memory of a device as another process of this host can map it. Whoever knows the handle can
    read and write the whole allocation, so it is a secret: kept out of reprs and logs."""

    handle: bytes
    offset_bytes: int
    """From the allocation's start to the memory that is meant."""

    def __repr__(self) -> str:
        return f"Shared({len(self.handle)} bytes)"


@dataclass(frozen=True)
class PeerCopies:
    """How a device copies out of another one's memory that it has mapped. What is true of NVLink is
    the default."""

    piece_bytes: int = 128 * 1024 * 1024
    """Of one piece: 0.35 ms of NVLink, long against what giving it and its checksums costs."""

    least_piece_bytes: int = 32 * 1024 * 1024
    """Of the last pieces: nothing hides the checksums of the very last. To give one takes about as
    long as this does to come, and a smaller batch of checksums than 16 blocks saves nothing."""

    max_copies_at_once: int = 128
    """That the loop itself gives: each costs 2 to 4 us where the driver has no batches. As many as
    two pieces of blocks of 2 MiB that lie anywhere: a thread comes to the copy before they are
    here."""

    ask_early_bytes: int = 256 * 1024 * 1024
    """From here on a copy takes about as long as the lender's answer (0.7 to 0.9 ms). A smaller one
    is confirmed: the promise would say all of its lease, to save less."""

    hold_s: float = 0.05
    """For which a lender is asked to keep what it told of while that is copied; it is asked again
    when that took longer. Guessed: fifteen times what a chunk's blocks take, and half of what a
    request that is given up may keep its blocks."""


PEER_COPIES = PeerCopies()


SPINS = 30
"""Looks at a mark before the first nap: about 30 us, what a small copy takes."""
LAST_SPINS = 150
"""Where nothing is behind it: a nap takes 55 us more than it is told to."""
_NAP_S = 50e-6


class Mark(Protocol):
    """A point in a queue of the device."""

    def is_over(self) -> bool:
        """Whether everything before it has ended. Raises: TransferFailed when the device failed."""

    def before(self, stream: int) -> None:
        """Have what a stream of this process is given from now on, by the driver's handle, wait for
        it on the device. Raises: TransferFailed."""


class CopyQueue(Protocol):
    """Copies that run in order, beside the device's kernels."""

    def to_host(self, copies: Copies) -> None:
        """Start to copy from the device into registered host memory. Raises: TransferFailed."""

    def to_device(self, copies: Copies) -> None:
        """Start to copy registered host memory into the device's. Raises: TransferFailed."""

    def between(self, copies: Copies) -> None:
        """Start to copy between devices: rows of (target address, source address, bytes), each side
        this device's own or mapped by `map_shared`. Raises: TransferFailed."""

    def mark(self) -> Mark:
        """Behind all copies given until now."""

    def close(self) -> None:
        """Nothing of it may be under way."""


class PendingChecksums(Protocol):
    """Checksums that a device computes."""

    def result(self) -> list[int]:
        """Of each block, in order; once. Blocks its thread. Raises: TransferFailed."""


class DeviceChecksums(Protocol):
    """`block_hash.checksum` of blocks, computed where they lie."""

    def begin(self, block_ids: Sequence[int], after: Mark | None = None) -> PendingChecksums:
        """Start with blocks as they are now, or behind `after`. Raises: TransferFailed."""


class Device(Protocol):
    """See the module."""

    @property
    def device_id(self) -> int:
        """Its number in this process."""

    @property
    def memory(self) -> str:
        """What NIXL calls its memory: VRAM."""

    @property
    def peer_copies(self) -> PeerCopies:
        """How it copies what it has mapped."""

    def register(self, address: int, num_bytes: int) -> None:
        """Page-lock host memory of this process for DMA. Blocks while pages are locked.

        Raises: FailedPrecondition saying why it cannot be.
        """

    def unregister(self, address: int) -> None:
        """Nothing may copy from or to it any more."""

    def compute_mark(self) -> Mark:
        """Behind all kernels that the engine gave the device until now."""

    def new_queue(self) -> CopyQueue: ...

    def use_in_this_thread(self) -> None:
        """Make the device the calling thread's; libraries such as NIXL look at that."""

    def share(self, address: int) -> Shared:
        """Let other processes map the allocation that holds `address`. Raises: FailedPrecondition
        where it cannot be shared."""

    def map_shared(self, shared: Shared) -> int:
        """What another process shares: its address here. Blocks. Raises: FailedPrecondition where
        this device cannot reach it."""

    def unmap_shared(self, shared: Shared, address: int) -> None:
        """Give back what `map_shared` gave; nothing may copy from there any more. Also where its
        owner is gone."""


def wait_for(
    mark: Mark, is_stopped: Callable[[], bool] = lambda: False, *, num_spins: int = SPINS
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
