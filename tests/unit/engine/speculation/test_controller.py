"""SpeculationController: how much is drafted and for whom. Never more nodes than the budget, never
one without its parent, the best there is by its own reckoning, and none where it does not pay. Time
is lost by finding out up to a share of what was served, and no more; a proposer that pays is
called, for few sequences at once, and one that would pay for all of many is found by one. What
launched steps are worth is what drafts are compared with.
Every step is learnt from once, in order, and none too soon, whatever comes between."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
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
    num_nodes = sum(map(len, trees))
    return (load.num_sequences + gain) / (load.step_s + load.row_s * num_nodes)


@given(
    st.randoms(use_true_random=False), st.integers(1, 2), st.integers(0, 12), st.floats(0.0, 1.0)
)
def test_the_best_choice_within_the_budget(
    rng: random.Random, num_trees: int, budget: int, row_s: float
) -> None:
    trees = [_tree(rng, 2) for _ in range(num_trees)]
    step_s = rng.uniform(0.1, 2.0) + row_s * num_trees
    load = StepEstimate(num_trees, num_trees + rng.randrange(5), step_s, step_s, row_s)
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
    assert (
        len(choose_nodes([tree], StepEstimate(1, 1, plain_s=1.0, step_s=1.0, row_s=1.0), 3)[0]) == 0
    )
    assert (
        len(choose_nodes([tree], StepEstimate(1, 1, plain_s=1.0, step_s=1.0, row_s=0.0), 3)[0]) == 3
    )


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


def test_a_step_that_is_held_up_is_not_taken_for_the_price_of_its_rows() -> None:
    """Not even the second one of its size; drafts would be left out, and never measured again."""
    cost = StepCost()
    for num_rows in (16, 16, 16, 64):
        cost.observe(num_rows, 0.006 + 0.0004 * num_rows)
    cost.observe(64, 0.1)
    assert cost.line(16)[1] < 0.0005


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


def _event(name: str, token_ids: tuple[int, ...]) -> RequestOutput:
    return RequestOutput(name, token_ids, None, (), 0, None, None, None)


PLAIN_S = 0.01


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
@given(st.integers(0, 2**32), st.floats(0.0, 0.1), st.integers(1, 64))
def test_time_lost_is_a_share_of_the_time_served(number: int, share: float, size: int) -> None:
    """Whatever calls cost and bring: heavy tails, gains and losses that come in runs."""
    rng = random.Random(number)
    grant_s = rng.choice([0.0, GRANT_STEPS * PLAIN_S])
    budget = CallBudget(share, grant_s, rng.choice([1, min(FEW, size)]))
    lost_s = served_s = 0.0
    trial = _TrialLoss()
    price, luck = 1.0, 1.0
    for _ in range(300):
        if rng.random() < 0.05:
            price, luck = 10 ** rng.uniform(-3, 2), rng.uniform(0, 4)
        plain_s = PLAIN_S * rng.lognormvariate(0, 0.5)
        load = StepEstimate(size, size, plain_s, plain_s, 0.0)
        width = budget.take_call()
        if width:
            num_tasks = min(width, size)
            num_accepted = int(num_tasks * rng.uniform(0, luck))
            cost_s = 0.001 * price * rng.lognormvariate(0, 1)
            loss_s = cost_s - num_accepted * load.token_s
            budget.on_call(load, ProposerCall(num_tasks, num_accepted, cost_s))
            trial.add(budget.num_trials, loss_s)
            lost_s += loss_s
        budget.on_served(plain_s)
        served_s += plain_s
        most_s = share * served_s + grant_s + trial.worst_s
        assert lost_s <= most_s * (1 + 1e-9)


# ---- served as by an engine: what steps cost, and what comes of drafts, is scripted


@dataclass(frozen=True)
class _World:
    """What steps cost in seconds, and how often drafts are right.

    Attributes:
        plain_s: a plain step, launched ahead of time where steps are.
        tree_s: by the number of rows, a step with drafts; without the proposer.
        own_s: by the number of sequences, a call of the proposer.
        chance: by the number of the step, that of each draft token after an accepted one.
        is_launched: plain steps are launched ahead.
        unlaunched_s: by so much is a plain step longer that is not.
        restart_s: by so much is a launched step longer after one that was not.
        noise: relative spread of durations.
        num_tokens: of each sequence.
    """

    size: int
    plain_s: float
    tree_s: Callable[[int], float]
    own_s: Callable[[int], float]
    chance: Callable[[int], float]
    is_launched: bool = True
    unlaunched_s: float = 0.0
    restart_s: float = 0.0
    beside_s: float = 0.0
    noise: float = 0.05
    num_tokens: int = 100
    is_at_once: bool = False
    """A launch returns when it is computed."""

    def best(self, step: int) -> float:
        """The speed of the better choice, known beforehand: as many drafts for each sequence as
        raise it the most, or none."""
        found, num_tokens, chance = 1.0, 1.0, 1.0
        for depth in range(1, DEPTH + 1):
            chance *= self.chance(step)
            num_tokens += chance
            seconds = self.tree_s(self.size * (1 + depth)) + self.own_s(self.size)
            found = max(found, num_tokens * self.plain_s / seconds)
        return found


DEPTH, BELIEF = 4, 0.8
_DRAFT = chain(list(range(1, DEPTH + 1)), [BELIEF**depth for depth in range(1, DEPTH + 1)])
_WRONG = 99


class _Step(NamedTuple):
    seconds: float
    num_tokens: int
    num_asked: int
    """Number of sequences that the proposer was called for."""
    is_launched: bool
    is_asleep: bool


def _serve(
    world: _World, num_steps: int, seed: int = 1, controller: SpeculationController | None = None
) -> list[_Step]:
    """As engine/runner.py and SpeculationManager do."""
    rng, one, size = random.Random(seed), controller or SpeculationController(1), world.size
    found: list[_Step] = []
    is_live = False
    for number in range(num_steps):
        factor = max(rng.gauss(1.0, world.noise), 0.5)
        is_first = not is_live
        is_asleep = one.is_asleep(size)
        if world.is_launched and (is_live or is_asleep or one.is_idle(size)):
            seconds = world.plain_s * factor + (world.restart_s if is_first else 0.0)
            is_live = one.is_asleep(size) or one.is_idle(size)
            if world.is_at_once:  # this one, unless it was launched before, and the next one
                seconds = world.plain_s * (is_first + is_live) * factor
            one.update_rates()
            one.on_launched_step(size, seconds, is_first=is_first, is_last=not is_live)
            found.append(_Step(seconds, size, 0, True, is_asleep))
            continue
        seconds = (world.plain_s + (world.unlaunched_s if world.is_launched else 0.0)) * factor
        if is_asleep:
            one.on_slept_step(size, seconds)
            found.append(_Step(seconds, size, 0, False, True))
            continue
        one.begin_drafts()
        asked: Sequence[int] = ()
        outputs: list[RequestOutput] = []
        accepted: dict[tuple[str, int], int] = {}
        num_rows = size
        if one.begin_step(size, size, world.num_tokens * size):
            asked = one.select_tasks(0, one.select_sequences(range(size)))
            for sequence in asked:
                one.on_proposed((str(sequence), 0), 0, _DRAFT)
            calibrated = one.calibrate(0, _DRAFT)
            for sequence, tree in zip(
                asked, one.choose_nodes([calibrated] * len(asked), 8192), strict=True
            ):
                num_right = 0
                while num_right < DEPTH and rng.random() < world.chance(number):
                    num_right += 1
                num_kept = min(num_right, len(tree))
                last = num_kept + 1 if num_right > num_kept else _WRONG
                name = str(sequence)
                accepted[name, 0] = num_kept
                outputs.append(_event(name, (*range(1, num_kept + 1), last)))
                num_rows += len(tree)
        own_s = {0: world.own_s(len(asked))} if asked else {}
        if num_rows > size:
            seconds = world.tree_s(num_rows) * factor
        seconds += sum(own_s.values()) + world.beside_s
        one.update_rates()
        one.on_outputs(outputs, accepted)
        one.on_step(num_rows, seconds, own_s, one.num_accepted(own_s), beside_s=world.beside_s)
        num_kept = sum(accepted.values())
        found.append(_Step(seconds, size + num_kept, len(asked), False, False))
    return found


def _speed(world: _World, steps: Sequence[_Step]) -> float:
    """Against plain steps."""
    seconds = sum(one.seconds for one in steps)
    return sum(one.num_tokens for one in steps) / world.size * world.plain_s / seconds


_GRAPH_SEQUENCES = (1, 4, 16, 64)
_GRAPH_ROWS = (16, 24, 32, 40, 48, 64, 80, 96, 128, 192, 256, 320, 384)


def _h200(size: int, chance: Callable[[int], float] = lambda _: 0.79, **changes: Any) -> _World:
    """About an 8B model on an H200, and a proposer that costs next to nothing. A step with drafts
    of one sequence of 32 costs more than a plain one by much more than their rows do in others."""
    plain_s = {1: 0.00431, 4: 0.00436, 8: 0.00441, 16: 0.00463, 32: 0.00505, 64: 0.006}[size]

    def tree_s(num_rows: int) -> float:
        least = max(num_rows, next(num for num in _GRAPH_SEQUENCES if num >= size))
        return 0.00435 + 0.000022 * next(num for num in _GRAPH_ROWS if num >= least)

    world = _World(size, plain_s, tree_s, lambda num: 0.0001, chance)
    return dataclasses.replace(world, **{"unlaunched_s": 0.0005, "restart_s": 0.0003, **changes})


def _cpu(size: int, chance: Callable[[int], float], own_s: Callable[[int], float]) -> _World:
    """The bundled pair on one core: each row has its cost, and steps are not launched."""

    def step_s(num_rows: int) -> float:
        return 0.006 + 0.0004 * num_rows

    return _World(size, step_s(size), step_s, own_s, chance, is_launched=False, beside_s=0.0001)


_PROPOSERS: dict[str, Callable[[int], float]] = {
    "free": lambda num_asked: 0.00002 * num_asked,
    "draft model": lambda num_asked: 0.009 + 0.0008 * num_asked,
    "useless": lambda num_asked: 0.1,
}


def _worlds() -> list[tuple[str, Callable[[Callable[[int], float]], _World]]]:
    sizes = (1, 4, 32)
    found: list[tuple[str, Callable[[Callable[[int], float]], _World]]] = []
    for size in sizes:
        found.append((f"h200-{size}", functools.partial(_h200, size)))
        for name, own_s in _PROPOSERS.items():
            found.append((f"cpu-{name}-{size}", functools.partial(_cpu, size, own_s=own_s)))
    return found


_ALL = [pytest.param(make, id=name) for name, make in _worlds()]


def _after_a_second(steps: list[_Step]) -> list[_Step]:
    ends = itertools.accumulate(one.seconds for one in steps)
    return steps[sum(end < 1.0 for end in ends) :]


@pytest.mark.parametrize("make", _ALL)
def test_what_does_not_pay_costs_little(make: Callable[..., _World]) -> None:
    """No draft is right. The proposer is called all the same, now and then."""
    world = make(lambda _: 0.0)
    steps = _serve(world, 1200)
    assert _speed(world, _after_a_second(steps)) > 0.98
    assert any(one.num_asked for one in steps)


@pytest.mark.parametrize("make", _ALL)
@pytest.mark.parametrize("chance", [0.4, 0.9])
def test_it_is_about_as_fast_as_the_better_choice(
    make: Callable[..., _World], chance: float
) -> None:
    """After some hundred steps, where that is clear; and nowhere slower than plain decoding."""
    world = make(lambda _: chance)
    speed, best = _speed(world, _serve(world, 1300)[600:]), world.best(0)
    assert speed > 0.98
    assert speed > 0.93 * best or best < 1.25


@pytest.mark.parametrize("size", [32, 64])
@pytest.mark.parametrize("unlaunched_s", [0.0001, 0.0003])
def test_drafts_for_a_large_batch_are_tried_for_all_of_it(size: int, unlaunched_s: float) -> None:
    """A step with drafts of one sequence of 32 costs much more than a plain one, whatever part of
    it the launch is, and the other sequences' drafts are nearly free then. It is found out within
    the steps of five short answers."""
    world = _h200(size, unlaunched_s=unlaunched_s, noise=0.01)
    for seed in range(2):
        steps = _serve(world, 550, seed)
        assert _speed(world, steps[450:]) > 0.9 * world.best(0) > 1.4
        assert sum(one.num_asked == size for one in steps[450:]) > 85


def test_a_large_batch_that_ends_soon_pays_for_no_trial_where_steps_are_not_launched() -> None:
    world = dataclasses.replace(_h200(8), is_launched=False)
    steps = _serve(world, 200)
    assert not any(one.num_asked for one in steps[:90]) and any(one.num_asked for one in steps)


@pytest.mark.parametrize("make", [functools.partial(_h200, size) for size in (1, 8, 32)])
def test_a_change_is_noticed_within_some_hundred_steps(make: Callable[..., _World]) -> None:
    world = make(lambda step: 0.8 if 1000 <= step < 2200 else 0.0)
    steps = _serve(world, 3000)
    assert _speed(world, steps[1700:2200]) > 0.9 * world.best(1000)
    assert _speed(world, steps[2400:]) > 0.98
    # What was gained before is lost in part until it is noticed.
    assert _speed(world, steps[2200:]) > 0.96


def test_what_pays_in_steps_that_are_not_launched_is_compared_with_launched_ones() -> None:
    """Two tokens more a step for 3.2 times the seconds: beside plain steps that are not launched,
    which last 1.5 times as long, it would be faster."""

    def tree_s(num_rows: int) -> float:
        return 1.5 * PLAIN_S + 0.0315 * PLAIN_S * (num_rows - 16)

    world = _World(16, PLAIN_S, tree_s, lambda _: 0.2 * PLAIN_S, lambda _: 0.8)
    world = dataclasses.replace(world, unlaunched_s=0.5 * PLAIN_S)
    assert world.best(0) == 1.0
    assert _speed(world, _serve(world, 2000)[500:]) > 0.98
    alone = dataclasses.replace(world, plain_s=1.5 * PLAIN_S, is_launched=False)
    assert _speed(alone, _serve(alone, 2000)[1000:]) > 1.25


def test_launches_that_return_when_they_are_computed_are_not_taken_for_fast_ones() -> None:
    world = dataclasses.replace(_h200(1), is_at_once=True)
    steps = _serve(world, 2000)
    assert sum(one.num_asked for one in steps) > 0.95 * 2000


def test_what_pays_is_asked_but_for_a_few_plain_steps() -> None:
    """Eight before, three launched ones after 128 with drafts, or one after 32."""
    for world, num_plain in ((_h200(1), 3), (_cpu(1, lambda _: 0.8, lambda _: 0.0001), 1)):
        steps = _serve(world, 1000)
        assert not any(one.num_asked for one in steps[:8])
        plain = [one.num_asked == 0 for one in steps[20:]]
        runs = [len(list(group)) for is_plain, group in itertools.groupby(plain) if is_plain]
        assert set(runs) == {num_plain}
        assert sum(runs) < 0.04 * 980


def test_proposers_that_see_every_step_are_left_no_gap_where_they_pay() -> None:
    one = SpeculationController(1, measures_again=False)
    steps = _serve(_h200(1), 1000, controller=one)
    assert all(step.num_asked for step in steps[20:])


def test_a_small_batch_is_tried_as_a_whole_and_a_large_or_a_long_one_by_one() -> None:
    for size, num_tokens, num_first in (
        (1, 5000, 1),
        (4, 30, 4),
        (4, 200, 2),
        (4, 5000, 1),
        (8, 30, 1),
    ):
        world = dataclasses.replace(_h200(size), num_tokens=num_tokens)
        steps = _serve(world, 30 if size <= 4 else 200)
        assert next(one.num_asked for one in steps if one.num_asked) == num_first


def test_who_does_not_pay_is_tried_again_by_one_and_by_others_in_turn() -> None:
    controller, seen = SpeculationController(1), set[int]()
    for _ in range(6000):
        if controller.begin_step(8, 8):
            asked = controller.select_tasks(0, controller.select_sequences(range(8)))
            assert len(asked) == 1
            seen.update(asked)
            controller.on_step(9, 1.1 * PLAIN_S, {0: 0.1 * PLAIN_S}, {0: 0})
        else:
            controller.on_step(8, PLAIN_S, {}, {})
    assert seen == set(range(8))
    assert not controller.begin_step(0, 100)
    controller.on_step(100, 1.0, {}, {})


def test_fewer_are_asked_where_drafts_for_all_do_not_pay_any_more() -> None:
    world = _cpu(16, lambda step: 1.0 if step < 600 else 0.0, lambda num: 0.0002 * num)
    steps = _serve(world, 6000)
    assert max(one.num_asked for one in steps[:600]) == 16
    assert {one.num_asked for one in steps[3000:]} == {0, 1}


# ---- single calls


def _outcomes(budget: CallBudget, size: int, costs: Sequence[float], kept: Sequence[int]) -> int:
    """Returns: the number of calls before the budget allowed none, or all.

    Args: costs: in durations of a plain step. kept: accepted tokens of each call.
    """
    load = StepEstimate(size, size, PLAIN_S, PLAIN_S, 0.0)
    for number, (cost, num_accepted) in enumerate(zip(costs, kept, strict=True)):
        if budget.take_call() == 0:
            return number
        budget.on_call(load, ProposerCall(size, num_accepted, cost * PLAIN_S))
    return len(costs)


def _budget(width: int) -> CallBudget:
    return CallBudget(PROBE_SHARE, GRANT_STEPS * PLAIN_S, width)


def test_what_was_lost_once_is_paid_by_calls_that_gain() -> None:
    """Two sequences' six tokens are worth 2.7 plain steps. The first call computes all prompts."""
    assert _outcomes(_budget(2), 2, [20.0] + 40 * [1.5], 41 * [6]) == 41
    assert _outcomes(_budget(2), 2, [20.0] + 40 * [1.5], [6] + 40 * [0]) == TRIAL


