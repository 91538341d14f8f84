"""Decision: the wanted numbers of workers of the two pools, and why: for the log, the metrics, and
events of a Deployment. Carrying it out means to set `wanted` and to order `flips`, nothing else.

DecisionLog: the latest decisions with their outcomes; those that changed something are kept longer.
Values; one asyncio loop.
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
    """What is done; never two of them at once."""

    HOLD = "hold"
    UP = "up"
    DOWN = "down"
    FLIP = "flip"


class Reason(StrEnum):
    """Why; one word for metrics and events."""

    STEADY = "steady"
    """What there is suffices, and less might not."""
    LOAD = "load"
    """More or fewer workers are needed for what is asked."""
    BALANCE = "balance"
    """One pool needs what the other can spare, or what serves more under the same budget."""
    LATENCY = "latency"
    """Requests are late though the model says they should not be."""
    IDLE = "idle"
    """Nobody has asked for anything for long."""
    WAKE = "wake"
    """There are no workers, and somebody waits."""
    LIMITS = "limits"
    """What is wanted now breaks a limit."""
    WAIT_UP = "wait_up"
    """More are needed, but not for long enough yet."""
    WAIT_DOWN = "wait_down"
    """Fewer would suffice, but not for long enough yet, or too soon after the last change."""
    BUDGET = "budget"
    """More are needed, and the budget or a maximum does not allow them."""
    DEVICES = "devices"
    """More are needed, and workers on their way out still hold the devices."""
    STALE = "stale"
    """Signals are too old, or there are none."""
    INCOMPLETE = "incomplete"
    """Workers that serve do not report, so none is taken away."""


@dataclass(frozen=True)
class Flip:
    """One worker that shall take the other role."""

    worker_id: str
    to: Role


@dataclass(frozen=True)
class Decision:
    """One outcome of the plan."""

    at_s: float
    """Of the observations' clock."""
    direction: Direction
    reason: Reason
    before: ByRole[int]
    """Workers that were wanted when it was made."""
    wanted: ByRole[int]
    """Workers that are wanted from now on, flips counted as done."""
    flips: tuple[Flip, ...] = ()
    binding: str = ""
    """The one constraint that kept it from being another: a limit, a target, a window."""
    terms: Mapping[str, float] = field(default_factory=dict)
    """What it was made from, by name; units are in the names, roles before the dot."""
    num_candidates: int = 0
    """Pairs (prefill, decode) within the limits of both pools."""
    num_affordable: int = 0
    """Of them, those within the budget."""
    notes: tuple[str, ...] = ()
    """Short sentences for people: what is still believed rather than seen, and what is wrong."""

    @property
    def is_action(self) -> bool:
        """Whether anything is to be done."""
        return self.direction is not Direction.HOLD

    def change(self, role: Role) -> int:
        """Workers more (or fewer) than before."""
        return self.wanted.of(role) - self.before.of(role)

    def to_json(self) -> dict[str, Any]:
        """Plain values, for `json.dumps`; the names are those of the fields."""
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
        """The same, as one line."""
        return json.dumps(self.to_json(), allow_nan=False)

    def line(self) -> str:
        """For people: one line."""

        def pool(role: Role) -> str:
            before, wanted = self.before.of(role), self.wanted.of(role)
            return f"{role.value} {before}" + (f" -> {wanted}" if wanted != before else "")

        what = ", ".join(pool(role) for role in Role)
        flips = "".join(f", {flip.worker_id} becomes {flip.to.value}" for flip in self.flips)
        why = f"{self.reason.value}: {self.binding}" if self.binding else self.reason.value
        return f"{self.direction.value} ({what}{flips}): {why}"


# ---- the log of decisions


class ActionOutcome(StrEnum):
    """The result of carrying out a decision."""

    NOTHING = ""
    """There was nothing to do."""
    DONE = "done"
    ORDERED = "ordered"
    """Workers were told to flip; their answers are logged later."""
    FAILED = "failed"
    NOT_LEADER = "not_leader"
    """Another autoscaler acts."""
    ADVISED = "advised"
    """Another system carries it out (act=false)."""


@dataclass(frozen=True)
class DecisionRecord:
    """One decision."""

    decided_unix_ms: int
    decision: Decision
    outcome: ActionOutcome
    problem: str = ""

    def to_proto(self) -> autoscaler_pb2.ScalingDecision:
        """For whoever asks."""
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
    """See the module."""

    def __init__(self, num_kept: int) -> None:
        self._all: deque[DecisionRecord] = deque(maxlen=num_kept)
        self._actions: deque[DecisionRecord] = deque(maxlen=num_kept)
        self.counts: Counter[tuple[str, str]] = Counter()
        """Since start, by direction and reason."""
        self.outcomes: Counter[str] = Counter()
        """Of those that were to act."""

    def add(self, record: DecisionRecord) -> None:
        """The newest."""
        decision = record.decision
        self._all.append(record)
        self.counts[decision.direction.value, decision.reason.value] += 1
        if decision.is_action:
            self._actions.append(record)
            self.outcomes[record.outcome.value] += 1

    @property
    def last(self) -> DecisionRecord | None:
        """The newest; None: none yet."""
        return self._all[-1] if self._all else None

    def newest(self, num: int, *, only_actions: bool = False) -> list[DecisionRecord]:
        """At most `num` (0: all that are kept), newest first."""
        kept = list(self._actions if only_actions else self._all)[::-1]
        return kept[:num] if num else kept
