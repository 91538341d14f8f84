"""SpeculationController: how much is drafted and for whom. Never more nodes than the budget, never
one without its parent, the best there is by its own reckoning. Time is lost by finding out up to a
share of what was served, and no more, in each class of batch sizes; a proposer that pays is called.
What launched steps are worth is what drafts are compared with, and what stopping them costs is
charged. Every step is learnt from once, in order, and none too soon."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
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
    size_class,
)
from engine.speculation.ngram import NgramProposer
from engine.speculation.proposer import Draft, DraftTask
from engine.speculation.token_tree import EMPTY, TokenTree, chain, merge
from engine.testing.fake_model import FakeModel
from tests.harness.workloads import SIZE, VOCAB, WINDOW, steps_beyond, undisturbed
from tests.unit.engine.speculation.test_manager import Right

PLAIN_S = 0.01


def _tree(rng: random.Random, num_paths: int, most: int) -> TokenTree:
    chains = []
    for _ in range(num_paths):
        chances = sorted((rng.random() for _ in range(rng.randint(1, most))), reverse=True)
        chains.append(chain([rng.randrange(3) for _ in chances], chances))
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
    trees = [_tree(rng, 2, 4) for _ in range(num_trees)]
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


@pytest.mark.parametrize(("base_s", "row_s", "num_nodes"), [(0.0, 1.0, 0), (1.0, 0.0, 3)])
def test_nothing_is_guessed_where_rows_are_all_that_counts(
    base_s: float, row_s: float, num_nodes: int
) -> None:
    tree = chain([1, 2, 3], [0.9, 0.8, 0.7])
    assert len(choose_nodes([tree], StepEstimate(1, 1, base_s, row_s), 3)[0]) == num_nodes


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
    worst_charge_s = dict.fromkeys(map(size_class, sizes), 0.0)
    for _ in range(300):
        if rng.random() < 0.05:
            price, luck, size = 10 ** rng.uniform(-3, 2), rng.uniform(0, 4), rng.choice(sizes)
        load = StepEstimate(size, size, 0.01 * rng.lognormvariate(0, 0.5), 0.0)
        place = size_class(size)
        num_tasks = budget.take_call(load, rng.choice([1, FEW]))
        granted.setdefault(place, GRANT_STEPS * load.seconds if size <= FEW else 0.0)
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


@dataclass(frozen=True)
class _World:
    """What steps last, and what drafts cost and bring."""

    size: int | Callable[[int], int] = 1
    """Number of sequences, of a step by its number."""
    own_s: float = 0.1 * PLAIN_S
    """Of a call, whatever the number of sequences."""
    each_s: float = 0.0
    """Of a call, for each sequence."""
    kept: float | Callable[[int], float] = 0.0
    """Tokens for each sequence of a call, of a step by its number."""
    num_nodes: int = 1
    """Of each sequence of a call."""
    row_s: float = 0.0
    """Of each row but one for each sequence."""
    beside_s: float = 0.0
    """Of a planned step's bookkeeping."""
    can_draft: Callable[[int], bool] = lambda _: True
    noise: float = 0.0
    num_prompt_tokens: Callable[[random.Random], int] = lambda _: 0
    num_proposers: int = 1
    overhead_s: float | None = None
    """Steps without drafts are launched ahead, and any other one lasts so much longer; None: no
    step is launched ahead."""
    is_at_once: bool = False
    """A launch returns when it is computed."""
    measures_again: bool = True


@dataclass
class _Account:
    """Of all steps so far."""

    asked: list[int] = field(default_factory=list)
    """For how many sequences proposers were called in each."""
    slept: list[bool] = field(default_factory=list)
    launched: list[bool] = field(default_factory=list)
    lost_s: float = 0.0
    """By which they lasted longer than as many tokens without any draft."""
    served_s: float = 0.0

    @property
    def speed(self) -> float:
        """Against the same tokens without any draft."""
        return 1.0 - self.lost_s / self.served_s


