"""Arrival: the KV of a reserved request while it arrives: the router's handles, and what is pulled
before the final one.

Life: created with the request -> `prefetch`, any number of times -> `hand_over`, once; `wait` pulls
meanwhile and returns at the final handover. The handle belongs to the request from then on;
`untaken` is what has to be released if the request ended before that. One request, the loop's
thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager

from process.deadline import Deadline
from services.decode.intake import Handover, Intake
from services.decode.states import DecodeState
from services.worker import handle as handles


class Arrival:
    """Partial handles and the final handover of one request."""

    def __init__(self) -> None:
        self.news = asyncio.Event()
        """Something may be pulled, or the last word is here."""
        self._last: asyncio.Future[Handover] = asyncio.get_running_loop().create_future()
        self._early: handles.Handle | None = None
        self._intake: Intake | None = None  # while somebody waits

    @property
    def is_over(self) -> bool:
        """Return whether the final handover has come."""
        return self._last.done()

    @property
    def untaken(self) -> handles.Handle | None:
        """Return the handle of the final handover, if the request has not taken it."""
        if not self._last.done() or self._last.cancelled():
            return None
        return self._last.result().handle

    def hand_over(self, handover: Handover) -> None:
        """Record the final handover; called once."""
        self._last.set_result(handover)
        self.news.set()
        if self._intake is not None:
            self._intake.look_early(handover)  # now: what it names may still be on its way

    def prefetch(self, handle: handles.Handle) -> None:
        """Record a partial handle. Only the newest of several waiting ones counts; one after the
        final handover is ignored."""
        self._early = handle
        self.news.set()

    async def wait(
        self,
        intake: Intake,
        deadline: Deadline,
        *,
        move: Callable[[DecodeState], None],
        standing_back: Callable[[], AbstractContextManager[None]],
    ) -> Handover:
        """Wait for the final handover; meanwhile pull what partial handles name and what their
        lender offers. A cancellation leaves no pending question.

        Args: move: called with each state. standing_back: context manager around each pull.
        """
        self._intake = intake
        try:
            while not self.is_over:
                await self.news.wait()
                self.news.clear()
                early, self._early = self._early, None
                if self.is_over or not (early or intake.has_rest):
                    continue
                move(DecodeState.PREFETCHING)
                with standing_back():
                    if early is not None:
                        await intake.pull_early(early, deadline)
                    if not self.is_over:
                        await intake.pull_rest(deadline)
                move(DecodeState.RESERVED)
        finally:
            self._intake = None
            intake.follow_no_more()
        return self._last.result()
