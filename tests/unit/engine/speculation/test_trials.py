"""Trials of a drafter: with whom they begin and when, when they end, and what has no say in them.
What they may cost: test_exploration.py."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from engine.batch import Batch
from engine.config import EngineConfig
from engine.engine import LLMEngine
from engine.request import Request
from engine.speculation.config import NgramConfig
from engine.speculation.drafter import Draft, Task
from engine.speculation.expansion import Load
from engine.speculation.exploration import Exploration
from engine.speculation.ngram import PromptLookup
from engine.speculation.pace import Pace
from engine.speculation.tree import EMPTY
from engine.speculation.worth import GRANT_STEPS, SHARE, TRIAL, Call, Worth, value_s
from engine.testing.fake_model import FakeModel
from tests.harness.workloads import SIZE, WINDOW

PLAIN_S = 0.01


def _bundled(exploration: Exploration, size: int, step_s: float, *, kept: int = 3) -> int:
    """A step as the bundled pair's on a CPU: the drafter's call for all costs a little more than
    for one, each row of four has its price. Returns: for how many it was asked."""
    num_asked = 0
    if exploration.begin(size, size, 30 * size):
        num_asked = len(exploration.choose(0, exploration.among(range(size))))
    own_s = 0.009 + 0.0008 * num_asked if num_asked else 0.0
    seconds = step_s + own_s + 4 * num_asked * 0.0004
    num_right = {0: kept * num_asked}
    exploration.learn(size + 4 * num_asked, seconds, {0: own_s} if num_asked else {}, num_right)
    return num_asked


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_small_batch_is_tried_at_once_and_as_a_whole(size: int) -> None:
    """Of 2 and of 4 one alone would never pay the call."""
    one = Exploration(1)
    asked = [_bundled(one, size, 0.0075) for _ in range(100)]
    assert asked[:9] == [0] * 8 + [size]
    assert asked.count(size) + asked.count(0) == 100 and asked.count(0) < 24


@pytest.mark.parametrize("size", [5, 8, 32, 64])
def test_a_large_batch_is_tried_by_one_and_not_in_a_short_session(size: int) -> None:
    one = Exploration(1)
    asked = [_bundled(one, size, 0.008, kept=1) for _ in range(1000)]
    assert not any(asked[:200])
    assert 2 <= sum(asked) <= 6 and set(asked) == {0, 1}


def test_where_not_even_the_best_outcome_would_pay_a_trial_ends_with_its_second_call() -> None:
    load = Load(4, 4, PLAIN_S, 0.0)
    for own_s, num_calls in ((4.0 * PLAIN_S, 2), (3.0 * PLAIN_S, 3)):  # four nodes: 3.6 steps
        worth = Worth()
        asked = 0
        while worth.num_asked(load):
            worth.observe(load, Call(4, 0, 16, own_s, 0.0))
            asked += 1
        assert asked == num_calls
    worth, asked = Worth(), 0
    while worth.num_asked(load):  # catching up: nothing was guessed so far
        worth.observe(load, Call(4, 0, 0, 4.0 * PLAIN_S, 0.0))
        asked += 1
    assert asked == TRIAL


@pytest.mark.parametrize("size", [8, 32, 64])
def test_noise_of_a_step_ends_no_trial(size: int) -> None:
    """A tenth of a step, by which one with the guesses of one sequence seems dearer, is many times
    what its four tokens are worth, were they those of all."""
    load, worth, asked = Load(size, size, PLAIN_S, 0.0), Worth(), 0
    worth.open(load)
    worth.serve(size, 400 * PLAIN_S)
    for _ in range(TRIAL):
        assert worth.num_asked(load) == 1
        assert worth.num_trials(size) == 1
        rows_s = (0.1 + 0.5 / size) * PLAIN_S  # of them, four rows' own price
        worth.observe(load, Call(1, 3, 4, 1e-6, rows_s))
    worth = Worth()
    worth.open(load)
    worth.serve(size, 400 * PLAIN_S)
    while worth.num_asked(load):  # whole steps are no noise
        worth.observe(load, Call(1, 3, 4, 1e-6, 4 * PLAIN_S))
        asked += 1
    assert asked == 2


@pytest.mark.parametrize(("is_example", "num_calls"), [(False, 3), (True, 2)])
def test_a_step_that_was_the_first_of_its_kind_says_nothing_of_later_ones(
    is_example: bool, num_calls: int
) -> None:
    """Whose rows cost ten steps, as something was compiled; the next ones a tenth of one."""
    load, worth, asked = Load(4, 4, PLAIN_S, 0.0), Worth(), 0
    while worth.num_asked(load):
        rows_s = 0.1 * PLAIN_S if asked else 10 * PLAIN_S
        is_own = is_example or asked > 0
        worth.observe(load, Call(4, 0, 16, 0.5 * PLAIN_S, rows_s, is_example=is_own))
        asked += 1
    assert asked == num_calls


def test_a_first_of_its_kind_among_others_has_no_say_in_how_many_are_asked() -> None:
    load, worth = Load(4, 4, PLAIN_S, 0.0), Worth()
    for place in range(TRIAL):
        assert worth.num_asked(load) == 4
        rows_s = 10 * PLAIN_S if place == 1 else 0.1 * PLAIN_S
        worth.observe(load, Call(4, 12, 16, 0.5 * PLAIN_S, rows_s, is_example=place != 1))
    assert worth.num_asked(load) == 4


def test_what_was_lost_once_is_paid_by_calls_that_gain() -> None:
    """And not by 600 steps without guesses: here the first call computes all prompts."""
    load, worth = Load(2, 2, PLAIN_S, 0.0), Worth()
    for step in range(30):
        assert worth.num_asked(load) == 2
        own_s = 8 * PLAIN_S if step == 0 else 1.5 * PLAIN_S
        worth.observe(load, Call(2, 6, 8, own_s, 0.0))
        worth.serve(2, PLAIN_S)
    other = Worth()
    asked = 0
    while other.num_asked(load):  # the same loss, and then none that gains
        other.observe(load, Call(2, 6 * (asked == 0), 8, 8 * PLAIN_S if not asked else 1e-9, 0.0))
        asked += 1
    assert asked == TRIAL


@pytest.mark.parametrize(("each_s", "goes_on"), [(1.2, True), (3.2, False)])
def test_calls_that_gain_together_end_no_trial_where_the_last_one_brought_nothing(
    each_s: float, *, goes_on: bool
) -> None:
    """Of two sequences, each call costs `each_s` plain steps and every second one is right: it
    brings 2.7 of them."""
    load, worth = Load(2, 2, PLAIN_S, 0.0), Worth()
    worth.num_asked(load)
    worth.observe(load, Call(2, 6, 8, 8 * PLAIN_S, 0.0))  # it computes all prompts
    asked = 1
    while asked < 60 and worth.num_asked(load):
        asked += 1
        worth.observe(load, Call(2, 6 * (asked % 2 == 0), 8, each_s * PLAIN_S, 0.0))
    assert asked == (60 if goes_on else TRIAL)


def test_what_no_call_tells_counts_against_those_that_gain_together() -> None:
    """Two calls gain 0.2 plain steps, and what is charged beside each two of them is 0.3."""
    load, worth = Load(2, 2, PLAIN_S, 0.0), Worth()
    worth.num_asked(load)
    worth.observe(load, Call(2, 6, 8, 8 * PLAIN_S, 0.0))
    asked = 1
    while asked < 60 and worth.num_asked(load):
        asked += 1
        if asked % 2:
            worth.charge(2, 0.3 * PLAIN_S)
        worth.observe(load, Call(2, 6 * (asked % 2 == 0), 8, 1.25 * PLAIN_S, 0.0))
    assert asked == TRIAL


@pytest.mark.parametrize(("gain", "beside", "every"), [(0.2, 0.3, 1), (0.01, 0.3, 8)])
def test_calls_that_gain_go_on_in_no_debt_that_grows(
    gain: float, beside: float, every: int
) -> None:
    """Each of them gains, and what is charged beside is more than all do."""
    load, worth = Load(2, 2, PLAIN_S, 0.0), Worth()
    worth.num_asked(load)
    worth.observe(load, Call(2, 6, 8, 8 * PLAIN_S, 0.0))
    asked = 1
    brings_s = 6 * value_s(load)
    while asked < 60 and worth.num_asked(load):
        asked += 1
        worth.observe(load, Call(2, 6, 8, brings_s - gain * PLAIN_S, 0.0))
        if asked % every == 0:
            worth.charge(2, beside * PLAIN_S)
    assert asked <= TRIAL + 2 * every


def test_a_trial_owes_nothing_to_the_one_before() -> None:
    """What earlier ones gained does not let it go on."""
    load, worth = Load(2, 2, PLAIN_S, 0.0), Worth()
    for first_s, num_kept in ((5 * PLAIN_S, 6), (30 * PLAIN_S, 0)):
        assert worth.num_asked(load)
        worth.observe(load, Call(2, 0, 8, first_s, 0.0))
        asked = 1
        while asked < TRIAL + (num_kept == 0) and worth.num_asked(load):
            asked += 1
            worth.observe(load, Call(2, num_kept, 8, 0.5 * PLAIN_S, 0.0))
        assert asked == TRIAL
    assert worth.num_trials(2) == 2


def test_each_trial_has_its_own_debt_to_pay() -> None:
    """The second one has a deeper one, and goes on as the first did: two calls of three gain."""
    load, worth = Load(2, 2, PLAIN_S, 0.0), Worth()
    for first_s in (5 * PLAIN_S, 30 * PLAIN_S):
        assert worth.num_asked(load)
        worth.observe(load, Call(2, 0, 8, first_s, 0.0))
        trial, asked = worth.num_trials(2), 1
        while worth.num_asked(load) and worth.num_trials(2) == trial:
            asked += 1
            worth.observe(load, Call(2, 6 if asked % 3 != 1 else 0, 8, 1.2 * PLAIN_S, 0.0))
        worth.take_back(load)
    assert asked > 30


@pytest.mark.parametrize("own_s", [0.02 * PLAIN_S, 3.0 * PLAIN_S])
def test_who_is_in_debt_is_asked_again_some_time_later_and_slept_through(own_s: float) -> None:
    """Whether a call costs much, or next to nothing: what is measured in steps that are not slept
    through has its price, too."""
    one = Exploration(1)
    num_slept = num_asked = 0
    for step in range(2000):
        if one.sleeps(1):
            one.sleep(1, PLAIN_S)
            num_slept += step >= 200
            continue
        is_asking = one.begin(1, 1)
        if is_asking:
            one.choose(0, one.among(range(1)))
        num_asked += is_asking
        own = {0: own_s} if is_asking else {}
        one.learn(1, PLAIN_S + sum(own.values()), own, {0: 0})
    assert num_slept > 0.5 * 1800
    assert num_asked * own_s <= SHARE * 2000 * 2 * PLAIN_S + GRANT_STEPS * PLAIN_S + TRIAL * own_s
    assert num_asked * own_s >= 0.5 * SHARE * 2000 * PLAIN_S


def test_a_step_for_which_nobody_can_guess_costs_no_call_of_a_trial() -> None:
    """The last step of a request, say, while a first call's loss is being made good."""
    one = Exploration(1)
    for _ in range(8):
        assert not one.begin(1, 1, 30)
        one.learn(1, PLAIN_S, {}, {})
    for step in range(12):
        if step in (2, 3, 5):
            assert not one.begin(1, 1, 30, can_ask=False)
            one.learn(1, PLAIN_S, {}, {})
        assert one.begin(1, 1, 30)
        assert one.among([0]) == [0]
        one.choose(0, [0])
        own_s = 9 * PLAIN_S if step == 0 else 1.5 * PLAIN_S
        one.learn(4, PLAIN_S + own_s, {0: own_s}, {0: 3})