def _steps(world: _World, *, number: int = 0, sleeps: bool = True) -> Iterator[_Account]:
    """As manager.py and runner.py do; the account after each step."""
    rng, account, is_live = random.Random(number), _Account(), False
    one = SpeculationController(world.num_proposers, measures_again=world.measures_again)
    for step in itertools.count():
        size = world.size(step) if callable(world.size) else world.size
        num_rows = size + (num_prompt_tokens := world.num_prompt_tokens(rng))
        plain_s = PLAIN_S * rng.uniform(1 - world.noise, 1 + world.noise)
        plain_s += world.row_s * num_prompt_tokens
        asked: dict[int, int] = {}
        num_kept, step_s = 0, plain_s
        is_launched = world.overhead_s is not None and (is_live or one.is_idle(size))
        is_asleep = not is_launched and sleeps and one.is_asleep(size)
        if is_launched:
            is_first, is_live = not is_live, one.is_idle(size)
            step_s += (world.overhead_s or 0.0) / 2 * is_first
            if world.is_at_once:  # this one, unless it was launched before, and the next one
                step_s = plain_s * (is_first + is_live)
            one.on_launched_step(size, step_s, is_first=is_first, is_last=not is_live)
        elif is_asleep:
            one.on_slept_step(size, plain_s)
        else:
            if one.begin_step(size, num_rows, 30 * size, can_draft=world.can_draft(step)):
                tasks = one.select_sequences(range(size))
                widths = [len(one.select_tasks(each, tasks)) for each in range(world.num_proposers)]
                asked = {each: width for each, width in enumerate(widths) if width}
            own_s = {each: world.own_s + world.each_s * width for each, width in asked.items()}
            kept = world.kept(step) if callable(world.kept) else world.kept
            num_right = {each: int(width * kept) for each, width in asked.items()}
            num_nodes, num_kept = world.num_nodes * sum(asked.values()), sum(num_right.values())
            step_s += (world.overhead_s or 0.0) + sum(own_s.values()) + world.row_s * num_nodes
            step_s += world.beside_s
            num_rows += num_nodes
            one.on_step(num_rows, step_s, own_s, num_right, beside_s=world.beside_s)
        account.asked.append(max(asked.values(), default=0))
        account.slept.append(is_asleep)
        account.launched.append(is_launched)
        account.served_s += step_s
        account.lost_s += step_s - plain_s - num_kept / size * PLAIN_S
        yield account


def _after(num_steps: int, world: _World, **options: Any) -> _Account:
    return next(itertools.islice(_steps(world, **options), num_steps - 1, None))


_HALF, _TWICE = 0.5 * PLAIN_S, 2.0 * PLAIN_S


@pytest.mark.parametrize(
    ("world", "first", "late"),
    [
        pytest.param(_World(1, _HALF, kept=2.0), 1, {0, 1}, id="one sequence pays"),
        pytest.param(_World(32, _HALF, kept=2.0), 1, {0, 32}, id="all pay what one does not"),
        pytest.param(_World(32, _HALF), 1, {0, 1}, id="nothing pays"),
        pytest.param(_World(4, _TWICE), 4, {0, 1}, id="each costs more than it brings"),
        pytest.param(_World(4, _TWICE, kept=1.0), 4, {0, 4}, id="the call costs too much"),
    ],
)
def test_who_pays_is_called_and_who_does_not_is_tried_again(
    world: _World, first: int, late: set[int]
) -> None:
    """For more sequences where that would pay, and for fewer where each costs more than it
    brings; where it does not pay for a share of the time."""
    account = _after(8000, world)
    assert next(num for num in account.asked if num) == first
    assert set(account.asked[2000:]) == late
    if account.speed > 1.0:
        assert sum(num > 0 for num in account.asked[2000:]) > 0.9 * 6000
    else:
        assert account.lost_s <= PROBE_SHARE * account.served_s + 2 * TRIAL * world.own_s + PLAIN_S


def test_what_does_not_pay_any_more_is_given_up() -> None:
    """And found again when it does."""
    world = _World(1, _HALF, kept=lambda step: 0.0 if 300 <= step < 2000 else 2.0)
    asked = _after(3000, world).asked
    assert sum(asked[100:300]) > 150 and sum(asked[300:2000]) < 60 and sum(asked[2500:]) > 400


def test_a_plain_step_is_measured_before_guesses_and_among_them() -> None:
    asked = _after(400, _World(kept=3.0)).asked
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


