"""plan: the autoscaling policy. One pure function that returns the wanted numbers of prefill and
decode workers from the observations, the settings, and the state of its last call (`PlanState`).
The simulator and the running autoscaler call the same function.

The first rule that applies decides:

1. the Scaler does not report the wanted sizes: no change;
2. the wanted sizes break a limit: they are corrected at any load, at most `max_removed_workers` at
   once; no worker is removed while workers that serve are missing in the registry;
3. signals are stale or missing: no change;
4. there are no workers, and requests wait: workers are added at once;
5. there has been no request for `idle_s`, and workers report no work: all workers are removed, if
   the limits allow zero;
6. a pool has lacked workers for `up_s`: a worker of the other pool, which has not needed it for
   `flip_s`, is flipped; else workers are added as far as devices are free; else, when the same
   devices would carry more by more than the slack, the other pool gives up workers (by a flip, or
   by a removal that makes room);
7. a pool has had too many workers for `down_s`, even for the load with the slack, and none of its
   workers was starting meanwhile: workers are removed, at most `max_removed_workers` at once.

The plan does not oscillate: it adds what was needed at every observation of `up_s`, and removes
what was not needed, with the slack, at any observation of `down_s`. While every measurement stays
within a share e of its mean and (1 + e) / (1 - e) < 1 + slack, no added worker becomes one too
many.

**Pressure** (`press`): a correction for latencies that miss their targets although the capacity
model says that the workers suffice. The pool at fault is assumed to carry less, by a factor
(strain) that makes it need one more worker, and that fades while the targets are met. There is no
correction where more workers would not help: for a pool that is hardly busy, has starting or
leaving workers, or has just changed.

`check_decision` recomputes the invariants before a decision is returned: limits and budget, one
direction, and flips that conserve the number of workers. `PlanState` holds no more than the longest
window needs. Any thread.
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
from services.autoscaler.signals import (
    ByRole,
    DurationCounts,
    Observations,
    ObservedTraffic,
    ObservedWorker,
    Pool,
    Role,
)

# ---- state between observations


@dataclass(frozen=True)
class PastLook:
    """Record of one earlier observation: the traffic, and the workers that it needed."""

    at_s: float
    traffic: ObservedTraffic
    needed: ByRole[int]
    """Fewest workers for the load."""
    enough: ByRole[int]
    """Fewest workers for the load with the slack; workers beyond these may be removed."""
    waiting: float = 0.0
    """Number of requests that waited."""
    helped: Role | None = None
    """The pool to which a worker of the other should move, so that the same devices carry more by
    more than the slack; None: neither."""


@dataclass(frozen=True)
class PlanState:
    """State of the plan between two calls. `PlanState()` is the state before the first observation.
    All times are of the observations' clock, in seconds."""

    looks: tuple[PastLook, ...] = ()
    """Records of earlier observations, oldest first, without a gap: stale signals clear them."""
    since_s: float | None = None
    """Start of the present period without a gap in the signals; None: there is none."""
    capacity: Capacity | None = None
    strain: ByRole[float] = ByRole(1.0, 1.0)  # noqa: RUF009  a frozen value
    """Factor by which each pool is assumed to carry less than the capacity model says; at
    least 1."""
    strained_at_s: float = float("-inf")
    complete_since_s: float | None = None
    """Since when all wanted workers serve, and none is leaving or flipping; None: not now."""
    starting_since_s: ByRole[float | None] = ByRole(None, None)  # noqa: RUF009  a frozen value
    """Since when workers of each pool have been starting; None: no worker is starting."""
    started_at_s: ByRole[float] = ByRole(float("-inf"), float("-inf"))  # noqa: RUF009  likewise
    """When a worker of each pool was last seen starting, not counting one that has been starting
    for longer than START_S. The window of `down_s` begins no earlier than this."""
    carried_since_s: float | None = None
    """Since when, by the capacity model, the wanted workers carry the load and there is no backlog;
    None: not now."""
    idle_since_s: float | None = None
    """Since when there has been no request; None: there are requests."""
    up_at_s: float = float("-inf")
    down_at_s: float = float("-inf")
    flip_at_s: float = float("-inf")
    wanted: ByRole[int] | None = None
    """Wanted workers after the last decision."""

    @property
    def changed_at_s(self) -> float:
        """Time of the last change of any kind."""
        return max(self.up_at_s, self.down_at_s, self.flip_at_s)

    def covers(self, now_s: float, span_s: float) -> bool:
        """Return whether there has been no gap in the signals for `span_s` seconds."""
        return self.since_s is not None and now_s - self.since_s >= span_s

    def after(self, now_s: float, span_s: float) -> Sequence[PastLook]:
        """Return the records of the last `span_s` seconds, and always the newest one."""
        found = [look for look in self.looks if now_s - look.at_s <= span_s]
        return found or self.looks[-1:]

    def add(self, look: PastLook, *, keep_s: float) -> PlanState:
        """Return the state with one more record, without those older than `keep_s` seconds."""
        kept = (old for old in self.looks if look.at_s - old.at_s <= keep_s)
        since_s = look.at_s if self.since_s is None else self.since_s
        return replace(self, looks=(*kept, look), since_s=since_s)

    def blind(self) -> PlanState:
        """Return the state after a gap in the signals: the windows begin anew."""
        return replace(
            self,
            looks=(),
            since_s=None,
            complete_since_s=None,
            carried_since_s=None,
            idle_since_s=None,
        )

    def fewest(self, now_s: float, span_s: float) -> ByRole[int]:
        """Return the workers that every observation of the span needed; 0 while the span is not
        covered."""
        return self._over(now_s, span_s, min, 0, lambda look: look.needed)

    def most(self, now_s: float, span_s: float, uncovered: int) -> ByRole[int]:
        """Return the workers that were enough at every observation of the span; `uncovered` while
        the span is not covered."""
        return self._over(now_s, span_s, max, uncovered, lambda look: look.enough)

    def helped(self, now_s: float, span_s: float) -> Role | None:
        """Return the pool to which a worker should have moved by every observation of the span;
        None: no such pool, or the span is not covered."""
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


