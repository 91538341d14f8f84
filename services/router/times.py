"""Where a request's time went. Each stage begins where the one before ended, so the stages sum to
the whole exactly.

A stage that another process worked on is split by that process's own account; what is left (wire,
waking up) goes to one named stage, so nothing is lost and nothing counted twice. Used by one
request; no I/O.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from process.deadline import Clock


class StageTimes:
    """Seconds by stage, in the order of first mention."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._begin_s = self._last_s = clock()
        self._seconds: dict[str, float] = {}

    def mark(self, stage: str) -> None:
        """The time since the last mark was `stage`."""
        self._add(stage, self._lap())

    def mark_split(self, parts: Iterable[tuple[str, float]], rest: str) -> None:
        """The time since the last mark was `parts` (seconds, as another process measured them) and
        otherwise `rest`.
        """
        lap_s = self._lap()
        known = [(stage, max(0.0, seconds)) for stage, seconds in parts]
        total_s = sum(seconds for _, seconds in known)
        # Clocks of two processes drift by parts in a million: the account must not exceed what
        # passed here.
        scale = min(1.0, lap_s / total_s) if total_s > 0 else 1.0
        for stage, seconds in known:
            self._add(stage, seconds * scale)
        self._add(rest, max(0.0, lap_s - total_s * scale))

    def stages(self) -> Sequence[tuple[str, float]]:
        """(stage, seconds) so far."""
        return tuple(self._seconds.items())

    @property
    def total_s(self) -> float:
        """From the first moment to the last mark; equals the sum of the stages up to rounding."""
        return self._last_s - self._begin_s

    @property
    def elapsed_s(self) -> float:
        """From the first moment until now."""
        return self._clock() - self._begin_s

    def _lap(self) -> float:
        now = self._clock()
        lap_s, self._last_s = now - self._last_s, now
        return lap_s

    def _add(self, stage: str, seconds: float) -> None:
        self._seconds[stage] = self._seconds.get(stage, 0.0) + seconds