def test_always_asks_for_all_and_never_sleeps() -> None:
    one = SpeculationController(2, always=True)
    for _ in range(100):
        assert one.begin_step(5, 5) and not one.is_idle(5)
        for proposer in range(2):
            tasks = one.select_tasks(proposer, one.select_sequences(range(5)))
            assert list(tasks) == list(range(5))
        one.on_step(10, 9 * PLAIN_S, {0: 4 * PLAIN_S, 1: 4 * PLAIN_S}, {0: 0, 1: 0})
        assert not one.is_asleep(5)


@settings(max_examples=40)
@given(st.integers(0, 2**32), st.integers(1, 64), st.floats(0.0, 1.0), st.floats(0.1, 4.0))
def test_steps_with_prompts_grant_no_more_than_plain_ones(
    number: int, size: int, row_share: float, price: float
) -> None:
    """From an engine's very first step on, of which nothing is known; and with prompts in any."""
    share = random.Random(number).random()
    world = _World(
        size,
        price * PLAIN_S,
        row_s=row_share * PLAIN_S / size,
        num_prompt_tokens=lambda rng: 0 if rng.random() < share else rng.choice([1, 30, 1000]),
    )
    trial_s = TRIAL * (world.own_s + world.row_s * size)
    for account in itertools.islice(_steps(world, number=number), 600):
        most_s = PROBE_SHARE * account.served_s + GRANT_STEPS * PLAIN_S + trial_s
        assert account.lost_s <= most_s * (1 + 1e-6)


