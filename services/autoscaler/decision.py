"""Decision: a scaling decision, with the wanted numbers of workers of the two pools and the reason,
as logs, metrics and events of a Deployment show it. To carry it out is to set `wanted` and to order
`flips`.

DecisionLog keeps the latest decisions with their outcomes; those that change something have a
second list of their own, so they stay longer. One asyncio loop.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from protos import autoscaler_pb2
from services.autoscaler.signals import ByRole, Role

# ---- decisions


class Direction(StrEnum):
    """Kind of change that a decision makes; each decision has exactly one."""

    HOLD = "hold"
    UP = "up"
    DOWN = "down"
    FLIP = "flip"


class Reason(StrEnum):
    """Reason of a decision, as one word for metrics and events."""

    STEADY = "steady"
    """The workers suffice, and fewer might not."""
    LOAD = "load"
    """The load needs more or fewer workers."""
    BALANCE = "balance"
    """One pool needs a worker that the other can spare, or the same budget serves more with
    another split."""
    LATENCY = "latency"
    """Latencies miss their targets although the capacity model says that the workers suffice."""
    IDLE = "idle"
    """There has been no request for `pace.idle_s`, or there are no workers and no requests."""
    WAKE = "wake"
    """There are no workers, and requests wait."""
    LIMITS = "limits"
    """The present wanted numbers break a limit."""
    WAIT_UP = "wait_up"
    """More workers are needed, but not for long enough yet."""
    WAIT_DOWN = "wait_down"
    """Fewer workers would suffice, but not for long enough yet, or the last change is too
    recent."""
    BUDGET = "budget"
    """More workers are needed, and the budget or a pool's maximum does not allow them."""
    DEVICES = "devices"
    """More workers are needed, and leaving workers still hold the devices."""
    STALE = "stale"
    """Signals are stale or missing."""
    INCOMPLETE = "incomplete"
    """Workers that serve are missing in the registry, so no worker is removed."""


@dataclass(frozen=True)
class Flip:
    """Order to one worker to take the other role."""

    worker_id: str
    to: Role


@dataclass(frozen=True)
class Decision:
    """Result of one call of the plan."""

    at_s: float
    """Time of the decision, by the observations' monotonic clock."""
    direction: Direction
    reason: Reason
    before: ByRole[int]
    """Wanted workers before this decision."""
    wanted: ByRole[int]
    """Wanted workers after this decision, flips counted as done."""
    flips: tuple[Flip, ...] = ()
    binding: str = ""
    """The constraint (a limit, a target, a window) that decided; empty: none."""
    terms: Mapping[str, float] = field(default_factory=dict)
    """Figures that the decision was made from, by name. Names contain units; a role comes before
    the dot."""
    num_candidates: int = 0
    """Number of pairs (prefill, decode) of worker counts within the limits of both pools."""
    num_affordable: int = 0
    """Number of those pairs within the device budget."""
    notes: tuple[str, ...] = ()
    """Short sentences for people: figures still taken from the priors, and problems."""

    @property
    def is_action(self) -> bool:
        """Whether the decision changes anything."""
        return self.direction is not Direction.HOLD

    def change(self, role: Role) -> int:
        """Return the change of the wanted workers of `role`; negative: fewer."""
        return self.wanted.of(role) - self.before.of(role)

    def to_json(self) -> dict[str, Any]:
        """Return plain values for `json.dumps`, by field name."""
        return {
            "at_s": round(self.at_s, 3),
            "direction": self.direction.value,
            "reason": self.reason.value,
            "before": self.before.to_json(),
            "wanted": self.wanted.to_json(),
            "flips": [{"worker_id": f.worker_id, "to": f.to.value} for f in self.flips],
            "binding": self.binding,
            "terms": {name: float(f"{value:.6g}") for name, value in sorted(self.terms.items())},
            "num_candidates": self.num_candidates,
            "num_affordable": self.num_affordable,
            "notes": list(self.notes),
        }

    def to_json_line(self) -> str:
        """Return `to_json` as one line of text."""
        return json.dumps(self.to_json(), allow_nan=False)

    def line(self) -> str:
        """Return a one-line summary for people."""

        def pool(role: Role) -> str:
            before, wanted = self.before.of(role), self.wanted.of(role)
            return f"{role.value} {before}" + (f" -> {wanted}" if wanted != before else "")

        what = ", ".join(pool(role) for role in Role)
        flips = "".join(f", {flip.worker_id} becomes {flip.to.value}" for flip in self.flips)
        why = f"{self.reason.value}: {self.binding}" if self.binding else self.reason.value
        return f"{self.direction.value} ({what}{flips}): {why}"


# ---- the log of decisions


class ActionOutcome(StrEnum):
    """Outcome of carrying out a decision."""

    NOTHING = ""
    """The decision changes nothing."""
    DONE = "done"
    ORDERED = "ordered"
    """Workers were told to flip; their answers are logged later."""
    FAILED = "failed"
    NOT_LEADER = "not_leader"
    """This autoscaler is not the leader."""
    ADVISED = "advised"
    """Another system carries out the decision (act=false)."""


@dataclass(frozen=True)
class DecisionRecord:
    """Decision with its wall-clock time and its outcome."""

    decided_unix_ms: int
    decision: Decision
    outcome: ActionOutcome
    problem: str = ""

    def to_proto(self) -> autoscaler_pb2.ScalingDecision:
        """Return the record as the gRPC message."""
        return autoscaler_pb2.ScalingDecision(
            decided_unix_ms=self.decided_unix_ms,
            direction=self.decision.direction.value,
            reason=self.decision.reason.value,
            summary=self.decision.line(),
            why_json=self.decision.to_json_line(),
            outcome=self.outcome.value,
            problem=self.problem,
        )


class DecisionLog:
    """The latest decisions in memory, those that act in a second list, and counters since start."""

    def __init__(self, num_kept: int) -> None:
        self._all: deque[DecisionRecord] = deque(maxlen=num_kept)
        self._actions: deque[DecisionRecord] = deque(maxlen=num_kept)
        self.counts: Counter[tuple[str, str]] = Counter()
        """Number of decisions since start, by direction and reason."""
        self.outcomes: Counter[str] = Counter()
        """Number of outcomes since start, of decisions that act; also the ends of flips."""

    def add(self, record: DecisionRecord) -> None:
        """Append the newest record."""
        decision = record.decision
        self._all.append(record)
        self.counts[decision.direction.value, decision.reason.value] += 1
        if decision.is_action:
            self._actions.append(record)
            self.outcomes[record.outcome.value] += 1

    @property
    def last(self) -> DecisionRecord | None:
        """The newest record; None: there is none yet."""
        return self._all[-1] if self._all else None

    def newest(self, num: int, *, only_actions: bool = False) -> list[DecisionRecord]:
        """Return at most `num` records (0: all that are kept), newest first.

        Args:
            only_actions: only decisions that act.
        """
        kept = list(self._actions if only_actions else self._all)[::-1]
        return kept[:num] if num else kept
