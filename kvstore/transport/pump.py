"""Pump: many copies given to a device piece by piece, a few pieces at once, so that who stops does
so within a piece: what a device was given cannot be taken back.

Knows no blocks: whoever uses it says how a piece is given. Blocks its thread; several threads may
use one pump, each with a queue of the device for itself. Who must not block, and is in a hurry,
begins a `Flight` himself, and leaves its end to a thread.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvstore.errors import TransferFailed
from kvstore.transport.copy_job import IsStopped
from kvstore.transport.device import CopyQueue, Device, Mark, wait_for
from process.errors import DeadlineExceeded

IN_FLIGHT = 3

Give = Callable[[CopyQueue, slice], None]
"""Starts the copies of items [start, stop)."""


@dataclass(frozen=True)
class _Flying:
    """A piece under way, and its end."""

    items: slice
    mark: Mark


class Flight:
    """All pieces of one copy, in order, IN_FLIGHT at once: `begin`, once, on a thread that need not
    be that of `finish`, which waits for it."""

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

    def finish(
        self,
        is_stopped: IsStopped,
        landed: Callable[[slice], None] = lambda _: None,
        given: Callable[[slice, Mark], None] = lambda *_: None,
    ) -> None:
        """See Pump.run."""
        self._has_begun.wait()
        queue = self._queue
        if queue is None:
            raise self._problem or TransferFailed("copy: it was never begun")
        try:
            if self._problem is not None:
                raise self._problem
            while self._flying or self._num_given < self._num_items:
                if self._num_given < self._num_items and len(self._flying) < IN_FLIGHT:
                    stop_here(is_stopped)
                    self._give_more(queue)
                while self._untold:
                    given(self._untold[0].items, self._untold.popleft().mark)
                piece = self._flying.popleft()
                wait_for(piece.mark)
                landed(piece.items)
        except BaseException:
            self._pump.end_queue(queue)
            raise
        self._pump.give_back(queue)

    def _give_more(self, queue: CopyQueue) -> None:
        while self._num_given < self._num_items and len(self._flying) < IN_FLIGHT:
            end = min(self._num_given + self._pump.piece_items, self._num_items)
            items = slice(self._num_given, end)
            self._give(queue, items)
            self._flying.append(_Flying(items, queue.mark()))
            self._untold.append(self._flying[-1])
            self._num_given = end


class Pump:
    """See the module.

    Args:
        piece_items: items of one piece.
    """

    def __init__(self, device: Device, piece_items: int) -> None:
        self.piece_items = piece_items
        self._device = device
        self._queues: list[CopyQueue] = []  # those that nobody uses now

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
        return self._queues.pop() if self._queues else self._device.new_queue()

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


def stop_here(is_stopped: IsStopped) -> None:
    """Raises: DeadlineExceeded when that says so."""
    if is_stopped():
        raise DeadlineExceeded("copy: the time for it ran out")
