"""The plan's rules, one by one, each with the case that it is there for."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace

import pytest

from process.rpc_errors import Internal
from services.autoscaler.app import as_advised
from services.autoscaler.config import START_S, Pace, PoolLimits, ScaleLimits
from services.autoscaler.decision import Decision, Direction, Flip, Reason
from services.autoscaler.plan import check_decision
from services.autoscaler.signals import ByRole, ObservedTraffic, Pool, Role
from tests.unit.autoscaler.looks import (
    EVERY_S,
    LIMITS,
    PACE,
    PROMPT_TOKENS,
    Runs,
    directions,
    look,
    pool,
    traffic,
)

ZERO = ScaleLimits(PoolLimits(0, 8), PoolLimits(0, 8), budget_devices=10)


def test_more_load_brings_more_workers_within_the_up_window() -> None:
    runs = Runs()
    runs.during(60, 2.0)
    assert runs.workers == ByRole(1, 1)
    decisions = runs.during(60, 30.0)
    first = next(index for index, decision in enumerate(decisions) if decision.is_action)
    # The rate's own window delays the first sight of it.
    assert PACE.up_s <= first * EVERY_S <= PACE.up_s + PACE.window_s / 2
    assert decisions[first].direction is Direction.UP
    assert decisions[first].reason is Reason.LOAD
    assert runs.workers.prefill >= 4  # 30 prompts a second at 10 a second each
    assert runs.decisions[-1].terms["prefill.needed"] <= runs.workers.prefill


def test_a_moment_of_more_load_brings_nobody() -> None:
    runs = Runs(pace=replace(PACE, up_s=30.0))
    runs.during(120, 4.0)
    runs.at(12.0)
    assert not directions(runs.during(120, 4.0))


def test_less_load_takes_workers_away_after_the_down_window_and_one_by_one() -> None:
    runs = Runs()
    runs.during(120, 30.0)
    many = runs.workers
    began_s = runs.now_s
    decisions = runs.during(PACE.down_s + 400, 2.0)
    downs = [decision for decision in decisions if decision.direction is Direction.DOWN]
    assert runs.workers.prefill < many.prefill and runs.workers.prefill <= 2
    assert downs[0].at_s >= began_s + PACE.down_s - EVERY_S
    moments = [decision.at_s for decision in downs]
    gaps = [b - a for a, b in itertools.pairwise(moments)]
    assert min(gaps) >= PACE.down_cooldown_s
    assert all(sum(d.change(role) for role in Role) == -1 for d in downs)


def starting(runs: Runs, role: Role, num: int, rate: float) -> ByRole[Pool]:
    """The pools as they are wanted; `num` workers of one role do not serve yet."""
    pools = look(runs.now_s, runs.workers, rate).pools
    one = pools.of(role)
    num_ready = one.wanted - num
    return pools.but(role, replace(one, num_ready=num_ready, workers=one.workers[:num_ready]))


@pytest.mark.parametrize("role", list(Role), ids=str)
def test_fewer_suffice_is_not_counted_while_a_worker_of_the_pool_starts(role: Role) -> None:
    """A burst that is over before the worker that it brought is ready."""
    runs = Runs(workers=ByRole(3, 3))
    runs.during(30, 30.0)
    before = runs.workers
    for _ in range(int(PACE.down_s / EVERY_S) + 10):
        decision = runs.at(2.0, pools=starting(runs, role, 1, 2.0))
        assert runs.workers.of(role) == before.of(role)
    ready_s = runs.now_s
    while runs.workers.of(role) == before.of(role):
        decision = runs.at(2.0)
        assert decision.at_s < ready_s + 2 * PACE.down_s
    assert decision.direction is Direction.DOWN
    assert decision.at_s - ready_s >= PACE.down_s - EVERY_S


def test_a_worker_that_starts_keeps_only_its_own_pool() -> None:
    runs = Runs(workers=ByRole(3, 3))
    runs.during(30, 30.0)
    before = runs.workers
    for _ in range(int(PACE.down_s / EVERY_S) + 20):
        decision = runs.at(2.0, pools=starting(runs, Role.PREFILL, 1, 2.0))
    assert runs.workers.prefill == before.prefill and runs.workers.decode < before.decode
    while "starts" not in decision.binding:
        decision = runs.at(2.0, pools=starting(runs, Role.PREFILL, 1, 2.0))
        assert runs.workers.prefill == before.prefill
    assert "prefill worker starts" in decision.binding


def test_a_worker_that_never_comes_does_not_keep_its_pool_for_ever() -> None:
    """No node has room for it, or it dies at each start."""
    runs = Runs(workers=ByRole(3, 1))
    runs.during(30, 20.0)
    began_s, before = runs.now_s, runs.workers
    while runs.workers.prefill == before.prefill:
        runs.at(2.0, pools=starting(runs, Role.PREFILL, 1, 2.0))
        assert runs.now_s < began_s + START_S + 2 * PACE.down_s
    assert runs.now_s >= began_s + START_S


def test_the_hold_says_which_window_it_waits_for() -> None:
    runs = Runs()
    runs.during(120, 30.0)
    assert runs.during(60, 2.0)[-1].reason is Reason.WAIT_DOWN
    assert "down_s" in runs.decisions[-1].binding


def test_a_worker_of_the_pool_that_has_too_many_is_flipped_before_any_is_started() -> None:
    """Long answers first, long prompts then: the same devices, in the other role."""
    runs = Runs(workers=ByRole(1, 4))
    runs.during(60, 4.0)
    decisions = runs.during(60, 12.0)
    flips = [decision for decision in decisions if decision.direction is Direction.FLIP]
    assert flips and flips[0] is next(d for d in decisions if d.is_action)
    assert flips[0].wanted == ByRole(2, 3)
    assert flips[0].flips == (Flip("decode-0", Role.PREFILL),)
    assert flips[0].reason is Reason.BALANCE


def test_the_least_loaded_worker_that_serves_is_flipped() -> None:
    """Not an idle one that is on its way out, nor one that has not reported for long."""
    runs = Runs(workers=ByRole(1, 4))
    runs.during(60, 4.0)

    def one_look() -> Decision:
        pools = look(runs.now_s, runs.workers, 12.0).pools
        workers = [
            replace(worker, num_running=0) if worker.worker_id == "decode-2" else worker
            for worker in pools.decode.workers
        ]
        leaves = replace(workers[0], worker_id="a", num_running=0, is_draining=True)
        silent = replace(workers[0], worker_id="b", num_running=0, age_s=PACE.stale_s + 1)
        decode = replace(pools.decode, workers=(leaves, silent, *workers))
        return runs.at(12.0, pools=pools.but(Role.DECODE, decode))

    assert runs.until_action(one_look).flips == (Flip("decode-2", Role.PREFILL),)


LACKING = ScaleLimits(PoolLimits(1, 4), PoolLimits(1, 4), budget_devices=3)
"""All devices are taken by 1 prefill and 2 decode workers; at LACKING_RATE prefill lacks one."""
LACKING_RATE = 9.0


def half_of_decode(**one: object) -> ByRole[Pool]:
    """Two are wanted, one serves; `one`: fields of the other one in the registry."""
    decode = pool(Role.DECODE, 2, LACKING_RATE)
    serves, does_not = decode.workers
    seen = (serves, replace(does_not, **one)) if one else (serves,)  # type: ignore[arg-type]
    decode = replace(decode, num_ready=1, workers=seen)
    return ByRole(pool(Role.PREFILL, 1, LACKING_RATE), decode)


def test_while_a_flip_outlasts_its_call_nobody_else_is_taken() -> None:
    """The worker drains on behind a call that was given up, and belongs to its old pool until it
    is done. Neither does the last one that serves follow it, nor is it ended."""
    runs = Runs(limits=LACKING, workers=ByRole(1, 2))
    assert runs.until_action(lambda: runs.at(LACKING_RATE)).direction is Direction.FLIP
    runs.workers = ByRole(1, 2)  # as it is counted again
    draining = half_of_decode(is_draining=True, can_flip=False)
    for _ in range(60):
        runs.at(LACKING_RATE, pools=draining)
    assert len(runs.actions) == 1
    # It came back as what it was.
    assert runs.until_action(lambda: runs.at(LACKING_RATE), 60).direction is Direction.FLIP


def test_who_cannot_flip_is_not_asked_and_makes_room_instead() -> None:
    """Full budget, prefill lacks, decode has plenty: one goes, its device is another's then."""
    limits = replace(LIMITS, budget_devices=5)
    runs = Runs(workers=ByRole(1, 4), limits=limits)
    for _ in range(24):
        stiff = runs.workers.map(lambda role, num: pool(role, num, 16.0, can_flip=False))
        runs.at(16.0, pools=stiff)
    assert directions(runs.decisions)[:2] == [Direction.DOWN, Direction.UP]
    assert runs.actions[0].reason is Reason.BALANCE
    assert "room for prefill" in runs.actions[0].binding
    assert runs.workers.prefill >= 2


