"""Least load: the prefill worker with the fewest prompt tokens under way (counted in prompts like
this one), and the decode worker with the fewest requests. Pure; knows no prefixes and no links.
"""

from __future__ import annotations

from services.router.policies.penalties import parts
from services.router.policies.scored import ScoredPolicy, Scorer, Terms
from services.router.policy import Ask, Pools, WorkerLoad


class LeastLoad(ScoredPolicy):
    """See the module."""

    name = "least_load"
    unit = "requests"

    def scorer(self, pools: Pools, ask: Ask) -> Scorer:
        return _LoadScorer(pools, ask, self._costs, self._mode)


class _LoadScorer(Scorer):
    def prefill_own(self, p: WorkerLoad) -> int:
        return parts(p.num_queued_tokens / self.ask.num_prompt_tokens)

    def prefill_terms(self, p: WorkerLoad) -> Terms:
        return {"prefill_queue": self.prefill_own(p)}

    def decode_own(self, d: WorkerLoad) -> int:
        return parts(d.num_requests)

    def decode_terms(self, d: WorkerLoad) -> Terms:
        return {"decode_load": self.decode_own(d)}
