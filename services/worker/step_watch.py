"""StepWatch: watchdog that detects a step that exceeds its time limit because its device does not
answer.

The engine's thread says when a step begins and ends; the event loop looks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from process.errors import Internal

WATCH_S = 1.0
"""Seconds between two checks; a quarter of `timeout_s` where that is less."""


class StepWatch:
    """Timer of the running step.

    Args:
        timeout_s: most seconds of a step; 0: no limit.
        what: name of the step, for the error's message.
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
        """Start the timer of a step; the previous one has ended."""
        self._since_s = self._clock()

    def end(self) -> None:
        """Stop the timer at the end of the step."""
        self._since_s = None

    @property
    def age_s(self) -> float:
        """Return the seconds since the running step began; 0: none runs. Any thread."""
        since_s = self._since_s
        return 0.0 if since_s is None else self._clock() - since_s

    @property
    def is_late(self) -> bool:
        """Return whether the running step has exceeded its limit. Any thread."""
        return self.is_on and self.age_s > self._timeout_s

    async def run(self, on_late: Callable[[Internal], None]) -> None:
        """Check until a step is late, then call `on_late` once."""
        while not self.is_late:
            await asyncio.sleep(min(WATCH_S, self._timeout_s / 4))
        on_late(
            Internal(
                f"{self._what} did not end within {self._timeout_s:g} s (limits.step_timeout_s): "
                "its device does not answer"
            )
        )