def test_under_a_full_budget_workers_go_where_they_serve_more() -> None:
    """More is asked than the budget carries, and no pool has too many by itself."""
    limits = ScaleLimits(PoolLimits(1, 8), PoolLimits(1, 8), budget_devices=8)
    runs = Runs(workers=ByRole(1, 7), limits=limits)
    runs.during(600, 500.0)
    assert runs.decisions[-1].reason is Reason.BUDGET
    assert "budget_devices 8" in runs.decisions[-1].binding
    assert LIMITS.devices(runs.workers) == 8
    assert runs.workers.prefill > 1
    assert runs.decisions[-1].terms["prefill.wished"] > 8


def test_one_pool_at_its_maximum_bounds_the_other() -> None:
    """More decode workers than prefill can feed serve nobody."""
    limits = ScaleLimits(PoolLimits(1, 1), PoolLimits(1, 8))
    runs = Runs(limits=limits)
    runs.during(300, 500.0)
    assert runs.workers.prefill == 1
    assert runs.workers.decode <= 2
    assert runs.decisions[-1].reason is Reason.BUDGET
    assert "prefill.max_workers 1" in runs.decisions[-1].binding


def test_idle_decode_workers_go_although_prefill_is_at_its_maximum() -> None:
    """An endless shortage of one role must not keep the other role's spare workers for ever."""
    limits = ScaleLimits(PoolLimits(1, 1), PoolLimits(1, 8))
    runs = Runs(limits=limits, workers=ByRole(1, 6))
    for _ in range(160):
        runs.at(7.0, traffic=replace(traffic(7.0), num_arrived=500, num_refused=465))
    assert runs.decisions[-1].reason is Reason.BUDGET
    assert runs.workers.decode <= 2