def test_calls_that_gain_together_go_on_where_every_second_one_brings_nothing() -> None:
    kept = [6, *(20 * [6, 0])]
    assert _outcomes(_budget(2), 2, [20.0] + 40 * [1.2], kept) == 41
    assert _outcomes(_budget(2), 2, [20.0] + 40 * [3.2], kept) == TRIAL


def test_each_trial_has_its_own_debt_to_pay() -> None:
    """The second one has a deeper one than the first."""
    budget = _budget(2)
    assert _outcomes(budget, 2, [20.0] + 9 * [0.5], 10 * [0]) == TRIAL
    budget.on_served(10000 * PLAIN_S)
    assert _outcomes(budget, 2, [60.0] + 9 * [0.5], [0] + 9 * [6]) == 10
    assert budget.num_trials == 2


def test_a_call_that_comes_to_nothing_is_none() -> None:
    budget = _budget(4)
    for _ in range(3 * TRIAL):
        assert budget.take_call() == 4
        budget.return_call()
    assert budget.num_trials == 1 and budget.credit_s == GRANT_STEPS * PLAIN_S


def _step(controller: SpeculationController, size: int, own_s: float, kept: int) -> int:
    """A step that is not launched. Returns: for how many sequences the proposer was called."""
    num_asked = 0
    if controller.begin_step(size, size):
        num_asked = len(controller.select_tasks(0, controller.select_sequences(range(size))))
    drafted = {0: own_s} if num_asked else {}
    seconds = PLAIN_S + sum(drafted.values())
    controller.on_step(size + num_asked, seconds, drafted, {0: kept * num_asked})
    return num_asked


