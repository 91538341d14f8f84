"""The free list as runs, against a set."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from engine.errors import IntegrityError
from engine.kv.free_runs import FreeRuns


def test_runs_are_a_set_that_prefers_neighbours(seed: int, scale: Callable[[int], int]) -> None:
    rng = random.Random(seed)
    for _ in range(scale(200)):
        num_blocks = rng.randint(1, 40)
        runs, free, used = FreeRuns(num_blocks), set(range(num_blocks)), []
        for _ in range(60):
            if used and rng.random() < 0.6:
                block_id = used.pop(rng.randrange(len(used)))
                runs.give(block_id)
                free.add(block_id)
            else:
                count = rng.randint(0, len(free))
                starts = [s for s in free if all(s + i in free for i in range(count))]
                taken = runs.take(count)
                assert len(set(taken)) == count and set(taken) <= free
                if starts and count:  # fewer runs than are looked at: a fit is found
                    assert taken == list(range(taken[0], taken[0] + count))
                free -= set(taken)
                used += taken
            runs.check_integrity()
            assert (set(runs), len(runs)) == (free, len(free))


def test_integrity_notices_a_block_given_twice() -> None:
    """check_integrity must be able to fail."""
    runs = FreeRuns(8)
    runs.take(3)
    runs.give(1)
    runs.give(1)
    with pytest.raises(IntegrityError):
        runs.check_integrity()
