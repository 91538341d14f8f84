"""plan: the number of prefill and decode workers. One pure function of the observations, the
settings, and the state that it returned last (`PlanState`); the simulator and the running
autoscaler call the same.

The first rule that applies decides:

1. the scaler does not report the wanted sizes: nothing is done;
2. the wanted sizes break a limit: they are corrected, whatever the load, `max_removed_workers` at
   once; no worker is removed while workers that serve are missing in the registry;
3. signals are stale or missing: nothing is done;
4. there are no workers, and requests wait: workers are added at once;
5. no request has come for `idle_s`, and workers report no work: they are removed, where zero is
   allowed;
6. a pool has lacked workers for `up_s`: one of the other pool, which has not needed it for
   `flip_s`, is flipped; else workers are added where devices are free; else, when the same devices
   would carry more by more than the slack, one is removed from the pool that has too many (by a
   flip, or to make room);
7. a pool has had too many for `down_s`, also at the load with the slack, and none of its workers
   was starting meanwhile: one is removed.

It does not swing: it adds for what was needed at every observation of `up_s`, and removes what was
not needed, with the slack, at any observation of `down_s`. While every measurement stays within e
of its mean and (1 + e) / (1 - e) < 1 + slack, nothing that it adds can become too many.

**Pressure**: a correction where latencies miss their targets although the model says that the
workers suffice. The pool that causes it is assumed to carry less, by a factor (strain) that makes
it need one more worker, and that fades while requests are in time. Only where more workers can
help: not for a pool that is hardly busy, incomplete, or just changed.

`check_decision` recomputes the invariants before a decision is returned: limits and budget, one
direction, and flips that conserve the number of workers. `PlanState` holds no more than the longest
window needs; an autoscaler that loses the leadership drops it.

Knows no Redis, no Kubernetes and no clock. Pure; any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from process.rpc_errors import Internal
from services.autoscaler import capacity_model
from services.autoscaler.capacity_model import (
    Capacity,
    PredictedLoad,
    Rates,
    learn,
    predict_load,
    rates_of,
)
from services.autoscaler.config import START_S, Pace, Priors, ScaleLimits, Targets
from services.autoscaler.decision import Decision, Direction, Flip, Reason
from services.autoscaler.signals import ByRole, Histogram, Observations, Pool, Role, Traffic, Worker

# ---- state between looks


@dataclass(frozen=True)
class PastLook:
    """What one look found: the traffic, and what it asks of the pools."""

    at_s: float
    traffic: Traffic
    needed: ByRole[int]
    """Fewest workers for it."""
    enough: ByRole[int]
    """Fewest workers for it and the slack; so many more may be given away."""
    waiting: float = 0.0
    """Requests that waited then."""
    helped: Role | None = None
    """The pool that, with a worker of the other, would have the same devices serve more by more
    than the slack."""


@dataclass(frozen=True)
class PlanState:
    """See the module. `PlanState()` has seen nothing."""

    looks: tuple[PastLook, ...] = ()
    """Oldest first, without a gap: signals that were stale end them."""
    since_s: float | None = None
    """Since when signals came without a gap."""
    capacity: Capacity | None = None
    strain: ByRole[float] = ByRole(1.0, 1.0)  # noqa: RUF009  a frozen value
    """By how much each pool carries less than its model says; at least 1."""
    strained_at_s: float = float("-inf")
    complete_since_s: float | None = None
    """Since when all workers that are wanted serve, and none is leaving."""
    starting_since_s: ByRole[float | None] = ByRole(None, None)  # noqa: RUF009  a frozen value
    """Since when workers of the pool have been starting; None: none is."""
    started_at_s: ByRole[float] = ByRole(float("-inf"), float("-inf"))  # noqa: RUF009  likewise
    """When a worker of the pool was last seen starting, if it had not been for longer than
    START_S. From here on it counts for how long fewer workers have sufficed."""
    carried_since_s: float | None = None
    """Since when the model says that what is wanted carries all that is asked, and nothing has
    piled up."""
    idle_since_s: float | None = None
    up_at_s: float = float("-inf")
    down_at_s: float = float("-inf")
    flip_at_s: float = float("-inf")
    wanted: ByRole[int] | None = None
    """After the last decision."""

    @property
    def changed_at_s(self) -> float:
        """When anything was last done."""
        return max(self.up_at_s, self.down_at_s, self.flip_at_s)

    def covers(self, now_s: float, span_s: float) -> bool:
        """Whether signals came without a gap for so long."""
        return self.since_s is not None and now_s - self.since_s >= span_s

    def after(self, now_s: float, span_s: float) -> Sequence[PastLook]:
        """The looks of the last `span_s` seconds, the newest one always."""
        found = [look for look in self.looks if now_s - look.at_s <= span_s]
        return found or self.looks[-1:]

    def add(self, look: PastLook, *, keep_s: float) -> PlanState:
        """With one look more; those older than `keep_s` are forgotten."""
        kept = (old for old in self.looks if look.at_s - old.at_s <= keep_s)
        since_s = look.at_s if self.since_s is None else self.since_s
        return replace(self, looks=(*kept, look), since_s=since_s)

    def blind(self) -> PlanState:
        """Signals are missing: what was asked before is no history of now."""
        return replace(
            self,
            looks=(),
            since_s=None,
            complete_since_s=None,
            carried_since_s=None,
            idle_since_s=None,
        )

    def fewest(self, now_s: float, span_s: float) -> ByRole[int]:
        """Workers that were needed at every look of the span; 0 while it is not covered."""
        return self._over(now_s, span_s, min, 0, lambda look: look.needed)

    def most(self, now_s: float, span_s: float, uncovered: int) -> ByRole[int]:
        """Workers that were enough at every look of the span; `uncovered` while it is not
        covered."""
        return self._over(now_s, span_s, max, uncovered, lambda look: look.enough)

    def helped(self, now_s: float, span_s: float) -> Role | None:
        """The pool that a move would have helped at every look of the span."""
        if not self.covers(now_s, span_s):
            return None
        found = {look.helped for look in self.after(now_s, span_s)}
        return found.pop() if len(found) == 1 else None

    def _over(
        self,
        now_s: float,
        span_s: float,
        pick: Callable[[list[int]], int],
        uncovered: int,
        of: Callable[[PastLook], ByRole[int]],
    ) -> ByRole[int]:
        if not self.looks or not self.covers(now_s, span_s):
            return ByRole(uncovered, uncovered)
        looks = self.after(now_s, span_s)
        return ByRole(
            pick([of(look).prefill for look in looks]), pick([of(look).decode for look in looks])
        )


def latencies(traffics: Sequence[Traffic]) -> tuple[Histogram, Histogram]:
    """Times to the first token, and between two, of several looks together; of those with the
    newest one's bounds."""
    ttft, tpot = Histogram(), Histogram()
    for traffic in reversed(traffics):
        if not ttft.bounds_s or traffic.ttft.bounds_s == ttft.bounds_s:
            ttft = ttft.plus(traffic.ttft)
        if not tpot.bounds_s or traffic.tpot.bounds_s == tpot.bounds_s:
            tpot = tpot.plus(traffic.tpot)
    return ttft, tpot


