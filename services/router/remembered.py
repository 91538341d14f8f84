"""Remembered: who stays known although the registry does not name it: Redis was away, or is another
one that begins empty, and processes need a moment to register again.

An absence means something again once `keep_s` have passed since Redis came back: in that time every
process that lives has had a beat through. Who did is remembered no more, and counts by its beat
alone. Pure; the caller says what time it is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Generic, TypeVar

T = TypeVar("T")


class Remembered(Generic[T]):
    """Of one kind of process, by id."""

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._until_s = 0.0
        self._unheard: dict[str, T] = {}

    def begin(self, known: Mapping[str, T], now_s: float) -> None:
        """Redis is back after beats could lapse, or is another one: from now on these are known
        until they are heard of, or their time is over, which begins anew."""
        self._unheard = dict(known)
        self._until_s = now_s + self._keep_s

    def without(self, heard: Collection[str], now_s: float) -> Mapping[str, T]:
        """Who is known although not `heard` of: its beat is not in Redis."""
        if now_s >= self._until_s:
            self._unheard = {}
        for name in heard:
            self._unheard.pop(name, None)
        return self._unheard
