"""Neighbours: blocks whose numbers follow one another, found in a list of blocks, so that what is
done to many is done by slices: to some hundred of them at the price of a few. The pool hands out
neighbours where it can (engine/kv/free_runs.py). Pure.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

MANY = 32
"""Fewer neighbours cost less one by one."""


Piece = tuple[int, int, bool]
"""Of a list: [start, end), and whether it is a run."""


def runs(block_ids: array[int], numbers: array[int], many: int = MANY) -> Iterator[Piece]:
    """Cut a list into runs of at least `many` neighbours, ascending, and what lies between them.

    Args:
        numbers: 0, 1, 2 and so on up to the greatest block there is.
    Yields: places in the list, in order, without gaps.
    """
    num_blocks, stride = len(block_ids), many // 2
    done = at = 0
    while at + stride < num_blocks:
        # Of a run, two places so far apart are seen, wherever it begins.
        if block_ids[at + stride] - block_ids[at] == stride:
            start, end = _begin(block_ids, at, done), _end(block_ids, at)
            first = block_ids[start]
            is_run = block_ids[start:end] == numbers[first : first + end - start]
            if is_run and end - start >= many:
                if done < start:
                    yield done, start, False
                yield start, end, True
                done = at = end
                continue
        at += stride
    if done < num_blocks:
        yield done, num_blocks, False


def _begin(block_ids: array[int], at: int, least: int) -> int:
    """Where the neighbours begin that reach up to `at`."""
    while at > least and block_ids[at - 1] == block_ids[at] - 1:
        at -= 1
    return at


def _end(block_ids: array[int], start: int) -> int:
    """Where a run may end that has `start` in it: the last block before is as far away as it would
    be in one. By doubling and halving."""
    first, low, high, width = block_ids[start] - start, start, len(block_ids), 1
    while low + 1 < high:  # `low` is in it, `high` is behind
        middle = min(start + width, high - 1) if width else (low + high) // 2
        if block_ids[middle] - middle == first:
            low, width = middle, 2 * width
        else:
            high, width = middle, 0
    return high


def all_are(values: array[int], value: int) -> bool:
    """Whether a slice has nothing but `value` in it."""
    return values == array("q", (value,)) * len(values)
