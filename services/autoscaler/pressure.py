"""Pressure: what to make of latencies that miss their targets though the model says that what
there is should do. The pool that is to blame is believed to carry less, by a factor called strain,
just so much that it needs one worker more; a factor that fades when requests are in time again.

Only where more workers can help: a pool that is hardly busy is not late for want of workers, and
one that is incomplete, or has just been changed, tells nothing. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from services.autoscaler.limits import Pace, ScaleLimits, Targets
from services.autoscaler.load import Load
from services.autoscaler.rates import Rates
from services.autoscaler.signals import ByRole, Observations, Role
from services.autoscaler.state import Look, PlanState, latencies

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
    recent: Sequence[Look],
    load: Load,
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
    load: Load,
    carried: float,
    recent: Sequence[Look],
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
