"""ChecksumBatches: batches of blocks whose checksums a device computes, in order, in a fixed number
of slots. Where all slots are in use, `begin` first reads the results of the oldest one, which ends
first: so callers may begin any number of batches before they ask for a result, and no caller waits
for a slot that it holds itself.

Knows no CUDA: how a slot is filled and asked is its own matter. Any thread. Invariant: a slot is
free, or of one batch whose numbers were not taken out.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from kvstore.errors import TransferFailed
from kvstore.transport.device import DeviceMark

STALL_S = 10.0
"""Seconds after which a device that has not computed one batch counts as failed."""

_SPINS = 30
_NAP_S = 20e-6


class Slot(Protocol):
    """A buffer pair that carries one batch to the device and its checksums back. Raises:
    RuntimeError when the device failed."""

    def start(self, block_ids: Sequence[int], after: DeviceMark | None) -> None:
        """Start the computation on the device, after all work that was started before in any slot,
        and after `after`."""

    def is_over(self) -> bool:
        """Return whether the last started batch has finished."""

    def values(self, count: int) -> list[int]:
        """Return the first `count` checksums of the finished batch."""


S = TypeVar("S", bound=Slot)


@dataclass(eq=False)
class _Part(Generic[S]):
    """One batch of a `Pending`; `values` is set once its slot was given up."""

    slot: S | None
    count: int
    values: Sequence[int] = ()


class ChecksumBatches(Generic[S]):
    """Scheduler of checksum batches over a fixed number of slots.

    Args:
        batch_size: blocks that a slot holds.
        name: name of the device, for error messages.
    """

    def __init__(
        self, slots: Sequence[S], batch_size: int, name: str, stall_s: float = STALL_S
    ) -> None:
        self._free = list(slots)
        self._batch_size = batch_size
        self._name = name
        self._stall_s = stall_s
        self._busy: deque[_Part[S]] = deque()  # in the device's order
        self._turn = threading.Lock()
        self._failed = False

    def begin(self, block_ids: Sequence[int], after: DeviceMark | None = None) -> Pending[S]:
        """Begin to checksum blocks as they lie on the device now, or after `after`; all batches
        that begin later wait for that, too. Raises: TransferFailed."""
        parts: list[_Part[S]] = []
        for start in range(0, len(block_ids), self._batch_size):
            with self._turn:
                parts.append(self._start(block_ids[start : start + self._batch_size], after))
        return Pending(self, parts)

    def take(self, part: _Part[S]) -> Sequence[int]:
        """Wait for a batch and return its checksums. Raises: TransferFailed."""
        self._wait(part)  # without the lock: others begin meanwhile
        with self._turn:
            if part.slot is not None:
                self._free.append(self._land(part))
        return part.values

    def _start(self, block_ids: Sequence[int], after: DeviceMark | None) -> _Part[S]:
        if self._failed:
            raise TransferFailed(f"checksums on {self._name}: it did not answer before")
        slot = self._free.pop() if self._free else self._land(self._busy[0])
        part = _Part(slot, len(block_ids))
        self._busy.append(part)
        try:
            slot.start(block_ids, after)
        except RuntimeError as error:
            raise self._failure(error) from error
        except TransferFailed as error:  # the mark's: the slot was never started
            self._failed = True
            raise error
        return part

    def _land(self, part: _Part[S]) -> S:
        """Read the checksums out of a batch's slot, which becomes the caller's. `_turn` is held."""
        self._wait(part)
        slot = part.slot
        if slot is None:
            raise TransferFailed(f"checksums on {self._name}: a batch was taken out twice")
        part.values = slot.values(part.count)
        part.slot = None
        self._busy.remove(part)
        return slot

    def _wait(self, part: _Part[S]) -> None:
        """Wait until a batch has finished or another thread has read its checksums. Raises:
        TransferFailed."""
        num_spins, ends_s = 0, 0.0
        try:
            while (slot := part.slot) is not None and not slot.is_over():
                num_spins += 1
                if num_spins < _SPINS:
                    continue
                ends_s = ends_s or time.monotonic() + self._stall_s
                if time.monotonic() > ends_s:
                    raise self._failure("no answer in time")
                time.sleep(_NAP_S)
        except RuntimeError as error:
            raise self._failure(error) from error

    def _failure(self, why: RuntimeError | str) -> TransferFailed:
        self._failed = True
        line = str(why).partition("\n")[0]
        return TransferFailed(f"checksums on {self._name}: {line}")


class Pending(Generic[S]):
    """Checksums that the device is computing; one that is no longer needed can simply be
    dropped."""

    def __init__(self, owner: ChecksumBatches[S], parts: list[_Part[S]]) -> None:
        self._owner = owner
        self._parts = parts

    def result(self) -> list[int]:
        """Return the checksum of each block, in order; blocks the thread until they are computed.
        Raises: TransferFailed."""
        return [value for part in self._parts for value in self._owner.take(part)]
