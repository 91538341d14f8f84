"""What holds of the plan whatever it sees: each law is recomputed here, from the decisions alone.

Draws come from the run's seed (tests/conftest.py). No false alarms: each law is one that the plan
must keep always, within the noise that the law itself names.
"""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import dataclass, replace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from services.autoscaler.config import Pace, PoolLimits, Priors, ScaleLimits, Targets
from services.autoscaler.decision import Decision, Direction, Reason
from services.autoscaler.plan import PlanState, plan
from services.autoscaler.signals import (
    ByRole,
    Observations,
    ObservedTraffic,
    ObservedWorker,
    Pool,
    Role,
    Work,
)
from tests.conftest import examples
from tests.unit.autoscaler.looks import (
    EVERY_S,
    PACE,
    PROMPT_TOKENS,
    Runs,
    by_time,
    look,
    pool,
    traffic,
)

NUM_LOOKS = 40

PHASES = (Phase.explicit, Phase.generate)
"""A case is mostly its seed, which does not get simpler by shrinking."""


@st.composite
def scale_limits(draw: st.DrawFn) -> ScaleLimits:
    def one() -> PoolLimits:
        least = draw(st.integers(0, 3))
        most = draw(st.integers(max(1, least), 9))
        return PoolLimits(least, most, draw(st.sampled_from([1, 1, 1, 2, 4])))

    prefill, decode = one(), one()
    least = ScaleLimits(prefill, decode)
    budget = draw(st.one_of(st.just(0), st.integers(least.devices(least.least), 40)))
    return ScaleLimits(prefill, decode, budget, draw(st.integers(1, 5)), draw(st.integers(1, 3)))


@st.composite
def paces(draw: st.DrawFn) -> Pace:
    up_s = draw(st.sampled_from([0.0, 5.0, 20.0]))
    return Pace(
        window_s=draw(st.sampled_from([5.0, 30.0])),
        up_s=up_s,
        down_s=draw(st.sampled_from([up_s, 20.0, 60.0])),
        flip_s=draw(st.sampled_from([0.0, 10.0])),
        flip_cooldown_s=draw(st.sampled_from([0.0, 20.0])),
        down_cooldown_s=draw(st.sampled_from([0.0, 15.0])),
        settle_s=draw(st.sampled_from([0.0, 10.0])),
        idle_s=draw(st.sampled_from([0.0, 20.0])),
        slack=draw(st.sampled_from([0.0, 0.2])),
        lead_s=draw(st.sampled_from([0.0, 60.0])),
    )


def anything(
    rng: random.Random, now_s: float, workers: ByRole[int], *, num_lost: int = 0
) -> Observations:
    """A look at a cluster in which everything may be, also what makes no sense together."""
    rate = rng.choice([0.0, 0.0, 1.0, 10.0, 200.0]) * rng.random()

    def one(role: Role, num: int) -> Pool:
        seen = min(num, 12)
        return Pool(
            wanted=num,
            num_ready=rng.randint(max(0, num - 2), num + 1),
            num_draining=rng.choice([0, 0, 0, 1, 2]),
            workers=tuple(
                ObservedWorker(
                    f"{role.value}-{index}",
                    age_s=rng.choice([0.0, 1.0, 1.0, 1.0, 99.0]),
                    is_draining=rng.random() < 0.1,
                    can_flip=rng.random() < 0.8,
                    num_running=rng.randrange(64),
                    num_waiting=rng.randrange(9),
                    num_queued_tokens=rng.choice([0, 0, 10_000, 1_000_000]),
                    num_blocks=rng.choice([0, 1000, 20_000]),
                    num_free_blocks=rng.randrange(1000),
                    work=Work(
                        rng.randrange(500),
                        rng.random() * 5,
                        rng.randrange(100_000),
                        rng.randrange(5_000),
                    ),
                )
                for index in range(seen)
            ),
        )

    num = round(rate * EVERY_S)
    done = rng.randint(0, num)
    seen = ObservedTraffic(
        EVERY_S,
        num_arrived=num,
        num_finished=done,
        num_prompt_tokens=done * rng.randrange(1, 5000),
        num_cached_tokens=done * rng.randrange(5000),
        num_output_tokens=done * rng.randrange(1, 2000),
        ttft=by_time(rng.choice([0.2, 0.2, 3.0]), done),
        tpot=by_time(rng.choice([0.02, 0.02, 0.2]), done),
        num_waiting=rng.choice([0, 0, 0, 3]),
        num_queued=rng.choice([0, 0, 0, 300]),
        num_running=rng.choice([0, 5]),
    )
    return Observations(
        now_s,
        workers.map(one),
        None if rng.random() < 0.05 else seen,
        routers_age_s=rng.choice([1.0] * 9 + [60.0]),
        scale_age_s=rng.choice([0.0] * 9 + [60.0]),
        num_flipping=rng.choice([0, 0, 0, 1]),
    )