def test_devices_of_leaving_workers_are_not_given_twice() -> None:
    limits = replace(LIMITS, budget_devices=4)
    runs = Runs(workers=ByRole(1, 1), limits=limits)
    for _ in range(12):
        seen = look(runs.now_s, runs.workers, 30.0)
        leaving = replace(seen.pools.decode, num_draining=2)
        decision = runs.step(replace(seen, pools=seen.pools.but(Role.DECODE, leaving)))
    assert not runs.actions
    assert decision.reason is Reason.DEVICES
    assert runs.at(30.0).direction is Direction.UP


@pytest.mark.parametrize(
    ("before", "wanted"),
    [
        (ByRole(0, 1), ByRole(1, 1)),
        (ByRole(12, 1), ByRole(8, 1)),
        (ByRole(1, 11), ByRole(1, 8)),
        (ByRole(8, 8), None),
        (ByRole(0, 12), ByRole(0, 8)),
    ],
)
def test_what_breaks_a_limit_is_put_right_at_once(
    before: ByRole[int], wanted: ByRole[int] | None
) -> None:
    """By a hand on the scale, or new settings; whatever the load, and however old it is."""
    runs = Runs(workers=before, limits=replace(LIMITS, max_removed_workers=16))
    decision = runs.at(1.0, traffic=None, routers_age_s=math.inf)
    assert decision.reason is Reason.LIMITS
    assert decision.binding
    if wanted is not None:
        assert decision.wanted == wanted
    for _ in range(3):
        runs.at(1.0, traffic=None, routers_age_s=math.inf)
    assert LIMITS.allows(runs.workers)


def test_a_limit_that_only_seems_broken_takes_nobody_away() -> None:
    """Two of four decode workers serve as prefill workers, says a registry that is not read yet, or
    was just emptied: without it there are four of one role, one too many beside the other's
    minimum."""
    limits = ScaleLimits(PoolLimits(1, 4), PoolLimits(1, 4), budget_devices=4)
    runs = Runs(limits=limits, workers=ByRole(0, 4))
    for num_seen in (0, 1):
        decode = pool(Role.DECODE, 4, 1.0)
        decode = replace(decode, workers=decode.workers[:num_seen])
        pools = ByRole(pool(Role.PREFILL, 0, 0.0), decode)
        decision = runs.at(1.0, pools=pools, traffic=None, routers_age_s=math.inf)
        assert not decision.is_action
        assert decision.reason is Reason.INCOMPLETE and "decode" in decision.binding


