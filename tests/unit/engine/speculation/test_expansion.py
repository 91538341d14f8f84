"""How much is guessed: never more than the budget, never without its parent, the best there is by
its own reckoning, and none where it does not pay."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.speculation.expansion import Calibration, Load, StepCost, calibrated, choose
from engine.speculation.tree import TokenTree, chain, merge


def _tree(rng: random.Random, num_paths: int) -> TokenTree:
    chains = []
    for _ in range(num_paths):
        length = rng.randint(1, 4)
        chances = sorted((rng.random() for _ in range(length)), reverse=True)
        chains.append(chain([rng.randrange(3) for _ in range(length)], chances))
    return merge(chains)


def _rate(trees: list[TokenTree], load: Load) -> float:
    gain = sum(sum(tree.chances) for tree in trees)
    num_rows = load.num_sequences + sum(map(len, trees))  # prompts' are computed in any case
    return (load.num_sequences + gain) / (load.base_s + load.row_s * num_rows)


@given(
    st.randoms(use_true_random=False), st.integers(1, 2), st.integers(0, 12), st.floats(0.0, 1.0)
)
def test_the_best_choice_within_the_budget(
    rng: random.Random, num_trees: int, budget: int, row_s: float
) -> None:
    trees = [_tree(rng, 2) for _ in range(num_trees)]
    load = Load(num_trees, num_trees + rng.randrange(5), rng.uniform(0.1, 2.0), row_s)
    chosen = choose(trees, load, budget)
    assert sum(map(len, chosen)) <= budget
    best = max(
        _rate([tree.best(count) for tree, count in zip(trees, counts, strict=True)], load)
        for counts in itertools.product(*(range(len(tree) + 1) for tree in trees))
        if sum(counts) <= budget
    )
    assert _rate(chosen, load) == pytest.approx(best)
    assert _rate(chosen, load) >= _rate([tree.best(0) for tree in trees], load) * (1 - 1e-12)


def test_nothing_is_guessed_where_rows_are_all_that_counts() -> None:
    tree = chain([1, 2, 3], [0.9, 0.8, 0.7])
    assert len(choose([tree], Load(1, 1, base_s=0.0, row_s=1.0), 3)[0]) == 0
    assert len(choose([tree], Load(1, 1, base_s=1.0, row_s=0.0), 3)[0]) == 3


def test_beliefs_are_corrected_by_what_is_seen() -> None:
    calibration = Calibration()
    assert calibration.chance(0.9) == pytest.approx(0.9)  # nothing seen: believed
    for index in range(1000):
        calibration.observe(0.9, is_kept=index % 4 == 0)
    assert calibration.chance(0.9) == pytest.approx(0.25, abs=0.05)
    assert calibration.chance(0.1) == pytest.approx(0.1)  # another bin
    tree = calibrated(chain([1, 2], [0.9, 0.81]), calibration)
    assert tree.chances[0] == pytest.approx(0.25, abs=0.05)
    assert tree.chances[1] == pytest.approx(tree.chances[0] ** 2)


def test_a_line_through_what_steps_cost() -> None:
    cost = StepCost()
    assert cost.line(4) == (1.0, 0.0)
    cost.observe(4, 0.5)
    assert cost.line(4) == (0.5, 0.0)  # one size says nothing of a row's price
    rng = random.Random(1)
    for _ in range(2000):
        num_rows = rng.randint(1, 64)
        cost.observe(num_rows, 0.01 + 0.002 * num_rows)
    base_s, row_s = cost.line(30)
    assert (base_s, row_s) == (pytest.approx(0.01, rel=0.1), pytest.approx(0.002, rel=0.1))


def test_a_rows_price_is_that_of_steps_of_about_its_size() -> None:
    """A thousand rows cost less each, and what was seen once is not forgotten for what is always
    seen; one step that was held up is not believed."""
    cost = StepCost()
    cost.observe(1000, 0.1)
    for num_rows in (8, 12):
        for _ in range(4):
            cost.observe(num_rows, 0.004 + 0.0005 * num_rows)
    for _ in range(1000):
        cost.observe(8, 0.008)
    cost.observe(8, 10.0)
    base_s, row_s = cost.line(8)
    assert row_s == pytest.approx(0.0005, rel=0.3)
    assert base_s + 8 * row_s == pytest.approx(0.008, rel=0.1)


@given(st.lists(st.tuples(st.integers(1, 100), st.floats(0.0, 10.0)), min_size=1, max_size=30))
def test_no_price_is_negative(steps: list[tuple[int, float]]) -> None:
    cost = StepCost()
    for num_rows, seconds in steps:
        cost.observe(num_rows, seconds)
    for num_rows in (1, 30, 1000):
        base_s, row_s = cost.line(num_rows)
        assert base_s >= -1e-9
        assert row_s >= 0.0
