"""PlanState: what the plan remembers from one look to the next. A frozen value, and never more of
it than the longest window needs.

Whoever runs the plan keeps the newest one, and drops it with the right to act: what was learned
belongs to one life of one planner.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from services.autoscaler.capacity import Capacity
from services.autoscaler.signals import ByRole, Histogram, Role, Traffic


@dataclass(frozen=True)
class Look:
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

    looks: tuple[Look, ...] = ()
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

    def after(self, now_s: float, span_s: float) -> Sequence[Look]:
        """The looks of the last `span_s` seconds, the newest one always."""
        found = [look for look in self.looks if now_s - look.at_s <= span_s]
        return found or self.looks[-1:]

    def add(self, look: Look, *, keep_s: float) -> PlanState:
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
        of: Callable[[Look], ByRole[int]],
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
