"""EvictionOrder: the blocks that may be evicted, the least recently used first. Knows numbers only.

A ring through two arrays, by block: the one after it and the one before it. So a block enters or
leaves at O(1) wherever it stands, and neighbours enter by slices. Engine thread only.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator

from engine.errors import IntegrityError
from engine.kv.neighbours import MANY, runs

_OUT = -1
"""Stands where a block that is not in the ring would have a neighbour."""


class EvictionOrder:
    """See the module. Empty at the start.

    Args:
        numbers: 0, 1, 2 and so on, of all blocks that there are.
        many: so many neighbours are worked off by slices.
    """

    def __init__(self, numbers: array[int], many: int = MANY) -> None:
        self._numbers = numbers
        self._many = many
        num_blocks = len(numbers)
        self._ends = num_blocks  # stands before the first and after the last
        self._after = array("q", (_OUT,)) * (num_blocks + 1)
        self._before = array("q", (_OUT,)) * (num_blocks + 1)
        self._after[self._ends] = self._before[self._ends] = self._ends
        self._num_blocks = 0

    def __len__(self) -> int:
        return self._num_blocks

    def __contains__(self, block_id: int) -> bool:
        return self._after[block_id] != _OUT

    def __iter__(self) -> Iterator[int]:
        """Who is evicted first comes first."""
        block_id = self._after[self._ends]
        while block_id != self._ends:
            yield block_id
            block_id = self._after[block_id]

    def extend(self, block_ids: Iterable[int]) -> None:
        """Blocks that are not in it, to be evicted last, in this order."""
        after, before, ends = self._after, self._before, self._ends
        last = before[ends]
        for block_id in block_ids:
            after[last] = block_id
            before[block_id] = last
            last = block_id
            self._num_blocks += 1
        after[last], before[ends] = ends, last

    def extend_down(self, start: int, end: int) -> None:
        """`extend` by [start, end), the last of them first."""
        last, ends, first = self._before[self._ends], self._ends, end - 1
        self._after[start + 1 : end] = self._numbers[start:first]
        self._before[start:first] = self._numbers[start + 1 : end]
        self._after[last], self._before[first] = first, last
        self._after[start], self._before[ends] = ends, start
        self._num_blocks += end - start

    def remove(self, block_id: int) -> None:
        """A block that is in it."""
        before, after = self._before[block_id], self._after[block_id]
        self._after[before], self._before[after] = after, before
        self._after[block_id] = self._before[block_id] = _OUT
        self._num_blocks -= 1

    def take_first(self, num_blocks: int) -> list[int]:
        """Remove so many, which must be there. Returns them in order."""
        after, before = self._after, self._before
        block_id = after[self._ends]
        taken: list[int] = []
        for _ in range(num_blocks):
            taken.append(block_id)
            block_id = after[block_id]
        upwards = array("q", taken)
        upwards.reverse()  # mostly chains from their tails on
        for i, j, is_run in runs(upwards, self._numbers, self._many):
            if is_run:
                start, end = upwards[i], upwards[i] + j - i
                after[start:end] = before[start:end] = array("q", (_OUT,)) * (j - i)
                continue
            for one in upwards[i:j]:
                after[one] = before[one] = _OUT
        after[self._ends], before[block_id] = block_id, self._ends
        self._num_blocks -= num_blocks
        return taken

    def check_integrity(self) -> None:
        """Each block's neighbours name it, in both directions, and nobody is in it who is not on
        the way through. Raises: IntegrityError."""
        num_inside = sum(1 for after in self._after if after != _OUT)
        block_id, num_passed = self._ends, 0
        while num_passed <= self._num_blocks:
            after = self._after[block_id]
            if after == _OUT or self._before[after] != block_id:
                raise IntegrityError(f"the order of eviction is broken behind block {block_id}")
            block_id, num_passed = after, num_passed + 1
            if block_id == self._ends:
                break
        if not num_passed == num_inside == self._num_blocks + 1:
            raise IntegrityError(
                f"{num_inside - 1} blocks are in the order of eviction, {num_passed - 1} in a row, "
                f"{self._num_blocks} by count"
            )
