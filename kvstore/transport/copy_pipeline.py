"""Copies of a GPU (DMA) that can be stopped midway: `CopyPipeline` queues a copy piece by piece,
`run_copy` runs it on an executor's thread for a caller with a deadline.

What a device was given cannot be taken back. So a copy goes in pieces, a few under way at once, and
a copy that is told to stop ends within a piece. A device that does not end its pieces within
STALL_S is left alone with them: `Unsettled` says so, and transports turn it into what their
contract says.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvstore.errors import Quarantine, TransferCancelled, TransferFailed, TransferTimeout
from kvstore.transport.device import LAST_SPINS, CopyQueue, Device, DeviceMark, wait_for
from process.deadline import Deadline
from process.rpc_errors import DeadlineExceeded

IN_FLIGHT = 3
"""Pieces of a copy that are queued on the device at once, or more short ones of as many bytes: the
next ones run while a thread wakes that has waited for the first."""

QueuePiece = Callable[[CopyQueue, slice], None]
"""A function that queues the copies of items [start, stop) on a device."""


@dataclass(frozen=True)
class _Flying:
    """A piece under way, and its end."""

    items: slice
    mark: DeviceMark


class Flight:
    """One copy through a CopyPipeline: its pieces in order, IN_FLIGHT at once. The caller must call
    `begin` or `begin_early` once, on any thread: `finish` waits for that without a limit. A flight
    that was begun must be finished."""

    def __init__(self, pipeline: CopyPipeline, num_items: int, queue_piece: QueuePiece) -> None:
        self._pipeline = pipeline
        self._num_items = num_items
        self._queue_piece = queue_piece
        self._queue: CopyQueue | None = None
        self._problem: Exception | None = None
        self._num_queued = 0
        self._flying: deque[_Flying] = deque()
        self._not_reported: deque[_Flying] = deque()
        self._has_begun = threading.Event()

    def begin(self) -> None:
        """Queue as many pieces as may be under way; waits for none. Raises nothing: `finish` raises
        what went wrong here."""
        try:
            self._queue = self._pipeline.take_queue()
            self._queue_more(self._queue)
        except Exception as error:  # what was given is still to be waited for
            self._problem = error
        finally:
            self._has_begun.set()

    def begin_early(self, is_stopped: IsStopped, num_pieces: int) -> None:
        """Queue the first pieces, at most `num_pieces`, if a queue is free for that and there is
        time; everything else is left to `finish`. Raises nothing: `finish` raises what went wrong
        here."""
        try:
            if num_pieces > 0 and not is_stopped():
                self._queue = self._pipeline.take_free_queue()
            if self._queue is not None:
                self._queue_more(self._queue, num_pieces)
        except Exception as error:
            self._problem = error
        finally:
            self._has_begun.set()

    def finish(
        self,
        is_stopped: IsStopped,
        on_copied: Callable[[slice], None] = lambda _: None,
        on_queued: Callable[[slice, DeviceMark], None] = lambda *_: None,
    ) -> None:
        """Queue the remaining pieces and wait for all of them, as CopyPipeline.run, which says what
        the arguments are."""
        self._has_begun.wait()
        if self._queue is None and self._problem is None:  # it was left to us
            raise_if_stopped(is_stopped)
            self.begin()
        queue = self._queue
        if queue is None:
            assert self._problem is not None
            raise self._problem
        self._pipeline.claim(queue)
        try:
            if self._problem is not None:
                raise self._problem
            while self._flying or self._num_queued < self._num_items:
                if self._next_end() is not None:
                    raise_if_stopped(is_stopped)
                    self._queue_more(queue)
                while self._not_reported:
                    on_queued(self._not_reported[0].items, self._not_reported.popleft().mark)
                piece = self._flying.popleft()
                if self._flying or self._num_queued < self._num_items:
                    piece.mark.wait()
                else:  # no other piece hides how late a thread wakes
                    wait_for(piece.mark, num_spins=LAST_SPINS)
                on_copied(piece.items)
        except BaseException:
            self._pipeline.end_queue(queue)
            raise
        self._pipeline.release_queue(queue)

    def _next_end(self) -> int | None:
        """The end of the piece that is queued next; None: there is none, or no room for it yet."""
        num_queued = self._num_queued
        if num_queued == self._num_items:
            return None
        end = self._pipeline.piece_end(num_queued, self._num_items)
        num_landed = self._flying[0].items.start if self._flying else num_queued
        return end if end - num_landed <= self._pipeline.most_items else None

    def _queue_more(self, queue: CopyQueue, most: int | None = None) -> None:
        while (end := self._next_end()) is not None and (most is None or len(self._flying) < most):
            items = slice(self._num_queued, end)
            self._queue_piece(queue, items)
            self._flying.append(_Flying(items, queue.mark()))
            self._not_reported.append(self._flying[-1])
            self._num_queued = end


class CopyPipeline:
    """Keeps up to IN_FLIGHT pieces of a copy queued on a device. Knows no blocks: its caller says
    how a piece is queued.

    Blocks its thread; several threads may use one pipeline, each with a queue of the device for
    itself. `Flight.begin_early` queues the first pieces on the event loop, before a thread runs;
    one thread does so, and has one such flight at a time that no thread has taken over yet. So
    there is at most one queue more than there are threads.

    Args:
        piece_items: items of one piece.
        least_items: of the last ones, each of which is half of what is left; None: they are not.
    """

    def __init__(self, device: Device, piece_items: int, least_items: int | None = None) -> None:
        self.most_items = IN_FLIGHT * piece_items
        """Most items of one flight that are queued at once."""
        self._piece_items = piece_items
        self._least_items = least_items or piece_items
        self._device = device
        self._queues: list[CopyQueue] = []  # those that are not in use
        self._early: CopyQueue | None = None  # of a flight that no thread has come to yet

    def piece_end(self, start: int, num_items: int) -> int:
        """The end of the piece that begins at item `start` of a copy of `num_items`."""
        return piece_end(start, num_items, self._piece_items, self._least_items)

    def run(
        self,
        num_items: int,
        queue_piece: QueuePiece,
        is_stopped: IsStopped,
        on_copied: Callable[[slice], None] = lambda _: None,
        on_queued: Callable[[slice, DeviceMark], None] = lambda *_: None,
    ) -> None:
        """Queue all pieces in order, IN_FLIGHT at once. When it returns or raises, none is under
        way.

        Args:
            queue_piece: queues the copies of a piece.
            on_copied: called with each piece whose copy is over.
            on_queued: called with each piece that is queued and the mark after it, once as many
                are queued as may be.
        Raises: DeadlineExceeded when `is_stopped`; TransferFailed; what `queue_piece` raises.
        """
        raise_if_stopped(is_stopped)
        flight = Flight(self, num_items, queue_piece)
        flight.begin()
        flight.finish(is_stopped, on_copied, on_queued)

    def take_queue(self) -> CopyQueue:
        """Take a queue of the device for one flight. Raises: TransferFailed."""
        try:
            return self._queues.pop()  # whether there is one may change until it is taken
        except IndexError:
            return self._device.new_queue()

    def take_free_queue(self) -> CopyQueue | None:
        """Take an unused queue for a flight that is begun early. None: there is none, or the last
        such flight still waits for its thread."""
        if self._early is None:
            with contextlib.suppress(IndexError):
                self._early = self._queues.pop()
                return self._early
        return None

    def claim(self, queue: CopyQueue) -> None:
        """Note that a thread has taken over the flight of this queue."""
        if self._early is queue:
            self._early = None

    def release_queue(self, queue: CopyQueue) -> None:
        """Keep a flight's queue for the next one. None of its copies may be under way."""
        self._queues.append(queue)

    def end_queue(self, queue: CopyQueue) -> None:
        """Wait for the copies of a flight that failed, then keep its queue for the next one.
        Raises: TransferFailed when the device failed: nothing of it moves any more."""
        try:
            wait_for(queue.mark())
        except TransferFailed:
            queue.close()
            raise
        self._queues.append(queue)

    def close(self) -> None:
        """Close the queues. No copy may be under way."""
        for queue in self._queues:
            queue.close()
        self._queues.clear()