# ---- correction by missed latencies

FEWEST_SAMPLES = 20
"""Requests; of fewer the quantile is chance."""

BUSY = 0.5
"""Of what a pool carries: below it the pool is not what requests wait for. So strain is never much
more than its inverse."""

ENOUGH_STRAIN = 1.05
"""Of what makes the pool need one worker more: it must still need it some looks later."""

HALF_LIFE_S = 900.0
"""In which strain fades to half, while requests are in time."""

FULL = 0.05
"""Share of free blocks, or of streams below the most, with which prompts wait for decode, not for
prefill."""

SHORT_WAIT = 0.1
"""Of the target: where requests wait less than this (by Little's law, from how many do), a late
first token comes of something else."""


@dataclass(frozen=True)
class Pressure:
    """What was measured, and what it means."""

    strain: ByRole[float]
    role: Role | None = None
    """The pool that was just believed to carry less."""
    late: tuple[str, ...] = ()
    """Targets that are missed: "ttft", "tpot"."""
    ttft_s: float | None = None
    tpot_s: float | None = None
    """At the targets' quantile; None: too few."""
    note: str = ""

    @property
    def is_in_time(self) -> bool:
        """Whether something was measured, and no target was missed."""
        return not self.late and not (self.ttft_s is None and self.tpot_s is None)


