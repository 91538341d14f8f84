"""SpeculationController: how much is drafted and for whom. Never more nodes than the budget, never
one without its parent, the best there is by its own reckoning, and none where it does not pay. Time
is lost by finding out up to a share of what was served, and no more; a proposer that pays is
called, for few sequences at once, and one that would pay for all of many is found by one. What
launched steps are worth is what drafts are compared with, and what stopping them costs is charged.
Every step is learnt from once, in order, and none too soon, whatever comes between."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch import Batch
from engine.config import EngineConfig
from engine.engine import LLMEngine
from engine.outputs import RequestOutput
from engine.request import Request
from engine.speculation.config import NgramConfig, SpeculationConfig
from engine.speculation.controller import (
    FEW,
    GRANT_STEPS,
    PROBE_SHARE,
    TRIAL,
    AcceptanceRates,
    CallBudget,
    PlainStepTimes,
    ProposerCall,
    SpeculationController,
    StepCost,
    StepEstimate,
    choose_nodes,
)
from engine.speculation.ngram import NgramProposer
from engine.speculation.proposer import Draft, DraftTask
from engine.speculation.token_tree import EMPTY, TokenTree, chain, merge
from engine.testing.fake_model import FakeModel
from tests.harness.workloads import SIZE, VOCAB, WINDOW, steps_beyond, undisturbed
from tests.unit.engine.speculation.test_manager import KnowsTheAnswers


def _tree(rng: random.Random, num_paths: int) -> TokenTree:
    chains = []
    for _ in range(num_paths):
        length = rng.randint(1, 4)
        chances = sorted((rng.random() for _ in range(length)), reverse=True)
        chains.append(chain([rng.randrange(3) for _ in range(length)], chances))
    return merge(chains)


def _rate(trees: list[TokenTree], load: StepEstimate) -> float:
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
    load = StepEstimate(num_trees, num_trees + rng.randrange(5), rng.uniform(0.1, 2.0), row_s)
    chosen = choose_nodes(trees, load, budget)
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
    assert len(choose_nodes([tree], StepEstimate(1, 1, base_s=0.0, row_s=1.0), 3)[0]) == 0
    assert len(choose_nodes([tree], StepEstimate(1, 1, base_s=1.0, row_s=0.0), 3)[0]) == 3


def test_beliefs_are_corrected_by_what_is_seen() -> None:
    rates = AcceptanceRates()
    assert rates.chance(0.9) == pytest.approx(0.9)  # nothing seen: believed
    for index in range(1000):
        rates.observe(0.9, is_accepted=index % 4 == 0)
    assert rates.chance(0.9) == pytest.approx(0.25, abs=0.05)
    assert rates.chance(0.1) == pytest.approx(0.1)  # another bin
    tree = rates.calibrate(chain([1, 2], [0.9, 0.81]))
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


PLAIN_S = 0.01


def _class(num_sequences: int) -> int:
    return (num_sequences - 1).bit_length()


def _granted_s(num_sequences: int, step_s: float) -> float:
    return GRANT_STEPS * step_s if num_sequences <= FEW else 0.0


class _TrialLoss:
    """Of one trial: of its first calls, and of one of those that it went on with."""

    def __init__(self) -> None:
        self._number = self._num_calls = 0
        self._first_s = self._later_s = 0.0
        self.worst_s = 0.0

    def add(self, number: int, loss_s: float) -> None:
        if number != self._number:
            self._number, self._num_calls, self._first_s, self._later_s = number, 0, 0.0, 0.0
        self._num_calls += 1
        if self._num_calls <= TRIAL:
            self._first_s += max(loss_s, 0.0)
        else:
            self._later_s = max(self._later_s, loss_s)
        self.worst_s = max(self.worst_s, self._first_s + self._later_s)


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.floats(0.0, 0.1), st.booleans())
def test_time_lost_is_a_share_of_the_time_served(
    number: int, share: float, is_charged: bool
) -> None:
    """Whatever calls cost and bring: heavy tails, gains and losses that come in runs, batches that
    grow and shrink, and something beside each call that it does not tell. In each class of batch
    sizes by itself."""
    rng = random.Random(number)
    budget = CallBudget(share)
    sizes = rng.sample(range(1, 70), 3)
    lost: dict[int, float] = {}
    served: dict[int, float] = {}
    granted: dict[int, float] = {}
    trials: dict[int, _TrialLoss] = {}
    price, luck, size = 1.0, 1.0, sizes[0]
    worst_charge_s = dict.fromkeys(map(_class, sizes), 0.0)
    for _ in range(300):
        if rng.random() < 0.05:
            price, luck, size = 10 ** rng.uniform(-3, 2), rng.uniform(0, 4), rng.choice(sizes)
        load = StepEstimate(size, size, 0.01 * rng.lognormvariate(0, 0.5), 0.0)
        place = _class(size)
        num_tasks = budget.take_call(load, rng.choice([1, FEW]))
        granted.setdefault(place, _granted_s(size, load.seconds))
        trial = trials.setdefault(place, _TrialLoss())
        loss = 0.0
        if num_tasks:
            assert num_tasks <= size
            num_kept = int(num_tasks * rng.uniform(0, luck))
            own_s = 0.001 * price * rng.lognormvariate(0, 1)
            rows_s = rng.gauss(0.001, 0.001)
            loss = own_s + rows_s - num_kept * load.token_s
            num_nodes = num_kept + rng.randrange(4)
            budget.on_call(load, ProposerCall(num_tasks, num_kept, num_nodes, own_s, rows_s))
            if is_charged:
                beside_s = 0.001 * price * rng.uniform(0, 1)
                budget.charge(size, beside_s)
                worst_charge_s[place] = max(worst_charge_s[place], beside_s)
                loss += beside_s
            trial.add(budget.num_trials(size), loss)
        budget.on_served(size, load.seconds)
        lost[place] = lost.get(place, 0.0) + loss
        served[place] = served.get(place, 0.0) + load.seconds
        most = share * served[place] + granted[place] + trial.worst_s + worst_charge_s[place]
        assert lost[place] <= most * (1 + 1e-9)


def _asked(budget: CallBudget, size: int, num_steps: int, kept: float, own_s: float) -> list[int]:
    """Of each step, where a call costs the same for any number of sequences."""
    load = StepEstimate(size, size, PLAIN_S, 0.0)
    found: list[int] = []
    for _ in range(num_steps):
        num_tasks = budget.take_call(load)
        if num_tasks:
            num_nodes = 4 * num_tasks
            budget.on_call(
                load, ProposerCall(num_tasks, int(num_tasks * kept), num_nodes, own_s, 0.0)
            )
        budget.on_served(size, PLAIN_S)
        found.append(num_tasks)
    return found


def test_who_pays_is_asked_each_time() -> None:
    assert _asked(CallBudget(), 1, 100, kept=2.0, own_s=0.5 * PLAIN_S) == [1] * 100


def test_who_pays_for_all_alone_is_found_by_one() -> None:
    """One sequence's tokens bring a 32nd of what the call costs for them."""
    asked = _asked(CallBudget(), 32, 2000, kept=2.0, own_s=0.5 * PLAIN_S)
    assert next(num for num in asked if num) == 1
    assert asked[-1] == 32
    assert {1, 4, 16, 32} <= set(asked) <= {0, 1, 4, 16, 32}


