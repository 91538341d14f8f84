"""LenderLimits: what one lender bounds for all of its readers together. Values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LenderLimits:
    """See the module."""

    max_followers: int = 256
    """Readers that wait for the rest of a lease. Each has a prompt under way here. Guessed: far
    more than a worker computes at once."""

    max_wait_s: float = 5.0
    """How long one of them waits; then it asks again, if it still wants to know. Guessed: many
    chunks of a prompt."""

    max_holds: int = 256
    """Promises to readers at once. Guessed: as many as may wait to be told."""

    max_hold_s: float = 1.0
    """How long a promise lasts. Guessed: a hundred times what the copy of a chunk takes, and no
    long time to do without blocks that nobody reads."""


LENDER_LIMITS = LenderLimits()