def press(
    seen: Observations,
    recent: Sequence[PastLook],
    load: PredictedLoad,
    rates: Rates,
    strain: ByRole[float],
    targets: Targets,
    limits: ScaleLimits,
) -> Pressure:
    """What latencies say.

    Args:
        recent: looks since `ready_since`; empty: nothing is told now.
        rates: as the model has them, without strain.
        strain: so far.
    """
    ttft, tpot = latencies([look.traffic for look in recent])
    ttft_s = ttft.quantile(targets.quantile) if ttft.total >= FEWEST_SAMPLES else None
    tpot_s = tpot.quantile(targets.quantile) if tpot.total >= FEWEST_SAMPLES else None
    late = tuple(
        name
        for name, found_s, target_s in (
            ("ttft", ttft_s, targets.ttft_s),
            ("tpot", tpot_s, targets.tpot_s),
        )
        if found_s is not None and found_s > target_s
    )
    calm = Pressure(strain, None, late, ttft_s, tpot_s)
    workers = seen.pools.map(lambda _, pool: pool.wanted)
    if not late or not load.rate:
        return calm
    role = _to_blame(seen, late, rates)
    carried = rates.of(role, workers.of(role))
    note = _futile(late, role, load, carried, recent, targets)
    if note:
        return replace(calm, note=note)
    if workers.of(role) >= limits.of(role).max_workers:
        return calm
    factor = max(strain.of(role), ENOUGH_STRAIN * carried / load.rate)
    return replace(calm, strain=strain.but(role, factor), role=role)


def _futile(
    late: Sequence[str],
    role: Role,
    load: PredictedLoad,
    carried: float,
    recent: Sequence[PastLook],
    targets: Targets,
) -> str:
    """Why more workers would not help; empty: they may."""
    what = " and ".join(late)
    if load.rate < BUSY * carried:
        return f"{what} late, but {role.value} is not busy: more workers would not help"
    waits_s = sum(look.waiting for look in recent) / len(recent) / load.rate
    if role is Role.PREFILL and waits_s < SHORT_WAIT * targets.ttft_s:
        return f"{what} late, but nobody waits: more workers would not help"
    return ""


def faded(strain: ByRole[float], passed_s: float) -> ByRole[float]:
    """After so long in time."""
    keep = 0.5 ** (passed_s / HALF_LIFE_S)
    return strain.map(lambda _, factor: 1.0 + (factor - 1.0) * keep)


def ready_since(state: PlanState, pace: Pace) -> float | None:
    """From when on latencies are those of the workers that are wanted now, without what had piled
    up before; None: not yet."""
    if state.complete_since_s is None or state.carried_since_s is None:
        return None
    since_s = max(state.complete_since_s, state.carried_since_s, state.changed_at_s)
    return since_s + pace.settle_s


def _to_blame(seen: Observations, late: Sequence[str], rates: Rates) -> Role:
    """A late first token is prefill's, unless decode has no room for further streams."""
    if "tpot" in late:
        return Role.DECODE
    workers = [w for w in seen.pools.decode.workers if not w.is_draining and w.num_blocks]
    if not workers:
        return Role.PREFILL
    free = sum(w.num_free_blocks for w in workers) / sum(w.num_blocks for w in workers)
    batch = sum(w.num_running + w.num_waiting for w in workers) / len(workers)
    is_full = free < FULL or batch > (1 - FULL) * rates.bounds.max_batch
    return Role.DECODE if is_full else Role.PREFILL


# ---- input of a decision


