"""Who goes first: candidates of one kind, the least recently used first.

Of candidates used at the same moment the deepest goes first, so that a chain goes tail first.
Finding one costs O(log n): a heap whose outdated items are skipped. What a candidate is, is the
owner's predicate; whoever changes an entry so that it may have become one offers it again.

Knows nothing of frames, pages or clocks. Plain synchronous values, one thread.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator

from kvstore.catalog import Entry
from kvstore.errors import IntegrityError


class LruOrder:
    """See the module."""

    def __init__(self, what: str, is_candidate: Callable[[Entry], bool]) -> None:
        """what: names the kind in errors."""
        self._what = what
        self._is_candidate = is_candidate
        self._heap: list[tuple[int, int, int, Entry]] = []  # (last_used, -depth, serial, entry)
        self._serial = 0
        self._num_live = 0  # when the heap was last rebuilt

    def offer(self, entry: Entry) -> None:
        """Let `first` find the entry if it is a candidate now."""
        if not self._is_candidate(entry):
            return
        self._serial += 1
        heapq.heappush(self._heap, (entry.last_used, -entry.depth, self._serial, entry))
        # Each use leaves an outdated item behind.
        if len(self._heap) > 64 + 4 * self._num_live:
            self._rebuild()

    def first(self) -> Entry | None:
        """The candidate that was used the longest ago; it stays one until its owner changes it."""
        while self._heap:
            last_used, _, _, entry = self._heap[0]
            if last_used == entry.last_used and self._is_candidate(entry):
                return entry
            heapq.heappop(self._heap)
        return None

    def checks(self, entries: Iterable[Entry]) -> Iterator[None]:
        """Every candidate among `entries` must be found, in steps. Raises: IntegrityError."""
        offered: set[int] = set()
        for tick, _, _, entry in self._heap:
            if tick == entry.last_used:
                offered.add(id(entry))
            yield
        for entry in entries:
            if self._is_candidate(entry) and id(entry) not in offered:
                raise IntegrityError(f"{self._what}: {entry.chain_hash.hex()} would never be found")
            yield

    def _rebuild(self) -> None:
        live: dict[int, tuple[int, int, int, Entry]] = {}
        for item in self._heap:
            entry = item[3]
            if item[0] == entry.last_used and self._is_candidate(entry):
                live[id(entry)] = item
        self._heap = list(live.values())
        heapq.heapify(self._heap)
        self._num_live = len(self._heap)