def test_of_long_sequences_a_first_trial_asks_for_one() -> None:
    for num_tokens, num_asked in ((30, 4), (200, 2), (5000, 1)):
        one = Exploration(1)
        for _ in range(8):
            assert not one.begin(4, 4, 4 * num_tokens)
            one.learn(4, PLAIN_S, {}, {})
        assert one.begin(4, 4, 4 * num_tokens)
        assert len(one.among(range(4))) == num_asked


def test_rows_have_a_price_before_one_was_measured_and_the_first_measure_is_none() -> None:
    one = Exploration(1)
    for _ in range(8):
        one.begin(2, 2)
        one.learn(2, PLAIN_S, {}, {})
    for step_s in (9 * PLAIN_S, 1.4 * PLAIN_S):
        assert one.begin(2, 2)
        assert math.isclose(one.load.row_s, 0.05 * PLAIN_S)
        assert math.isclose(one.load.plain_s, PLAIN_S)
        one.choose(0, one.among(range(2)))
        one.learn(10, step_s + 1e-5, {0: 1e-5}, {0: 6})
    one.begin(2, 2)
    assert 0.03 * PLAIN_S < one.load.row_s < 0.051 * PLAIN_S


def test_a_step_is_the_median_of_the_newest_ones() -> None:
    """Neither the very first ones, nor the shortest; and not of another time."""
    pace = Pace()
    for seconds in (0.5, 0.3, 0.010, 0.011, 0.007, 0.010, 0.012):
        pace.observe(2, seconds)
        assert pace.seconds(2, 0.0, 8) is None
    pace.observe(2, 0.011)
    assert pace.seconds(2, 0.0, 8) == 0.011
    for seconds in (0.020, 0.9, 0.021, 0.022, 0.021, 0.023):
        pace.on_guessed(2)
        pace.observe(2, seconds)
    assert pace.seconds(2, 0.0, 8) == 0.021