@dataclass(frozen=True)
class PlanInput:
    """What was seen and what is allowed."""

    seen: Observations
    limits: ScaleLimits
    pace: Pace
    state: PlanState
    before: ByRole[int]
    """Workers that are wanted now."""

    def hold(self, reason: Reason, binding: str = "") -> Decision:
        """Nothing is done."""
        return self.to(self.before, Direction.HOLD, reason, binding)

    def to(
        self, wanted: ByRole[int], direction: Direction, reason: Reason, binding: str = ""
    ) -> Decision:
        """So many are wanted."""
        return Decision(self.seen.now_s, direction, reason, self.before, wanted, (), binding)

    @property
    def free_devices(self) -> int:
        """Of the budget, beside what is wanted, serves, or is still leaving."""
        present = self.seen.pools.map(lambda _, pool: pool.num_present)
        return self.limits.budget - self.limits.devices(present)

    @property
    def may_remove(self) -> bool:
        """Whether the last removal is long enough ago, and no flip is under way."""
        since_s = self.seen.now_s - self.state.down_at_s
        return since_s >= self.pace.down_cooldown_s and not self.seen.num_flipping

    def num_reporting(self, role: Role) -> int:
        """Workers with a fresh beat that are not leaving."""
        return sum(
            not worker.is_draining and worker.age_s <= self.pace.stale_s
            for worker in self.seen.pools.of(role).workers
        )

    def num_serving(self, role: Role) -> int:
        """Workers that surely serve: the scaler and the registry both say so."""
        return min(self.seen.pools.of(role).num_ready, self.num_reporting(role))

    def num_on_their_way(self, role: Role) -> int:
        """Workers that say that they drain: towards their end or another role, and which of the
        two only they know."""
        return sum(
            worker.is_draining and worker.age_s <= self.pace.stale_s
            for worker in self.seen.pools.of(role).workers
        )

    def num_missing(self, role: Role) -> int:
        """Workers that serve, says the scaler, and of which the registry has no fresh beat."""
        pool = self.seen.pools.of(role)
        return max(0, min(pool.wanted, pool.num_ready) - self.num_reporting(role))

    def unreported(self) -> str:
        """Of which pool workers are missing, in words; empty: of none."""
        missing = [role.value for role in Role if self.num_missing(role)]
        return f"{missing[0]} workers that serve do not report" if missing else ""


@dataclass(frozen=True)
class LoadEstimate:
    """What the load asks, and from what that was reckoned."""

    load: PredictedLoad
    rates: Rates
    pressure: Pressure
    capacity: Capacity
    helped: tuple[Role, ByRole[int]] | None
    """See `pairs.helped_by_move`; None also while there is nothing to help."""


# ---- terms of a decision, for the record


def observed_levels(seen: Observations, limits: ScaleLimits) -> Mapping[str, float]:
    """What is there, known also without any traffic."""
    found: dict[str, float] = {"budget_devices": limits.budget}
    for role in Role:
        pool = seen.pools.of(role)
        found[f"{role.value}.ready"] = pool.num_ready
        found[f"{role.value}.starting"] = pool.num_starting
        found[f"{role.value}.draining"] = pool.num_draining
    blocks = [worker for worker in seen.pools.decode.workers if worker.num_blocks]
    if blocks:
        num_free = sum(worker.num_free_blocks for worker in blocks)
        found["decode.free_blocks_share"] = num_free / sum(worker.num_blocks for worker in blocks)
    return found


def decision_terms(asked: LoadEstimate) -> Mapping[str, float]:
    """What the load is, what workers do, and what that needs; rates per second, times in
    seconds."""
    load, capacity, rates = asked.load, asked.capacity, asked.rates
    a, b = capacity.decode.line
    found = {
        "arrivals_per_s": load.arriving,
        "trend_per_s": load.trend,
        "backlog_per_s": load.backlog,
        "most_carried_per_s": load.most,
        "prompt_tokens": capacity.prompt_tokens.value,
        "output_tokens": capacity.output_tokens.value,
        "cached_share": capacity.cached.value,
        "prefill.tokens_per_s": 1 / capacity.token_s.value,
        "prefill.wait_s": rates.bounds.wait_s,
        "decode.step_s": a,
        "decode.stream_s": b,
        "decode.max_batch": rates.bounds.max_batch,
        "decode.stream_blocks": capacity.stream_blocks.value,
    }
    for role in Role:
        found[f"{role.value}.wished"] = load.wished.of(role)
        found[f"{role.value}.needed"] = load.needed.of(role)
        found[f"{role.value}.enough"] = load.enough.of(role)
        found[f"{role.value}.strain"] = asked.pressure.strain.of(role)
    if asked.pressure.ttft_s is not None:
        found["ttft_s"] = asked.pressure.ttft_s
    if asked.pressure.tpot_s is not None:
        found["tpot_s"] = asked.pressure.tpot_s
    return found


