"""Where a request's time went. Each stage begins where the one before ended, so the stages sum to
the whole exactly, and those up to the first token to the time that it took.

A stage that another process worked on is split by that process's own account; what is left (wire,
waking up) goes to one named stage, so nothing is lost and nothing counted twice. Where in such a
stage the other process was at work is not known here: its parts are laid one after the other from
the beginning on, as they followed each other there. Used by one request; no I/O.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from process.deadline import Clock
from process.trace_spans import Value

BEFORE_FIRST = frozenset(
    {"prefill_queue", "prefill_fetch", "prefill_compute", "decode_fetch", "decode_queue"}
)
"""Stages of workers' accounts that are over when their first token is drawn."""

Details = Callable[[], Mapping[str, Value]]
"""What a trace says of a stage; asked for only where there is one."""


@dataclass(frozen=True, slots=True)
class Lap:
    """One piece of one stage. Moments of the request's clock."""

    stage: str
    begin_s: float
    end_s: float
    details: Details | None = None


class StageTimes:
    """Seconds by stage, in the order of first mention."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._last_s = clock()
        self._seconds: dict[str, float] = {}
        self._laps: list[Lap] = []
        self.begin_s = self._last_s
        """The first moment, on the clock."""
        self.first_token_s: float | None = None
        """When the first token was out, on the clock; None: none was."""

    def mark(self, stage: str, details: Details | None = None) -> None:
        """The time since the last mark was `stage`."""
        begin_s, end_s = self._lap()
        cut_s = self.cut(begin_s, end_s)
        self._add(stage, begin_s, cut_s, details)
        self._add(stage, cut_s, end_s, details)

    def mark_split(
        self,
        parts: Iterable[tuple[str, float]],
        rest: str,
        *,
        wire: str = "",
        details: Details | None = None,
    ) -> None:
        """The time since the last mark was `parts` (seconds, as another process measured them) and
        otherwise `rest`; before the first token, if that came meanwhile, otherwise `wire`.
        """
        begin_s, end_s = self._lap()
        known = [(stage, max(0.0, seconds)) for stage, seconds in parts]
        cut_s = self.cut(begin_s, end_s)
        if cut_s > begin_s:
            before = [part for part in known if part[0] in BEFORE_FIRST]
            known = [part for part in known if part[0] not in BEFORE_FIRST]
            self._lay(before, wire or rest, begin_s, cut_s, details)
        self._lay(known, rest, cut_s, end_s, details)

    def first_token(self) -> float:
        """A token is out; the first one counts. Returns: seconds from the first moment to it."""
        if self.first_token_s is None:
            self.first_token_s = self._clock()
        return self.first_token_s - self.begin_s

    def cut(self, begin_s: float, end_s: float) -> float:
        """Where the first token came within a piece of time; its beginning, if not there."""
        first_s = self.first_token_s
        return begin_s if first_s is None else min(max(first_s, begin_s), end_s)

    def stages(self) -> Sequence[tuple[str, float]]:
        """(stage, seconds) so far."""
        return tuple(self._seconds.items())

    def laps(self) -> Sequence[Lap]:
        """All pieces so far, each beginning where the one before ended; none is empty. The first
        token is out where one of them ends."""
        return tuple(self._laps)

    @property
    def last_s(self) -> float:
        """The last mark, on the clock."""
        return self._last_s

    @property
    def total_s(self) -> float:
        """From the first moment to the last mark; equals the sum of the stages up to rounding."""
        return self._last_s - self.begin_s

    @property
    def elapsed_s(self) -> float:
        """From the first moment until now."""
        return self._clock() - self.begin_s

    def _lap(self) -> tuple[float, float]:
        begin_s, self._last_s = self._last_s, self._clock()
        return begin_s, self._last_s

    def _lay(
        self,
        parts: Sequence[tuple[str, float]],
        rest: str,
        begin_s: float,
        end_s: float,
        details: Details | None,
    ) -> None:
        """`parts` from the beginning on, then `rest` to the end."""
        total_s = sum(seconds for _, seconds in parts)
        # Clocks of two processes drift by parts in a million: the account must not exceed what
        # passed here.
        scale = min(1.0, (end_s - begin_s) / total_s) if total_s > 0 else 1.0
        at_s = begin_s
        for stage, seconds in parts:
            until_s = min(end_s, at_s + seconds * scale)
            self._add(stage, at_s, until_s, details)
            at_s = until_s
        self._add(rest, at_s, end_s, details)

    def _add(self, stage: str, begin_s: float, end_s: float, details: Details | None) -> None:
        self._seconds[stage] = self._seconds.get(stage, 0.0) + (end_s - begin_s)
        if end_s <= begin_s:
            return
        last = self._laps[-1] if self._laps and begin_s != self.first_token_s else None
        if last is not None and last.stage == stage and last.details is details is None:
            # A request that waits for a worker marks the same stage again and again: one piece.
            begin_s = self._laps.pop().begin_s
        self._laps.append(Lap(stage, begin_s, end_s, details))
