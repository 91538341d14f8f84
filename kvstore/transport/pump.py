"""Pump: many copies given to a device piece by piece, a few pieces at once, so that who stops does
so within a piece: what a device was given cannot be taken back.

Knows no blocks: whoever uses it says how a piece is given. Blocks its thread; several threads may
use one pump, each with a queue of the device for itself. Who must not block, and is in a hurry,
begins a `Flight` early, and leaves its end to a thread; one thread does so, and has one such flight
at a time that no thread has come to yet: so there are never more queues than threads, and one.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvstore.errors import TransferFailed
from kvstore.transport.copy_job import IsStopped
from kvstore.transport.device import LAST_SPINS, SPINS, CopyQueue, Device, Mark, wait_for
from process.errors import DeadlineExceeded

IN_FLIGHT = 3
"""Pieces, or more short ones that are as much: the last of them are over before a thread that naps
has seen it."""

Give = Callable[[CopyQueue, slice], None]
"""Starts the copies of items [start, stop)."""


@dataclass(frozen=True)
class _Flying:
    """A piece under way, and its end."""

    items: slice
    mark: Mark


class Flight:
    """All pieces of one copy, in order, IN_FLIGHT at once. Whoever makes one calls `begin` or
    `begin_early`, once, on a thread that need not be that of `finish`: that waits for it, and for
    ever if nobody does. What was begun is to be finished."""

    def __init__(self, pump: Pump, num_items: int, give: Give) -> None:
        self._pump = pump
        self._num_items = num_items
        self._give = give
        self._queue: CopyQueue | None = None
        self._problem: Exception | None = None
        self._num_given = 0
        self._flying: deque[_Flying] = deque()
        self._untold: deque[_Flying] = deque()
        self._has_begun = threading.Event()

    def begin(self) -> None:
        """Give the device as many pieces as may be under way; waits for none. Raises nothing:
        `finish` does."""
        try:
            self._queue = self._pump.take_queue()
            self._give_more(self._queue)
        except Exception as error:  # what was given is still to be waited for
            self._problem = error
        finally:
            self._has_begun.set()

    def begin_early(self, is_stopped: IsStopped, num_pieces: int) -> None:
        """Give the device the first pieces, at most so many, if a queue is free for that and there
        is time; all else is left to `finish`, also to begin. Raises nothing: `finish` does."""
        try:
            if num_pieces > 0 and not is_stopped():
                self._queue = self._pump.take_free_queue()
            if self._queue is not None:
                self._give_more(self._queue, num_pieces)
        except Exception as error:
            self._problem = error
        finally:
            self._has_begun.set()

    def finish(
        self,
        is_stopped: IsStopped,
        landed: Callable[[slice], None] = lambda _: None,
        given: Callable[[slice, Mark], None] = lambda *_: None,
    ) -> None:
        """See Pump.run."""
        self._has_begun.wait()
        if self._queue is None and self._problem is None:  # it was left to us
            stop_here(is_stopped)
            self.begin()
        queue = self._queue
        if queue is None:
            assert self._problem is not None
            raise self._problem
        self._pump.came_to(queue)
        try:
            if self._problem is not None:
                raise self._problem
            while self._flying or self._num_given < self._num_items:
                if self._next_end() is not None:
                    stop_here(is_stopped)
                    self._give_more(queue)
                while self._untold:
                    given(self._untold[0].items, self._untold.popleft().mark)
                piece = self._flying.popleft()
                is_last = not self._flying and self._num_given == self._num_items
                wait_for(piece.mark, num_spins=LAST_SPINS if is_last else SPINS)
                landed(piece.items)
        except BaseException:
            self._pump.end_queue(queue)
            raise
        self._pump.give_back(queue)

    def _next_end(self) -> int | None:
        """Of the piece to be given next; None: there is none, or no room for it yet."""
        num_given = self._num_given
        if num_given == self._num_items:
            return None
        end = self._pump.piece_end(num_given, self._num_items)
        num_landed = self._flying[0].items.start if self._flying else num_given
        return end if end - num_landed <= self._pump.most_items else None

    def _give_more(self, queue: CopyQueue, most: int | None = None) -> None:
        while (end := self._next_end()) is not None and (most is None or len(self._flying) < most):
            items = slice(self._num_given, end)
            self._give(queue, items)
            self._flying.append(_Flying(items, queue.mark()))
            self._untold.append(self._flying[-1])
            self._num_given = end


class Pump:
    """See the module.

    Args:
        piece_items: items of one piece.
        least_items: of the last ones, each of which is half of what is left; None: they are not.
    """

    def __init__(self, device: Device, piece_items: int, least_items: int | None = None) -> None:
        self.most_items = IN_FLIGHT * piece_items
        """Of one flight under way at once."""
        self._piece_items = piece_items
        self._least_items = least_items or piece_items
        self._device = device
        self._queues: list[CopyQueue] = []  # those that nobody uses now
        self._early: CopyQueue | None = None  # of a flight that no thread has come to yet

    def piece_end(self, start: int, num_items: int) -> int:
        """Of the piece of `num_items` that begins at `start`."""
        return piece_end(start, num_items, self._piece_items, self._least_items)

    def run(
        self,
        num_items: int,
        give: Give,
        is_stopped: IsStopped,
        landed: Callable[[slice], None] = lambda _: None,
        given: Callable[[slice, Mark], None] = lambda *_: None,
    ) -> None:
        """All pieces in order, IN_FLIGHT at once. When it returns or raises, none is under way.

        Args: landed: told of each piece that is over. given: told of each that is under way, with
            the mark behind it; not before all are given that may be.
        Raises: DeadlineExceeded when `is_stopped`; TransferFailed; what `give` raises.
        """
        stop_here(is_stopped)
        flight = Flight(self, num_items, give)
        flight.begin()
        flight.finish(is_stopped, landed, given)

    def take_queue(self) -> CopyQueue:
        """For one flight. Raises: TransferFailed."""
        try:
            return self._queues.pop()  # whether there is one may change until it is taken
        except IndexError:
            return self._device.new_queue()

    def take_free_queue(self) -> CopyQueue | None:
        """For a flight that is begun early: one that is there. None: there is none, or the last
        such flight still waits for its thread."""
        if self._early is None:
            with contextlib.suppress(IndexError):
                self._early = self._queues.pop()
                return self._early
        return None

    def came_to(self, queue: CopyQueue) -> None:
        """A thread sees to the flight of this one."""
        if self._early is queue:
            self._early = None

    def give_back(self, queue: CopyQueue) -> None:
        """Nothing of it is under way."""
        self._queues.append(queue)

    def end_queue(self, queue: CopyQueue) -> None:
        """Wait for what may be under way, and give it back. Raises: TransferFailed when the device
        failed: nothing of it moves any more."""
        try:
            wait_for(queue.mark())
        except TransferFailed:
            queue.close()
            raise
        self._queues.append(queue)

    def close(self) -> None:
        """Nothing may be under way."""
        for queue in self._queues:
            queue.close()
        self._queues.clear()


def piece_end(start: int, num_items: int, piece_items: int, least_items: int) -> int:
    """Where the piece that begins at `start` ends: `piece_items` on, but at most half of what is
    left, in whole `least_items`: so what follows the last piece, its checksums, is short, and that
    of each before it is done while the next one is copied, if it takes less than half as long.

    Pure. Source: ours.
    """
    half = -(-(num_items - start) // (2 * least_items)) * least_items
    return min(start + min(piece_items, half), num_items)


def stop_here(is_stopped: IsStopped) -> None:
    """Raises: DeadlineExceeded when that says so."""
    if is_stopped():
        raise DeadlineExceeded("copy: the time for it ran out")
