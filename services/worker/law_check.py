"""LawCheck: the last result of a worker's invariant checks, and when to repeat them.

A check takes time of the engine's thread that running requests wait for: tens of milliseconds with
tens of thousands of blocks. So while the engine works, checks get at most SHARE of its time,
however many callers ask; callers in between get the last result. An idle worker runs a check at
each request for one, once for all that came before it began. The checks themselves belong to the
caller. One asyncio loop.

An engine has one LawCheck for its whole life, which passes from role to role (`hand_over`).

Invariant: at most one check runs at a time, and it ends even if its callers are cancelled.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from process.errors import BatonError

SHARE = 0.02
"""Share of the engine's time that checks may take while it works."""

Look = Callable[[], Awaitable[float]]
"""Function that checks all invariants and returns the seconds for which it held the engine. Raises:
BatonError naming the broken one; bounds its own time."""


class LawCheck:
    """Rate-limited invariant checks of one engine, shared by all callers."""

    def __init__(
        self,
        look: Look,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_looks = 0
        """That were begun."""
        self._look = look
        self._clock = clock
        self._problem = ""
        self.due_s = clock()
        """On the clock: when a working engine may be held again."""
        self._looking: asyncio.Task[None] | None = None

    def hand_over(self, look: Look) -> LawCheck:
        """Replace the check function because the engine has a new role. Time spent and a running
        check still count; the last result belongs to the previous role and is dropped."""
        self._look, self._problem = look, ""
        return self

    async def settle(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` seconds for the check that is running, if there is one."""
        if self._looking is not None:
            await asyncio.wait({self._looking}, timeout=timeout_s)

    async def problem(self, *, is_busy: bool) -> str:
        """Return the broken invariant; empty: none. Never raises."""
        num_before = self.num_looks
        while not (is_busy and self._clock() < self.due_s):
            if self._looking is None:
                self.num_looks += 1
                self._looking = asyncio.create_task(self._find())
            number = self.num_looks
            await asyncio.shield(self._looking)  # who asks no more does not undo what it costs
            if is_busy or number > num_before:
                break
        return self._problem

    async def _find(self) -> None:
        held_s, look = 0.0, self._look
        try:
            held_s = await look()
            problem = ""
        except BatonError as error:
            problem = str(error)
        finally:
            self.due_s = self._clock() + held_s / SHARE
            self._looking = None
        if self._look is look:
            self._problem = problem