def test_who_does_not_pay_is_tried_again_by_one() -> None:
    asked = _asked(CallBudget(), 32, 4000, kept=0.0, own_s=0.5 * PLAIN_S)
    assert set(asked) == {0, 1}
    assert TRIAL < sum(asked[1000:]) <= TRIAL * (1 + 3000 * PROBE_SHARE / (0.5 * TRIAL))


def test_fewer_are_tried_where_each_costs_more_than_it_brings() -> None:
    """And as many as before where it is the call that costs too much."""
    asked = _asked(CallBudget(), 4, 4000, kept=0.0, own_s=2.0 * PLAIN_S)
    assert next(num for num in asked if num) == 4 and set(asked[1000:]) == {0, 1}
    asked = _asked(CallBudget(), 4, 4000, kept=1.0, own_s=2.0 * PLAIN_S)
    assert set(asked[1000:]) == {0, 4}


def test_what_does_not_pay_any_more_is_given_up() -> None:
    budget = CallBudget()
    assert _asked(budget, 1, 200, kept=2.0, own_s=0.5 * PLAIN_S)[-1] == 1
    assert sum(_asked(budget, 1, 1000, kept=0.0, own_s=PLAIN_S)) < 40
    # and what pays in a batch of one says nothing of 32
    assert sum(_asked(budget, 32, 1000, kept=0.0, own_s=PLAIN_S)) < 40


def _step(
    controller: SpeculationController,
    size: int,
    own_s: float,
    kept: int,
    num_rows: int | None = None,
) -> int:
    """Returns: for how many one proposer was asked."""
    samples = list(range(size))
    asked: list[int] = []
    if controller.begin_step(size, num_rows or size):
        asked = list(controller.select_tasks(0, controller.select_sequences(samples)))
    drafted = {0: own_s} if asked else {}
    seconds = PLAIN_S + sum(drafted.values())
    controller.on_step((num_rows or size) + len(asked), seconds, drafted, {0: kept * len(asked)})
    return len(asked)


def test_a_plain_step_is_measured_before_guesses_and_among_them() -> None:
    controller = SpeculationController(1)
    asked = [_step(controller, 1, own_s=0.1 * PLAIN_S, kept=3) for _ in range(400)]
    assert asked[:9] == [0] * 8 + [1]
    assert 370 <= sum(asked) < 393


def test_trials_go_round_and_prompts_alone_ask_nobody() -> None:
    controller = SpeculationController(1)
    seen: set[int] = set()
    for _ in range(3000):
        if controller.begin_step(8, 8):
            (one,) = controller.select_tasks(0, controller.select_sequences(range(8)))
            seen.add(one)
            controller.on_step(9, 1.1 * PLAIN_S, {0: 0.1 * PLAIN_S}, {0: 0})
        else:
            controller.on_step(8, PLAIN_S, {}, {})
    assert seen == set(range(8))
    assert not controller.begin_step(0, 100)
    controller.on_step(100, 1.0, {}, {})


@settings(max_examples=40)
@given(st.integers(0, 2**32), st.integers(1, 64), st.floats(0.0, 1.0))
def test_steps_with_prompts_grant_no_more_than_plain_ones(
    number: int, size: int, row_share: float
) -> None:
    """From an engine's very first step on, of which nothing is known; and with prompts in any."""
    rng = random.Random(number)
    row_s = row_share * PLAIN_S / size
    plain_s = 2 * PLAIN_S
    base_s = plain_s - row_s * size
    controller = SpeculationController(1)
    num_plain = served_s = lost_s = 0.0
    share = rng.random()
    own_s = PLAIN_S * rng.uniform(0.1, 4.0)
    for step in range(600):
        num_prompt = 0 if step and rng.random() < share else rng.choice([1, 30, 1000])
        num_asked = 0
        if controller.begin_step(size, size + num_prompt):
            tasks = controller.select_sequences(range(size))
            num_asked = len(controller.select_tasks(0, tasks))
        num_rows = size + num_prompt + num_asked
        cost_s = own_s if num_asked else 0.0
        step_s = base_s + row_s * num_rows + cost_s
        controller.on_step(num_rows, step_s, {0: own_s} if num_asked else {}, {0: 0})
        lost_s += cost_s + row_s * num_asked
        served_s += step_s
        num_plain += num_prompt == 0
        trial_s = TRIAL * (own_s + row_s * size)
        assert lost_s <= PROBE_SHARE * served_s + (GRANT_STEPS * plain_s + trial_s) * (1 + 1e-6)
        assert num_asked == 0 or num_plain >= 8


def test_always_asks_for_all() -> None:
    controller = SpeculationController(2, always=True)
    assert controller.begin_step(5, 5)
    for proposer in range(2):
        assert list(
            controller.select_tasks(proposer, controller.select_sequences(range(5)))
        ) == list(range(5))


class _Account(NamedTuple):
    asked: list[bool]
    slept: list[bool]
    lost_s: float
    served_s: float


def _served(number: int, size: int, own_s: float, *, sleeps: bool) -> _Account:
    """Steps of one class of sizes, a few with prompts, whose guesses are all wrong. As
    speculation.py does, or awake all the time."""
    rng, one = random.Random(number), SpeculationController(1)
    asked: list[bool] = []
    slept: list[bool] = []
    lost_s = served_s = 0.0
    for _ in range(2500):
        step_s = PLAIN_S * rng.uniform(0.9, 1.1)
        num_rows = size + (100 if rng.random() < 0.02 else 0)
        is_asleep = sleeps and one.is_asleep(size)
        is_asking = not is_asleep and one.begin_step(size, num_rows)
        if is_asking:
            assert len(one.select_tasks(0, one.select_sequences(range(size)))) > 0
        cost_s = own_s if is_asking else 0.0
        if is_asleep:
            one.on_slept_step(size, step_s)
        else:
            drafted = {0: own_s} if is_asking else {}
            one.on_step(num_rows + is_asking, step_s + cost_s, drafted, {0: 0})
        asked.append(is_asking)
        slept.append(is_asleep)
        lost_s += cost_s
        served_s += step_s + cost_s
    return _Account(asked, slept, lost_s, served_s)


