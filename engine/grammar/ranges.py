"""Ranges: sets of characters. Pure functions over values; any thread."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""Code points: inclusive, sorted, apart from one another."""

_LAST = 0x10FFFF


def union(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Sorted, without overlap, neighbours joined."""
    joined: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if joined and low <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(joined[-1][1], high))
        else:
            joined.append((low, high))
    return tuple(joined)


def minus(ranges: Ranges, others: Ranges) -> Ranges:
    """What is in `ranges` and not in `others`."""
    left = list(ranges)
    for low, high in others:
        rest: list[tuple[int, int]] = []
        for start, end in left:
            if end < low or start > high:
                rest.append((start, end))
                continue
            if start < low:
                rest.append((start, low - 1))
            if end > high:
                rest.append((high + 1, end))
        left = rest
    return tuple(left)


def everything_but(ranges: Ranges) -> Ranges:
    """All characters that are not in `ranges`."""
    return minus(((0, _LAST),), ranges)


def is_one(ranges: Ranges) -> bool:
    """They are one character."""
    return len(ranges) == 1 and ranges[0][0] == ranges[0][1]
