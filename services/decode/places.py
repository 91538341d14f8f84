"""Places: whose turn it is to have places in the engine's steps. Pure."""

from __future__ import annotations

from collections.abc import Iterable


def num_granted(needed: Iterable[int], num_held: int, num_places: int) -> int:
    """How many of those in line get their places now, from its head on: none passes another.

    Args:
        needed: places that each in line needs.
        num_held: places that are held.
        num_places: places that there are.
    """
    num = 0
    for num_needed in needed:
        if num_held + num_needed > num_places:
            break
        num_held += num_needed
        num += 1
    return num