@settings(max_examples=6, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 64), st.floats(0.5, 3.0))
def test_what_is_slept_through_is_served_all_the_same(number: int, size: int, price: float) -> None:
    """As often asked as who stays awake, within the same law, and only after steps that said what
    one lasts now."""
    own_s = price * PLAIN_S
    ran, awake = (_served(number, size, own_s, sleeps=sleeps) for sleeps in (True, False))
    assert not any(awake.slept)
    assert sum(ran.slept) > len(ran.slept) / 4
    trial_s = TRIAL * own_s
    for one in (ran, awake):
        assert (
            one.lost_s
            <= PROBE_SHARE * one.served_s + (GRANT_STEPS * 1.1 * PLAIN_S + trial_s) * 1.01
        )
    # Prompts among the steps move a trial by a few of them, and so maybe beyond the end.
    assert abs(sum(ran.asked) - sum(awake.asked)) <= TRIAL
    assert sum(ran.asked) > TRIAL
    for place, is_asking in enumerate(ran.asked):
        if is_asking and place > TRIAL + 9:
            own = range(max(0, place - 16), place)
            assert not any(ran.slept[step] for step in own)


@settings(max_examples=10, deadline=None)
@given(
    st.integers(0, 2**32),
    st.integers(1, 64),
    st.integers(1, 2),
    st.floats(0.02, 0.2),
    st.floats(0.0, 0.1),
)
def test_bookkeeping_is_time_lost_as_any_other(
    number: int, size: int, num_proposers: int, beside: float, own: float
) -> None:
    """What a step that is not slept through costs beside its proposers: within the same law, but
    for one time of waking up, which the trial behind it pays for; and no trial pays for it
    twice."""
    rng, one = random.Random(number), SpeculationController(num_proposers)
    beside_s, own_s = beside * PLAIN_S, own * PLAIN_S / num_proposers
    lost_s = served_s = 0.0
    num_asked = num_slept = 0
    for _ in range(4000):
        step_s = PLAIN_S * rng.uniform(0.9, 1.1)
        if one.is_asleep(size):
            one.on_slept_step(size, step_s)
            num_slept += 1
        else:
            drafted: dict[int, float] = {}
            if one.begin_step(size, size):
                tasks = one.select_sequences(range(size))
                asked = [each for each in range(num_proposers) if one.select_tasks(each, tasks)]
                drafted = dict.fromkeys(asked, own_s)
            cost_s = beside_s + sum(drafted.values())
            num_right = dict.fromkeys(drafted, 0)
            one.on_step(size, step_s + cost_s, drafted, num_right, beside_s=beside_s)
            num_asked += bool(drafted)
            lost_s += cost_s
            step_s += cost_s
        served_s += step_s
        once_s = num_proposers * (GRANT_STEPS * 1.1 * PLAIN_S + TRIAL * own_s)
        once_s += (num_proposers * TRIAL + 40) * beside_s
        assert lost_s <= (PROBE_SHARE * served_s + once_s) * 1.01
    assert num_asked > TRIAL and num_slept > 2000
    assert lost_s >= 0.8 * PROBE_SHARE * served_s


def test_what_a_step_lasts_without_guesses_is_without_their_bookkeeping() -> None:
    one = SpeculationController(1)
    for _ in range(8):
        assert not one.begin_step(4, 4)
        one.on_step(4, PLAIN_S + 0.001, {}, {}, beside_s=0.001)
    assert one.begin_step(4, 4)
    assert math.isclose(one.load.plain_s, PLAIN_S)


def test_a_launched_step_of_its_size_ends_a_sleep_and_those_of_others_do_not() -> None:
    """Nothing of what was served is lost, nor counted twice."""
    one = SpeculationController(1)
    for _ in range(8 + TRIAL + 1):
        _step(one, 8, own_s=PLAIN_S, kept=0)
    (budget,) = one._budgets
    barred_s = budget.blocked_s(8)
    assert one.is_asleep(8) and one.is_asleep(5) and not one.is_asleep(4) and not one.is_asleep(0)
    one.on_slept_step(8, 0.25)
    assert budget.blocked_s(8) == barred_s
    _step(one, 1, own_s=PLAIN_S, kept=0)
    one.on_launched_step(1, PLAIN_S, is_first=True, is_last=True)
    assert one.is_asleep(8) and budget.blocked_s(8) == barred_s
    one.on_slept_step(5, 0.125)
    one.on_launched_step(8, PLAIN_S, is_first=True, is_last=True)
    assert not one.is_asleep(8)
    assert math.isclose(budget.blocked_s(8), barred_s - 0.25 - 0.125 - PLAIN_S)


def _course(
    num_steps: int,
    size: Callable[[int], int],
    kept: Callable[[int], int],
    can_ask: Callable[[int], bool] = lambda _: True,
) -> tuple[list[int], float, float]:
    """Steps whose bookkeeping is 2 % of one, with a cheap proposer. Returns: those in which it was
    asked; seconds that all of it cost; seconds served."""
    beside_s, own_s = 0.02 * PLAIN_S, 0.1 * PLAIN_S
    one, asked, lost_s, served_s = SpeculationController(1), list[int](), 0.0, 0.0
    for step in range(num_steps):
        num = size(step)
        seconds = PLAIN_S
        if one.is_asleep(num):
            one.on_slept_step(num, seconds)
        else:
            drafted, num_right, num_rows = dict[int, float](), 0, num
            seconds += beside_s
            if one.begin_step(num, num, 50 * num, can_draft=can_ask(step)):
                tasks = one.select_tasks(0, one.select_sequences(range(num)))
                asked.append(step)
                drafted, num_right = {0: own_s}, kept(step) * len(tasks)
                num_rows += len(tasks)
                seconds += own_s
            one.on_step(num_rows, seconds, drafted, {0: num_right}, beside_s=beside_s)
        lost_s += seconds - PLAIN_S
        served_s += seconds
    return asked, lost_s, served_s


def test_where_batches_straddle_a_class_each_sleeps_by_itself_and_who_pays_is_found() -> None:
    asked, lost_s, served_s = _course(12000, lambda step: 4 + step % 2, lambda _: 0)
    assert len(asked) > 4 * TRIAL
    assert lost_s <= PROBE_SHARE * served_s + 2 * (GRANT_STEPS + 2.0) * PLAIN_S
    asked, *_ = _course(12000, lambda step: 4 + step % 2, lambda step: int(step >= 8000))
    assert (
        next(step for step in asked if step >= 8000) < 8500
        and sum(step >= 10000 for step in asked) > 1000
    )