def decision_notes(asked: LoadEstimate) -> tuple[str, ...]:
    """What is still believed rather than seen, targets that cannot be met, and why latencies that
    are missed lead to nothing."""
    missing = asked.capacity.missing
    return (
        *([f"from settings, not seen yet: {', '.join(missing)}"] if missing else []),
        *asked.rates.bounds.problems,
        *([asked.pressure.note] if asked.pressure.note else []),
    )


# ---- invariants of a decision


def check_decision(decision: Decision, limits: ScaleLimits) -> None:
    """Raises: Internal naming the rule that a decision breaks: a mistake of the plan's."""
    problem = _direction_problem(decision) or _limits_problem(decision, limits)
    if problem:
        raise Internal(f"the plan broke its own rule ({problem}): {decision.to_json_line()}")


def _direction_problem(decision: Decision) -> str:
    changes = [decision.change(role) for role in Role]
    if decision.direction is Direction.HOLD:
        return "who holds changes nothing" if any(changes) or decision.flips else ""
    if decision.direction is Direction.FLIP:
        moved = decision.before
        for flip in decision.flips:
            moved = moved.but(flip.to, moved.of(flip.to) + 1)
            moved = moved.but(flip.to.other, moved.of(flip.to.other) - 1)
        is_true = decision.flips and moved == decision.wanted and sum(changes) == 0
        return "" if is_true else "flips conserve the number of workers"
    if decision.flips or not any(changes):
        return "one direction, and something to do"
    if decision.direction is Direction.UP:
        return "" if min(changes) >= 0 else "up takes nobody away"
    return "" if max(changes) <= 0 else "down adds nobody"


def _limits_problem(decision: Decision, limits: ScaleLimits) -> str:
    wanted, least = decision.wanted, limits.least
    is_none = wanted == ByRole(0, 0) and limits.scales_to_zero
    for role in Role:
        num, change = wanted.of(role), decision.change(role)
        if change > 0 and num > limits.of(role).max_workers:
            return f"more {role.value} workers than max_workers"
        # What was there before the limits were set is put right step by step.
        if change < 0 and num < min(least.of(role), decision.before.of(role)) and not is_none:
            return f"fewer {role.value} workers than min_workers"
    is_more = decision.direction in (Direction.UP, Direction.FLIP)
    return (
        "more devices than the budget" if is_more and limits.devices(wanted) > limits.budget else ""
    )


# ---- changes of a pool

_MANY = 1 << 30
"""Workers that no pool has: nothing can be spared."""

STRAINED = 1.05
"""A pool is believed to carry less by so much: what it lacks, it lacks for its latencies."""


def first_workers(case: PlanInput, traffic: Traffic, asked: LoadEstimate) -> Decision | None:
    """There is nobody, which is allowed: until somebody waits."""
    if case.before != ByRole(0, 0):
        return None
    if not traffic.num_open and not traffic.num_arrived:
        return case.hold(Reason.IDLE, "nobody asks for anything")
    least = case.limits.least
    num_more = case.limits.max_added_workers - least.prefill - least.decode
    free = case.free_devices - case.limits.devices(least)
    if free < 0:
        return case.hold(Reason.DEVICES, "workers on their way out hold the devices")
    wanted = capacity_model.grown_pair(
        least,
        asked.load.needed,
        asked.rates,
        case.limits,
        free_devices=free,
        most=max(0, num_more),
    )
    return case.to(wanted, Direction.UP, Reason.WAKE, f"{traffic.num_open} requests wait")