def latencies(traffics: Sequence[ObservedTraffic]) -> tuple[DurationCounts, DurationCounts]:
    """Return the histograms of TTFT and TPOT over several observations, oldest first. Those with
    other bounds than the newest are left out."""
    ttft, tpot = DurationCounts(), DurationCounts()
    for traffic in reversed(traffics):
        if not ttft.bounds_s or traffic.ttft.bounds_s == ttft.bounds_s:
            ttft = ttft.plus(traffic.ttft)
        if not tpot.bounds_s or traffic.tpot.bounds_s == tpot.bounds_s:
            tpot = tpot.plus(traffic.tpot)
    return ttft, tpot


# ---- correction by missed latencies

FEWEST_SAMPLES = 20
"""Fewest requests for a quantile; of fewer the quantile is chance."""

BUSY = 0.5
"""Share of the rate that a pool carries. Below this load requests do not wait for the pool. So
strain is never much more than the inverse."""

ENOUGH_STRAIN = 1.05
"""Margin above the strain at which the pool needs one more worker, so that it still needs the
worker some observations later."""

HALF_LIFE_S = 900.0
"""Seconds in which strain fades to half while the targets are met."""

FULL = 0.05
"""Share of free blocks, or of free places for streams, below which prompts wait for decode, not for
prefill."""

SHORT_WAIT = 0.1
"""Share of the TTFT target. Where requests wait less than this (by Little's law, from the number of
waiting requests), a late first token has another cause."""