def test_what_was_spent_while_nobody_could_be_asked_bars_nobody() -> None:
    """A long time of requests that take no guesses, and then of some that do, which pay."""
    rng = random.Random(3)
    asked, *_ = _course(
        30000,
        lambda _: 1,
        lambda _: 2 * (rng.random() < 0.4),
        lambda step: step < 100 or step >= 10000,
    )
    assert sum(step >= 10000 for step in asked) > 10000


def test_who_is_always_asked_never_sleeps() -> None:
    one = SpeculationController(1, always=True)
    for _ in range(100):
        assert _step(one, 4, own_s=9 * PLAIN_S, kept=0) == 4
        assert not one.is_asleep(4)


def _bundled(controller: SpeculationController, size: int, step_s: float, *, kept: int = 3) -> int:
    """A step as the bundled pair's on a CPU: the proposer's call for all costs a little more than
    for one, each row of four has its price. Returns: for how many it was asked."""
    num_asked = 0
    if controller.begin_step(size, size, 30 * size):
        num_asked = len(controller.select_tasks(0, controller.select_sequences(range(size))))
    own_s = 0.009 + 0.0008 * num_asked if num_asked else 0.0
    seconds = step_s + own_s + 4 * num_asked * 0.0004
    num_right = {0: kept * num_asked}
    controller.on_step(size + 4 * num_asked, seconds, {0: own_s} if num_asked else {}, num_right)
    return num_asked


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_small_batch_is_tried_at_once_and_as_a_whole(size: int) -> None:
    """Of 2 and of 4 one alone would never pay the call."""
    one = SpeculationController(1)
    asked = [_bundled(one, size, 0.0075) for _ in range(100)]
    assert asked[:9] == [0] * 8 + [size]
    assert asked.count(size) + asked.count(0) == 100 and asked.count(0) < 24


@pytest.mark.parametrize("size", [5, 8, 32, 64])
def test_a_large_batch_is_tried_by_one_and_not_in_a_short_session(size: int) -> None:
    one = SpeculationController(1)
    asked = [_bundled(one, size, 0.008, kept=1) for _ in range(1000)]
    assert not any(asked[:200])
    assert 2 <= sum(asked) <= 6 and set(asked) == {0, 1}


def test_where_not_even_the_best_outcome_would_pay_a_trial_ends_with_its_second_call() -> None:
    load = StepEstimate(4, 4, PLAIN_S, 0.0)
    for own_s, num_calls in ((4.0 * PLAIN_S, 2), (3.0 * PLAIN_S, 3)):  # four nodes: 3.6 steps
        budget = CallBudget()
        asked = 0
        while budget.take_call(load):
            budget.on_call(load, ProposerCall(4, 0, 16, own_s, 0.0))
            asked += 1
        assert asked == num_calls
    budget, asked = CallBudget(), 0
    while budget.take_call(load):  # catching up: nothing was guessed so far
        budget.on_call(load, ProposerCall(4, 0, 0, 4.0 * PLAIN_S, 0.0))
        asked += 1
    assert asked == TRIAL


@pytest.mark.parametrize("size", [8, 32, 64])
def test_noise_of_a_step_ends_no_trial(size: int) -> None:
    """A tenth of a step, by which one with the guesses of one sequence seems dearer, is many times
    what its four tokens are budget, were they those of all."""
    load, budget, asked = StepEstimate(size, size, PLAIN_S, 0.0), CallBudget(), 0
    budget.open(load)
    budget.on_served(size, 400 * PLAIN_S)
    for _ in range(TRIAL):
        assert budget.take_call(load) == 1
        assert budget.num_trials(size) == 1
        rows_s = (0.1 + 0.5 / size) * PLAIN_S  # of them, four rows' own price
        budget.on_call(load, ProposerCall(1, 3, 4, 1e-6, rows_s))
    budget = CallBudget()
    budget.open(load)
    budget.on_served(size, 400 * PLAIN_S)
    while budget.take_call(load):  # whole steps are no noise
        budget.on_call(load, ProposerCall(1, 3, 4, 1e-6, 4 * PLAIN_S))
        asked += 1
    assert asked == 2


@pytest.mark.parametrize(("is_example", "num_calls"), [(False, 3), (True, 2)])
def test_a_step_that_was_the_first_of_its_kind_says_nothing_of_later_ones(
    is_example: bool, num_calls: int
) -> None:
    """Whose rows cost ten steps, as something was compiled; the next ones a tenth of one."""
    load, budget, asked = StepEstimate(4, 4, PLAIN_S, 0.0), CallBudget(), 0
    while budget.take_call(load):
        rows_s = 0.1 * PLAIN_S if asked else 10 * PLAIN_S
        is_own = is_example or asked > 0
        budget.on_call(load, ProposerCall(4, 0, 16, 0.5 * PLAIN_S, rows_s, is_example=is_own))
        asked += 1
    assert asked == num_calls


def test_a_first_of_its_kind_among_others_has_no_say_in_how_many_are_asked() -> None:
    load, budget = StepEstimate(4, 4, PLAIN_S, 0.0), CallBudget()
    for place in range(TRIAL):
        assert budget.take_call(load) == 4
        rows_s = 10 * PLAIN_S if place == 1 else 0.1 * PLAIN_S
        budget.on_call(load, ProposerCall(4, 12, 16, 0.5 * PLAIN_S, rows_s, is_example=place != 1))
    assert budget.take_call(load) == 4


def test_what_was_lost_once_is_paid_by_calls_that_gain() -> None:
    """And not by 600 steps without guesses: here the first call computes all prompts."""
    load, budget = StepEstimate(2, 2, PLAIN_S, 0.0), CallBudget()
    for step in range(30):
        assert budget.take_call(load) == 2
        own_s = 8 * PLAIN_S if step == 0 else 1.5 * PLAIN_S
        budget.on_call(load, ProposerCall(2, 6, 8, own_s, 0.0))
        budget.on_served(2, PLAIN_S)
    other = CallBudget()
    asked = 0
    while other.take_call(load):  # the same loss, and then none that gains
        other.on_call(
            load, ProposerCall(2, 6 * (asked == 0), 8, 8 * PLAIN_S if not asked else 1e-9, 0.0)
        )
        asked += 1
    assert asked == TRIAL


@pytest.mark.parametrize(("each_s", "goes_on"), [(1.2, True), (3.2, False)])
def test_calls_that_gain_together_end_no_trial_where_the_last_one_brought_nothing(
    each_s: float, *, goes_on: bool
) -> None:
    """Of two sequences, each call costs `each_s` plain steps and every second one is right: it
    brings 2.7 of them."""
    load, budget = StepEstimate(2, 2, PLAIN_S, 0.0), CallBudget()
    budget.take_call(load)
    budget.on_call(load, ProposerCall(2, 6, 8, 8 * PLAIN_S, 0.0))  # it computes all prompts
    asked = 1
    while asked < 60 and budget.take_call(load):
        asked += 1
        budget.on_call(load, ProposerCall(2, 6 * (asked % 2 == 0), 8, each_s * PLAIN_S, 0.0))
    assert asked == (60 if goes_on else TRIAL)