def no_workers(case: PlanInput) -> Decision | None:
    """Nobody has asked for anything for long, and there may be none."""
    since_s, idle_s = case.state.idle_since_s, case.pace.idle_s
    if since_s is None or not case.limits.scales_to_zero or case.seen.now_s - since_s < idle_s:
        return None
    return case.to(ByRole(0, 0), Direction.DOWN, Reason.IDLE, f"idle_s {idle_s:g}")


def change(case: PlanInput, asked: LoadEstimate) -> Decision:
    """There are workers, and somebody uses them."""
    pace, now_s = case.pace, case.seen.now_s
    needed = case.state.fewest(now_s, pace.up_s)
    lacking = [role for role in Role if needed.of(role) > case.before.of(role)]
    if lacking:
        return _more(case, asked, needed, lacking)
    if any(asked.load.needed.of(role) > case.before.of(role) for role in Role):
        return case.hold(Reason.WAIT_UP, f"up_s {pace.up_s:g}")
    if asked.load.rate <= asked.load.most:
        return _fewer(case, asked)
    for decision in (_moved(case, asked), _fewer(case, asked)):
        if decision is not None and decision.is_action:
            return decision
    return case.hold(Reason.BUDGET, _bound(case, asked))


def _more(
    case: PlanInput, asked: LoadEstimate, needed: ByRole[int], lacking: list[Role]
) -> Decision:
    is_late = asked.pressure.role is not None or any(
        case.state.strain.of(role) > STRAINED for role in lacking
    )
    reason = Reason.LATENCY if is_late else Reason.LOAD
    enough = case.state.most(case.seen.now_s, case.pace.flip_s, uncovered=_MANY)
    spared = [role for role in lacking if case.before.of(role.other) > enough.of(role.other)]
    for role in spared:
        flipped = _flip(case, role, f"{role.other.value} has more than it needs")
        if flipped is not None:
            return flipped
    free = case.free_devices
    wanted = capacity_model.grown_pair(
        case.before,
        needed,
        asked.rates,
        case.limits,
        free_devices=free,
        most=case.limits.max_added_workers,
    )
    if wanted != case.before:
        cut = any(wanted.of(role) < needed.of(role) for role in lacking)
        return case.to(wanted, Direction.UP, reason, "max_added_workers or budget" if cut else "")
    leaving = [case.seen.pools.of(role).num_draining for role in Role]
    if any(leaving):
        return case.hold(Reason.DEVICES, "workers on their way out hold the devices")
    for role in spared:
        room = _room(case, role, 1)
        if room is not None:
            return room
    return _moved(case, asked) or case.hold(Reason.BUDGET, _bound(case, asked))


def _moved(case: PlanInput, asked: LoadEstimate) -> Decision | None:
    """The same devices would serve more by more than the slack, for a while already."""
    role = case.state.helped(case.seen.now_s, case.pace.flip_s)
    if asked.helped is None or asked.helped[0] is not role:
        return None
    pair = asked.helped[1]
    flipped = _flip(case, role, "the budget serves more so")
    return flipped or _room(case, role, case.before.of(role.other) - pair.of(role.other))


def _room(case: PlanInput, role: Role, num: int) -> Decision | None:
    """The other pool gives up `num` workers, as many as may go at once, for `role`; None: not now,
    or one can be flipped some looks later. The next look finds their devices free, when they
    are."""
    if not case.may_remove or case.num_missing(role.other) or _able(case, role):
        return None
    if case.num_on_their_way(role.other):
        return None
    num = min(num, case.limits.max_removed_workers)
    wanted = case.before.but(role.other, case.before.of(role.other) - num)
    return case.to(wanted, Direction.DOWN, Reason.BALANCE, f"room for {role.value}")


