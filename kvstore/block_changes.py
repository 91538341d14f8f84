"""ChangeLog: the blocks that came to a store and left it, in order, until the publisher of the
prefix index has taken them.

The store appends and never waits; the publisher (index_publisher.py) takes. Beyond
`max_changes` the log drops all changes and says `overflowed`: publishing everything anew then costs
less memory than the list. `serve` makes the log and gives it to both.

One asyncio loop.
"""

from __future__ import annotations

import asyncio
import time
from typing import NamedTuple

from process.deadline import Clock

MAX_CHANGES = 200_000
"""Most changes that the log keeps: about 30 MB."""


class BlockChange(NamedTuple):
    """One change of the store: a block that is present from `since_s` on, or absent."""

    is_present: bool
    chain_hash: bytes
    since_s: float
    """Time of the change on the log's clock, in seconds."""


class ChangeLog:
    """The changes of a store that the index's publisher has not taken yet, the oldest first."""

    def __init__(self, max_changes: int = MAX_CHANGES, clock: Clock = time.monotonic) -> None:
        self.appended = asyncio.Event()
        """An event that each change sets; the publisher clears it."""
        self.overflowed = False
        """Whether changes were dropped since the last `clear`; until the next one all new changes
        are dropped."""
        self.since_s: float | None = None
        """Time of the oldest change that was dropped or not taken, on the log's clock; None: there
        is none."""
        self._max_changes = max_changes
        self._clock = clock
        self._changes: list[BlockChange] = []

    def __len__(self) -> int:
        return len(self._changes)

    def append(self, is_present: bool, chain_hash: bytes) -> None:
        """Note that a block came to the store (`is_present`) or left it."""
        if self.overflowed:
            return
        now_s = self._clock()
        if self.since_s is None:
            self.since_s = now_s
        self._changes.append(BlockChange(is_present, chain_hash, now_s))
        if len(self._changes) > self._max_changes:
            self._changes.clear()
            self.overflowed = True
        self.appended.set()

    def take(self, max_changes: int) -> list[BlockChange]:
        """Remove the oldest `max_changes` changes. Returns: these, in order."""
        taken = self._changes[:max_changes]
        del self._changes[:max_changes]
        if not self.overflowed:
            self.since_s = self._changes[0].since_s if self._changes else None
        return taken

    def clear(self) -> None:
        """Drop all changes. The publisher calls it in the turn of the loop in which it lists what
        is present."""
        self._changes.clear()
        self.overflowed = False
        self.since_s = None


class NullLog(ChangeLog):
    """A log that keeps nothing, for a store that is in no index."""

    def append(self, is_present: bool, chain_hash: bytes) -> None:
        """Drop the change."""