def test_workers_that_do_not_report_freeze_it() -> None:
    runs = Runs(workers=ByRole(1, 1))
    runs.during(60, 2.0)
    for _ in range(12):
        old = runs.workers.map(lambda role, num: pool(role, num, 30.0, age_s=PACE.stale_s + 1))
        decision = runs.at(30.0, pools=old)
        assert decision.reason is Reason.STALE and "worker has reported" in decision.binding


def test_after_a_freeze_every_window_begins_anew() -> None:
    """What was asked before says nothing of what was asked meanwhile."""
    runs = Runs()
    runs.during(120, 30.0)
    runs.during(PACE.down_s - 30, 2.0)
    for _ in range(3):
        runs.at(2.0, traffic=None)
    assert not directions(runs.during(PACE.down_s - 30, 2.0))
    assert Direction.DOWN in directions(runs.during(60, 2.0))


def test_nobody_is_taken_away_while_some_do_not_report() -> None:
    """A registry that was emptied must not look like a cluster that has too many."""
    runs = Runs()
    runs.during(120, 30.0)
    for _ in range(100):
        pools = look(runs.now_s, runs.workers, 2.0).pools
        some = replace(pools.prefill, workers=pools.prefill.workers[:1])
        decision = runs.at(2.0, pools=pools.but(Role.PREFILL, some))
        assert decision.direction is Direction.HOLD
    assert decision.reason is Reason.INCOMPLETE


def test_without_requests_for_long_there_are_no_workers_and_one_that_waits_brings_them() -> None:
    runs = Runs(limits=ZERO)
    runs.during(30, 1.0)
    idle = replace(traffic(0.0), num_running=0)
    began_s = runs.now_s
    while runs.workers != ByRole(0, 0):
        decision = runs.at(0.0, traffic=idle)
        assert runs.now_s < began_s + PACE.idle_s + 60
    assert decision.reason is Reason.IDLE and decision.at_s - began_s >= PACE.idle_s - EVERY_S
    nobody = ByRole(pool(Role.PREFILL, 0, 0.0), pool(Role.DECODE, 0, 0.0))
    assert not runs.at(0.0, traffic=idle, pools=nobody).is_action
    waits = replace(idle, num_arrived=1, num_waiting=1)
    decision = runs.at(0.0, traffic=waits, pools=nobody)
    assert decision.reason is Reason.WAKE and decision.wanted == ByRole(1, 1)


def test_a_running_request_keeps_its_workers() -> None:
    """One answer longer than `idle_s` must not lose the only decode worker."""
    runs = Runs(limits=ZERO)
    busy = replace(traffic(0.0), num_running=1)
    for _ in range(200):
        assert not runs.at(0.0, traffic=busy).is_action


def test_workers_with_requests_of_a_router_that_is_not_seen_are_kept() -> None:
    """A router that has lost Redis serves on with the workers that it knows; all traffic that is
    seen is that of another one, which has none. Beats from before it all ended tell nothing."""
    runs = Runs(limits=ZERO)
    idle = replace(traffic(0.0), num_running=0)

    def busy(age_s: float) -> ByRole[Pool]:
        return runs.workers.map(lambda role, num: pool(role, num, 5.0 * num, age_s=age_s))

    for _ in range(200):
        assert runs.at(0.0, traffic=idle, pools=busy(1.0)).wanted != ByRole(0, 0)
    pools = look(runs.now_s, runs.workers, 0.0).pools
    old = replace(busy(PACE.stale_s + 1).decode.workers[0], worker_id="gone")
    pools = pools.but(Role.DECODE, replace(pools.decode, workers=(*pools.decode.workers, old)))
    action = runs.until_action(lambda: runs.at(0.0, traffic=idle, pools=pools), 200)
    assert action.reason is Reason.IDLE and action.wanted == ByRole(0, 0)


def test_min_of_one_keeps_one() -> None:
    runs = Runs(workers=ByRole(3, 3))
    runs.during(3000, 0.0)
    assert runs.workers == ByRole(1, 1)


LATE = replace(traffic(10.0, ttft_s=3.0), num_queued=4)


