"""FreeRuns: the free blocks as runs of neighbours. Knows numbers only.

A run is a half-open interval [start, end); two runs never touch. Neighbours matter for transfers
(one descriptor for a run) and for the CPU's caches, so that `take` looks for a run that is long
enough, among the first few only: giving and taking a block is O(1) however many there are. Engine
thread only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain, islice, pairwise, starmap

from engine.errors import IntegrityError

_NUM_LOOKED_AT = 32
"""Runs in which `take` looks for enough neighbours. A guess: a pool with more is scattered."""


class FreeRuns:
    """The runs, longest unused first; at the start one of all blocks."""

    def __init__(self, num_blocks: int) -> None:
        self._end_of: OrderedDict[int, int] = OrderedDict({0: num_blocks})
        self._start_of: dict[int, int] = {num_blocks: 0}
        self._num_blocks = num_blocks

    def __len__(self) -> int:
        """Free blocks."""
        return self._num_blocks

    def __iter__(self) -> Iterator[int]:
        """Free blocks, ascending within a run."""
        return chain.from_iterable(starmap(range, self._end_of.items()))

    def give(self, block_id: int) -> None:
        """A block is free now; it was not."""
        self.give_run(block_id, block_id + 1)

    def give_run(self, first: int, behind: int) -> None:
        """Blocks [first, behind) are free now; none was."""
        start, end = first, behind
        if first in self._start_of:
            start = self._start_of.pop(first)
        if behind in self._end_of:
            end = self._end_of.pop(behind)
        self._end_of[start] = end
        self._start_of[end] = start
        self._num_blocks += behind - first

    def take(self, num_blocks: int) -> list[int]:
        """So many blocks, which must be there: neighbours if a run looked at has enough, else runs
        as they come."""
        if num_blocks == 0:
            return []
        for start, end in islice(self._end_of.items(), _NUM_LOOKED_AT):
            if end - start >= num_blocks:
                return self._cut(start, num_blocks)
        taken: list[int] = []
        while len(taken) < num_blocks:
            start, end = next(iter(self._end_of.items()))
            taken += self._cut(start, min(end - start, num_blocks - len(taken)))
        return taken

    def _cut(self, start: int, num_blocks: int) -> list[int]:
        """Take the first blocks of a run."""
        end = self._end_of.pop(start)
        middle = start + num_blocks
        if middle < end:
            self._end_of[middle] = end
            self._end_of.move_to_end(middle, last=False)
            self._start_of[end] = middle
        else:
            del self._start_of[end]
        self._num_blocks -= num_blocks
        return list(range(start, middle))

    def check_integrity(self) -> None:
        """Both maps are each other's reverse, no two runs touch, the count is right. Raises:
        IntegrityError."""
        runs = sorted(self._end_of.items())
        if {end: start for start, end in runs} != self._start_of:
            raise IntegrityError("the free runs' two maps disagree")
        for (_, end), (start, _) in pairwise(runs):
            if start <= end:
                raise IntegrityError(f"free runs touch or overlap at block {start}")
        if any(start >= end for start, end in runs) or self._num_blocks != sum(
            end - start for start, end in runs
        ):
            raise IntegrityError("free blocks are miscounted")