def test_what_no_call_tells_counts_against_those_that_gain_together() -> None:
    """Two calls gain 0.2 plain steps, and what is charged beside each two of them is 0.3."""
    load, budget = StepEstimate(2, 2, PLAIN_S, 0.0), CallBudget()
    budget.take_call(load)
    budget.on_call(load, ProposerCall(2, 6, 8, 8 * PLAIN_S, 0.0))
    asked = 1
    while asked < 60 and budget.take_call(load):
        asked += 1
        if asked % 2:
            budget.charge(2, 0.3 * PLAIN_S)
        budget.on_call(load, ProposerCall(2, 6 * (asked % 2 == 0), 8, 1.25 * PLAIN_S, 0.0))
    assert asked == TRIAL


@pytest.mark.parametrize(("gain", "beside", "every"), [(0.2, 0.3, 1), (0.01, 0.3, 8)])
def test_calls_that_gain_go_on_in_no_debt_that_grows(
    gain: float, beside: float, every: int
) -> None:
    """Each of them gains, and what is charged beside is more than all do."""
    load, budget = StepEstimate(2, 2, PLAIN_S, 0.0), CallBudget()
    budget.take_call(load)
    budget.on_call(load, ProposerCall(2, 6, 8, 8 * PLAIN_S, 0.0))
    asked = 1
    brings_s = 6 * load.token_s
    while asked < 60 and budget.take_call(load):
        asked += 1
        budget.on_call(load, ProposerCall(2, 6, 8, brings_s - gain * PLAIN_S, 0.0))
        if asked % every == 0:
            budget.charge(2, beside * PLAIN_S)
    assert asked <= TRIAL + 2 * every


def test_a_trial_owes_nothing_to_the_one_before() -> None:
    """What earlier ones gained does not let it go on."""
    load, budget = StepEstimate(2, 2, PLAIN_S, 0.0), CallBudget()
    for first_s, num_kept in ((5 * PLAIN_S, 6), (30 * PLAIN_S, 0)):
        assert budget.take_call(load)
        budget.on_call(load, ProposerCall(2, 0, 8, first_s, 0.0))
        asked = 1
        while asked < TRIAL + (num_kept == 0) and budget.take_call(load):
            asked += 1
            budget.on_call(load, ProposerCall(2, num_kept, 8, 0.5 * PLAIN_S, 0.0))
        assert asked == TRIAL
    assert budget.num_trials(2) == 2


def test_each_trial_has_its_own_debt_to_pay() -> None:
    """The second one has a deeper one, and goes on as the first did: two calls of three gain."""
    load, budget = StepEstimate(2, 2, PLAIN_S, 0.0), CallBudget()
    for first_s in (5 * PLAIN_S, 30 * PLAIN_S):
        assert budget.take_call(load)
        budget.on_call(load, ProposerCall(2, 0, 8, first_s, 0.0))
        trial, asked = budget.num_trials(2), 1
        while budget.take_call(load) and budget.num_trials(2) == trial:
            asked += 1
            budget.on_call(load, ProposerCall(2, 6 if asked % 3 != 1 else 0, 8, 1.2 * PLAIN_S, 0.0))
        budget.return_call(load)
    assert asked > 30


@pytest.mark.parametrize("own_s", [0.02 * PLAIN_S, 3.0 * PLAIN_S])
def test_who_is_in_debt_is_asked_again_some_time_later_and_slept_through(own_s: float) -> None:
    """Whether a call costs much, or next to nothing: what is measured in steps that are not slept
    through has its price, too."""
    one = SpeculationController(1)
    num_slept = num_asked = 0
    for step in range(2000):
        if one.is_asleep(1):
            one.on_slept_step(1, PLAIN_S)
            num_slept += step >= 200
            continue
        is_asking = one.begin_step(1, 1)
        if is_asking:
            one.select_tasks(0, one.select_sequences(range(1)))
        num_asked += is_asking
        own = {0: own_s} if is_asking else {}
        one.on_step(1, PLAIN_S + sum(own.values()), own, {0: 0})
    assert num_slept > 0.5 * 1800
    assert (
        num_asked * own_s
        <= PROBE_SHARE * 2000 * 2 * PLAIN_S + GRANT_STEPS * PLAIN_S + TRIAL * own_s
    )
    assert num_asked * own_s >= 0.5 * PROBE_SHARE * 2000 * PLAIN_S


def test_a_step_for_which_nobody_can_guess_costs_no_call_of_a_trial() -> None:
    """The last step of a request, say, while a first call's loss is being made good."""
    one = SpeculationController(1)
    for _ in range(8):
        assert not one.begin_step(1, 1, 30)
        one.on_step(1, PLAIN_S, {}, {})
    for step in range(12):
        if step in (2, 3, 5):
            assert not one.begin_step(1, 1, 30, can_draft=False)
            one.on_step(1, PLAIN_S, {}, {})
        assert one.begin_step(1, 1, 30)
        assert one.select_sequences([0]) == [0]
        one.select_tasks(0, [0])
        own_s = 9 * PLAIN_S if step == 0 else 1.5 * PLAIN_S
        one.on_step(4, PLAIN_S + own_s, {0: own_s}, {0: 3})


def test_of_long_sequences_a_first_trial_asks_for_one() -> None:
    for num_tokens, num_asked in ((30, 4), (200, 2), (5000, 1)):
        one = SpeculationController(1)
        for _ in range(8):
            assert not one.begin_step(4, 4, 4 * num_tokens)
            one.on_step(4, PLAIN_S, {}, {})
        assert one.begin_step(4, 4, 4 * num_tokens)
        assert len(one.select_sequences(range(4))) == num_asked


def test_rows_have_a_price_before_one_was_measured_and_the_first_measure_is_none() -> None:
    one = SpeculationController(1)
    for _ in range(8):
        one.begin_step(2, 2)
        one.on_step(2, PLAIN_S, {}, {})
    for step_s in (9 * PLAIN_S, 1.4 * PLAIN_S):
        assert one.begin_step(2, 2)
        assert math.isclose(one.load.row_s, 0.05 * PLAIN_S)
        assert math.isclose(one.load.plain_s, PLAIN_S)
        one.select_tasks(0, one.select_sequences(range(2)))
        one.on_step(10, step_s + 1e-5, {0: 1e-5}, {0: 6})
    one.begin_step(2, 2)
    assert 0.03 * PLAIN_S < one.load.row_s < 0.051 * PLAIN_S