@pytest.mark.parametrize(
    ("rate", "late", "wanted"),
    [(10.0, LATE, ByRole(3, 1)), (8.0, traffic(8.0, tpot_s=0.09), ByRole(2, 2))],
    ids=["first tokens", "tokens"],
)
def test_what_is_late_brings_a_worker_though_the_model_says_that_there_are_enough(
    rate: float, late: ObservedTraffic, wanted: ByRole[int]
) -> None:
    runs = Runs(workers=ByRole(2, 1))
    runs.during(120, rate)
    assert runs.workers == ByRole(2, 1)
    action = runs.until_action(lambda: runs.at(rate, traffic=late))
    assert (action.reason, action.wanted) == (Reason.LATENCY, wanted)
    assert any(decision.terms.get("ttft_s", 0.0) > 1.0 for decision in runs.decisions) == (
        late is LATE
    )


def test_late_first_tokens_for_want_of_blocks_are_decode_workers_to_bring() -> None:
    runs = Runs(workers=ByRole(2, 1))
    runs.during(120, 10.0)

    def one_look() -> Decision:
        pools = look(runs.now_s, runs.workers, 10.0).pools
        full = tuple(replace(w, num_free_blocks=0, num_running=60) for w in pools.decode.workers)
        decode = replace(pools.decode, workers=full)
        return runs.at(10.0, traffic=LATE, pools=pools.but(Role.DECODE, decode))

    assert runs.until_action(one_look).wanted.decode == 2


@pytest.mark.parametrize(
    ("workers", "rate", "note"),
    [
        (ByRole(4, 2), 5.0, "more workers would not help"),  # hardly busy
        (ByRole(2, 1), 10.0, "nobody waits"),  # long prompts: found by the simulator
    ],
)
def test_what_more_workers_cannot_cure_brings_none(
    workers: ByRole[int], rate: float, note: str
) -> None:
    runs = Runs(workers=workers, pace=replace(PACE, down_s=1e6))
    runs.during(120, rate)
    for _ in range(60):
        decision = runs.at(rate, traffic=traffic(rate, ttft_s=3.0))
        assert not decision.is_action
    assert any(note in said for said in decision.notes)


def test_what_a_shortage_explains_is_no_strain() -> None:
    """A pool at its maximum makes all late; the other pool must not be believed to be slow for it:
    found by the simulator."""
    limits = ScaleLimits(PoolLimits(1, 8), PoolLimits(1, 1))
    runs = Runs(limits=limits, workers=ByRole(6, 1), pace=replace(PACE, down_s=1e6))
    for _ in range(60):
        asked = replace(traffic(30.0, ttft_s=9.0), num_queued=50)
        decision = runs.at(8.0, traffic=asked)
    assert decision.terms["prefill.strain"] == decision.terms["decode.strain"] == 1.0


def test_latencies_of_an_incomplete_pool_are_not_blamed_on_it() -> None:
    """Late because the worker that is wanted is starting: no further one is."""
    runs = Runs(workers=ByRole(2, 1))
    runs.during(120, 10.0)
    for _ in range(24):
        pools = look(runs.now_s, runs.workers, 10.0).pools
        starting = replace(pools.prefill, num_ready=1, workers=pools.prefill.workers[:1])
        late = traffic(10.0, ttft_s=3.0)
        assert not runs.at(10.0, traffic=late, pools=pools.but(Role.PREFILL, starting)).is_action


def test_a_backlog_is_load() -> None:
    runs = Runs(workers=ByRole(1, 1))
    runs.during(60, 5.0)
    assert runs.workers == ByRole(1, 1)
    for _ in range(6):
        runs.at(5.0, traffic=replace(traffic(5.0), num_queued=400))
    assert runs.workers.prefill >= 2
    assert runs.decisions[-1].terms["backlog_per_s"] > 5


def test_prompts_queued_at_workers_are_load_too() -> None:
    runs = Runs(workers=ByRole(1, 1))
    runs.during(60, 5.0)
    for _ in range(6):
        pools = look(runs.now_s, runs.workers, 5.0).pools
        queued = tuple(
            replace(worker, num_queued_tokens=400 * PROMPT_TOKENS)
            for worker in pools.prefill.workers
        )
        prefill = replace(pools.prefill, workers=queued)
        runs.at(5.0, pools=pools.but(Role.PREFILL, prefill))
    assert runs.workers.prefill >= 2


