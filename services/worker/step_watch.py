"""StepWatch: finds a step that takes longer than it may, since its device does not answer. Nothing
can end such a step: its process must end (process/entrypoint.py:end_now).

The engine's thread says when a step begins and ends; the event loop looks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from process.errors import Internal

WATCH_S = 1.0
"""Seconds between two looks; a quarter of `timeout_s` where that is less."""


class StepWatch:
    """Times the step under way.

    Args:
        timeout_s: 0: no bound.
        what: what did not end, for the error's message.
    """

    def __init__(
        self, timeout_s: float, what: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.is_on = timeout_s > 0.0
        self._timeout_s = timeout_s
        self._what = what
        self._clock = clock
        self._since_s: float | None = None

    def begin(self) -> None:
        """A step begins; the one before has ended."""
        self._since_s = self._clock()

    def end(self) -> None:
        """The step is over, and there is none."""
        self._since_s = None

    @property
    def age_s(self) -> float:
        """Seconds since the step under way began; 0: there is none. Any thread."""
        since_s = self._since_s
        return 0.0 if since_s is None else self._clock() - since_s

    @property
    def is_late(self) -> bool:
        """Any thread."""
        return self.is_on and self.age_s > self._timeout_s

    async def run(self, on_late: Callable[[Internal], None]) -> None:
        """Look until a step is late, and say so once."""
        while not self.is_late:
            await asyncio.sleep(min(WATCH_S, self._timeout_s / 4))
        on_late(
            Internal(
                f"{self._what} did not end within {self._timeout_s:g} s (limits.step_timeout_s): "
                "its device does not answer"
            )
        )
