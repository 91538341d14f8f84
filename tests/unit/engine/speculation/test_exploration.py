"""Whom a drafter is asked for: time is lost by finding out up to a share of what was served, and no
more; who pays is asked, few sequences at once, and who would pay for all of many is found by
one."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.speculation.expansion import Load
from engine.speculation.exploration import Exploration
from engine.speculation.worth import FEW, GRANT_STEPS, SHARE, TRIAL, Call, Worth, value_s

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
    worth = Worth(share)
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
        load = Load(size, size, 0.01 * rng.lognormvariate(0, 0.5), 0.0)
        place = _class(size)
        num_tasks = worth.num_asked(load, rng.choice([1, FEW]))
        granted.setdefault(place, _granted_s(size, load.seconds))
        trial = trials.setdefault(place, _TrialLoss())
        loss = 0.0
        if num_tasks:
            assert num_tasks <= size
            num_kept = int(num_tasks * rng.uniform(0, luck))
            own_s = 0.001 * price * rng.lognormvariate(0, 1)
            rows_s = rng.gauss(0.001, 0.001)
            loss = own_s + rows_s - num_kept * value_s(load)
            num_nodes = num_kept + rng.randrange(4)
            worth.observe(load, Call(num_tasks, num_kept, num_nodes, own_s, rows_s))
            if is_charged:
                beside_s = 0.001 * price * rng.uniform(0, 1)
                worth.charge(size, beside_s)
                worst_charge_s[place] = max(worst_charge_s[place], beside_s)
                loss += beside_s
            trial.add(worth.num_trials(size), loss)
        worth.serve(size, load.seconds)
        lost[place] = lost.get(place, 0.0) + loss
        served[place] = served.get(place, 0.0) + load.seconds
        most = share * served[place] + granted[place] + trial.worst_s + worst_charge_s[place]
        assert lost[place] <= most * (1 + 1e-9)


def _asked(worth: Worth, size: int, num_steps: int, kept: float, own_s: float) -> list[int]:
    """Of each step, where a call costs the same for any number of sequences."""
    load = Load(size, size, PLAIN_S, 0.0)
    found: list[int] = []
    for _ in range(num_steps):
        num_tasks = worth.num_asked(load)
        if num_tasks:
            num_nodes = 4 * num_tasks
            worth.observe(load, Call(num_tasks, int(num_tasks * kept), num_nodes, own_s, 0.0))
        worth.serve(size, PLAIN_S)
        found.append(num_tasks)
    return found


def test_who_pays_is_asked_each_time() -> None:
    assert _asked(Worth(), 1, 100, kept=2.0, own_s=0.5 * PLAIN_S) == [1] * 100


def test_who_pays_for_all_alone_is_found_by_one() -> None:
    """One sequence's tokens bring a 32nd of what the call costs for them."""
    asked = _asked(Worth(), 32, 2000, kept=2.0, own_s=0.5 * PLAIN_S)
    assert next(num for num in asked if num) == 1
    assert asked[-1] == 32
    assert {1, 4, 16, 32} <= set(asked) <= {0, 1, 4, 16, 32}


def test_who_does_not_pay_is_tried_again_by_one() -> None:
    asked = _asked(Worth(), 32, 4000, kept=0.0, own_s=0.5 * PLAIN_S)
    assert set(asked) == {0, 1}
    assert TRIAL < sum(asked[1000:]) <= TRIAL * (1 + 3000 * SHARE / (0.5 * TRIAL))


def test_fewer_are_tried_where_each_costs_more_than_it_brings() -> None:
    """And as many as before where it is the call that costs too much."""
    asked = _asked(Worth(), 4, 4000, kept=0.0, own_s=2.0 * PLAIN_S)
    assert next(num for num in asked if num) == 4 and set(asked[1000:]) == {0, 1}
    asked = _asked(Worth(), 4, 4000, kept=1.0, own_s=2.0 * PLAIN_S)
    assert set(asked[1000:]) == {0, 4}


def test_what_does_not_pay_any_more_is_given_up() -> None:
    worth = Worth()
    assert _asked(worth, 1, 200, kept=2.0, own_s=0.5 * PLAIN_S)[-1] == 1
    assert sum(_asked(worth, 1, 1000, kept=0.0, own_s=PLAIN_S)) < 40
    # and what pays in a batch of one says nothing of 32
    assert sum(_asked(worth, 32, 1000, kept=0.0, own_s=PLAIN_S)) < 40