@settings(max_examples=6, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 64), st.floats(0.02, 3.0))
def test_what_is_slept_through_is_served_all_the_same(number: int, size: int, price: float) -> None:
    """As often asked as who stays awake, within the same law, and only after steps that said what
    one lasts now. Prompts among the steps move a trial by a few of them."""
    world = _World(
        size,
        price * PLAIN_S,
        noise=0.1,
        num_prompt_tokens=lambda rng: 100 * (rng.random() < 0.02),
    )
    ran, awake = (_after(2500, world, number=number, sleeps=sleeps) for sleeps in (True, False))
    assert not any(awake.slept) and sum(ran.slept) > len(ran.slept) / 4
    for one in (ran, awake):
        most_s = PROBE_SHARE * one.served_s + GRANT_STEPS * 1.1 * PLAIN_S + TRIAL * world.own_s
        assert one.lost_s <= most_s * 1.01
    num_asked, num_awake = (sum(num > 0 for num in one.asked) for one in (ran, awake))
    assert abs(num_asked - num_awake) <= max(TRIAL, num_awake // 4) and num_asked > TRIAL
    for place, num in enumerate(ran.asked):
        if num and place > TRIAL + 9:
            assert not any(ran.slept[max(0, place - 16) : place])


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
    world = _World(
        size,
        own * PLAIN_S / num_proposers,
        beside_s=beside * PLAIN_S,
        noise=0.1,
        num_proposers=num_proposers,
    )
    once_s = num_proposers * (GRANT_STEPS * 1.1 * PLAIN_S + TRIAL * world.own_s)
    once_s += (num_proposers * TRIAL + 40) * world.beside_s
    for account in itertools.islice(_steps(world, number=number), 4000):
        assert account.lost_s <= (PROBE_SHARE * account.served_s + once_s) * 1.01
    assert sum(num > 0 for num in account.asked) > TRIAL and sum(account.slept) > 2000
    assert account.lost_s >= 0.8 * PROBE_SHARE * account.served_s


_LIGHT = _World(beside_s=0.02 * PLAIN_S)


def test_where_batches_straddle_a_class_each_sleeps_by_itself_and_who_pays_is_found() -> None:
    straddles = dataclasses.replace(_LIGHT, size=lambda step: 4 + step % 2)
    account = _after(12000, straddles)
    assert sum(num > 0 for num in account.asked) > 4 * TRIAL
    assert account.lost_s <= PROBE_SHARE * account.served_s + 2 * (GRANT_STEPS + 2.0) * PLAIN_S
    pays = dataclasses.replace(straddles, kept=lambda step: float(step >= 8000))
    asked = _after(12000, pays).asked
    assert any(asked[8000:8500])
    assert sum(num > 0 for num in asked[10000:]) > 1000


def test_what_was_spent_while_nobody_could_be_asked_bars_nobody() -> None:
    """A long time of requests that take no guesses, and then of some that do, which pay."""
    rng = random.Random(3)
    world = dataclasses.replace(
        _LIGHT,
        kept=lambda _: 2.0 * (rng.random() < 0.4),
        can_draft=lambda step: step < 100 or step >= 10000,
    )
    asked = _after(30000, world).asked
    assert not any(asked[100:10000]) and sum(asked[10000:]) > 10000


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_small_batch_is_tried_at_once_and_as_a_whole(size: int) -> None:
    """As the bundled pair on a CPU: of 2 and of 4 one alone would never pay the call."""
    bundled = _World(size, 0.012, 0.001, kept=3.0, num_nodes=4, row_s=0.0005)
    asked = _after(100, bundled).asked
    assert asked[:9] == [0] * 8 + [size]
    assert asked.count(size) + asked.count(0) == 100 and asked.count(0) < 24


@pytest.mark.parametrize("size", [5, 8, 32, 64])
def test_a_large_batch_is_tried_by_one_and_not_in_a_short_session(size: int) -> None:
    asked = _after(1000, _World(size, 0.012, 0.001, kept=1.0, num_nodes=4, row_s=0.0005)).asked
    assert not any(asked[:200])
    assert 2 <= sum(asked) <= 6 and set(asked) == {0, 1}


@pytest.mark.parametrize(("num_tokens", "num_asked"), [(30, 4), (200, 2), (5000, 1)])
def test_of_long_sequences_a_first_trial_asks_for_fewer(num_tokens: int, num_asked: int) -> None:
    one = SpeculationController(1)
    for _ in range(8):
        assert not one.begin_step(4, 4, 4 * num_tokens)
        one.on_step(4, PLAIN_S, {}, {})
    assert one.begin_step(4, 4, 4 * num_tokens)
    assert len(one.select_sequences(range(4))) == num_asked


@pytest.mark.parametrize(
    ("each_s", "brings", "goes_on"),
    [(1.5, (1,), True), (1.2, (1, 0), True), (1.2, (1, 0, 1), True), (3.2, (1, 0), False)],
    ids=["each call gains", "two together gain", "three together gain", "two together lose"],
)
def test_what_was_lost_once_is_paid_by_calls_that_gain(
    each_s: float, brings: tuple[int, ...], *, goes_on: bool
) -> None:
    """And not by 600 steps without guesses: here the first call computes all prompts of two
    sequences; later ones cost `each_s` plain steps, and some of so many bring 2.7."""
    load, budget, num_calls = StepEstimate(2, 2, PLAIN_S, 0.0), CallBudget(), 0
    while num_calls < 60 and budget.take_call(load):
        num_calls += 1
        own_s = 8 * PLAIN_S if num_calls == 1 else each_s * PLAIN_S
        num_kept = 6 * brings[num_calls % len(brings)]
        budget.on_call(load, ProposerCall(2, num_kept, 8, own_s, 0.0))
    assert num_calls == (60 if goes_on else TRIAL)


@pytest.mark.parametrize(("gain", "beside", "every"), [(0.2, 0.3, 1), (0.01, 0.3, 8)])
def test_calls_that_gain_go_on_in_no_debt_that_grows(
    gain: float, beside: float, every: int
) -> None:
    """Each of them gains, and what is charged beside is more than all do."""
    load, budget = StepEstimate(2, 2, PLAIN_S, 0.0), CallBudget()
    num_calls, own_s = 0, 8 * PLAIN_S
    while num_calls < 60 and budget.take_call(load):
        num_calls += 1
        budget.on_call(load, ProposerCall(2, 6, 8, own_s, 0.0))
        own_s = 6 * load.token_s - gain * PLAIN_S
        if num_calls % every == 0:
            budget.charge(2, beside * PLAIN_S)
    assert num_calls <= TRIAL + 2 * every


@pytest.mark.parametrize(
    ("own_s", "rows_s", "num_nodes", "num_calls"),
    [
        pytest.param(4.0, 0.0, 16, 2, id="not even four nodes would pay it"),
        pytest.param(3.0, 0.0, 16, 3, id="they might"),
        pytest.param(4.0, 0.0, 0, 3, id="nothing was guessed so far"),
        pytest.param(1e-4, 0.6, 16, 3, id="noise of a step"),
        pytest.param(1e-4, 8.0, 16, 2, id="whole steps are no noise"),
    ],
)
def test_a_trial_ends_early_where_not_even_the_best_outcome_would_pay(
    own_s: float, rows_s: float, num_nodes: int, num_calls: int
) -> None:
    load, budget, found = StepEstimate(4, 4, PLAIN_S, 0.0), CallBudget(), 0
    while found < TRIAL and budget.take_call(load):
        call = ProposerCall(4, 0, num_nodes, own_s * PLAIN_S, rows_s * PLAIN_S)
        budget.on_call(load, call)
        found += 1
    assert found == num_calls


def test_the_first_step_of_its_kind_says_nothing_of_later_ones() -> None:
    """Its rows cost ten steps, as something was compiled; the next ones' a tenth of one."""
    load, budget = StepEstimate(4, 4, PLAIN_S, 0.0), CallBudget()
    for place in range(TRIAL):
        assert budget.take_call(load) == 4
        rows_s = 0.1 * PLAIN_S if place else 10 * PLAIN_S
        call = ProposerCall(4, 12, 16, _HALF, rows_s, is_example=place > 0)
        budget.on_call(load, call)
    assert budget.take_call(load) == 4


def test_a_step_that_comes_to_nothing_costs_a_trial_no_call() -> None:
    load, budget = StepEstimate(4, 4, PLAIN_S, 0.0), CallBudget()
    for _ in range(3 * TRIAL):
        assert budget.take_call(load) > 0
        budget.return_call(load)
    assert budget.num_trials(4) <= 1


def _launched(size: int, overhead: float, row_s: float = 0.0001, **fields: Any) -> _World:
    """`overhead`: of a step."""
    return _World(size, 0.0005, num_nodes=8, row_s=row_s, overhead_s=overhead * PLAIN_S, **fields)


@pytest.mark.parametrize(
    ("world", "num_steps", "speed", "asked"),
    [
        # Two tokens a step for 2.1 times the seconds: a step that is not launched lasts 26 %
        # longer, and beside such ones it is faster.
        pytest.param(
            _launched(32, 0.26, 0.0000315, kept=1.0), 4000, 0.98, (0.001, 0.02), id="loses"
        ),
        pytest.param(_launched(1, 0.2, kept=2.0), 1000, 2.0, (0.94, 0.985), id="pays"),
        # A pause as long as what 32 sequences' tokens are worth a quarter of: one sequence never
        # pays it, all of them do.
        pytest.param(
            _launched(32, 0.3, 0.00001, kept=2.0), 3000, 1.3, (0.5, 1.0), id="pays for all"
        ),
        # Launches that return when they are computed are not taken for fast ones.
        pytest.param(
            _launched(1, 0.0, kept=1.0, is_at_once=True), 3000, 1.5, (0.94, 0.985), id="at once"
        ),
        pytest.param(
            _launched(1, 0.2, kept=2.0, measures_again=False), 1000, 2.0, (0.999, 1.0), id="no gaps"
        ),
    ],
)
def test_drafts_are_compared_with_launched_steps(
    world: _World, num_steps: int, speed: float, asked: tuple[float, float]
) -> None:
    account = _after(num_steps, world)
    assert account.speed > speed
    late = account.asked[num_steps // 4 :]
    assert asked[0] <= sum(num > 0 for num in late) / len(late) <= asked[1]
    assert set(late) <= {0, 1, world.size}


@pytest.mark.parametrize("size", [1, 8, 32])
@pytest.mark.parametrize("kept", [0.0, 0.5])
def test_finding_out_costs_its_share_and_the_pause_is_in_it(size: int, kept: float) -> None:
    world = _launched(size, 0.5, 0.0004, kept=kept)
    account = _after(6000, world)
    overhead_s = 0.5 * PLAIN_S
    trial_s = TRIAL * (world.own_s + 8 * size * world.row_s + overhead_s)
    once_s = GRANT_STEPS * PLAIN_S + 6 * overhead_s + trial_s
    assert account.lost_s <= PROBE_SHARE * account.served_s + once_s
    assert any(account.asked[3000:]), "it is tried again"
    if size > FEW:
        assert all(account.launched[:190]), "none is planned for nothing before its first trial"


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


class _Charged(NamedTuple):
    seconds: float
    own_s: dict[int, float]
    beside_s: float


class _Timed:
    """Engines whose clock moves by what is done for drafts: a call of the proposer takes 8 seconds,
    and each of the controller's methods so many."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **seconds: float) -> None:
        self.now_s, self.num_calls = 0.0, 0
        self.charged: list[_Charged] = []
        for name, own_s in ({"on_step": 0.0} | seconds).items():
            self._time(monkeypatch, name, own_s)

    def _time(self, monkeypatch: pytest.MonkeyPatch, name: str, seconds: float) -> None:
        real = getattr(SpeculationController, name)

        def run(controller: SpeculationController, *args: Any, **kwargs: Any) -> Any:
            self.now_s += seconds
            if name == "on_step":
                self.charged.append(_Charged(args[1], dict(args[2]), kwargs["beside_s"]))
            return real(controller, *args, **kwargs)

        monkeypatch.setattr(SpeculationController, name, run)

    def engine(self, model: FakeModel | None = None) -> LLMEngine:
        timed = self

        class Slow(NgramProposer):
            def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
                timed.now_s += 8.0
                timed.num_calls += 1
                return [Draft(EMPTY, {}) for _ in tasks]

        model = model or FakeModel(context_window=WINDOW, block_size=SIZE)
        proposer = Slow(NgramConfig())
        config = EngineConfig(num_blocks=40)
        return LLMEngine(config, model, proposers=[proposer], clock=lambda: self.now_s)


def test_all_that_is_done_for_guesses_is_charged_but_in_steps_that_are_slept_through(
    make_request: Callable[..., Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is learnt of a step is learnt in the next one's time; what a request before left to be
    learnt is not of the next one's, as the engine was idle between the two."""
    timed = _Timed(monkeypatch, is_idle=1.0, begin_step=2.0, on_step=4.0)
    engine = timed.engine()
    engine.submit(make_request("r", [1, 2, 3], max_tokens=30))
    while engine.has_work():
        engine.step()
    assert [(one.own_s, one.beside_s) for one in timed.charged[:2]] == [({}, 3.0), ({}, 7.0)]
    asked = [(one.own_s, one.beside_s) for one in timed.charged if one.own_s]
    assert asked and all(one == ({0: 10.0}, 5.0) for one in asked)
    assert len(timed.charged) < 29, "steps were slept through"
    timed.charged.clear()
    timed.now_s += 1000.0
    engine.submit(make_request("s", [1], max_tokens=2))
    while engine.has_work():
        engine.step()
    assert all(one.seconds >= one.beside_s for one in timed.charged)


def test_what_was_asked_for_a_step_that_is_taken_back_is_charged_to_the_next(
    make_request: Callable[..., Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    timed, num_failed = _Timed(monkeypatch), 0

    class Failing(FakeModel):
        def forward(self, batch: Batch) -> torch.Tensor:
            nonlocal num_failed
            if timed.num_calls and not num_failed:
                num_failed += 1
                raise RuntimeError("once")
            return super().forward(batch)

    engine = timed.engine(Failing(context_window=WINDOW, block_size=SIZE))
    engine.submit(make_request("r", [1, 2, 3], max_tokens=30))
    while engine.has_work():
        with contextlib.suppress(RuntimeError):
            engine.step()
    assert num_failed == 1 and timed.num_calls > 1
    charged_s = sum(sum(one.own_s.values()) + one.beside_s for one in timed.charged)
    assert charged_s == 8.0 * timed.num_calls


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
                own.append((name, proposer, _tree(rng, rng.randint(1, 3), 3)))
                one.on_proposed((name, 0), proposer, own[-1][2])
        probe = _tree(rng, rng.randint(1, 3), 3)
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


class _Noting(Right):
    """Three tokens of the answer, of which the last is sometimes wrong."""

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
        tree = super()._tree(task)
        if self._own_rng.random() >= 0.3:
            return tree
        *right, last = tree.token_ids
        return chain([*right, (last + 1) % VOCAB], tree.chances)


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
