"""Joint: the pair whose answer can go on soonest, in estimated seconds. Pure.

prefill_queue    prompt tokens before this one
prefill_compute  the uncached rest
prefill_link     what its own store holds
prefill_pull     what other stores hold
prefill_scarce   a longer window than the prompt needs, where others have a shorter one
handover_put     the last chunk's way into the store
decode_link      the prompt's way to the decode worker, less what should lie there
decode_compute   the prompt computed there: nothing can be moved, or it is short enough
decode_disturb   what computing there costs those who stream from it
decode_load      requests that run there
decode_scarce    as for prefill
"""

from __future__ import annotations

from services.router.config import HandoverMode, RouterCosts
from services.router.policies.penalties import fitting, parts
from services.router.policies.scored import ScoredPolicy, Scorer, Terms
from services.router.policy import Ask, Pools, WorkerLoad


class Joint(ScoredPolicy):
    """See the module."""

    name = "joint"
    unit = "s"

    def scorer(self, pools: Pools, ask: Ask) -> Scorer:
        return _JointScorer(pools, ask, self._costs, self._mode)


class _JointScorer(Scorer):
    def __init__(self, pools: Pools, ask: Ask, costs: RouterCosts, mode: HandoverMode) -> None:
        super().__init__(pools, ask, costs, mode)
        # Whole parts for each, so that what runs for every worker is a product of integers.
        self._token = parts(1.0 / costs.prefill_tokens_per_s)
        self._request = parts(costs.decode_request_s)
        self._scarce = parts(costs.scarce_window_s)
        self._windows = tuple(
            min([w.context_window for w in fitting(workers, ask)], default=0)
            for workers in (pools.prefill, pools.decode)
        )
        """Shortest window that suffices, at prefill and at decode."""

    def prefill_own(self, p: WorkerLoad) -> int:
        return p.num_queued_tokens * self._token

    def prefill_shared(self, p: WorkerLoad) -> int:
        prefix = self.prefixes.of(p)
        scarce = self._scarce if p.context_window > self._windows[0] else 0
        return prefix.num_computed * self._token + prefix.link + prefix.pull + scarce

    def prefill_terms(self, p: WorkerLoad) -> Terms:
        prefix = self.prefixes.of(p)
        return {
            "prefill_queue": p.num_queued_tokens * self._token,
            "prefill_compute": prefix.num_computed * self._token,
            "prefill_link": prefix.link,
            "prefill_pull": prefix.pull,
            "prefill_scarce": self._scarce if p.context_window > self._windows[0] else 0,
        }

    def decode_own(self, d: WorkerLoad) -> int:
        return d.num_requests * self._request + (
            self._scarce if d.context_window > self._windows[1] else 0
        )

    def decode_terms(self, d: WorkerLoad) -> Terms:
        return {
            "decode_load": d.num_requests * self._request,
            "decode_scarce": self._scarce if d.context_window > self._windows[1] else 0,
        }

    def way_terms(self, p: WorkerLoad, d: WorkerLoad) -> Terms:
        way = self.way(p, d)
        return {
            "handover_put": parts(way.put_s),
            "decode_link": parts(way.link_s),
            "decode_compute": parts(way.compute_s),
        }

    def own_terms(self, d: WorkerLoad) -> Terms:
        compute = self.num_own(d) * self._token
        # Each request that runs there waits as long as this one computes.
        return {"decode_compute": compute, "decode_disturb": compute * d.num_requests}
