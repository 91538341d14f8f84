"""Whom nobody is asked for is launched ahead: what that is worth is what guesses are held against,
and what stopping it costs is charged. The engine's part: test_engine.py."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import NamedTuple

import pytest

from engine.speculation.exploration import Exploration
from engine.speculation.worth import GRANT_STEPS, SHARE, TRIAL

LAUNCHED_S = 0.01


@dataclass(frozen=True)
class World:
    """What steps cost, and what guesses bring."""

    size: int
    pause_s: float
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
        return LAUNCHED_S + self.pause_s + rows_s + (self.own_s if num_asked else 0.0)


class Ran(NamedTuple):
    seconds: float
    num_tokens: float
    asked: list[int]
    """Of each step; 0: nobody."""
    launched: list[bool]


def _run(
    world: World,
    num_steps: int,
    exploration: Exploration | None = None,
    *,
    launches: bool = True,
) -> Ran:
    """As engine/runner.py does."""
    size, one = world.size, exploration or Exploration(1)
    seconds = num_tokens = 0.0
    asked: list[int] = []
    launched: list[bool] = []
    is_live = False
    for _ in range(num_steps):
        num_asked = 0
        is_first = not is_live
        if launches and (is_live or one.rests(size)):
            step_s = LAUNCHED_S + (world.pause_s / 2 if is_first else 0.0)
            is_live = one.rests(size)
            if world.is_at_once:  # this one, unless it was launched before, and the next one
                step_s = LAUNCHED_S * (is_first + is_live)
            one.pass_by(size, step_s, is_first=is_first, is_last=not is_live)
            launched.append(True)
        else:
            launched.append(False)
            drafted: dict[int, float] = {}
            if one.begin(size, size):
                num_asked = len(one.choose(0, one.among(range(size))))
                drafted = {0: world.own_s}
            step_s = world.guessed_s(num_asked)
            num_rows = size + num_asked * world.num_nodes
            one.learn(num_rows, step_s, drafted, {0: int(num_asked * world.kept)})
        seconds += step_s
        num_tokens += size + int(num_asked * world.kept)
        asked.append(num_asked)
    return Ran(seconds, num_tokens, asked, launched)


def _speed(world: World, ran: Ran) -> float:
    """Against steps that are all launched."""
    return ran.num_tokens / world.size * LAUNCHED_S / ran.seconds


def test_what_pays_against_plain_steps_that_are_not_launched_is_given_up() -> None:
    """Two tokens a step for 2.1 times the seconds: a step that is not launched lasts 26 % longer,
    and beside such ones it is faster."""
    world = World(size=32, pause_s=0.26 * LAUNCHED_S, row_s=0.0000315, kept=1.0)
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
    world = World(size=size, pause_s=0.5 * LAUNCHED_S, row_s=0.0004, kept=kept)
    ran = _run(world, 6000)
    lost_s = ran.seconds - ran.num_tokens / size * LAUNCHED_S
    trial_s = TRIAL * (world.guessed_s(size) - LAUNCHED_S) + world.pause_s
    once_s = GRANT_STEPS * LAUNCHED_S + 5 * world.pause_s
    assert lost_s <= SHARE * ran.seconds + once_s + trial_s
    assert any(ran.asked[3000:]), "it is tried again"


@pytest.mark.parametrize("size", [5, 32, 64])
def test_every_step_of_a_larger_batch_is_launched_until_its_first_trial(size: int) -> None:
    """What stopping costs is measured when somebody can be asked, and not 200 steps before."""
    ran = _run(World(size=size, pause_s=0.3 * LAUNCHED_S, row_s=0.0001, kept=1.0), 400)
    assert 190 < ran.launched.index(False) < 220
    first = next(step for step, num in enumerate(ran.asked) if num)
    assert ran.launched.index(False) + 3 == first


def test_what_pays_is_asked_but_for_a_few_launched_steps() -> None:
    world = World(size=1, pause_s=0.2 * LAUNCHED_S, row_s=0.0001, kept=2.0)
    ran = _run(world, 1000)
    assert ran.launched[:9] == [True] * 9
    assert 0.94 < sum(num > 0 for num in ran.asked) / 1000 < 0.985
    assert 0 < sum(ran.launched[100:]) < 30
    assert _speed(world, ran) > 2.0


def test_the_pause_has_no_say_in_what_more_sequences_would_cost() -> None:
    """A pause as long as what 32 sequences' tokens are worth a quarter of: one sequence never pays
    it, all of them do."""
    world = World(size=32, pause_s=0.3 * LAUNCHED_S, row_s=0.00001, kept=2.0)
    ran = _run(world, 3000)
    assert next(num for num in ran.asked if num) == 1
    assert ran.asked[-1] == 32 or ran.launched[-1]
    assert _speed(world, ran) > 1.3


def test_launches_that_return_when_they_are_computed_are_not_taken_for_fast_ones() -> None:
    world = World(size=1, pause_s=0.0, row_s=0.0001, kept=1.0, is_at_once=True)
    ran = _run(world, 3000)
    assert 0.94 < sum(num > 0 for num in ran.asked) / 3000 < 0.985
    assert _speed(world, ran) > 1.5


def test_drafters_that_see_every_step_are_left_no_gap_where_they_pay() -> None:
    world = World(size=1, pause_s=0.2 * LAUNCHED_S, row_s=0.0001, kept=2.0)
    ran = _run(world, 1000, Exploration(1, measures_again=False))
    assert all(num > 0 for num in ran.asked[20:])


def test_it_rests_when_nobody_would_be_asked(seed: int) -> None:
    """Whatever was before, and looking changes nothing."""
    rng = random.Random(seed)
    one = Exploration(2)
    num_asked = num_rested = 0
    kept = [0.0, 0.0]
    for _ in range(3000):
        if rng.random() < 0.02:
            kept = [rng.choice([0.0, 1.0, 4.0]) for _ in kept]
        size = rng.choice([1, 1, 1, 2, 9])
        rests = one.rests(size)
        assert one.rests(size) == rests
        if rests and rng.random() < 0.7:
            one.pass_by(size, LAUNCHED_S, is_first=rng.random() < 0.1, is_last=rng.random() < 0.1)
            num_rested += 1
            continue
        is_asking = one.begin(size, size)
        assert not (rests and is_asking)
        asked = [len(one.choose(index, one.among(range(size)))) for index in (0, 1) if is_asking]
        own_s = {index: 0.001 for index, num in enumerate(asked) if num}
        num_right = {index: int(asked[index] * kept[index]) for index in own_s}
        assert is_asking == bool(own_s)
        num_asked += is_asking
        one.learn(size + 4 * sum(asked), 1.5 * LAUNCHED_S, own_s, num_right)
    assert num_asked > 0 and num_rested > 0
