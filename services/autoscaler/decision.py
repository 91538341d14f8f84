"""Decision: what the plan wants of the two pools, and why: a record for the log, the metrics, the
events on a Deployment, and whoever asks afterwards.

A value. Whoever acts upon it sets `wanted` and orders `flips`, and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from services.autoscaler.signals import ByRole, Role


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