@dataclass
class Wild:
    """The plan on anything; now and then somebody else sets the scale."""

    limits: ScaleLimits
    pace: Pace
    seed: int
    is_meddled: bool

    def run(self) -> Looks:
        rng, state, now_s = random.Random(self.seed), PlanState(), 0.0
        workers = self.limits.least
        seen_and_done = []
        for _ in range(NUM_LOOKS):
            if self.is_meddled and rng.random() < 0.1:
                workers = ByRole(rng.randrange(12), rng.randrange(12))
            seen = anything(rng, now_s, workers)
            decision, state = plan(
                seen, Targets(), self.limits, state, pace=self.pace, priors=Priors()
            )
            seen_and_done.append((seen, decision))
            if not self.is_meddled or rng.random() < 0.9:  # else the scaler failed
                workers = decision.wanted
            now_s += EVERY_S
        return seen_and_done


Looks = list[tuple[Observations, Decision]]

WILD = st.builds(Wild, scale_limits(), paces(), st.integers(0, 2**32), st.booleans())


def is_allowed(workers: ByRole[int], limits: ScaleLimits) -> bool:
    """Recomputed: the limits as their docstrings say them."""
    p, d = workers.prefill, workers.decode
    if p == d == 0 and limits.prefill.min_workers == limits.decode.min_workers == 0:
        return True
    in_pools = (
        max(1, limits.prefill.min_workers) <= p <= limits.prefill.max_workers
        and max(1, limits.decode.min_workers) <= d <= limits.decode.max_workers
    )
    devices = p * limits.prefill.num_devices + d * limits.decode.num_devices
    return in_pools and (limits.budget_devices == 0 or devices <= limits.budget_devices)


@settings(max_examples=examples(100), phases=PHASES)
@given(WILD)
def test_the_laws_hold_whatever_is_seen(wild: Wild) -> None:
    """Each law by itself, over the same runs."""
    looks = wild.run()
    for law in (
        never_over_the_budget_nor_beyond_a_pools_bounds,
        devices_of_who_is_leaving_or_starting_are_counted,
        never_two_directions_at_once_and_flips_conserve_the_total,
        stale_signals_change_nothing_but_what_breaks_a_limit,
        windows_and_cooldowns_bound_what_is_done,
        who_is_needed_to_serve_at_all_is_not_taken_away,
    ):
        law(wild, looks)


def never_over_the_budget_nor_beyond_a_pools_bounds(wild: Wild, looks: Looks) -> None:
    for seen, decision in looks:
        if is_allowed(decision.before, wild.limits):
            assert is_allowed(decision.wanted, wild.limits), decision.line()
        elif seen.scale_age_s <= wild.pace.stale_s:
            assert decision.reason in (Reason.LIMITS, Reason.DEVICES, Reason.INCOMPLETE)