def test_a_step_that_comes_to_nothing_costs_a_trial_no_call() -> None:
    load, worth = Load(4, 4, PLAIN_S, 0.0), Worth()
    for _ in range(3 * TRIAL):
        assert worth.num_asked(load) > 0
        worth.take_back(load)
    assert worth.num_trials(4) <= 1


def _engine(
    drafter: PromptLookup, clock: Callable[[], float], model: FakeModel | None = None
) -> LLMEngine:
    model = model or FakeModel(context_window=WINDOW, block_size=SIZE)
    return LLMEngine(EngineConfig(num_blocks=40), model, drafters=[drafter], clock=clock)


def test_all_that_is_done_for_guesses_is_charged_but_in_steps_that_are_slept_through(
    make_request: Callable[..., Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the clock of who guesses: looking whether to rest takes 1, beginning 2, learning 4, a call
    of the drafter 8; what is learnt of a step is learnt in the next one's time."""
    now_s = 0.0
    learnt: list[tuple[dict[int, float], float]] = []

    def taking(name: str, seconds: float) -> None:
        real = getattr(Exploration, name)

        def run(self: Exploration, *args: Any, **kwargs: Any) -> Any:
            nonlocal now_s
            now_s += seconds
            if name == "learn":
                learnt.append((dict(args[2]), kwargs["beside_s"]))
            return real(self, *args, **kwargs)

        monkeypatch.setattr(Exploration, name, run)

    for name, seconds in (("rests", 1.0), ("begin", 2.0), ("learn", 4.0)):
        taking(name, seconds)

    class Knowing(PromptLookup):
        def propose(self, tasks: Sequence[Task]) -> list[Draft]:
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
    speculator = engine._speculator
    assert speculator is not None
    speculator._beside_s = 9.0  # looking whether to rest, in the wait for a launched step
    speculator.pass_by(1, (), is_first=False, is_last=False)
    assert speculator._beside_s == 0.0


def test_what_a_request_before_left_to_be_learnt_is_not_of_the_next_ones_time(
    make_request: Callable[..., Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the two the engine was idle."""
    now_s = 0.0
    found: list[tuple[float, float]] = []
    real = Exploration.learn

    def learn(self: Exploration, rows: int, seconds: float, *args: Any, beside_s: float) -> None:
        nonlocal now_s
        now_s += 4.0
        found.append((seconds, beside_s))
        real(self, rows, seconds, *args, beside_s=beside_s)

    monkeypatch.setattr(Exploration, "learn", learn)
    engine = _engine(PromptLookup(NgramConfig()), lambda: now_s)
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
    real = Exploration.learn

    def learn(
        self: Exploration, rows: int, seconds: float, own_s: Any, right: Any, *, beside_s: float
    ) -> None:
        nonlocal charged_s
        charged_s += sum(own_s.values()) + beside_s
        real(self, rows, seconds, own_s, right, beside_s=beside_s)

    class Slow(PromptLookup):
        def propose(self, tasks: Sequence[Task]) -> list[Draft]:
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

    monkeypatch.setattr(Exploration, "learn", learn)
    model = Failing(context_window=WINDOW, block_size=SIZE)
    engine = _engine(Slow(NgramConfig()), lambda: now_s, model)
    engine.submit(make_request("r", [1, 2, 3], max_tokens=30))
    while engine.has_work():
        with contextlib.suppress(RuntimeError):
            engine.step()
    assert num_failed == 1
    assert charged_s == drafted_s > 8.0
