"""Converts tuples of integers to int32 arrays, quickly: a step has thousands of them, and the
device waits meanwhile. Pure but for a memory of the block tables converted last; any thread."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_REMEMBERED_BYTES = 32 << 20
"""Of tables: those of a step of a thousand sequences with a thousand blocks each, where an entry
takes 12 bytes. A sequence's changes once a block."""
_ENTRY_BYTES = 12
"""An int32, and a pointer in the tuple; the numbers themselves belong to the sequence."""


def int32s(values: Sequence[int]) -> NDArray[np.int32]:
    """The same numbers; read only. In half of the time of numpy's own way. Raises: struct.error for
    one that is no int32."""
    return np.frombuffer(struct.pack(f"={len(values)}i", *values), dtype=np.int32)


class Tables:
    """`int32s` of what was asked for lately, in two generations: when the younger one takes half of
    the bytes, it becomes the older one, and the older one is forgotten."""

    def __init__(self, max_bytes: int = _REMEMBERED_BYTES) -> None:
        self._max_bytes = max_bytes
        self._young: dict[tuple[int, ...], NDArray[np.int32]] = {}
        self._old: dict[tuple[int, ...], NDArray[np.int32]] = {}
        self._young_bytes = self._old_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Of what is remembered."""
        return self._young_bytes + self._old_bytes

    def of(self, values: tuple[int, ...]) -> NDArray[np.int32]:
        """The same array each time, as long as it is remembered."""
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
    """`int32s` of a sequence's blocks, which are asked for step after step."""
    return _tables.of(block_ids)