def test_a_step_is_the_median_of_the_newest_ones() -> None:
    """Neither the very first ones, nor the shortest; and not of another time."""
    times = PlainStepTimes()
    for seconds in (0.5, 0.3, 0.010, 0.011, 0.007, 0.010, 0.012):
        times.observe(2, seconds)
        assert times.seconds(2, 0.0, 8) is None
    times.observe(2, 0.011)
    assert times.seconds(2, 0.0, 8) == 0.011
    for seconds in (0.020, 0.9, 0.021, 0.022, 0.021, 0.023):
        times.on_drafted(2)
        times.observe(2, seconds)
    assert times.seconds(2, 0.0, 8) == 0.021


def test_a_step_that_comes_to_nothing_costs_a_trial_no_call() -> None:
    load, budget = StepEstimate(4, 4, PLAIN_S, 0.0), CallBudget()
    for _ in range(3 * TRIAL):
        assert budget.take_call(load) > 0
        budget.return_call(load)
    assert budget.num_trials(4) <= 1


def _engine(
    proposer: NgramProposer, clock: Callable[[], float], model: FakeModel | None = None
) -> LLMEngine:
    model = model or FakeModel(context_window=WINDOW, block_size=SIZE)
    return LLMEngine(EngineConfig(num_blocks=40), model, proposers=[proposer], clock=clock)


