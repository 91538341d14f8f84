"""Case: what one decision is made from, before and after the load is known. Values, and the few
questions that several rules ask of them. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.autoscaler.capacity import Capacity
from services.autoscaler.decision import Decision, Direction, Reason
from services.autoscaler.limits import Pace, ScaleLimits
from services.autoscaler.load import Load
from services.autoscaler.pressure import Pressure
from services.autoscaler.rates import Rates
from services.autoscaler.signals import ByRole, Observations, Role
from services.autoscaler.state import PlanState


@dataclass(frozen=True)
class Case:
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
class Asked:
    """What the load asks, and from what that was reckoned."""

    load: Load
    rates: Rates
    pressure: Pressure
    capacity: Capacity
    helped: tuple[Role, ByRole[int]] | None
    """See `pairs.helped_by_move`; None also while there is nothing to help."""
