"""plan: how many prefill and decode workers there shall be. One pure function of what was seen,
what is wanted of it, and what it remembers; the simulator and the running autoscaler call the same.

In this order, the first that applies:

1. the scaler does not say what is wanted now: nothing is done;
2. what is wanted breaks a limit: it is put right, whatever the load, `max_removed_workers` at
   once, and nobody goes while workers that serve are missing in the registry;
3. signals are stale or missing: nothing is done;
4. there are no workers and somebody waits: they come at once;
5. nobody has asked for anything for `idle_s`, and workers say that they do nothing: they go, where
   none are allowed;
6. a pool lacks workers, for `up_s` already: one of the other, which does without it for `flip_s`,
   is flipped; else workers are added where devices are free; else, when the same devices would
   serve more by more than the slack, one goes from the pool that has too many (by a flip, or to
   make room);
7. a pool has too many for `down_s` already, also at the load with the slack, and none of its
   workers was starting meanwhile: one goes.

Why it does not swing: it adds for what was needed at every look of `up_s` and takes away what was
not needed, with the slack, at any look of `down_s`. While everything measured stays within e of its
mean and (1 + e) / (1 - e) < 1 + slack, nothing that it adds can become too many.

Knows no Redis, no Kubernetes and no clock. Invariants, checked before it returns (`check`): within
limits and budget, one direction, flips conserve the number of workers. Pure; any thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from services.autoscaler import pairs, pressure
from services.autoscaler.capacity import Capacity, learn
from services.autoscaler.case import Asked, Case
from services.autoscaler.changes import change, first_workers, no_workers
from services.autoscaler.decision import Decision, Direction, Reason
from services.autoscaler.invariants import check
from services.autoscaler.limits import START_S, Pace, Priors, ScaleLimits, Targets
from services.autoscaler.load import load_of
from services.autoscaler.rates import Rates, rates_of
from services.autoscaler.signals import ByRole, Observations, Pool, Role, Traffic
from services.autoscaler.state import Look, PlanState
from services.autoscaler.terms import levels, notes, terms

__all__ = ["PlanState", "plan"]


def plan(
    seen: Observations,
    targets: Targets,
    limits: ScaleLimits,
    state: PlanState,
    *,
    pace: Pace,
    priors: Priors,
) -> tuple[Decision, PlanState]:
    """One decision, and what to remember for the next.

    Raises: Internal when it broke one of its own invariants: a mistake of ours.
    """
    before = seen.pools.map(lambda _, pool: pool.wanted)
    remarks: list[str] = []
    if state.wanted is not None and state.wanted != before:
        remarks.append(
            f"what is wanted was changed elsewhere: {_pair(state.wanted)} became {_pair(before)}"
        )
        # Whoever did it had a reason: every window begins anew.
        state = replace(state, since_s=seen.now_s, complete_since_s=None)
    case = Case(seen, limits, pace, state, before)
    decision = _without_load(case, targets, priors)
    if decision is None:
        decision, state = _with_load(case, targets, priors)
    else:
        state = state.blind()
    num_candidates, num_affordable = pairs.count(limits)
    decision = replace(
        decision,
        num_candidates=num_candidates,
        num_affordable=num_affordable,
        terms={**levels(seen, limits), **decision.terms},
        notes=(*remarks, *decision.notes),
    )
    check(decision, limits)
    return decision, _remembering(state, decision)


# ---- what does not depend on the load


def _without_load(case: Case, targets: Targets, priors: Priors) -> Decision | None:
    seen, limits, before = case.seen, case.limits, case.before
    if seen.scale_age_s > case.pace.stale_s:
        return case.hold(Reason.STALE, f"the scaler has not answered for {seen.scale_age_s:.0f} s")
    is_none = before == ByRole(0, 0) and limits.scales_to_zero
    if not is_none and not limits.allows(before):
        rates = rates_of(_capacity(case.state, priors), targets, limits, priors)
        return _put_right(case, rates)
    problem = _blindness(case)
    return case.hold(Reason.STALE, problem) if problem else None


def _put_right(case: Case, rates: Rates) -> Decision:
    """What is wanted breaks a limit. Which role a flipped worker has, only the registry knows: as
    long as workers that serve are missing there, it may only seem so, and nobody goes."""
    limits, before = case.limits, case.before
    wanted, broken = pairs.allowed(before, rates, limits), pairs.broken(before, limits)
    if sum(wanted.of(role) - before.of(role) for role in Role) > 0:
        if case.free_devices < limits.devices(wanted) - limits.devices(before):
            return case.hold(Reason.DEVICES, "workers on their way out hold the devices")
        return case.to(wanted, Direction.UP, Reason.LIMITS, broken)
    missing = case.unreported()
    if missing:
        return case.hold(Reason.INCOMPLETE, missing)
    wanted = pairs.shrunk(before, wanted, rates, most=limits.max_removed_workers)
    return case.to(wanted, Direction.DOWN, Reason.LIMITS, broken)


def _blindness(case: Case) -> str:
    seen, stale_s = case.seen, case.pace.stale_s
    if seen.routers_age_s > stale_s:
        return "no router reports" + (
            f" for {seen.routers_age_s:.0f} s" if seen.routers_age_s < float("inf") else ""
        )
    if seen.traffic is None:
        return "the first look: there is no traffic to compare with"
    for role in Role:
        pool = seen.pools.of(role)
        if pool.num_ready and not case.num_reporting(role):
            return f"no {role.value} worker has reported for {stale_s:g} s"
    return ""


# ---- what does


def _with_load(case: Case, targets: Targets, priors: Priors) -> tuple[Decision, PlanState]:
    traffic = case.seen.traffic
    assert traffic is not None
    asked, state = _ask(case, traffic, targets, priors)
    case = replace(case, state=state)
    decision = first_workers(case, traffic, asked) or no_workers(case) or change(case, asked)
    return replace(decision, terms=terms(asked), notes=notes(asked)), state


def _ask(case: Case, traffic: Traffic, targets: Targets, priors: Priors) -> tuple[Asked, PlanState]:
    seen, limits, pace, state = case.seen, case.limits, case.pace, case.state
    now_s = seen.now_s
    capacity = learn(_capacity(state, priors), seen, stale_s=pace.stale_s)
    state = _with_starts(seen, _timed(seen, traffic, state, pace))
    state = replace(state, capacity=capacity)
    plain = rates_of(capacity, targets, limits, priors)
    before = [(look.at_s, look.traffic) for look in state.looks]
    load = load_of(seen, traffic, before, capacity, plain, limits, pace)
    carried_s = state.carried_since_s
    if load.backlog or plain.strained(state.strain).carried(case.before) < load.rate:
        carried_s = None
    elif carried_s is None:
        carried_s = now_s
    state = replace(state, carried_since_s=carried_s)
    ready_s = pressure.ready_since(state, pace)
    look = Look(now_s, traffic, load.needed, load.enough, load.waiting)
    recent = [one for one in (*state.looks, look) if _is_told(one, ready_s, now_s, pace)]
    felt = pressure.press(seen, recent, load, plain, state.strain, targets, limits)
    strain = pressure.faded(felt.strain, traffic.elapsed_s) if felt.is_in_time else felt.strain
    rates = plain
    if strain != ByRole(1.0, 1.0):
        rates = plain.strained(strain)
        load = load_of(seen, traffic, before, capacity, rates, limits, pace)
    helped = None
    if load.rate > rates.carried(case.before):
        helped = pairs.helped_by_move(case.before, rates, limits, slack=pace.slack)
    look = Look(
        now_s, traffic, load.needed, load.enough, load.waiting, helped[0] if helped else None
    )
    keep_s = max(pace.down_s, pace.flip_s, 2 * pace.window_s)
    state = replace(state, strain=strain).add(look, keep_s=keep_s)
    return Asked(load, rates, felt, capacity, helped), state


def _is_told(look: Look, ready_s: float | None, now_s: float, pace: Pace) -> bool:
    return (
        ready_s is not None
        and look.at_s - look.traffic.elapsed_s >= ready_s
        and now_s - look.at_s < pace.window_s
    )


def _capacity(state: PlanState, priors: Priors) -> Capacity:
    return state.capacity or Capacity.believed(priors)


def _timed(seen: Observations, traffic: Traffic, state: PlanState, pace: Pace) -> PlanState:
    """Since when everybody serves, and since when nobody asks."""
    pools = [seen.pools.of(role) for role in Role]
    is_complete = not seen.num_flipping and not any(p.num_starting or p.num_draining for p in pools)
    # Routers whose beats have lapsed are not in the traffic, and may serve on.
    is_idle = not (traffic.num_open or traffic.num_arrived or _is_busy(pools, pace))
    complete_s, idle_s = state.complete_since_s, state.idle_since_s
    return replace(
        state,
        complete_since_s=(seen.now_s if complete_s is None else complete_s)
        if is_complete
        else None,
        idle_since_s=(seen.now_s if idle_s is None else idle_s) if is_idle else None,
    )


def _with_starts(seen: Observations, state: PlanState) -> PlanState:
    """When workers of each pool were last seen starting."""
    now_s = seen.now_s

    def since(role: Role, pool: Pool) -> float | None:
        known_s = state.starting_since_s.of(role)
        if not pool.num_starting:
            return None
        # Workers that were added later have their own time.
        return now_s if known_s is None else max(known_s, state.up_at_s)

    since_s = seen.pools.map(since)

    def last(role: Role, at_s: float) -> float:
        began_s = since_s.of(role)
        return now_s if began_s is not None and now_s - began_s <= START_S else at_s

    return replace(state, starting_since_s=since_s, started_at_s=state.started_at_s.map(last))


def _is_busy(pools: Sequence[Pool], pace: Pace) -> bool:
    """Whether any worker with a fresh beat has requests."""
    return any(
        worker.num_running + worker.num_waiting and worker.age_s <= pace.stale_s
        for pool in pools
        for worker in pool.workers
    )


def _remembering(state: PlanState, decision: Decision) -> PlanState:
    now_s = decision.at_s
    state = replace(state, wanted=decision.wanted)
    if decision.direction is Direction.UP:
        return replace(state, up_at_s=now_s)
    if decision.direction is Direction.DOWN:
        return replace(state, down_at_s=now_s)
    if decision.direction is Direction.FLIP:
        return replace(state, flip_at_s=now_s)
    return state


def _pair(workers: ByRole[int]) -> str:
    return f"{workers.prefill} prefill and {workers.decode} decode"
