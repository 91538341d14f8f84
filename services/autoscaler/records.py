"""Records: what was decided, why, and what became of it, as long as it is kept: all decisions of
late, and those that acted for longer. Values; one asyncio loop.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from protos import autoscaler_pb2
from services.autoscaler.acting import Outcome
from services.autoscaler.decision import Decision


@dataclass(frozen=True)
class Record:
    """One decision."""

    decided_unix_ms: int
    decision: Decision
    outcome: Outcome
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


class Records:
    """See the module."""

    def __init__(self, num_kept: int) -> None:
        self._all: deque[Record] = deque(maxlen=num_kept)
        self._actions: deque[Record] = deque(maxlen=num_kept)
        self.counts: Counter[tuple[str, str]] = Counter()
        """Since start, by direction and reason."""
        self.outcomes: Counter[str] = Counter()
        """Of those that were to act."""

    def add(self, record: Record) -> None:
        """The newest."""
        decision = record.decision
        self._all.append(record)
        self.counts[decision.direction.value, decision.reason.value] += 1
        if decision.is_action:
            self._actions.append(record)
            self.outcomes[record.outcome.value] += 1

    @property
    def last(self) -> Record | None:
        """The newest; None: none yet."""
        return self._all[-1] if self._all else None

    def newest(self, num: int, *, only_actions: bool = False) -> list[Record]:
        """At most `num` (0: all that are kept), newest first."""
        kept = list(self._actions if only_actions else self._all)[::-1]
        return kept[:num] if num else kept
