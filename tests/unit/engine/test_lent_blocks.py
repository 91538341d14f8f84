"""Blocks lent to somebody who is no request: few, free ones only, and given back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from engine.errors import IntegrityError, WrongState

Make = Callable[..., Any]
PROMPT = tuple(range(1, 15))


def test_half_of_the_free_ones_at_most_and_nothing_is_evicted(
    make_engine: Make, make_request: Make, finish: Make
) -> None:
    engine = make_engine()
    engine.reserve(make_request("a", PROMPT))
    engine.start("a")
    finish(engine)
    before = engine.stats()
    assert before.num_cached_blocks > 0
    first = engine.lend_blocks(10)
    assert len(set(first)) == 10
    second = engine.lend_blocks(1000)
    assert len(second) == (before.num_free_blocks - 10) // 2
    assert not set(first) & set(second)
    stats = engine.stats()
    assert (stats.num_cached_blocks, stats.num_evicted_blocks) == (before.num_cached_blocks, 0)
    assert stats.num_referenced_blocks == len(first) + len(second)
    engine.check_integrity()
    engine.return_blocks(first)
    engine.return_blocks(second)
    assert engine.stats() == before
    engine.check_integrity()


def test_what_is_not_lent_is_not_taken_back(make_engine: Make, make_request: Make) -> None:
    engine = make_engine()
    lent = engine.lend_blocks(3)
    reserved = engine.reserve(make_request("a", PROMPT)).block_ids
    for wrong in ([*lent, lent[0]], [lent[0], reserved[0]], [reserved[0]]):
        with pytest.raises(WrongState):
            engine.return_blocks(wrong)
    engine.check_integrity()
    engine.return_blocks(lent)
    engine.return_blocks(())
    engine.abort("a")
    engine.check_integrity()
    assert engine.stats().num_referenced_blocks == 0


def test_a_lent_block_that_nobody_remembers_breaks_the_law(make_engine: Make) -> None:
    engine = make_engine()
    (block_id,) = engine.lend_blocks(1)
    engine._cache_manager.lent.clear()
    with pytest.raises(IntegrityError, match=f"block {block_id} has 1 references"):
        engine.check_integrity()
    engine._cache_manager.lent.add(block_id)


def test_an_engine_with_one_free_block_lends_none(make_engine: Make, make_request: Make) -> None:
    engine = make_engine(num_blocks=8)
    while engine.stats().num_free_blocks > 1:
        engine.lend_blocks(8)
    assert engine.lend_blocks(8) == ()