@dataclass(frozen=True)
class Pressure:
    """Measured latencies and the strain that follows from them."""

    strain: ByRole[float]
    role: Role | None = None
    """The pool whose strain this observation raised; None: neither."""
    late: tuple[str, ...] = ()
    """Targets that are missed: "ttft", "tpot"."""
    ttft_s: float | None = None
    tpot_s: float | None = None
    """TTFT and TPOT at the targets' quantile, in seconds; None: too few requests."""
    note: str = ""
    """Why more workers would not help; empty: they may."""

    @property
    def is_in_time(self) -> bool:
        """Whether a latency was measured and no target was missed."""
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
    """Compare the measured latencies with the targets, and raise the strain of the pool at fault.

    Args:
        recent: records since `ready_since`; empty: nothing can be concluded now.
        load: the predicted load, without strain.
        rates: of the capacity model, without strain.
        strain: before this observation.
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
    """Return why more workers would not help; empty: they may."""
    what = " and ".join(late)
    if load.rate < BUSY * carried:
        return f"{what} late, but {role.value} is not busy: more workers would not help"
    waits_s = sum(look.waiting for look in recent) / len(recent) / load.rate
    if role is Role.PREFILL and waits_s < SHORT_WAIT * targets.ttft_s:
        return f"{what} late, but nobody waits: more workers would not help"
    return ""


def faded(strain: ByRole[float], passed_s: float) -> ByRole[float]:
    """Return the strain after `passed_s` seconds in which the targets were met."""
    keep = 0.5 ** (passed_s / HALF_LIFE_S)
    return strain.map(lambda _, factor: 1.0 + (factor - 1.0) * keep)


def ready_since(state: PlanState, pace: Pace) -> float | None:
    """Return the time from which latencies are those of the present wanted workers, without the
    effect of an earlier backlog; None: not yet."""
    if state.complete_since_s is None or state.carried_since_s is None:
        return None
    since_s = max(state.complete_since_s, state.carried_since_s, state.changed_at_s)
    return since_s + pace.settle_s


def _to_blame(seen: Observations, late: Sequence[str], rates: Rates) -> Role:
    """Return the pool at fault: decode for a late TPOT; for a late TTFT prefill, unless decode has
    no room for more streams."""
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
    """Input of one decision: observations, settings and state."""

    seen: Observations
    limits: ScaleLimits
    pace: Pace
    state: PlanState
    before: ByRole[int]
    """Wanted workers before the decision."""

    def hold(self, reason: Reason, binding: str = "") -> Decision:
        """Return a decision that changes nothing."""
        return self.to(self.before, Direction.HOLD, reason, binding)

    def to(
        self, wanted: ByRole[int], direction: Direction, reason: Reason, binding: str = ""
    ) -> Decision:
        """Return a decision for `wanted` workers, without flips."""
        return Decision(self.seen.now_s, direction, reason, self.before, wanted, (), binding)

    @property
    def free_devices(self) -> int:
        """Devices of the budget that no wanted, serving or leaving worker holds."""
        present = self.seen.pools.map(lambda _, pool: pool.num_present)
        return self.limits.budget - self.limits.devices(present)

    @property
    def may_remove(self) -> bool:
        """Whether the last removal is at least `down_cooldown_s` ago, and no flip is pending."""
        since_s = self.seen.now_s - self.state.down_at_s
        return since_s >= self.pace.down_cooldown_s and not self.seen.num_flipping

    def num_reporting(self, role: Role) -> int:
        """Return the number of workers with a fresh heartbeat that are not draining."""
        return sum(
            not worker.is_draining and worker.age_s <= self.pace.stale_s
            for worker in self.seen.pools.of(role).workers
        )

    def num_serving(self, role: Role) -> int:
        """Return the number of workers that serve by both the Scaler and the registry."""
        return min(self.seen.pools.of(role).num_ready, self.num_reporting(role))

    def num_on_their_way(self, role: Role) -> int:
        """Return the number of workers that report that they drain, to end or to change their role;
        the report does not say which."""
        return sum(
            worker.is_draining and worker.age_s <= self.pace.stale_s
            for worker in self.seen.pools.of(role).workers
        )

    def num_missing(self, role: Role) -> int:
        """Return the number of workers that serve by the Scaler but have no fresh heartbeat."""
        pool = self.seen.pools.of(role)
        return max(0, min(pool.wanted, pool.num_ready) - self.num_reporting(role))

    def unreported(self) -> str:
        """Return in words which pool has workers without a heartbeat (`num_missing`); empty:
        none."""
        missing = [role.value for role in Role if self.num_missing(role)]
        return f"{missing[0]} workers that serve do not report" if missing else ""


@dataclass(frozen=True)
class LoadEstimate:
    """The predicted load of one observation, and what it was computed from."""

    load: PredictedLoad
    rates: Rates
    pressure: Pressure
    capacity: Capacity
    helped: tuple[Role, ByRole[int]] | None
    """See `capacity_model.move_that_helps`; None also while the wanted workers carry the load."""


# ---- terms and notes of a decision


def observed_levels(seen: Observations, limits: ScaleLimits) -> Mapping[str, float]:
    """Return the terms that are known without traffic: budget, workers, free blocks."""
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
    """Return the terms of the load, the capacity and the workers needed; rates per second, times in
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
    """Return the notes: figures that are still priors, targets that cannot be met, and why missed
    latencies lead to no change."""
    missing = asked.capacity.missing
    return (
        *([f"from settings, not seen yet: {', '.join(missing)}"] if missing else []),
        *asked.rates.bounds.problems,
        *([asked.pressure.note] if asked.pressure.note else []),
    )


# ---- invariants of a decision


def check_decision(decision: Decision, limits: ScaleLimits) -> None:
    """Check the invariants of a decision.

    Raises: Internal naming the broken invariant: a bug in the plan.
    """
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
        # Workers from before a change of the limits are corrected step by step.
        if change < 0 and num < min(least.of(role), decision.before.of(role)) and not is_none:
            return f"fewer {role.value} workers than min_workers"
    is_more = decision.direction in (Direction.UP, Direction.FLIP)
    return (
        "more devices than the budget" if is_more and limits.devices(wanted) > limits.budget else ""
    )


# ---- changes of a pool

_MANY = 1 << 30
"""More workers than any pool has: no worker can be spared."""