@settings(max_examples=40)
@given(st.integers(0, 2**32), st.integers(1, 64), st.floats(0.0, 1.0))
def test_steps_with_prompts_allow_no_more_than_plain_ones(
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
    for _ in range(100):
        assert controller.begin_step(5, 5)
        tasks = controller.select_sequences(range(5))
        assert [list(controller.select_tasks(one, tasks)) for one in range(2)] == 2 * [[*range(5)]]
        controller.on_step(45, 9 * PLAIN_S, {0: 9 * PLAIN_S, 1: PLAIN_S}, {0: 0, 1: 0})
        assert not controller.is_asleep(5) and not controller.is_idle(5)


# ---- sleep, and bookkeeping


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


def test_a_call_comes_after_steps_that_say_what_one_lasts_now() -> None:
    for world in (_cpu(8, lambda _: 0.0, lambda _: PLAIN_S), _cpu(1, lambda _: 0.0, lambda _: 0.1)):
        steps = _serve(world, 12000)
        assert sum(one.is_asleep for one in steps) > 0.8 * len(steps)
        asked = [place for place, one in enumerate(steps) if one.num_asked]
        assert asked[-1] > 100
        assert not any(
            steps[at].is_asleep for place in asked[20:] for at in range(place - 9, place)
        )


def test_what_a_step_lasts_without_guesses_is_without_their_bookkeeping() -> None:
    one = SpeculationController(1)
    for _ in range(8):
        assert not one.begin_step(4, 4)
        one.on_step(4, PLAIN_S + 0.001, {}, {}, beside_s=0.001)
    assert one.begin_step(4, 4)
    assert math.isclose(one.load.plain_s, PLAIN_S)


def test_each_class_of_sizes_sleeps_by_itself_and_launched_steps_count() -> None:
    one = SpeculationController(1)
    for _ in range(120):
        _step(one, 8, own_s=2 * PLAIN_S, kept=0)
    assert one.is_asleep(8) and one.is_asleep(5) and not one.is_asleep(4) and not one.is_asleep(0)
    for _ in range(9):
        _step(one, 1, own_s=PLAIN_S, kept=0)
    num_served = 0
    while one.is_asleep(8):
        if num_served % 2:
            one.on_slept_step(8, PLAIN_S)
        else:
            one.on_launched_step(6, PLAIN_S, is_first=True, is_last=True)
        num_served += 1
    # Three calls of two steps each on a grant of three, and half a step that was earned before:
    # half a step is there after 600.
    assert 500 < num_served < 600


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


# ---- what steps last


def test_rows_have_a_price_before_one_was_measured_and_the_first_measure_is_none() -> None:
    """It may have been of a step that compiled something."""
    one = SpeculationController(1)
    for _ in range(8):
        one.begin_step(2, 2)
        one.on_step(2, PLAIN_S, {}, {})
    for step_s in (9 * PLAIN_S, 1.4 * PLAIN_S):
        assert one.begin_step(2, 2)
        assert math.isclose(one.load.plain_s, PLAIN_S)
        one.select_tasks(0, one.select_sequences(range(2)))
        one.on_step(10, step_s + 1e-5, {0: 1e-5}, {0: 6})
        if step_s > 2 * PLAIN_S:
            assert math.isclose(one.load.row_s, 0.05 * PLAIN_S)
    one.begin_step(2, 2)
    assert 0.03 * PLAIN_S < one.load.row_s < 0.051 * PLAIN_S


def test_a_step_is_the_median_of_the_newest_ones() -> None:
    """Neither the very first ones, nor the shortest; and not of another time."""
    times = PlainStepTimes()
    for seconds in (0.5, 0.3, 0.010, 0.011, 0.007, 0.010, 0.012):
        times.observe(2, seconds)
        assert times.seconds(2, 0.0) is None
    times.observe(2, 0.011)
    assert times.seconds(2, 0.0) == 0.011
    for seconds in (0.020, 0.9, 0.021, 0.022, 0.021, 0.023):
        times.on_drafted(2)
        times.observe(2, seconds)
    assert times.seconds(2, 0.0) == 0.021


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
                size, PLAIN_S, is_first=rng.random() < 0.1, is_last=rng.random() < 0.1
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
        one.on_step(size + 4 * sum(asked), 1.5 * PLAIN_S, own_s, num_right)
    assert num_asked > 0 and num_rested > 0


def _random_tree(rng: random.Random) -> TokenTree:
    chains = []
    for _ in range(rng.randint(1, 3)):
        chances = sorted((rng.random() for _ in range(rng.randint(1, 3))), reverse=True)
        chains.append(chain([rng.randrange(3) for _ in chances], chances))
    return merge(chains)


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