def test_a_load_that_rises_is_met_before_it_is_there() -> None:
    def first_up(pace: Pace) -> float:
        runs = Runs(pace=pace)
        runs.during(300, lambda passed_s: 1.0 + passed_s / 10)
        return runs.actions[0].at_s

    assert first_up(replace(PACE, lead_s=60.0)) < first_up(PACE)


def test_a_change_by_somebody_else_is_noticed_and_not_undone_at_once() -> None:
    runs = Runs(workers=ByRole(1, 1))
    runs.during(PACE.down_s + 60, 2.0)
    runs.workers = ByRole(3, 1)
    decision = runs.at(2.0)
    assert not decision.is_action
    assert "changed elsewhere: 1 prefill and 1 decode became 3 prefill and 1" in decision.notes[0]
    assert not directions(runs.during(PACE.down_s - 20, 2.0))
    assert Direction.DOWN in directions(runs.during(60, 2.0))


def test_advice_that_somebody_follows_later_does_not_swing() -> None:
    """KEDA asks every 30 s, and workers take a minute: the number that it is told stays."""
    runs = Runs()
    there, told = ByRole(1, 1), [ByRole(1, 1)]
    for index in range(60):
        seen = look(runs.now_s, there, 30.0)
        last = runs.decisions[-1] if runs.decisions else None
        decision = runs.step(as_advised(seen, last))
        assert not any("changed elsewhere" in note for note in decision.notes)
        assert not decision.flips
        told.append(decision.wanted)
        if index % 6 == 5:
            there = decision.wanted
    for role in Role:
        numbers = [pair.of(role) for pair in told]
        assert numbers == sorted(numbers)
    assert told[-1].prefill >= 4


def test_a_decision_says_why() -> None:
    runs = Runs()
    first = runs.at(0.2)
    assert "from settings, not seen yet" in " ".join(first.notes)
    runs.during(60, 30.0)
    decision = next(decision for decision in runs.actions)
    record = json.loads(decision.to_json_line())
    assert record["direction"] == "up" and record["reason"] == "load"
    assert record["before"] == {"prefill": 1, "decode": 1}
    assert record["num_candidates"] == 64
    assert record["num_affordable"] == sum(p + d <= 10 for p in range(1, 9) for d in range(1, 9))
    assert 20 < record["terms"]["arrivals_per_s"] <= 30
    assert record["terms"]["prefill.tokens_per_s"] == pytest.approx(10_000, rel=0.1)
    assert decision.line().startswith("up (prefill 1 -> ") and "\n" not in decision.line()
    settled = runs.during(200, 30.0)[-1]
    assert not any("not seen yet" in note for note in settled.notes)


def test_targets_that_nobody_can_meet_are_said() -> None:
    runs = Runs(targets=replace(Runs().targets, ttft_s=0.05, tpot_s=0.005))
    notes = " ".join(runs.during(60, 5.0)[-1].notes)
    assert "ttft_s 0.05 cannot be met" in notes and "tpot_s 0.005 cannot be met" in notes


HOLD = Decision(0.0, Direction.HOLD, Reason.STEADY, ByRole(2, 2), ByRole(2, 2))


@pytest.mark.parametrize(
    ("broken", "rule"),
    [
        (replace(HOLD, wanted=ByRole(3, 2)), "holds"),
        (replace(HOLD, direction=Direction.UP, wanted=ByRole(3, 1)), "takes nobody away"),
        (replace(HOLD, direction=Direction.DOWN, wanted=ByRole(3, 1)), "adds nobody"),
        (replace(HOLD, direction=Direction.UP), "something to do"),
        (replace(HOLD, direction=Direction.UP, wanted=ByRole(9, 2)), "max_workers"),
        (replace(HOLD, direction=Direction.DOWN, wanted=ByRole(0, 2)), "min_workers"),
        (replace(HOLD, direction=Direction.DOWN, wanted=ByRole(0, 0)), "min_workers"),
        (replace(HOLD, direction=Direction.UP, wanted=ByRole(8, 3)), "budget"),
        (
            replace(
                HOLD,
                direction=Direction.FLIP,
                wanted=ByRole(3, 2),
                flips=(Flip("a", Role.PREFILL),),
            ),
            "conserve",
        ),
    ],
)
def test_a_decision_that_breaks_a_rule_does_not_leave_the_plan(broken: Decision, rule: str) -> None:
    with pytest.raises(Internal, match=rule):
        check_decision(broken, LIMITS)