STRAINED = 1.05
"""Strain above which the reason of an addition is the latency."""


def first_workers(
    case: PlanInput, traffic: ObservedTraffic, asked: LoadEstimate
) -> Decision | None:
    """Return the decision of rule 4 while no workers are wanted: none until a request comes, then
    the first workers. None: the rule does not apply."""
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
    """Return the removal of all workers by rule 5; None: the rule does not apply."""
    since_s, idle_s = case.state.idle_since_s, case.pace.idle_s
    if since_s is None or not case.limits.scales_to_zero or case.seen.now_s - since_s < idle_s:
        return None
    return case.to(ByRole(0, 0), Direction.DOWN, Reason.IDLE, f"idle_s {idle_s:g}")


def change(case: PlanInput, asked: LoadEstimate) -> Decision:
    """Return the decision of rules 6 and 7, for pools that are in use."""
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
    """Return a flip or a removal that lets the same devices carry more by more than the slack.
    None: it would not at every observation of `flip_s`, or it is not possible now."""
    role = case.state.helped(case.seen.now_s, case.pace.flip_s)
    if asked.helped is None or asked.helped[0] is not role:
        return None
    pair = asked.helped[1]
    flipped = _flip(case, role, "the budget serves more so")
    return flipped or _room(case, role, case.before.of(role.other) - pair.of(role.other))


def _room(case: PlanInput, role: Role, num: int) -> Decision | None:
    """Return the removal of `num` workers of the other pool, at most `max_removed_workers`, whose
    devices a later decision gives to `role`. None: not possible now, or a worker can be flipped
    some observations later."""
    if not case.may_remove or case.num_missing(role.other) or _able(case, role):
        return None
    if case.num_on_their_way(role.other):
        return None
    num = min(num, case.limits.max_removed_workers)
    wanted = case.before.but(role.other, case.before.of(role.other) - num)
    return case.to(wanted, Direction.DOWN, Reason.BALANCE, f"room for {role.value}")


def _flip(case: PlanInput, role: Role, binding: str) -> Decision | None:
    """Return the flip of the least loaded worker of the other pool to `role`; None: not possible
    now."""
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


def _able(case: PlanInput, role: Role) -> list[ObservedWorker]:
    """Return the workers of the other pool that can take `role`, now or later. Empty unless more
    workers of that pool serve than its minimum: a wanted worker that does not serve yet may never
    start."""
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
    """Return the limit that keeps the pools from the wished numbers."""
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
    """Return the decision for one observation, and the state for the next call.

    Args:
        seen: the observation; its times never go back.
        state: as returned by the last call.

    Raises: Internal when the decision breaks an invariant: a bug in the plan.
    """
    before = seen.pools.map(lambda _, pool: pool.wanted)
    remarks: list[str] = []
    if state.wanted is not None and state.wanted != before:
        remarks.append(
            f"what is wanted was changed elsewhere: {_pair(state.wanted)} became {_pair(before)}"
        )
        # The other party had a reason for its change: every window begins anew.
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


# ---- rules that do not depend on the load


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
    """Return the correction of wanted numbers that break a limit. Only the registry has the roles
    of flipped workers: while workers that serve are missing there, the numbers may be wrong, and no
    worker is removed."""
    limits, before = case.limits, case.before
    wanted, broken = (
        capacity_model.nearest_allowed_pair(before, rates, limits),
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


# ---- rules that depend on the load


def _with_load(case: PlanInput, targets: Targets, priors: Priors) -> tuple[Decision, PlanState]:
    traffic = case.seen.traffic
    assert traffic is not None
    asked, state = _ask(case, traffic, targets, priors)
    case = replace(case, state=state)
    decision = first_workers(case, traffic, asked) or no_workers(case) or change(case, asked)
    return replace(decision, terms=decision_terms(asked), notes=decision_notes(asked)), state


def _ask(
    case: PlanInput, traffic: ObservedTraffic, targets: Targets, priors: Priors
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
        helped = capacity_model.move_that_helps(case.before, rates, limits, slack=pace.slack)
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


def _timed(seen: Observations, traffic: ObservedTraffic, state: PlanState, pace: Pace) -> PlanState:
    """Return the state with `complete_since_s` and `idle_since_s` updated."""
    pools = [seen.pools.of(role) for role in Role]
    is_complete = not seen.num_flipping and not any(p.num_starting or p.num_draining for p in pools)
    # Routers whose heartbeats have lapsed are not in the traffic, and may still serve.
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
    """Return the state with `starting_since_s` and `started_at_s` updated."""
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
    """Return whether any worker with a fresh heartbeat has requests."""
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
