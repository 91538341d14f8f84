"""What holds of every decision, whatever was seen: limits and budget, one direction, and flips that
conserve the number of workers. Recomputed from the decision alone, before it leaves the plan. Pure.
"""

from __future__ import annotations

from process.errors import Internal
from services.autoscaler.decision import Decision, Direction
from services.autoscaler.limits import ScaleLimits
from services.autoscaler.signals import ByRole, Role


def check(decision: Decision, limits: ScaleLimits) -> None:
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