def _step(
    exploration: Exploration, size: int, own_s: float, kept: int, num_rows: int | None = None
) -> int:
    """Returns: for how many one drafter was asked."""
    samples = list(range(size))
    asked: list[int] = []
    if exploration.begin(size, num_rows or size):
        asked = list(exploration.choose(0, exploration.among(samples)))
    drafted = {0: own_s} if asked else {}
    seconds = PLAIN_S + sum(drafted.values())
    exploration.learn((num_rows or size) + len(asked), seconds, drafted, {0: kept * len(asked)})
    return len(asked)


def test_a_plain_step_is_measured_before_guesses_and_among_them() -> None:
    exploration = Exploration(1)
    asked = [_step(exploration, 1, own_s=0.1 * PLAIN_S, kept=3) for _ in range(400)]
    assert asked[:9] == [0] * 8 + [1]
    assert 370 <= sum(asked) < 393


def test_trials_go_round_and_prompts_alone_ask_nobody() -> None:
    exploration = Exploration(1)
    seen: set[int] = set()
    for _ in range(3000):
        if exploration.begin(8, 8):
            (one,) = exploration.choose(0, exploration.among(range(8)))
            seen.add(one)
            exploration.learn(9, 1.1 * PLAIN_S, {0: 0.1 * PLAIN_S}, {0: 0})
        else:
            exploration.learn(8, PLAIN_S, {}, {})
    assert seen == set(range(8))
    assert not exploration.begin(0, 100)
    exploration.learn(100, 1.0, {}, {})


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
    exploration = Exploration(1)
    num_plain = served_s = lost_s = 0.0
    share = rng.random()
    own_s = PLAIN_S * rng.uniform(0.1, 4.0)
    for step in range(600):
        num_prompt = 0 if step and rng.random() < share else rng.choice([1, 30, 1000])
        num_asked = 0
        if exploration.begin(size, size + num_prompt):
            tasks = exploration.among(range(size))
            num_asked = len(exploration.choose(0, tasks))
        num_rows = size + num_prompt + num_asked
        cost_s = own_s if num_asked else 0.0
        step_s = base_s + row_s * num_rows + cost_s
        exploration.learn(num_rows, step_s, {0: own_s} if num_asked else {}, {0: 0})
        lost_s += cost_s + row_s * num_asked
        served_s += step_s
        num_plain += num_prompt == 0
        trial_s = TRIAL * (own_s + row_s * size)
        assert lost_s <= SHARE * served_s + (GRANT_STEPS * plain_s + trial_s) * (1 + 1e-6)
        assert num_asked == 0 or num_plain >= 8


def test_always_asks_for_all() -> None:
    exploration = Exploration(2, always=True)
    assert exploration.begin(5, 5)
    for drafter in range(2):
        assert list(exploration.choose(drafter, exploration.among(range(5)))) == list(range(5))


class _Account(NamedTuple):
    asked: list[bool]
    slept: list[bool]
    lost_s: float
    served_s: float


def _served(number: int, size: int, own_s: float, *, sleeps: bool) -> _Account:
    """Steps of one class of sizes, a few with prompts, whose guesses are all wrong. As
    speculator.py does, or awake all the time."""
    rng, one = random.Random(number), Exploration(1)
    asked: list[bool] = []
    slept: list[bool] = []
    lost_s = served_s = 0.0
    for _ in range(2500):
        step_s = PLAIN_S * rng.uniform(0.9, 1.1)
        num_rows = size + (100 if rng.random() < 0.02 else 0)
        is_asleep = sleeps and one.sleeps(size)
        is_asking = not is_asleep and one.begin(size, num_rows)
        if is_asking:
            assert len(one.choose(0, one.among(range(size)))) > 0
        cost_s = own_s if is_asking else 0.0
        if is_asleep:
            one.sleep(size, step_s)
        else:
            drafted = {0: own_s} if is_asking else {}
            one.learn(num_rows + is_asking, step_s + cost_s, drafted, {0: 0})
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
        assert one.lost_s <= SHARE * one.served_s + (GRANT_STEPS * 1.1 * PLAIN_S + trial_s) * 1.01
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
    number: int, size: int, num_drafters: int, beside: float, own: float
) -> None:
    """What a step that is not slept through costs beside its drafters: within the same law, but for
    one time of waking up, which the trial behind it pays for; and no trial pays for it twice."""
    rng, one = random.Random(number), Exploration(num_drafters)
    beside_s, own_s = beside * PLAIN_S, own * PLAIN_S / num_drafters
    lost_s = served_s = 0.0
    num_asked = num_slept = 0
    for _ in range(4000):
        step_s = PLAIN_S * rng.uniform(0.9, 1.1)
        if one.sleeps(size):
            one.sleep(size, step_s)
            num_slept += 1
        else:
            drafted: dict[int, float] = {}
            if one.begin(size, size):
                tasks = one.among(range(size))
                asked = [each for each in range(num_drafters) if one.choose(each, tasks)]
                drafted = dict.fromkeys(asked, own_s)
            cost_s = beside_s + sum(drafted.values())
            num_right = dict.fromkeys(drafted, 0)
            one.learn(size, step_s + cost_s, drafted, num_right, beside_s=beside_s)
            num_asked += bool(drafted)
            lost_s += cost_s
            step_s += cost_s
        served_s += step_s
        once_s = num_drafters * (GRANT_STEPS * 1.1 * PLAIN_S + TRIAL * own_s)
        once_s += (num_drafters * TRIAL + 40) * beside_s
        assert lost_s <= (SHARE * served_s + once_s) * 1.01
    assert num_asked > TRIAL and num_slept > 2000
    assert lost_s >= 0.8 * SHARE * served_s


