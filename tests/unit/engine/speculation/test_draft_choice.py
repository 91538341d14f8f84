"""Fetch or recompute: what is chosen follows what was measured; what was not is tried, and what
does not pay is looked at again, both rarely."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.speculation.draft_choice import (
    LAST_WAIT,
    MEMORY,
    NUM_PROBES,
    NUM_UNPROVEN,
    RECOMPUTE_AGAIN,
    WRITE_ANYWAY,
    WRITE_UNPROVEN,
    DraftChoice,
    Way,
)

SECONDS = st.floats(1e-6, 1.0)
PAGE_TOKENS = 16


def measured(token_s: float, fixed_s: float, page_s: float, share: float = 1.0) -> DraftChoice:
    """One that has seen as much as it remembers."""
    choice = DraftChoice(PAGE_TOKENS)
    for index in range(4 * MEMORY):
        num_asked = 4 + 4 * (index % 4)
        num_found = round(share * num_asked)
        choice.on_recomputed(100, 100 * token_s)
        choice.on_fetched(num_asked, num_found, fixed_s + num_found * page_s)
    return choice


def test_what_was_never_measured_is_tried_and_not_for_ever() -> None:
    choice = DraftChoice(PAGE_TOKENS)
    assert [choice.choose(3) for _ in range(5)] == [Way.RECOMPUTE] * 5
    choice.on_recomputed(48, 0.048)
    for _ in range(NUM_PROBES):
        assert choice.choose(3) is Way.FETCH
        choice.on_fetched(3, 0, 0.001)
    ways = [choice.choose(3) for _ in range(1000)]
    assert ways[0] is Way.RECOMPUTE
    assert 0 < ways.count(Way.FETCH) <= 3 + 1000 / LAST_WAIT + 1


@settings(max_examples=30)
@given(SECONDS, SECONDS, SECONDS, st.integers(1, 200))
def test_what_is_cheaper_is_chosen(
    token_s: float, fixed_s: float, page_s: float, num_pages: int
) -> None:
    """But for one in so many, by which the other one is measured again."""
    choice = measured(token_s, fixed_s, page_s)
    fetch_s = fixed_s + num_pages * page_s
    computing_s = num_pages * PAGE_TOKENS * token_s
    if abs(fetch_s - computing_s) < 0.01 * max(fetch_s, computing_s):
        return  # either is right
    better = Way.FETCH if fetch_s < computing_s else Way.RECOMPUTE
    ways = [choice.choose(num_pages) for _ in range(8 * RECOMPUTE_AGAIN)]
    num_others = len(ways) - ways.count(better)
    assert num_others == 8 if better is Way.FETCH else 5 <= num_others <= 12


@settings(max_examples=30)
@given(SECONDS, SECONDS, SECONDS)
def test_the_measures_are_found(token_s: float, fixed_s: float, page_s: float) -> None:
    choice = measured(token_s, fixed_s, page_s)
    for num_pages in (1, 10, 100):
        assert choice.fetch_s(num_pages) == pytest.approx(fixed_s + num_pages * page_s, rel=1e-3)
        expected_s = num_pages * PAGE_TOKENS * token_s
        assert choice.recompute_s(num_pages) == pytest.approx(expected_s, rel=1e-6)


def test_what_is_seldom_found_is_not_asked_for() -> None:
    """A look costs 1 ms and computing a page 16 ms: it pays for every tenth page, not for none."""
    assert measured(0.001, 0.001, 0.001, share=0.25).choose(8) is Way.FETCH
    choice = measured(0.001, 0.001, 0.001)
    for _ in range(20 * MEMORY):
        choice.on_fetched(8, 0, 0.001)
    assert choice.choose(8) is Way.RECOMPUTE
    for _ in range(3):  # it is found again
        choice.on_fetched(8, 8, 0.009)
    assert choice.choose(8) is Way.FETCH


def test_a_change_is_noticed_either_way() -> None:
    """The machine becomes busy, and idle again: what is measured on the way decides."""
    choice = measured(0.001, 0.001, 0.0001)
    for _ in range(3):
        for token_s, way in ((1e-6, Way.RECOMPUTE), (0.001, Way.FETCH)):
            for _ in range(6 * RECOMPUTE_AGAIN * MEMORY):
                if choice.choose(8) is Way.RECOMPUTE:
                    choice.on_recomputed(128, 128 * token_s)
                else:
                    choice.on_fetched(8, 8, 0.0018)
            ways = [choice.choose(8) for _ in range(20)]
            assert ways.count(way) >= 18


def test_what_does_not_pay_is_hardly_written() -> None:
    unproven = DraftChoice(PAGE_TOKENS)
    written = [unproven.writes() for _ in range(NUM_UNPROVEN + 80 * WRITE_UNPROVEN)]
    assert all(written[:NUM_UNPROVEN]) and sum(written[NUM_UNPROVEN:]) == 80
    paying = measured(0.001, 0.001, 0.0001)
    assert all(paying.writes() for _ in range(200))
    for _ in range(20 * MEMORY):  # nothing is found: because nothing was written, maybe
        paying.on_fetched(8, 0, 0.001)
    assert all(paying.writes() for _ in range(200))
    losing = measured(1e-6, 0.001, 0.001)
    assert sum(losing.writes() for _ in range(10 * WRITE_ANYWAY)) == 10


@settings(max_examples=30)
@given(st.randoms(use_true_random=False))
def test_no_measurement_breaks_it(rng: random.Random) -> None:
    """Zeros, clocks that stand still or go back, one page over and over."""
    choice = DraftChoice(PAGE_TOKENS)
    for _ in range(60):
        num_asked = rng.choice((1, 1, 1, 7))
        seconds = rng.choice((0.0, 0.0, -1.0, 1e-9, 0.3))
        if choice.choose(num_asked) is Way.FETCH:
            choice.on_fetched(num_asked, rng.randint(0, num_asked), seconds)
        else:
            choice.on_recomputed(rng.randint(1, 99), seconds)
        assert choice.fetch_s(3) >= 0.0 and choice.recompute_s(3) >= 0.0
        choice.writes()
