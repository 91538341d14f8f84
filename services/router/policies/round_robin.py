"""Round robin: whose turn it is, among the workers in the order of their ids. Pure: the turn comes
with the request. Who may not be taken is passed over by the next one.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.router.config import HandoverMode, RouterCosts
from services.router.policies.penalties import parts
from services.router.policies.scored import ScoredPolicy, Scorer, Terms
from services.router.policy import Ask, Pools, WorkerLoad


class RoundRobin(ScoredPolicy):
    """See the module."""

    name = "round_robin"
    unit = "turns"

    def scorer(self, pools: Pools, ask: Ask) -> Scorer:
        return _TurnScorer(pools, ask, self._costs, self._mode)


class _TurnScorer(Scorer):
    def __init__(self, pools: Pools, ask: Ask, costs: RouterCosts, mode: HandoverMode) -> None:
        super().__init__(pools, ask, costs, mode)
        self._prefill = _turns(pools.prefill, ask.turn)
        self._decode = _turns(pools.decode, ask.turn)

    def prefill_own(self, p: WorkerLoad) -> int:
        return parts(self._prefill[p.worker_id])

    def prefill_terms(self, p: WorkerLoad) -> Terms:
        return {"prefill_turn": self.prefill_own(p)}

    def decode_own(self, d: WorkerLoad) -> int:
        return parts(self._decode[d.worker_id])

    def decode_terms(self, d: WorkerLoad) -> Terms:
        return {"decode_turn": self.decode_own(d)}


def _turns(workers: Sequence[WorkerLoad], turn: int) -> dict[str, int]:
    """How many come before each."""
    names = sorted(worker.worker_id for worker in workers)
    return {name: (place - turn) % len(names) for place, name in enumerate(names)}
