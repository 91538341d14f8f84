"""Line: who waits for their first blocks, by priority and then by who came first, so that looking
at the first of them costs the same however many wait. Engine thread only."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice

from engine.schedule.order import Key
from engine.sequence import Sequence


class Line:
    """See the module.

    Args:
        has_priorities: they count; False: only who came first does.
    """

    def __init__(self, *, has_priorities: bool) -> None:
        self._has_priorities = has_priorities
        self._levels: dict[int, dict[Key, Sequence]] = {}
        self._level_of: dict[Key, int] = {}

    def add(self, sequence: Sequence) -> None:
        """It comes last in its priority."""
        level = sequence.request.priority if self._has_priorities else 0
        self._levels.setdefault(level, {})[sequence.key] = sequence
        self._level_of[sequence.key] = level

    def pop(self, key: Key) -> Sequence | None:
        """Take it out, if it is there."""
        level = self._level_of.pop(key, None)
        if level is None:
            return None
        sequence = self._levels[level].pop(key)
        if not self._levels[level]:
            del self._levels[level]
        return sequence

    def first(self, num: int) -> Iterator[Sequence]:
        """The first `num`: the highest priority first, then who came first."""
        levels = (self._levels[level] for level in sorted(self._levels, reverse=True))
        return islice(chain.from_iterable(one.values() for one in levels), num)

    def items(self) -> Iterator[tuple[Key, Sequence]]:
        """All, in no order that counts."""
        return chain.from_iterable(one.items() for one in self._levels.values())

    def __getitem__(self, key: Key) -> Sequence:
        return self._levels[self._level_of[key]][key]

    def __contains__(self, key: object) -> bool:
        return key in self._level_of

    def __len__(self) -> int:
        return len(self._level_of)
