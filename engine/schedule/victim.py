"""choose_victim: whose blocks are taken when there are none left. Pure; any thread.

The lowest priority, and among equals who came last; of one request its last sample. So who matters
most among those that run is never disturbed, ends, and gives its blocks back: there is no livelock
(tests/unit/engine/test_preemption.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from engine.schedule.order import Key, Policy


class Holder(NamedTuple):
    """A sample that holds blocks which may be taken from it."""

    key: Key
    priority: int
    order: int
    """Of `start` or `submit` calls: it does not change when the sample comes back."""


def choose_victim(holders: Iterable[Holder], policy: Policy) -> Key | None:
    """None: nobody holds anything that may be taken."""
    victim = max(
        holders,
        key=lambda one: (0 if policy == "fcfs" else -one.priority, one.order, one.key[1]),
        default=None,
    )
    return None if victim is None else victim.key