def test_all_that_is_done_for_guesses_is_charged_but_in_steps_that_are_slept_through(
    make_request: Callable[..., Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the clock of who guesses: looking whether to rest takes 1, beginning 2, learning 4, a call
    of the proposer 8; what is learnt of a step is learnt in the next one's time."""
    now_s = 0.0
    learnt: list[tuple[dict[int, float], float]] = []

    def taking(name: str, seconds: float) -> None:
        real = getattr(SpeculationController, name)

        def run(self: SpeculationController, *args: Any, **kwargs: Any) -> Any:
            nonlocal now_s
            now_s += seconds
            if name == "on_step":
                learnt.append((dict(args[2]), kwargs["beside_s"]))
            return real(self, *args, **kwargs)

        monkeypatch.setattr(SpeculationController, name, run)

    for name, seconds in (("is_idle", 1.0), ("begin_step", 2.0), ("on_step", 4.0)):
        taking(name, seconds)

    class Knowing(NgramProposer):
        def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
            nonlocal now_s
            now_s += 8.0
            return [Draft(EMPTY, {}) for _ in tasks]

    engine = _engine(Knowing(NgramConfig()), lambda: now_s)
    engine.submit(make_request("r", [1, 2, 3], max_tokens=30))
    while engine.has_work():
        engine.step()
    assert learnt[:2] == [({}, 3.0), ({}, 7.0)]
    asked = [beside_s for own_s, beside_s in learnt if own_s]
    assert all(own_s == {0: 10.0} for own_s, _ in learnt if own_s)
    assert asked and set(asked) == {5.0}
    assert len(learnt) < 29, "steps were slept through"
    speculation = engine._speculation
    assert speculation is not None
    speculation._beside_s = 9.0  # looking whether to rest, in the wait for a launched step
    speculation.on_launched_step(1, (), is_first=False, is_last=False)
    assert speculation._beside_s == 0.0


def test_what_a_request_before_left_to_be_learnt_is_not_of_the_next_ones_time(
    make_request: Callable[..., Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the two the engine was idle."""
    now_s = 0.0
    found: list[tuple[float, float]] = []
    real = SpeculationController.on_step

    def on_step(
        self: SpeculationController, rows: int, seconds: float, *args: Any, beside_s: float
    ) -> None:
        nonlocal now_s
        now_s += 4.0
        found.append((seconds, beside_s))
        real(self, rows, seconds, *args, beside_s=beside_s)

    monkeypatch.setattr(SpeculationController, "on_step", on_step)
    engine = _engine(NgramProposer(NgramConfig()), lambda: now_s)
    for name in "ab":
        engine.submit(make_request(name, [1], max_tokens=2))
        while engine.has_work():
            engine.step()
        now_s += 1000.0
    assert len(found) > 2 and all(seconds >= beside_s for seconds, beside_s in found)


def test_what_was_asked_for_a_step_that_is_taken_back_is_charged_to_the_next(
    make_request: Callable[..., Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = charged_s = drafted_s = 0.0
    num_failed = 0
    real = SpeculationController.on_step

    def on_step(
        self: SpeculationController,
        rows: int,
        seconds: float,
        own_s: Any,
        right: Any,
        *,
        beside_s: float,
    ) -> None:
        nonlocal charged_s
        charged_s += sum(own_s.values()) + beside_s
        real(self, rows, seconds, own_s, right, beside_s=beside_s)

    class Slow(NgramProposer):
        def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
            nonlocal now_s, drafted_s
            now_s += 8.0
            drafted_s += 8.0
            return [Draft(EMPTY, {}) for _ in tasks]

    class Failing(FakeModel):
        def forward(self, batch: Batch) -> torch.Tensor:
            nonlocal num_failed
            if drafted_s and not num_failed:
                num_failed += 1
                raise RuntimeError("once")
            return super().forward(batch)

    monkeypatch.setattr(SpeculationController, "on_step", on_step)
    model = Failing(context_window=WINDOW, block_size=SIZE)
    engine = _engine(Slow(NgramConfig()), lambda: now_s, model)
    engine.submit(make_request("r", [1, 2, 3], max_tokens=30))
    while engine.has_work():
        with contextlib.suppress(RuntimeError):
            engine.step()
    assert num_failed == 1
    assert charged_s == drafted_s > 8.0


LAUNCHED_S = 0.01


@dataclass(frozen=True)
class _World:
    """What steps cost, and what guesses bring."""

    size: int
    overhead_s: float
    """A step that is not launched lasts so much longer."""
    row_s: float
    kept: float
    """Tokens for each sequence that is asked for."""
    own_s: float = 0.0005
    num_nodes: int = 8
    """Of each sequence."""
    is_at_once: bool = False
    """A launch returns when it is computed."""

    def guessed_s(self, num_asked: int) -> float:
        """A step with guesses."""
        rows_s = self.row_s * num_asked * self.num_nodes
        return LAUNCHED_S + self.overhead_s + rows_s + (self.own_s if num_asked else 0.0)


class _Ran(NamedTuple):
    seconds: float
    num_tokens: float
    asked: list[int]
    """Of each step; 0: nobody."""
    launched: list[bool]


def _run(
    world: _World,
    num_steps: int,
    controller: SpeculationController | None = None,
    *,
    launches: bool = True,
) -> _Ran:
    """As engine/runner.py does."""
    size, one = world.size, controller or SpeculationController(1)
    seconds = num_tokens = 0.0
    asked: list[int] = []
    launched: list[bool] = []
    is_live = False
    for _ in range(num_steps):
        num_asked = 0
        is_first = not is_live
        if launches and (is_live or one.is_idle(size)):
            step_s = LAUNCHED_S + (world.overhead_s / 2 if is_first else 0.0)
            is_live = one.is_idle(size)
            if world.is_at_once:  # this one, unless it was launched before, and the next one
                step_s = LAUNCHED_S * (is_first + is_live)
            one.on_launched_step(size, step_s, is_first=is_first, is_last=not is_live)
            launched.append(True)
        else:
            launched.append(False)
            drafted: dict[int, float] = {}
            if one.begin_step(size, size):
                num_asked = len(one.select_tasks(0, one.select_sequences(range(size))))
                drafted = {0: world.own_s}
            step_s = world.guessed_s(num_asked)
            num_rows = size + num_asked * world.num_nodes
            one.on_step(num_rows, step_s, drafted, {0: int(num_asked * world.kept)})
        seconds += step_s
        num_tokens += size + int(num_asked * world.kept)
        asked.append(num_asked)
    return _Ran(seconds, num_tokens, asked, launched)


def _speed(world: _World, ran: _Ran) -> float:
    """Against steps that are all launched."""
    return ran.num_tokens / world.size * LAUNCHED_S / ran.seconds


def test_what_pays_against_plain_steps_that_are_not_launched_is_given_up() -> None:
    """Two tokens a step for 2.1 times the seconds: a step that is not launched lasts 26 % longer,
    and beside such ones it is faster."""
    world = _World(size=32, overhead_s=0.26 * LAUNCHED_S, row_s=0.0000315, kept=1.0)
    never = _run(world, 1000, launches=False)
    assert set(never.asked[-100:]) <= {0, 32} and sum(never.asked[-100:]) > 2000
    assert _speed(world, never) < 0.97
    ran = _run(world, 4000)
    assert _speed(world, ran) > 0.98
    late = ran.asked[1000:]
    assert 0 < sum(num > 0 for num in late) < 0.02 * len(late)
    assert sum(ran.launched[1000:]) > 0.97 * len(late)


@pytest.mark.parametrize("size", [1, 8, 32])
@pytest.mark.parametrize("kept", [0.0, 0.5])
def test_finding_out_costs_its_share_and_the_pause_is_in_it(size: int, kept: float) -> None:
    world = _World(size=size, overhead_s=0.5 * LAUNCHED_S, row_s=0.0004, kept=kept)
    ran = _run(world, 6000)
    lost_s = ran.seconds - ran.num_tokens / size * LAUNCHED_S
    trial_s = TRIAL * (world.guessed_s(size) - LAUNCHED_S) + world.overhead_s
    once_s = GRANT_STEPS * LAUNCHED_S + 5 * world.overhead_s
    assert lost_s <= PROBE_SHARE * ran.seconds + once_s + trial_s
    assert any(ran.asked[3000:]), "it is tried again"


@pytest.mark.parametrize("size", [5, 32, 64])
def test_every_step_of_a_larger_batch_is_launched_until_its_first_trial(size: int) -> None:
    """What stopping costs is measured when somebody can be asked, and not 200 steps before."""
    ran = _run(_World(size=size, overhead_s=0.3 * LAUNCHED_S, row_s=0.0001, kept=1.0), 400)
    assert 190 < ran.launched.index(False) < 220
    first = next(step for step, num in enumerate(ran.asked) if num)
    assert ran.launched.index(False) + 3 == first


def test_what_pays_is_asked_but_for_a_few_launched_steps() -> None:
    world = _World(size=1, overhead_s=0.2 * LAUNCHED_S, row_s=0.0001, kept=2.0)
    ran = _run(world, 1000)
    assert ran.launched[:9] == [True] * 9
    assert 0.94 < sum(num > 0 for num in ran.asked) / 1000 < 0.985
    assert 0 < sum(ran.launched[100:]) < 30
    assert _speed(world, ran) > 2.0


def test_the_pause_has_no_say_in_what_more_sequences_would_cost() -> None:
    """A pause as long as what 32 sequences' tokens are budget a quarter of: one sequence never pays
    it, all of them do."""
    world = _World(size=32, overhead_s=0.3 * LAUNCHED_S, row_s=0.00001, kept=2.0)
    ran = _run(world, 3000)
    assert next(num for num in ran.asked if num) == 1
    assert ran.asked[-1] == 32 or ran.launched[-1]
    assert _speed(world, ran) > 1.3


def test_launches_that_return_when_they_are_computed_are_not_taken_for_fast_ones() -> None:
    world = _World(size=1, overhead_s=0.0, row_s=0.0001, kept=1.0, is_at_once=True)
    ran = _run(world, 3000)
    assert 0.94 < sum(num > 0 for num in ran.asked) / 3000 < 0.985
    assert _speed(world, ran) > 1.5


def test_proposers_that_see_every_step_are_left_no_gap_where_they_pay() -> None:
    world = _World(size=1, overhead_s=0.2 * LAUNCHED_S, row_s=0.0001, kept=2.0)
    ran = _run(world, 1000, SpeculationController(1, measures_again=False))
    assert all(num > 0 for num in ran.asked[20:])


def test_it_rests_when_nobody_would_be_asked(seed: int) -> None:
    """Whatever was before, and looking changes nothing."""
    rng = random.Random(seed)
    one = SpeculationController(2)
    num_asked = num_rested = 0
    kept = [0.0, 0.0]
    for _ in range(3000):
        if rng.random() < 0.02:
            kept = [rng.choice([0.0, 1.0, 4.0]) for _ in kept]
        size = rng.choice([1, 1, 1, 2, 9])
        rests = one.is_idle(size)
        assert one.is_idle(size) == rests
        if rests and rng.random() < 0.7:
            one.on_launched_step(
                size, LAUNCHED_S, is_first=rng.random() < 0.1, is_last=rng.random() < 0.1
            )
            num_rested += 1
            continue
        is_asking = one.begin_step(size, size)
        assert not (rests and is_asking)
        asked = [
            len(one.select_tasks(index, one.select_sequences(range(size))))
            for index in (0, 1)
            if is_asking
        ]
        own_s = {index: 0.001 for index, num in enumerate(asked) if num}
        num_right = {index: int(asked[index] * kept[index]) for index in own_s}
        assert is_asking == bool(own_s)
        num_asked += is_asking
        one.on_step(size + 4 * sum(asked), 1.5 * LAUNCHED_S, own_s, num_right)
    assert num_asked > 0 and num_rested > 0


def _random_tree(rng: random.Random) -> TokenTree:
    chains = []
    for _ in range(rng.randint(1, 3)):
        chances = sorted((rng.random() for _ in range(rng.randint(1, 3))), reverse=True)
        chains.append(chain([rng.randrange(3) for _ in chances], chances))
    return merge(chains)


def _event(name: str, token_ids: tuple[int, ...]) -> RequestOutput:
    return RequestOutput(name, token_ids, None, (), 0, None, None, None)


def test_what_is_heard_is_learnt_when_there_is_time(seed: int) -> None:
    """Chances are by all steps but the last one, until it is studied; a step that was not heard of
    (it failed) teaches nothing."""
    rng = random.Random(seed)
    one, expected = SpeculationController(2), [AcceptanceRates(), AcceptanceRates()]
    waiting: list[tuple[int, TokenTree, tuple[int, ...]]] = []

    def study() -> None:
        for proposer, tree, token_ids in waiting:
            expected[proposer].observe_tree(tree, token_ids)
        waiting.clear()

    for _ in range(60):
        one.begin_drafts()
        own: list[tuple[str, int, TokenTree]] = []
        for name in rng.sample(["a", "b", "c"], rng.randrange(4)):
            for proposer in range(rng.randint(1, 2)):
                own.append((name, proposer, _random_tree(rng)))
                one.on_proposed((name, 0), proposer, own[-1][2])
        probe = _random_tree(rng)
        for proposer, rates in enumerate(expected):
            assert one.calibrate(proposer, probe) == rates.calibrate(probe)
        if rng.random() < 0.7:
            one.update_rates()
            study()
        one.prepare()
        if rng.random() < 0.2:
            continue
        num_kept = {(name, 0): rng.randrange(3) for name, _, _ in own if rng.random() < 0.9}
        told = {
            name: tuple(rng.randrange(3) for _ in range(1 + num_kept.get((name, 0), 0)))
            for name in ("a", "b", "d")
        }
        one.on_outputs([_event(name, token_ids) for name, token_ids in told.items()], num_kept)
        study()  # of the step before, at the latest now
        num_right = {0: 0, 1: 0}
        for name, proposer, tree in own:
            token_ids = told.get(name, ())
            kept = num_kept.get((name, 0), 0)
            paths = {
                tuple(tree.token_ids[at] for at in tree.path(node)) for node in range(len(tree))
            }
            num_right[proposer] += sum(token_ids[: end + 1] in paths for end in range(kept))
            waiting.append((proposer, tree, token_ids))
        assert one.num_accepted([0, 1]) == num_right


class _Proposed(NamedTuple):
    step: int
    tree: TokenTree


class _Noting(KnowsTheAnswers):
    """Three tokens of the answer, sometimes wrong."""

    def __init__(self, rng: random.Random, request: Request) -> None:
        super().__init__(rng, undisturbed([request]), VOCAB)
        self.step = 0
        self.proposed: list[_Proposed] = []
        self._own_rng = rng

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        drafts = super().propose(tasks)
        self.proposed += [_Proposed(self.step, draft.tree) for draft in drafts]
        return drafts

    def _tree(self, task: DraftTask) -> TokenTree:
        name, index = task.key
        done = len(task.token_ids) - task.num_prompt_tokens
        rest = list(self._expected[name][index][0][done : done + 3])
        if self._own_rng.random() < 0.3:
            rest[-1] = (rest[-1] + 1) % VOCAB
        return chain(rest, [0.9**place for place in range(1, len(rest) + 1)])


class _Failing(FakeModel):
    is_failing = False

    def forward(self, batch: Batch) -> torch.Tensor:
        if self.is_failing:
            raise MemoryError("no room")
        return super().forward(batch)


@pytest.mark.parametrize("ends", ["length", "abort"])
def test_an_engine_learns_of_each_step_once(
    ends: str,
    seed: int,
    make_request: Callable[..., Request],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps fail, sequences lose their blocks, answers end by their length or are aborted: of all
    steps that were told, in their order, the last one maybe later."""
    rng = random.Random(seed)
    learnt: list[tuple[TokenTree, tuple[int, ...]]] = []
    monkeypatch.setattr(
        AcceptanceRates,
        "observe_tree",
        lambda _, tree, token_ids: learnt.append((tree, tuple(token_ids))),
    )
    request = make_request("r", [1, 2, 3], max_tokens=40)
    proposer = _Noting(rng, request)
    model = _Failing(context_window=WINDOW, block_size=SIZE)
    config = EngineConfig(
        num_blocks=60, preemption="recompute", speculation=SpeculationConfig(always=True)
    )
    engine = LLMEngine(config, model, proposers=[proposer])
    told: list[tuple[TokenTree, tuple[int, ...]]] = []
    token_ids: list[int] = []
    for number in range(2):
        engine.submit(dataclasses.replace(request, request_id="r"))
        while engine.has_work():
            proposer.step += 1
            model.is_failing = rng.random() < 0.2
            try:
                events = engine.step().events
            except MemoryError:
                continue
            own = [one.tree for one in proposer.proposed if one.step == proposer.step]
            for event in events:
                token_ids += event.token_ids
                if own:
                    told.append((own[0], event.token_ids))
            assert learnt in (told, told[:-1])
            engine.check_integrity()
            if engine.has_work() and rng.random() < 0.1:
                engine.preempt("r")
            if ends == "abort" and len(token_ids) > 20:
                engine.abort("r")
        if ends == "length":
            assert tuple(token_ids) == proposer._expected["r"][0][0], number
        token_ids.clear()
    assert learnt in (told, told[:-1]) and len(learnt) > 5
    assert any(len(own) > 1 for _, own in learnt), "nothing was kept"


class _Mistaken(_Noting):
    """Two tokens, of which the right one is said to be the less likely."""

    def _tree(self, task: DraftTask) -> TokenTree:
        name, index = task.key
        right = self._expected[name][index][0][len(task.token_ids) - task.num_prompt_tokens]
        return merge([chain([(right + 1) % VOCAB], [0.6]), chain([right], [0.3])])


def test_where_there_is_room_for_one_of_two_it_is_the_one_that_was_right_before(
    seed: int, make_request: Callable[..., Request]
) -> None:
    """Also where all that there is room for is computed, whatever it costs."""
    request = make_request("r", [1, 2, 3], max_tokens=40, ignore_eos=True)
    proposer = _Mistaken(random.Random(seed), request)
    config = EngineConfig(
        num_blocks=60,
        max_num_running=1,
        max_num_tokens_per_step=2,
        speculation=SpeculationConfig(always=True),
    )
    engine = LLMEngine(
        config, FakeModel(context_window=WINDOW, block_size=SIZE), proposers=[proposer]
    )
    engine.submit(request)
    found, num_steps = steps_beyond(engine, 20)
    assert found == proposer._expected["r"][0][0]
    assert num_steps < 15, "of 20 tokens, two a step"
