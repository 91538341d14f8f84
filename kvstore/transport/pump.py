"""Pump: many copies given to a device piece by piece, a few pieces at once, so that who stops does
so within a piece: what a device was given cannot be taken back.

Knows no blocks: whoever uses it says how a piece is given. Blocks its thread; several threads may
use one pump, each with a queue of the device for itself.
"""

from __future__ import annotations

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


class Pump:
    """See the module.

    Args:
        piece_items: items of one piece.
    """

    def __init__(self, device: Device, piece_items: int) -> None:
        self._device = device
        self._piece_items = piece_items
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
        queue = self._queues.pop() if self._queues else self._device.new_queue()
        flying: deque[_Flying] = deque()
        untold: deque[_Flying] = deque()

        def land() -> None:
            while untold:
                given(untold[0].items, untold.popleft().mark)
            piece = flying.popleft()
            wait_for(piece.mark)
            landed(piece.items)

        try:
            for first in range(0, num_items, self._piece_items):
                stop_here(is_stopped)
                if len(flying) == IN_FLIGHT:
                    land()
                items = slice(first, min(first + self._piece_items, num_items))
                give(queue, items)
                flying.append(_Flying(items, queue.mark()))
                untold.append(flying[-1])
            while flying:
                land()
        except BaseException:
            try:
                wait_for(queue.mark())
            except TransferFailed:
                queue.close()  # the device failed: nothing of it moves any more
                raise
            self._queues.append(queue)
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