def _flip(case: PlanInput, role: Role, binding: str) -> Decision | None:
    """One worker of the other pool takes `role`: the one with the least to do; None: not now."""
    since_s, able = case.seen.now_s - case.state.flip_at_s, _able(case, role)
    if (
        not able
        or case.seen.num_flipping
        or since_s < case.pace.flip_cooldown_s
        or case.num_missing(role.other)
    ):
        return None
    chosen = min(
        able, key=lambda w: (w.num_running + w.num_waiting, w.num_queued_tokens, w.worker_id)
    )
    decision = case.to(_flipped(case.before, role), Direction.FLIP, Reason.BALANCE, binding)
    return replace(decision, flips=(Flip(chosen.worker_id, role),))


def _able(case: PlanInput, role: Role) -> list[Worker]:
    """Workers of the other pool that could take `role`, if not now. None while those that it must
    keep do not all serve: one that is wanted may never come."""
    limits, donor = case.limits, role.other
    if case.num_serving(donor) <= limits.least.of(donor):
        return []
    is_same = limits.prefill.num_devices == limits.decode.num_devices
    if not (is_same and limits.allows(_flipped(case.before, role))):
        return []
    return [
        worker
        for worker in case.seen.pools.of(donor).workers
        if worker.can_flip and not worker.is_draining and worker.age_s <= case.pace.stale_s
    ]


def _flipped(before: ByRole[int], role: Role) -> ByRole[int]:
    return ByRole(before.prefill - 1, before.decode - 1).but(role, before.of(role) + 1)


def _fewer(case: PlanInput, asked: LoadEstimate) -> Decision:
    pace, now_s, before, limits = case.pace, case.seen.now_s, case.before, case.limits
    spare_now = [role for role in Role if before.of(role) > asked.load.enough.of(role)]
    if not spare_now:
        return case.hold(Reason.STEADY)
    enough = case.state.most(now_s, pace.down_s, uncovered=_MANY)
    spare = [role for role in spare_now if before.of(role) > enough.of(role)]
    if not spare:
        return case.hold(Reason.WAIT_DOWN, f"down_s {pace.down_s:g}")
    started_s = case.state.started_at_s
    starting = [role for role in spare if started_s.of(role) == now_s]  # whatever down_s is
    settled = [
        role for role in spare if role not in starting and now_s - started_s.of(role) >= pace.down_s
    ]
    if not settled:
        starts = f"a {starting[0].value} worker starts" if starting else "since a start"
        return case.hold(Reason.WAIT_DOWN, f"down_s {pace.down_s:g}, {starts}")
    spare = settled
    if not case.may_remove:
        return case.hold(Reason.WAIT_DOWN, f"down_cooldown_s {pace.down_cooldown_s:g}")
    missing = case.unreported()
    if missing:
        return case.hold(Reason.INCOMPLETE, missing)
    wanted = before
    for _ in range(limits.max_removed_workers):
        spare = [role for role in spare if wanted.of(role) > enough.of(role)]
        if not spare:
            break
        role = max(spare, key=lambda r: (wanted.of(r) / max(1, enough.of(r)), r.value))
        wanted = wanted.but(role, wanted.of(role) - 1)
    return case.to(wanted, Direction.DOWN, Reason.LOAD)


def _bound(case: PlanInput, asked: LoadEstimate) -> str:
    """What keeps the pools from what is wished."""
    for role in Role:
        if asked.load.wished.of(role) > case.limits.of(role).max_workers == case.before.of(role):
            return f"{role.value}.max_workers {case.limits.of(role).max_workers}"
    return f"budget_devices {case.limits.budget}"


# ---- the plan

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
    case = PlanInput(seen, limits, pace, state, before)
    decision = _without_load(case, targets, priors)
    if decision is None:
        decision, state = _with_load(case, targets, priors)
    else:
        state = state.blind()
    num_candidates, num_affordable = capacity_model.num_pairs(limits)
    decision = replace(
        decision,
        num_candidates=num_candidates,
        num_affordable=num_affordable,
        terms={**observed_levels(seen, limits), **decision.terms},
        notes=(*remarks, *decision.notes),
    )
    check_decision(decision, limits)
    return decision, _remembering(state, decision)


# ---- what does not depend on the load


