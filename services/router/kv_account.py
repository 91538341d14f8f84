"""KvAccount: what the workers of one request say of its KV, worker by worker, in the order in which
they worked; some of them were left behind.

A leg that went on elsewhere says why (`MOVED`, `LOST`). What the next one computes of what any leg
had of the prompt counts as recomputed for that reason; the workers do not know it. A leg that broke
had all of the prompt, for all that is known. No I/O. One request.
"""

from __future__ import annotations

from protos import common_pb2
from services.router.policy import DECODE, PREFILL

MOVED = "moved"
"""Its worker was leaving, and let the answer go where it was."""
LOST = "worker_lost"
"""Its worker broke."""


_ALL = 2**63
"""Above every prompt."""


class KvAccount:
    """See the module."""

    def __init__(self) -> None:
        self._legs: list[common_pb2.KvLeg] = []
        self._expected: common_pb2.KvLeg | None = None
        self._again = ""
        self._num_reached = 0
        """Prompt tokens, counted from the first, that a leg has had."""

    @property
    def legs(self) -> tuple[common_pb2.KvLeg, ...]:
        """So far, in order."""
        return tuple(self._legs)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that who computed the prompt first did not have to compute: the prefill
        worker, or the decode worker where no other was asked; what was expected, while none has
        told.
        """
        told = [leg for leg in self._legs if leg.num_tokens_computed or _num_found(leg)]
        expected = [self._expected] if self._expected is not None else []
        by_prefill = [leg for leg in told if leg.role == PREFILL]
        return next(map(_num_found, [*by_prefill, *told, *expected]), 0)

    def expect(self, num_tokens_found: int) -> None:
        """Prompt tokens that the prefill worker should find; its account comes later, but
        messages that go out before it tell of the prompt, too."""
        self._expected = common_pb2.KvLeg(num_tokens_local=num_tokens_found)

    def add(self, leg: common_pb2.KvLeg, block_size: int, ended_by: str = "") -> None:
        """A worker's own account. `block_size`: tokens of a block of its cache; `ended_by`: see the
        module, empty for one whose part is done."""
        num_found, num_computed = _num_found(leg), leg.num_tokens_computed
        num_again = min(num_computed, self._num_reached - num_found)
        if self._again and num_again > 0:
            num_blocks = -(-num_again // block_size)
            leg.recomputed.add(reason=self._again, num_blocks=num_blocks)
        self._num_reached = max(self._num_reached, num_found + num_computed)
        self._again = ""
        leg.ended_by = ended_by
        self._legs.append(leg)

    def add_silent(self, worker_id: str, incarnation: str, ended_by: str) -> None:
        """A decode worker that has no account: it broke, or left before it did anything."""
        if ended_by == LOST:
            self._num_reached = _ALL
        self._legs.append(
            common_pb2.KvLeg(
                role=DECODE, worker_id=worker_id, incarnation=incarnation, ended_by=ended_by
            )
        )

    def recompute_for(self, reason: str) -> None:
        """What the next worker computes of the prompt was computed before; empty: or is counted
        by itself."""
        self._again = reason


def _num_found(leg: common_pb2.KvLeg) -> int:
    """Prompt tokens that the worker had, or found in a store."""
    return leg.num_tokens_local + sum(count.num_tokens for count in leg.from_store)
