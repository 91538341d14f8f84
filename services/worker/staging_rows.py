"""StagingRows: allocator of host memory rows for parked blocks in transit to and from the KV store.

A row is free, taken by its owner, or quarantined: a transfer may still write into it. Knows no
request and no store. No lock of its own: its owner calls it under one.

Conservation: free + taken + quarantined == all (`check_integrity`).
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable

import numpy as np

from engine.errors import IntegrityError
from kvstore.transport.base import BlockMemory


class StagingRows:
    """Host memory for `num_rows` rows of one block each, committed when first written."""

    def __init__(self, num_rows: int, block_bytes: int) -> None:
        self.memory = BlockMemory.of(np.zeros((num_rows, block_bytes), dtype=np.uint8))
        self._free = list(range(num_rows))  # a heap: low rows first, so neighbours, as pieces
        self._quarantined: set[int] = set()

    @property
    def num_rows(self) -> int:
        return self.memory.num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_quarantined(self) -> int:
        return len(self._quarantined)

    def take(self, num_rows: int) -> tuple[int, ...] | None:
        """Allocate rows; None, and none is allocated, where fewer are free."""
        if num_rows > len(self._free):
            return None
        return tuple(heapq.heappop(self._free) for _ in range(num_rows))

    def give_back(self, rows: Iterable[int]) -> None:
        """Free allocated rows that are no longer read or written."""
        for row in rows:
            heapq.heappush(self._free, row)

    def quarantine(self, rows: Collection[int]) -> None:
        """Quarantine allocated rows that a transfer may still write into, until `settle`."""
        self._quarantined.update(rows)

    def settle(self, rows: Iterable[int]) -> None:
        """Free quarantined rows; their transfer is over."""
        for row in rows:
            self._quarantined.remove(row)
            heapq.heappush(self._free, row)

    def check_integrity(self, taken: Iterable[int]) -> None:
        """Check that `taken` are exactly the rows that are allocated and not quarantined. Raises:
        IntegrityError."""
        rows = sorted([*self._free, *self._quarantined, *taken])
        if rows != list(range(self.num_rows)):
            raise IntegrityError(
                f"parking rows: {len(self._free)} free, {len(self._quarantined)} quarantined and "
                f"the taken ones make {len(rows)}, with some missing or twice, of {self.num_rows}"
            )
