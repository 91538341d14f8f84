"""The laws of one worker as they were found last, and when they are worth looking at again.

Looking costs the engine's thread time that the answers under way wait for: tens of milliseconds
with tens of thousands of blocks. So while the engine works it gets at most SHARE of its time for
looking, however many ask; who asks in between is told what was found last. An idle worker looks
whenever it is asked. Knows no law: those who have them are asked. One asyncio loop.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from process.errors import BatonError

SHARE = 0.02
"""Of the engine's time."""

Look = Callable[[], Awaitable[float]]
"""Recomputes everything; seconds for which the engine was held. Raises: BatonError naming a law."""


class LawCheck:
    """See the module."""

    def __init__(self, look: Look, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_looks = 0
        self._look = look
        self._clock = clock
        self._problem = ""
        self._due_s = clock()

    async def problem(self, *, is_busy: bool) -> str:
        """What is broken; empty: nothing. Never raises."""
        if is_busy and self._clock() < self._due_s:
            return self._problem
        self.num_looks += 1
        held_s = 0.0
        try:
            held_s = await self._look()
            self._problem = ""
        except BatonError as error:
            self._problem = str(error)
        self._due_s = self._clock() + held_s / SHARE
        return self._problem
