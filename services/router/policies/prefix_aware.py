"""Prefix aware: the prefill worker that has the fewest tokens to compute before this prompt is
done, its own uncached ones included; the decode worker with the fewest requests, of equal ones the
one with most of the prompt lying there. Pure; costs are prompt tokens.

The queue counts, or all prompts with one beginning would wait at one worker while others idle.
"""

from __future__ import annotations

from services.router.config import HandoverMode, RouterCosts
from services.router.policies.penalties import PARTS, parts
from services.router.policies.scored import ScoredPolicy, Scorer, Terms
from services.router.policy import Ask, Pools, WorkerLoad

_LITTLE = PARTS // 1000
"""What a token costs that is only further away: nearer is better, where all else is equal."""


class PrefixAware(ScoredPolicy):
    """See the module."""

    name = "prefix_aware"
    unit = "tokens"

    def scorer(self, pools: Pools, ask: Ask) -> Scorer:
        return _PrefixScorer(pools, ask, self._costs, self._mode)


class _PrefixScorer(Scorer):
    def __init__(self, pools: Pools, ask: Ask, costs: RouterCosts, mode: HandoverMode) -> None:
        super().__init__(pools, ask, costs, mode)
        self._request = parts(costs.decode_request_s * costs.prefill_tokens_per_s)

    def prefill_own(self, p: WorkerLoad) -> int:
        return p.num_queued_tokens * PARTS

    def prefill_shared(self, p: WorkerLoad) -> int:
        prefix = self.prefixes.of(p)
        return prefix.num_computed * PARTS + prefix.num_pulled * _LITTLE

    def prefill_terms(self, p: WorkerLoad) -> Terms:
        prefix = self.prefixes.of(p)
        return {
            "prefill_queue": p.num_queued_tokens * PARTS,
            "prefill_compute": prefix.num_computed * PARTS,
            "prefill_pull": prefix.num_pulled * _LITTLE,
        }

    def decode_own(self, d: WorkerLoad) -> int:
        return d.num_requests * self._request + self._num_missing(d) * _LITTLE

    def decode_terms(self, d: WorkerLoad) -> Terms:
        return {
            "decode_load": d.num_requests * self._request,
            "decode_missing": self._num_missing(d) * _LITTLE,
        }

    def _num_missing(self, d: WorkerLoad) -> int:
        num_tokens = self.ask.num_prompt_tokens
        if not self.ask.local:
            return num_tokens
        return num_tokens - min(num_tokens, self.ask.local.get(d.incarnation, 0))