@settings(max_examples=examples(60), phases=PHASES)
@given(scale_limits(), st.integers(0, 20), st.integers(0, 20))
def test_whatever_is_there_is_within_the_limits_soon(
    limits: ScaleLimits, num_prefill: int, num_decode: int
) -> None:
    """Each look takes away as many as may go at once, until one adds."""
    runs = Runs(limits=limits, workers=ByRole(num_prefill, num_decode))
    for _ in range(-(-(num_prefill + num_decode) // limits.max_removed_workers) + 1):
        runs.at(0.0, traffic=None)
    assert is_allowed(runs.workers, limits)


def who_is_needed_to_serve_at_all_is_not_taken_away(wild: Wild, looks: Looks) -> None:
    """A role that had the fewest workers that must be, serving by the word of the scaler and the
    registry, has them after any action: a flip takes one of them, a removal first those that do
    not serve. But where there shall be none at all."""
    for seen, decision in looks:
        if decision.wanted == ByRole(0, 0):
            continue
        for role in Role:
            pool, least = seen.pools.of(role), wild.limits.least.of(role)
            num_fresh = sum(
                not worker.is_draining and worker.age_s <= wild.pace.stale_s
                for worker in pool.workers
            )
            num_serving = min(pool.num_ready, num_fresh)
            num_taken = max(0, -decision.change(role))
            if decision.direction is Direction.DOWN:
                num_taken = max(0, num_taken - max(0, decision.before.of(role) - num_serving))
            if num_taken and num_serving >= least:
                assert num_serving - num_taken >= least, decision.line()


@settings(max_examples=examples(15), phases=PHASES)
@given(st.integers(0, 2**32), st.integers(2, 3))
def test_workers_that_never_come_cost_no_role_its_last_one(seed: int, num_decode: int) -> None:
    """Under a full budget prefill lacks one, and of the decode workers any may not serve."""
    rng, now = random.Random(seed), ByRole(1, num_decode)
    limits = ScaleLimits(PoolLimits(1, 4), PoolLimits(1, 4), 1 + num_decode)
    runs = Runs(limits=limits, workers=now)
    looks: Looks = []
    num_serving = rng.randint(1, num_decode)
    while not runs.actions and runs.now_s < 1200:
        decode = pool(Role.DECODE, num_decode, 9.0)
        decode = replace(decode, num_ready=num_serving, workers=decode.workers[:num_serving])
        seen = look(runs.now_s, now, 9.0, pools=ByRole(pool(Role.PREFILL, 1, 9.0), decode))
        looks.append((seen, runs.step(seen)))
    assert runs.actions
    who_is_needed_to_serve_at_all_is_not_taken_away(Wild(limits, PACE, seed, False), looks)


def devices_of_who_is_leaving_or_starting_are_counted(wild: Wild, looks: Looks) -> None:
    for seen, decision in looks:
        if decision.direction is Direction.UP:
            taken = sum(
                (max(pool.wanted, pool.num_ready) + pool.num_draining + decision.change(role))
                * wild.limits.of(role).num_devices
                for role, pool in ((role, seen.pools.of(role)) for role in Role)
            )
            assert taken <= wild.limits.budget


def never_two_directions_at_once_and_flips_conserve_the_total(wild: Wild, looks: Looks) -> None:
    for seen, decision in looks:
        changes = [decision.wanted.of(role) - decision.before.of(role) for role in Role]
        assert decision.before == seen.pools.map(lambda _, pool: pool.wanted)
        if decision.direction is Direction.FLIP:
            (flip,) = decision.flips
            assert sum(changes) == 0 and decision.change(flip.to) == 1
            donor = {worker.worker_id: worker for worker in seen.pools.of(flip.to.other).workers}
            chosen = donor[flip.worker_id]
            assert chosen.can_flip and not chosen.is_draining
            assert chosen.age_s <= wild.pace.stale_s
            assert not seen.num_flipping
        else:
            assert not decision.flips
            assert not min(changes) < 0 < max(changes)
            assert {Direction.HOLD: 0, Direction.UP: 1, Direction.DOWN: -1}[decision.direction] == (
                sum(changes) > 0
            ) - (sum(changes) < 0)


def stale_signals_change_nothing_but_what_breaks_a_limit(wild: Wild, looks: Looks) -> None:
    for seen, decision in looks:
        stale_s = wild.pace.stale_s
        is_blind = seen.traffic is None or seen.routers_age_s > stale_s
        if seen.scale_age_s > stale_s:
            assert not decision.is_action
        elif is_blind and is_allowed(decision.before, wild.limits):
            assert not decision.is_action and decision.reason is Reason.STALE


@settings(max_examples=examples(15), phases=PHASES)
@given(WILD)
def test_it_is_a_function_and_says_why(wild: Wild) -> None:
    once, again = wild.run(), wild.run()
    assert once == again
    for _, decision in once:
        assert json.loads(decision.to_json_line()) == decision.to_json()
        assert "\n" not in decision.line()
        assert decision.num_affordable <= decision.num_candidates
        if decision.reason not in (Reason.STEADY, Reason.LOAD, Reason.LATENCY):
            assert decision.binding


def windows_and_cooldowns_bound_what_is_done(wild: Wild, looks: Looks) -> None:
    """Of any span of `down_s` after more were asked for, none in which fewer are for want of load;
    removals and flips keep their distances. Where nobody meddles: whoever does begins anew."""
    if wild.is_meddled:
        return
    pace = wild.pace
    grown = {role: float("-inf") for role in Role}
    removed_s = flipped_s = float("-inf")
    for seen, decision in looks:
        now_s = seen.now_s
        if decision.direction is Direction.DOWN and decision.reason is Reason.LOAD:
            for role in Role:
                if decision.change(role) < 0:
                    assert now_s - grown[role] >= pace.down_s
        if decision.direction is Direction.DOWN and decision.reason is not Reason.IDLE:
            assert sum(map(decision.change, Role)) >= -wild.limits.max_removed_workers
            if decision.reason is not Reason.LIMITS:
                assert now_s - removed_s >= pace.down_cooldown_s
        if decision.direction is Direction.FLIP:
            assert now_s - flipped_s >= pace.flip_cooldown_s
            flipped_s = now_s
        if decision.direction is Direction.DOWN:
            removed_s = now_s
        if decision.direction is Direction.UP:
            if decision.reason is not Reason.LIMITS and decision.reason is not Reason.WAKE:
                assert sum(map(decision.change, Role)) <= wild.limits.max_added_workers
            for role in Role:
                if decision.change(role) > 0:
                    grown[role] = now_s


BUDGETS = st.sampled_from([0, 4, 6, 9])


def noisy(
    runs: Runs, rate: float, amplitude: float, rng: random.Random, seconds: float
) -> list[Decision]:
    """A constant load, of which everything measured is off by up to `amplitude` in all."""
    first, end_s = len(runs.decisions), runs.now_s + seconds
    part = (1 + amplitude) ** (1 / 3) - 1  # arrivals, steps and lengths multiply

    def off() -> float:
        return rng.uniform(1 - part, 1 + part)

    while runs.now_s < end_s:
        seen = look(runs.now_s, runs.workers, rate)
        arrived = replace(traffic(rate * off()), num_running=0)
        length, drawn = off(), off()
        arrived = replace(
            arrived,
            num_prompt_tokens=round(arrived.num_finished * PROMPT_TOKENS * length),
            num_output_tokens=round(arrived.num_output_tokens * drawn),
        )

        def one(role: Role, num: int) -> Pool:
            found = pool(role, num, rate)
            slower = off()
            return replace(
                found,
                workers=tuple(
                    replace(w, work=replace(w.work, step_s=w.work.step_s * slower), num_running=0)
                    for w in found.workers
                ),
            )

        runs.step(replace(seen, pools=runs.workers.map(one), traffic=arrived))
    return runs.decisions[first:]


def reversals(decisions: list[Decision], role: Role) -> int:
    """How often a pool's number of workers turned round."""
    moves = [decision.change(role) > 0 for decision in decisions if decision.change(role)]
    return sum(a != b for a, b in itertools.pairwise(moves))


@settings(max_examples=7, phases=PHASES)
@given(
    rate=st.floats(0.5, 120.0),
    amplitude=st.floats(0.0, 0.08),
    budget=BUDGETS,
    start=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    seed=st.integers(0, 2**32),
)
def test_a_constant_load_within_noise_is_answered_once(
    rate: float, amplitude: float, budget: int, start: tuple[int, int], seed: int
) -> None:
    """No swinging: after a quarter of an hour nothing at all is done any more, and no pool turned
    round twice before. Half of the slack of 0.2 is what noise may be."""
    limits = ScaleLimits(PoolLimits(1, 8), PoolLimits(1, 8), budget)
    runs = Runs(limits=limits, workers=ByRole(*start), pace=replace(PACE, lead_s=60.0))
    rng = random.Random(seed)
    first = noisy(runs, rate, amplitude, rng, 900)
    assert max(reversals(first, role) for role in Role) <= 1
    later = noisy(runs, rate, amplitude, rng, 900)
    assert not [decision.line() for decision in later if decision.is_action]


@settings(max_examples=7, phases=PHASES)
@given(
    low=st.floats(0.2, 100.0),
    times=st.floats(1.0, 4.0),
    prompt_tokens=st.integers(16, 4000),
    budget=BUDGETS,
)
def test_more_load_never_gets_fewer_workers(
    low: float, times: float, prompt_tokens: int, budget: int
) -> None:
    """From the same beginning, both settled. Under a full budget of both pools together: what each
    gets there is what serves most."""

    def settled(rate: float) -> ByRole[int]:
        limits = ScaleLimits(PoolLimits(1, 8), PoolLimits(1, 8), budget)
        runs = Runs(limits=limits, pace=replace(PACE, window_s=60.0))
        for _ in range(60):
            seen = look(runs.now_s, runs.workers, rate)
            asked = seen.traffic
            assert asked is not None
            num = asked.num_finished * prompt_tokens
            runs.step(replace(seen, traffic=replace(asked, num_prompt_tokens=num)))
        return runs.workers

    less, more = settled(low), settled(low * times)
    assert more.prefill + more.decode >= less.prefill + less.decode
    if not budget:
        assert more.prefill >= less.prefill and more.decode >= less.decode


@pytest.mark.parametrize("shape", ["saw", "square"])
def test_a_swinging_load_does_not_swing_the_pools(shape: str) -> None:
    """A load that goes up and down within the down window is answered by its height."""

    def rate(passed_s: float) -> float:
        phase = passed_s % 120 / 120
        return 2.0 + 28.0 * (phase if shape == "saw" else float(phase < 0.5))

    runs = Runs()
    decisions = runs.during(1800, rate)
    assert max(reversals(decisions, role) for role in Role) == 0


def test_a_load_beyond_the_budget_that_changes_its_mixture_follows_it_without_swinging() -> None:
    """Twice the devices would be needed all the time; prompts long, then answers long."""
    limits = ScaleLimits(PoolLimits(1, 8), PoolLimits(1, 8), 6)
    runs = Runs(limits=limits)

    def during(seconds: float, prompt_tokens: int, output_tokens: int) -> list[Decision]:
        first, end_s = len(runs.decisions), runs.now_s + seconds
        while runs.now_s < end_s:
            seen = look(runs.now_s, runs.workers, 40.0)
            assert seen.traffic is not None
            asked = replace(
                seen.traffic,
                num_prompt_tokens=seen.traffic.num_finished * prompt_tokens,
                num_output_tokens=seen.traffic.num_finished * output_tokens,
            )
            runs.step(replace(seen, traffic=asked))
        return runs.decisions[first:]

    during(900, 6000, 100)
    long_prompts = runs.workers
    turned = during(900, 200, 2000)
    long_answers = runs.workers
    assert limits.devices(long_prompts) == limits.devices(long_answers) == 6
    assert long_prompts.prefill > 3 > long_answers.prefill
    assert all(reversals(turned, role) == 0 for role in Role)
    assert {d.direction for d in turned if d.is_action} == {Direction.FLIP}
