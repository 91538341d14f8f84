"""Fast conversion of tuples of integers to int32 arrays: a step has thousands of integers, and the
device waits meanwhile. Pure, except for a cache of the block tables that were converted last;
any thread."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_REMEMBERED_BYTES = 32 << 20
"""Limit of the cache of block tables in bytes: those of a step of a thousand sequences with a
thousand blocks each, with 12 bytes per entry. A sequence's table changes once per block."""
_ENTRY_BYTES = 12
"""Bytes of one cached entry: an int32, and a pointer in the tuple; the integers themselves belong
to the sequence."""


def int32s(values: Sequence[int]) -> NDArray[np.int32]:
    """Convert integers to a read-only int32 array, in half of the time of numpy. Raises:
    struct.error for a value that does not fit."""
    return np.frombuffer(struct.pack(f"={len(values)}i", *values), dtype=np.int32)


class Tables:
    """A cache of `int32s` results in two generations: when the younger one uses half of the bytes,
    it becomes the older one, and the previous older one is dropped."""

    def __init__(self, max_bytes: int = _REMEMBERED_BYTES) -> None:
        self._max_bytes = max_bytes
        self._young: dict[tuple[int, ...], NDArray[np.int32]] = {}
        self._old: dict[tuple[int, ...], NDArray[np.int32]] = {}
        self._young_bytes = self._old_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of the cached entries."""
        return self._young_bytes + self._old_bytes

    def of(self, values: tuple[int, ...]) -> NDArray[np.int32]:
        """Return the array of `values`, the same one as long as it is cached."""
        found = self._young.get(values)
        if found is not None:
            return found
        found = self._old.get(values)
        if found is None:
            found = int32s(values)
        size = _ENTRY_BYTES * len(values)
        if 2 * size > self._max_bytes:
            return found
        if 2 * (self._young_bytes + size) > self._max_bytes:
            self._old, self._old_bytes = self._young, self._young_bytes
            self._young, self._young_bytes = {}, 0
        self._young[values] = found
        self._young_bytes += size
        return found


_tables = Tables()


def table_of(block_ids: tuple[int, ...]) -> NDArray[np.int32]:
    """Convert a sequence's block ids with a cache, since they are converted in every step."""
    return _tables.of(block_ids)
