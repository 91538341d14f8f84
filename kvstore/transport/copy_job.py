"""run_copy: a blocking copy on an executor's thread, for a waiter that has a deadline and may be
cancelled.

The copy is told to stop and then waited for, since what a device was given cannot be taken back. A
device that does not end its copies within STALL_S is left alone with them: `Unsettled` says so, and
transports turn it into what their contract says. One asyncio loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvstore.errors import Quarantine, TransferCancelled, TransferTimeout
from process.deadline import Deadline
from process.errors import DeadlineExceeded

STALL_S = 1.0
"""A copy that was told to stop ends within a piece, which takes under 1 ms, unless the device
hangs."""

IsStopped = Callable[[], bool]
Result = TypeVar("Result")


class Unsettled(Exception):
    """The waiter's time is over (`cause`), the copy is not until `settled` is done."""

    def __init__(self, cause: BaseException, settled: asyncio.Future[None]) -> None:
        super().__init__(str(cause))
        self.cause = cause
        self.settled = settled

    def with_quarantine(self, block_ids: Sequence[int]) -> TransferTimeout | TransferCancelled:
        """What `get` raises: the blocks may still be written into."""
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
    """Run `copy`, which looks at its argument between pieces and raises DeadlineExceeded when that
    says so.

    Args: begin: called here, with the same, before `copy`, whose thread may take its time: for what
        need not wait for it. Raises nothing.
    Raises: what `copy` raises; Unsettled.
    """
    told = threading.Event()

    def is_stopped() -> bool:
        return told.is_set() or deadline.expired

    if begin is not None:
        begin(is_stopped)
    try:
        job = asyncio.get_running_loop().run_in_executor(None, copy, is_stopped)
    except RuntimeError:  # no thread to be had: what was begun must end all the same
        told.set()
        with contextlib.suppress(Exception):
            copy(is_stopped)
        raise
    cause: BaseException | None = None
    try:
        await asyncio.wait([job], timeout=deadline.left_s() + STALL_S)
    except asyncio.CancelledError as error:
        cause = error
        told.set()
        await _wait_bounded(job, Deadline.after(STALL_S))
    if not job.done():
        told.set()
        if cause is None:
            cause = DeadlineExceeded("copy: the device did not answer in time")
        raise Unsettled(cause, _settled(job)) from cause
    if cause is not None:
        job.exception()  # it ended because we told it to
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
