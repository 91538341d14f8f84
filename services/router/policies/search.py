"""The cheapest pair of workers, found without looking at every pair. Pure.

A pair costs what its prefill worker costs, plus its decode worker, plus the way between them; and
the way depends on few things only: layout, whether both have one store, transports, what the prompt
has lying at the decode worker. So decode workers are put into classes, of each class and store only
the cheapest counts, and prefill workers that hand over alike are one group, of which only the
cheapest counts. What was measured as slow breaks that for the nodes at its other end only: whoever
hands over through such a node is weighed against each decode worker by itself. The result is that
of trying all pairs (a test compares). O(workers + groups x stores).

Among pairs of equal cost the prefill worker, then the decode worker, is found by rendezvous with
the request's affinity: equal conversations meet the same workers, on whichever router.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from process.errors import Unavailable
from services.router.link_costs import SlowLink
from services.router.policies.penalties import fitting
from services.router.policy import DECODE, PREFILL, Ask, Pools, WorkerLoad

_MASK = 2**64 - 1


class Scoring(Protocol):
    """Costs of one request, in parts; each at least 0."""

    def prefill_cost(self, p: WorkerLoad) -> int:
        """Of the prefill worker, whoever decodes: the sum of the two below."""
        ...

    def prefill_shared(self, p: WorkerLoad) -> int:
        """The part that is equal for workers of equal `place` and measurements, that have as much
        of the prompt."""
        ...

    def prefill_load(self, p: WorkerLoad) -> int:
        """The part that is each worker's own."""
        ...

    def decode_cost(self, d: WorkerLoad) -> int:
        """Of the decode worker, whoever prefills."""
        ...

    def way_cost(self, p: WorkerLoad, d: WorkerLoad) -> int:
        """Of the handover; equal for workers of equal `place` and measurements."""
        ...

    def own_cost(self, d: WorkerLoad) -> int | None:
        """Of a decode worker that computes the prompt itself, beyond `decode_cost`; None: it must
        not."""
        ...


@dataclass(frozen=True)
class Found:
    """Who serves: a pair, a prefill worker alone (the answer is one token), or a decode worker
    alone (it computes the prompt itself)."""

    prefill: WorkerLoad | None
    decode: WorkerLoad | None
    num_pairs: int


@dataclass
class _Cheapest:
    """The least cost so far, and all who have it."""

    cost: int = -1
    loads: list[WorkerLoad] = field(default_factory=list)

    def offer(self, cost: int, load: WorkerLoad) -> None:
        if self.cost < 0 or cost < self.cost:
            self.cost, self.loads = cost, [load]
        elif cost == self.cost:
            self.loads.append(load)


_Key = tuple[str, int, int, bool, str, int]


@dataclass
class _DecodeClass:
    """Decode workers to whom handovers cost the same, but for whether their own store is in it."""

    key: _Key
    by_store: dict[str, _Cheapest] = field(default_factory=dict)
    ordered: list[tuple[int, str]] = field(default_factory=list)
    """Least costs, with the store."""

    def elsewhere(self, store: str) -> _Cheapest | None:
        """The cheapest of one store that is not `store`."""
        for _, other in self.ordered[:2]:
            if not store or other != store:
                return self.by_store[other]
        return None

    def as_cheap_elsewhere(self, store: str, cost: int) -> Iterable[WorkerLoad]:
        """All that are not at `store` and cost so much."""
        for of_store, other in self.ordered:
            if of_store > cost:
                return
            if of_store == cost and (not store or other != store):
                yield from self.by_store[other].loads


def search(pools: Pools, ask: Ask, scoring: Scoring) -> Found:
    """See the module. Raises: Unavailable naming the role that is missing, or saying that no two
    workers fit.
    """
    if not ask.needs_decode:
        return _prefill_only(pools, ask, scoring)
    decode = fitting(pools.decode, ask)
    _need(DECODE, pools.decode, decode)
    finder = _PairFinder(pools, ask, scoring, decode)
    alone, num_alone = _Cheapest(), 0
    if ask.max_own_tokens:
        for d, cost in zip(decode, finder.decode_costs, strict=True):
            own = scoring.own_cost(d)
            if own is not None:
                alone.offer(cost + own, d)
                num_alone += 1
    if not alone.loads:
        _need(PREFILL, pools.prefill, finder.prefill)
    best, pair = finder.find()
    num_pairs = finder.num_pairs + num_alone
    if alone.loads and (pair is None or alone.cost <= best):
        return Found(None, _nearest(alone.loads, ask.affinity), num_pairs)
    if pair is None:
        raise Unavailable("no prefill and decode worker hold the same model")
    return Found(pair[0], pair[1], num_pairs)


def _prefill_only(pools: Pools, ask: Ask, scoring: Scoring) -> Found:
    best = _Cheapest()
    prefill = fitting(pools.prefill, ask)
    _need(PREFILL, pools.prefill, prefill)
    for p in prefill:
        best.offer(scoring.prefill_cost(p), p)
    return Found(_nearest(best.loads, ask.affinity), None, len(prefill))


