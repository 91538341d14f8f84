"""Pace: what a step lasts without guesses, and what it costs that one is not launched ahead.

Policy: pure; running averages that nobody else writes.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

_NEWEST = 8
"""Steps of a size before anybody is asked, and so many of the newest say what one lasts: their
median, as the very first ones are no example, and neither is the shortest, which would make steps
with guesses seem dearer than they are. Among guesses few plain steps come, so that an average of
more would be of another time."""
_PAUSES = 3
"""Plain steps of a class of sizes that are not launched, before anybody is asked where others are;
the shortest of them counts; guessed."""
ACCIDENT = 4.0
"""Times the usual seconds: a step with guesses that lasts longer, or the first launched one after
it, was held up by something else, and is taken for one of just so many; guessed."""


class Pace:
    """Seconds of steps without guesses and prompts, by the number of sequences: launched ahead, and
    not. What the next one would be, the newest of about its size says.

    Args:
        measures_again: see Exploration.
    """

    def __init__(self, *, measures_again: bool = True) -> None:
        self._by_size: dict[tuple[int, bool], _Pace] = {}
        self._is_launched: dict[int, bool] = {}
        self._pauses: dict[int, _Pause] = {}
        """By class of sizes: up to twice as many."""
        self._measures_again = measures_again

    def observe(self, num_sequences: int, seconds: float, *, is_launched: bool = False) -> None:
        """A plain step has lasted so long."""
        place = size_place(num_sequences)
        self._is_launched[place] = is_launched
        one = self._by_size.setdefault((place, is_launched), _Pace())
        one.num_seen += 1
        one.num_guessed = 0
        one.newest_s.append(seconds)
        share = max(1.0 / one.num_seen, 1.0 / _NEWEST)
        one.num_sequences += (num_sequences - one.num_sequences) * share

    def is_known(self, num_sequences: int, most: int) -> bool:
        """Enough steps of about this size were seen, one of them not longer than `most` steps with
        guesses ago."""
        one = self._newest(num_sequences)
        if one is None or one.num_seen < _NEWEST:
            return False
        is_launched = self._is_launched[size_place(num_sequences)]
        return one.num_guessed < most or (is_launched and not self._measures_again)

    def seconds(self, num_sequences: int, row_s: float, most: int) -> float | None:
        """Of a step; None: it is not known, and this one should be plain."""
        one = self._newest(num_sequences)
        if one is None or not self.is_known(num_sequences, most):
            return None
        return max(one.seconds + row_s * (num_sequences - one.num_sequences), 0.0)

    def is_launched(self, num_sequences: int) -> bool:
        """Plain steps of about this size are launched ahead."""
        return self._is_launched.get(size_place(num_sequences), False)

    def on_guessed(self, num_sequences: int) -> None:
        """A step of so many sequences had guesses."""
        one = self._newest(num_sequences)
        if one is not None:
            one.num_guessed += 1

    def wants_pause(self, num_sequences: int) -> bool:
        """Others of its size are launched, and too few were not to say what that costs."""
        is_launched = self.is_launched(num_sequences)
        return is_launched and self._pause(num_sequences).num_seen < _PAUSES

    def on_pause(self, num_sequences: int, seconds: float) -> None:
        """A plain step was not launched, though it could have been, and has lasted so long."""
        one = self._pause(num_sequences)
        one.num_seen += 1
        one.seconds = min(one.seconds, self.longer_s(num_sequences, seconds))

    def pause_s(self, num_sequences: int) -> float | None:
        """What a step of so many lasts longer where it is not launched; None: they are not
        launched in any case, or it is not known."""
        one = self._pause(num_sequences)
        return one.seconds if self.is_launched(num_sequences) and one.num_seen else None

    def _pause(self, num_sequences: int) -> _Pause:
        return self._pauses.setdefault(num_sequences.bit_length(), _Pause())

    def longer_s(self, num_sequences: int, seconds: float) -> float:
        """What a launched step lasted longer than others of its size; 0.0 where none is known."""
        one = self._by_size.get((size_place(num_sequences), True))
        if one is None:
            return 0.0
        return max(min(seconds, ACCIDENT * one.seconds) - one.seconds, 0.0)

    def shorter_s(self, num_sequences: int, seconds: float) -> float:
        """By how much it fell short of others of its size."""
        one = self._by_size.get((size_place(num_sequences), True))
        return 0.0 if one is None else max(one.seconds - seconds, 0.0)

    def _newest(self, num_sequences: int) -> _Pace | None:
        place = size_place(num_sequences)
        return self._by_size.get((place, self._is_launched.get(place, False)))


@dataclass(slots=True)
class _Pace:
    newest_s: deque[float] = field(default_factory=lambda: deque(maxlen=_NEWEST))
    num_sequences: float = 0.0
    num_seen: int = 0
    num_guessed: int = 0
    """Steps with guesses since the last one without."""

    @property
    def seconds(self) -> float:
        """Of one; found out when somebody asks, which is seldom."""
        return statistics.median_low(self.newest_s)


@dataclass(slots=True)
class _Pause:
    num_seen: int = 0
    seconds: float = float("inf")


def size_place(num_rows: int) -> int:
    """Sizes of one place differ by an eighth at most."""
    shift = max(0, num_rows.bit_length() - 4)
    return num_rows >> shift << shift
