"""What all policies are made of: a search for the cheapest pair, the way that its KV goes, and the
account of what was weighed. Pure.

A policy itself says no more than what a worker costs it, by name: `Scorer`.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping

from services.router import handover
from services.router.config import HandoverMode, RouterCosts
from services.router.policies.penalties import (
    NO_WAY,
    PARTS,
    decode_sum,
    fitting,
    of_decode,
    of_prefill,
    prefill_sum,
)
from services.router.policies.prefix_costs import PrefixCosts
from services.router.policies.search import search
from services.router.policy import DECODE, PREFILL, Ask, Candidate, Choice, Pools, WorkerLoad

Terms = Mapping[str, int]
"""Parts of a cost, by name."""


class Scorer(ABC):
    """One request among one pool, as one policy weighs it: the `Scoring` of its search.

    `*_own` are what it reckons for each worker, `prefill_shared` what is equal for workers at the
    same place; what makes a worker the last choice is added to them.
    """

    def __init__(self, pools: Pools, ask: Ask, costs: RouterCosts, mode: HandoverMode) -> None:
        self.pools = pools
        self.ask = ask
        self.costs = costs
        self.mode = mode
        self.prefixes = PrefixCosts(ask, costs, pools)

    @abstractmethod
    def prefill_own(self, p: WorkerLoad) -> int: ...
    def prefill_shared(self, p: WorkerLoad) -> int:
        """See `search.Scoring`."""
        return 0

    @abstractmethod
    def prefill_terms(self, p: WorkerLoad) -> Terms: ...
    @abstractmethod
    def decode_own(self, d: WorkerLoad) -> int: ...
    @abstractmethod
    def decode_terms(self, d: WorkerLoad) -> Terms: ...

    def way_terms(self, p: WorkerLoad, d: WorkerLoad) -> Terms:
        """Of the handover. That nothing can be moved costs in any unit."""
        return {"decode_compute": NO_WAY if self.way(p, d).compute_s else 0}

    def own_terms(self, d: WorkerLoad) -> Terms:
        """Of a decode worker that computes the prompt itself, which it may."""
        return {}

    def way(self, p: WorkerLoad, d: WorkerLoad) -> handover.Handover:
        """How KV gets from `p` to `d`: what `d` should not have already."""
        num_tokens = self.ask.num_prompt_tokens
        if self.ask.local:
            num_tokens -= min(num_tokens, self.ask.local.get(d.incarnation, 0))
        return handover.plan(p, d, num_tokens, self.mode, self.costs, self.pools.links)

    # What the search asks for: services.router.policies.search.Scoring.

    def prefill_cost(self, p: WorkerLoad) -> int:
        return self.prefill_shared(p) + self.prefill_load(p)

    def prefill_load(self, p: WorkerLoad) -> int:
        return self.prefill_own(p) + prefill_sum(p, self.ask)

    def decode_cost(self, d: WorkerLoad) -> int:
        return self.decode_own(d) + decode_sum(d, self.ask)

    def way_cost(self, p: WorkerLoad, d: WorkerLoad) -> int:
        return sum(self.way_terms(p, d).values())

    def own_cost(self, d: WorkerLoad) -> int | None:
        if self.num_own(d) > self.ask.max_own_tokens:
            return None
        return sum(self.own_terms(d).values())

    def num_own(self, d: WorkerLoad) -> int:
        """Prompt tokens that `d` would have to compute by itself."""
        num_tokens = self.ask.num_prompt_tokens
        return num_tokens - min(num_tokens - 1, self.ask.local.get(d.incarnation, 0))

    def terms(self, p: WorkerLoad | None, d: WorkerLoad | None) -> dict[str, int]:
        """All of what a pair costs, by name."""
        terms: dict[str, int] = {}
        if p is not None:
            terms |= {**self.prefill_terms(p), **of_prefill(p, self.ask)}
        if p is not None and d is not None:
            terms |= self.way_terms(p, d)
        if d is not None:
            terms |= {**self.decode_terms(d), **of_decode(d, self.ask)}
            if p is None:
                terms |= self.own_terms(d)
        return terms


class ScoredPolicy(ABC):
    """See the module."""

    name: str
    unit: str

    def __init__(self, costs: RouterCosts, mode: HandoverMode = "auto") -> None:
        self._costs = costs
        self._mode: HandoverMode = mode

    @abstractmethod
    def scorer(self, pools: Pools, ask: Ask) -> Scorer:
        """What the policy says of one request."""

    def choose(self, pools: Pools, ask: Ask) -> Choice:
        """As `services.router.policy.Policy` says."""
        scorer = self.scorer(pools, ask)
        found = search(pools, ask, scorer)
        p, d = found.prefill, found.decode
        path = scorer.way(p, d).path if p and d else handover.Path.STORE
        prefix = scorer.prefixes.of(p) if p else None
        num_computed = prefix.num_computed if prefix else scorer.num_own(d) if d else 0
        return Choice(
            prefill_id=p.worker_id if p else None,
            decode_id=d.worker_id if d else None,
            why=_units(scorer.terms(p, d)),
            num_pairs=found.num_pairs,
            runs=prefix.runs if prefix else (),
            path=path,
            num_computed=num_computed,
            prefill_life=p.incarnation if p else "",
        )

    def weigh(self, pools: Pools, ask: Ask, choice: Choice, limit: int) -> list[Candidate]:
        """As `services.router.policy.Policy` says."""
        scorer = self.scorer(pools, ask)
        p = next((p for p in pools.prefill if p.worker_id == choice.prefill_id), None)
        d = next((d for d in pools.decode if d.worker_id == choice.decode_id), None)
        chosen = p or d
        layout = chosen.layout if chosen is not None else None
        prefill = [each for each in fitting(pools.prefill, ask) if each.layout == layout]
        decode = [each for each in fitting(pools.decode, ask) if each.layout == layout]
        if p is None:
            decode = [each for each in decode if scorer.own_cost(each) is not None]
        return [
            *_rows(scorer, [(each, d) for each in prefill], PREFILL, choice.prefill_id, limit),
            *_rows(scorer, [(p, each) for each in decode if d], DECODE, choice.decode_id, limit),
        ]


_Pair = tuple[WorkerLoad | None, WorkerLoad | None]


def _rows(
    scorer: Scorer,
    pairs: Iterable[_Pair],
    role: str,
    chosen_id: str | None,
    limit: int,
) -> list[Candidate]:
    place = 0 if role == PREFILL else 1

    def rank(pair: _Pair) -> tuple[bool, int, str]:
        worker = pair[place]
        name = worker.worker_id if worker else ""
        return name != chosen_id, sum(scorer.terms(*pair).values()), name

    rows = []
    for pair in heapq.nsmallest(limit, pairs, key=rank):
        worker = pair[place]
        if worker is not None:
            name = worker.worker_id
            why = _units(scorer.terms(*pair))
            rows.append(Candidate(name, role, why, is_chosen=name == chosen_id))
    return rows


def _units(terms: Terms) -> dict[str, float]:
    return {name: cost / PARTS for name, cost in terms.items()}