class _PairFinder:
    """One search. `prefill`: those whose window the request fits."""

    def __init__(
        self, pools: Pools, ask: Ask, scoring: Scoring, decode: Sequence[WorkerLoad]
    ) -> None:
        self._ask = ask
        self._scoring = scoring
        self.prefill = fitting(pools.prefill, ask)
        self.decode_costs = [scoring.decode_cost(d) for d in decode]
        self._decode = decode
        self._slow = slow = pools.slow
        self._slow_nodes = {n for d in decode for n in slow.get(d.worker_id, ())} if slow else set()
        self._classes = self._classed()
        self._groups = self._grouped()
        self._ways: dict[object, int] = {}

    @property
    def num_pairs(self) -> int:
        """Pairs of equal layout."""
        decode = Counter(d.layout for d in self._decode)
        return sum(
            number * decode[layout]
            for layout, number in Counter(p.layout for p in self.prefill).items()
        )

    def find(self) -> tuple[int, tuple[WorkerLoad, WorkerLoad] | None]:
        """Its cost, and the pair; None: no two have one layout."""
        best = -1
        winners: list[_Cheapest] = []
        for group in sorted(self._groups, key=lambda group: group.cost):
            if 0 <= best < group.cost:
                break  # ways and decode workers cost nothing less than nothing
            most = best - group.cost if best >= 0 else None
            for cost, _ in self._partners(group.loads[0], most):
                whole = group.cost + cost
                if best < 0 or whole < best:
                    best, winners = whole, [group]
                elif whole == best and winners[-1] is not group:
                    winners.append(group)
        if not winners:
            return -1, None
        affinity = self._ask.affinity
        p = _nearest([p for group in winners for p in group.loads], affinity)
        (group,) = (g for g in winners if any(p is load for load in g.loads))
        partners = [
            d
            for cost, loads in self._partners(group.loads[0], best - group.cost, all_ties=True)
            if group.cost + cost == best
            for d in loads
        ]
        return best, (p, _nearest(partners, affinity))

    def _partners(
        self, p: WorkerLoad, most: int | None, *, all_ties: bool = False
    ) -> Iterable[tuple[int, Iterable[WorkerLoad]]]:
        """Who may decode for `p` cheapest, by cost of decode and way; complete up to `most`, but
        for those who cost the same elsewhere, of whom all come with `all_ties`.
        """
        store, layout = p.store_node_id, p.layout
        if store in self._slow_nodes or p.lender_node_id in self._slow_nodes:
            for cost, d in self._one_by_one:
                if most is not None and cost > most:
                    return
                if d.layout == layout:
                    yield cost + self._scoring.way_cost(p, d), (d,)
            return
        for each in self._classes:
            if each.key[:2] != layout:
                continue
            home = each.by_store.get(store) if store else None
            if home is not None:
                yield home.cost + self._way(p, each, home, is_home=True), home.loads
            other = each.elsewhere(store)
            if other is not None:
                ties: Iterable[WorkerLoad] = other.loads
                if all_ties:
                    ties = each.as_cheap_elsewhere(store, other.cost)
                yield other.cost + self._way(p, each, other, is_home=False), ties

    def _way(self, p: WorkerLoad, of: _DecodeClass, to: _Cheapest, *, is_home: bool) -> int:
        key = (p.kind, self._put_link(p), of.key, is_home)
        cost = self._ways.get(key)
        if cost is None:
            cost = self._ways[key] = self._scoring.way_cost(p, to.loads[0])
        return cost

    def _put_link(self, p: WorkerLoad) -> SlowLink | None:
        """How far its way into its own store is off what is usual."""
        slow = self._slow.get(p.worker_id) if self._slow else None
        return slow.get(p.store_node_id) if slow else None

    @cached_property
    def _one_by_one(self) -> Sequence[tuple[int, WorkerLoad]]:
        pairs = zip(self.decode_costs, self._decode, strict=True)
        return sorted(pairs, key=lambda entry: entry[0])

    def _classed(self) -> list[_DecodeClass]:
        classes: dict[_Key, _DecodeClass] = {}
        local = self._ask.local
        for d, cost in zip(self._decode, self.decode_costs, strict=True):
            fingerprint, size, num_bytes, store, reads, transport = d.place
            num_local = local.get(d.incarnation, 0) if local else 0
            key = (fingerprint, size, num_bytes, reads, transport, num_local)
            of_key = classes.get(key)
            if of_key is None:
                of_key = classes[key] = _DecodeClass(key)
            cheapest = of_key.by_store.get(store)
            if cheapest is None:
                cheapest = of_key.by_store[store] = _Cheapest()
            cheapest.offer(cost, d)
        for each in classes.values():
            each.ordered = sorted((least.cost, store) for store, least in each.by_store.items())
        return list(classes.values())

    def _grouped(self) -> list[_Cheapest]:
        """Prefill workers from whom a handover costs the same, whoever decodes, and to whom the
        prompt is as near."""
        load_of, local = self._scoring.prefill_load, self._ask.local
        groups: dict[object, _Cheapest] = {}
        for p in self.prefill:
            key: object = p.here
            if self._slow:
                slow = self._slow.get(p.worker_id)
                lender = p.lender_node_id if p.lender_node_id in self._slow_nodes else ""
                key = (key, lender, tuple(sorted(slow.items())) if slow else None)
            if local:
                key = (key, local.get(p.incarnation, 0))
            group = groups.get(key)
            if group is None:
                group = groups[key] = _Cheapest()
            group.offer(load_of(p), p)
        for group in groups.values():
            group.cost += self._scoring.prefill_shared(group.loads[0])
        return list(groups.values())


def _need(role: str, workers: Sequence[WorkerLoad], fitting: Sequence[WorkerLoad]) -> None:
    if not workers:
        raise Unavailable(f"no {role} worker is available")
    if not fitting:
        raise Unavailable(f"no {role} worker with a window that long is available")


def _nearest(loads: Sequence[WorkerLoad], affinity: bytes) -> WorkerLoad:
    """The one that rendezvous gives this affinity, whatever the order of `loads`."""
    if len(loads) == 1:
        return loads[0]
    seed = int.from_bytes(affinity[:8])
    return max(loads, key=lambda load: (_mix(load.key ^ seed), load.worker_id))


def _mix(x: int) -> int:
    """Each bit of the result depends on each of `x`: the finalizer of splitmix64."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