def test_what_a_step_lasts_without_guesses_is_without_their_bookkeeping() -> None:
    one = Exploration(1)
    for _ in range(8):
        assert not one.begin(4, 4)
        one.learn(4, PLAIN_S + 0.001, {}, {}, beside_s=0.001)
    assert one.begin(4, 4)
    assert math.isclose(one.load.plain_s, PLAIN_S)


def test_a_launched_step_of_its_size_ends_a_sleep_and_those_of_others_do_not() -> None:
    """Nothing of what was served is lost, nor counted twice."""
    one = Exploration(1)
    for _ in range(8 + TRIAL + 1):
        _step(one, 8, own_s=PLAIN_S, kept=0)
    (worth,) = one._worths
    barred_s = worth.barred_s(8)
    assert one.sleeps(8) and one.sleeps(5) and not one.sleeps(4) and not one.sleeps(0)
    one.sleep(8, 0.25)
    assert worth.barred_s(8) == barred_s
    _step(one, 1, own_s=PLAIN_S, kept=0)
    one.pass_by(1, PLAIN_S, is_first=True, is_last=True)
    assert one.sleeps(8) and worth.barred_s(8) == barred_s
    one.sleep(5, 0.125)
    one.pass_by(8, PLAIN_S, is_first=True, is_last=True)
    assert not one.sleeps(8)
    assert math.isclose(worth.barred_s(8), barred_s - 0.25 - 0.125 - PLAIN_S)


def _course(
    num_steps: int,
    size: Callable[[int], int],
    kept: Callable[[int], int],
    can_ask: Callable[[int], bool] = lambda _: True,
) -> tuple[list[int], float, float]:
    """Steps whose bookkeeping is 2 % of one, with a cheap drafter. Returns: those in which it was
    asked; seconds that all of it cost; seconds served."""
    beside_s, own_s = 0.02 * PLAIN_S, 0.1 * PLAIN_S
    one, asked, lost_s, served_s = Exploration(1), list[int](), 0.0, 0.0
    for step in range(num_steps):
        num = size(step)
        seconds = PLAIN_S
        if one.sleeps(num):
            one.sleep(num, seconds)
        else:
            drafted, num_right, num_rows = dict[int, float](), 0, num
            seconds += beside_s
            if one.begin(num, num, 50 * num, can_ask=can_ask(step)):
                tasks = one.choose(0, one.among(range(num)))
                asked.append(step)
                drafted, num_right = {0: own_s}, kept(step) * len(tasks)
                num_rows += len(tasks)
                seconds += own_s
            one.learn(num_rows, seconds, drafted, {0: num_right}, beside_s=beside_s)
        lost_s += seconds - PLAIN_S
        served_s += seconds
    return asked, lost_s, served_s


def test_where_batches_straddle_a_class_each_sleeps_by_itself_and_who_pays_is_found() -> None:
    asked, lost_s, served_s = _course(12000, lambda step: 4 + step % 2, lambda _: 0)
    assert len(asked) > 4 * TRIAL
    assert lost_s <= SHARE * served_s + 2 * (GRANT_STEPS + 2.0) * PLAIN_S
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
    one = Exploration(1, always=True)
    for _ in range(100):
        assert _step(one, 4, own_s=9 * PLAIN_S, kept=0) == 4
        assert not one.sleeps(4)