def _without_load(case: PlanInput, targets: Targets, priors: Priors) -> Decision | None:
    seen, limits, before = case.seen, case.limits, case.before
    if seen.scale_age_s > case.pace.stale_s:
        return case.hold(Reason.STALE, f"the scaler has not answered for {seen.scale_age_s:.0f} s")
    is_none = before == ByRole(0, 0) and limits.scales_to_zero
    if not is_none and not limits.allows(before):
        rates = rates_of(_capacity(case.state, priors), targets, limits, priors)
        return _put_right(case, rates)
    problem = _blindness(case)
    return case.hold(Reason.STALE, problem) if problem else None


def _put_right(case: PlanInput, rates: Rates) -> Decision:
    """What is wanted breaks a limit. Which role a flipped worker has, only the registry knows: as
    long as workers that serve are missing there, it may only seem so, and nobody goes."""
    limits, before = case.limits, case.before
    wanted, broken = (
        capacity_model.is_allowed_pair(before, rates, limits),
        capacity_model.broken_limit(before, limits),
    )
    if sum(wanted.of(role) - before.of(role) for role in Role) > 0:
        if case.free_devices < limits.devices(wanted) - limits.devices(before):
            return case.hold(Reason.DEVICES, "workers on their way out hold the devices")
        return case.to(wanted, Direction.UP, Reason.LIMITS, broken)
    missing = case.unreported()
    if missing:
        return case.hold(Reason.INCOMPLETE, missing)
    wanted = capacity_model.shrunk_pair(before, wanted, rates, most=limits.max_removed_workers)
    return case.to(wanted, Direction.DOWN, Reason.LIMITS, broken)


def _blindness(case: PlanInput) -> str:
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


def _with_load(case: PlanInput, targets: Targets, priors: Priors) -> tuple[Decision, PlanState]:
    traffic = case.seen.traffic
    assert traffic is not None
    asked, state = _ask(case, traffic, targets, priors)
    case = replace(case, state=state)
    decision = first_workers(case, traffic, asked) or no_workers(case) or change(case, asked)
    return replace(decision, terms=decision_terms(asked), notes=decision_notes(asked)), state


def _ask(
    case: PlanInput, traffic: Traffic, targets: Targets, priors: Priors
) -> tuple[LoadEstimate, PlanState]:
    seen, limits, pace, state = case.seen, case.limits, case.pace, case.state
    now_s = seen.now_s
    capacity = learn(_capacity(state, priors), seen, stale_s=pace.stale_s)
    state = _with_starts(seen, _timed(seen, traffic, state, pace))
    state = replace(state, capacity=capacity)
    plain = rates_of(capacity, targets, limits, priors)
    before = [(look.at_s, look.traffic) for look in state.looks]
    load = predict_load(seen, traffic, before, capacity, plain, limits, pace)
    carried_s = state.carried_since_s
    if load.backlog or plain.strained(state.strain).carried(case.before) < load.rate:
        carried_s = None
    elif carried_s is None:
        carried_s = now_s
    state = replace(state, carried_since_s=carried_s)
    ready_s = ready_since(state, pace)
    look = PastLook(now_s, traffic, load.needed, load.enough, load.waiting)
    recent = [one for one in (*state.looks, look) if _is_told(one, ready_s, now_s, pace)]
    felt = press(seen, recent, load, plain, state.strain, targets, limits)
    strain = faded(felt.strain, traffic.elapsed_s) if felt.is_in_time else felt.strain
    rates = plain
    if strain != ByRole(1.0, 1.0):
        rates = plain.strained(strain)
        load = predict_load(seen, traffic, before, capacity, rates, limits, pace)
    helped = None
    if load.rate > rates.carried(case.before):
        helped = capacity_model.is_helped_by_move(case.before, rates, limits, slack=pace.slack)
    look = PastLook(
        now_s, traffic, load.needed, load.enough, load.waiting, helped[0] if helped else None
    )
    keep_s = max(pace.down_s, pace.flip_s, 2 * pace.window_s)
    state = replace(state, strain=strain).add(look, keep_s=keep_s)
    return LoadEstimate(load, rates, felt, capacity, helped), state


def _is_told(look: PastLook, ready_s: float | None, now_s: float, pace: Pace) -> bool:
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
