"""ChecksumBatches: batches of blocks whose checksums a device computes, in order, each in a slot of
a fixed few. Where all slots are taken, whoever wants one takes the numbers out of the oldest, which
is the first to be over: so callers may begin as much as they like before they ask for a result,
also several at once, and nobody waits for a slot that he holds himself.

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
from kvstore.transport.device import Mark

STALL_S = 10.0
"""A device that has not computed one batch after that long has failed."""

_SPINS = 30
_NAP_S = 20e-6


class Slot(Protocol):
    """What one batch brings to the device and back. Raises: RuntimeError when the device failed."""

    def start(self, block_ids: Sequence[int], after: Mark | None) -> None:
        """Give the device the work, behind all that was started before in any slot, and `after`."""

    def is_over(self) -> bool:
        """Whether what was started last is."""

    def values(self, count: int) -> list[int]:
        """Its first numbers, once it is over."""


S = TypeVar("S", bound=Slot)


@dataclass(eq=False)
class _Part(Generic[S]):
    """A batch. `values` once its slot was given up."""

    slot: S | None
    count: int
    values: Sequence[int] = ()


class ChecksumBatches(Generic[S]):
    """See the module.

    Args:
        batch_size: blocks that a slot holds.
        name: of the device, for errors.
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

    def begin(self, block_ids: Sequence[int], after: Mark | None = None) -> Pending[S]:
        """Start with blocks as they lie on the device now, or behind `after`; all that others begin
        later waits for that, too. Raises: TransferFailed."""
        parts: list[_Part[S]] = []
        for start in range(0, len(block_ids), self._batch_size):
            with self._turn:
                parts.append(self._start(block_ids[start : start + self._batch_size], after))
        return Pending(self, parts)

    def take(self, part: _Part[S]) -> Sequence[int]:
        """The numbers of a batch, when it is over. Raises: TransferFailed."""
        self._wait(part)  # without the lock: others begin meanwhile
        with self._turn:
            if part.slot is not None:
                self._free.append(self._land(part))
        return part.values

    def _start(self, block_ids: Sequence[int], after: Mark | None) -> _Part[S]:
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
        """Take the numbers out of a slot, which is the caller's then. `_turn` is held."""
        self._wait(part)
        slot = part.slot
        if slot is None:
            raise TransferFailed(f"checksums on {self._name}: a batch was taken out twice")
        part.values = slot.values(part.count)
        part.slot = None
        self._busy.remove(part)
        return slot

    def _wait(self, part: _Part[S]) -> None:
        """Until it is over, or somebody took its numbers out. Raises: TransferFailed."""
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
    """Checksums that the device computes; whoever does not want them any more just forgets it."""

    def __init__(self, owner: ChecksumBatches[S], parts: list[_Part[S]]) -> None:
        self._owner = owner
        self._parts = parts

    def result(self) -> list[int]:
        """Of each block, in order; blocks its thread. Raises: TransferFailed."""
        return [value for part in self._parts for value in self._owner.take(part)]