def piece_end(start: int, num_items: int, piece_items: int, least_items: int) -> int:
    """The end of the piece that begins at item `start`: `piece_items` further, but at most half of
    what is left, in whole `least_items`. So what follows the last piece, its checksums, is short,
    and that of each piece before it is done while the next one is copied, if it takes less than
    half as long.

    Pure. Source: ours.
    """
    half = -(-(num_items - start) // (2 * least_items)) * least_items
    return min(start + min(piece_items, half), num_items)


def raise_if_stopped(is_stopped: IsStopped) -> None:
    """Stop a copy at this point if `is_stopped`. Raises: DeadlineExceeded then."""
    if is_stopped():
        raise DeadlineExceeded("copy: the time for it ran out")


STALL_S = 1.0
"""Longest wait for a copy that was told to stop: it ends within a piece, which takes under 1 ms,
unless the device hangs."""

IsStopped = Callable[[], bool]
"""A function that says whether a copy is to stop."""

Result = TypeVar("Result")


class Unsettled(Exception):
    """A copy goes on although its waiter's time is over (`cause`); `settled` is done when it has
    ended."""

    def __init__(self, cause: BaseException, settled: asyncio.Future[None]) -> None:
        super().__init__(str(cause))
        self.cause = cause
        self.settled = settled

    def with_quarantine(self, block_ids: Sequence[int]) -> TransferTimeout | TransferCancelled:
        """The error that a transport's `get` raises for it: these blocks may still be written
        into."""
        quarantine = Quarantine(tuple(block_ids), self.settled)
        message = f"the device may still write: {self.cause}"
        if isinstance(self.cause, asyncio.CancelledError):
            return TransferCancelled(message, quarantine)
        return TransferTimeout(message, quarantine)


async def run_copy(
    copy: Callable[[IsStopped], Result],
    deadline: Deadline,
    begin: Callable[[IsStopped], None] | None = None,
) -> Result:
    """Run `copy` on an executor's thread. It looks at its argument between pieces and raises
    DeadlineExceeded when that says so.

    Args: begin: called on the event loop, with the same argument, before `copy`, whose thread may
        take its time to start. It queues what need not wait for the thread, and raises nothing.
    Raises: what `copy` raises; Unsettled.
    """
    stop = threading.Event()

    def is_stopped() -> bool:
        return stop.is_set() or deadline.expired

    if begin is not None:
        begin(is_stopped)
    try:
        job = asyncio.get_running_loop().run_in_executor(None, copy, is_stopped)
    except RuntimeError:  # no thread to be had: what was begun must end all the same
        stop.set()
        with contextlib.suppress(Exception):
            copy(is_stopped)
        raise
    cause: BaseException | None = None
    try:
        await asyncio.wait([job], timeout=deadline.left_s() + STALL_S)
    except asyncio.CancelledError as error:
        cause = error
        stop.set()
        await _wait_bounded(job, Deadline.after(STALL_S))
    if not job.done():
        stop.set()
        if cause is None:
            cause = DeadlineExceeded("copy: the device did not answer in time")
        raise Unsettled(cause, _settled(job)) from cause
    if cause is not None:
        job.exception()  # it ended because it was told to stop
        raise cause
    return job.result()


async def _wait_bounded(job: asyncio.Future[Result], patience: Deadline) -> None:
    """A second cancellation does not end this wait: the first one is on its way out already."""
    while not job.done() and not patience.expired:
        try:
            await asyncio.wait([job], timeout=patience.left_s())
        except asyncio.CancelledError:
            continue


def _settled(job: asyncio.Future[Result]) -> asyncio.Future[None]:
    """Done when the job is, whatever came of it."""
    settled: asyncio.Future[None] = job.get_loop().create_future()

    def over(job: asyncio.Future[Result]) -> None:
        if not job.cancelled():
            job.exception()
        if not settled.done():
            settled.set_result(None)

    job.add_done_callback(over)
    return settled
