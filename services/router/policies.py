"""`Policy` and its implementations: pure functions that choose the prefill and decode worker of a
request.

`Policy.choose` maps `Pools` (a frozen snapshot of the workers that may serve the request) and
`PlacementQuery` (the request) to a `Choice`. A policy makes no RPC and reads no clock and no random
number, so equal inputs give equal choices on all routers. Prefix hits are the tenant's own: block
hashes are keyed by tenant. `make` returns the policy that the setting names:

    joint         fewest estimated seconds until the answer can go on
    prefix_aware  fewest prompt tokens to compute; then fewest requests at decode
    least_load    fewest prompt tokens under way at prefill, fewest requests at decode
    round_robin   each worker in turn, in the order of worker ids

Each is a `ScoredPolicy`; its `Scorer` only gives the cost terms of a worker or a pair. The rest is
common to all:

- **Costs.** A pair costs its prefill worker, plus its decode worker, plus the handover of the KV.
  Costs are whole billionths (`PARTS`) of the policy's unit, so that sums are exact and equal
  workers tie exactly.
- **Search.** `find_cheapest_pair` returns what trying all pairs would return, in
  O(workers + groups x stores). The handover cost depends on little: layout, transports, whether
  both workers have one store, and the part of the prompt that the decode worker has. So decode
  workers form classes, of which only the cheapest of each store counts; prefill workers that hand
  over alike form groups, of which only the cheapest counts. A prefill worker that hands over
  through a node with a slow link is compared with each decode worker.
- **Ties** are broken by rendezvous hashing of the request's affinity, prefill worker first: the
  requests of one conversation meet the same workers, whichever router they come through.
- **Penalties** (`NAMES`) make a suspect worker, or one without enough blocks or places, the
  last choice. A worker with too short a context window is never chosen.
- **Links** (`LinkCosts`). A link is measured once, when the worker meets the store or lender,
  perhaps on a busy machine. So links count in classes: a link within a factor of the best healthy
  one of its kind (own store, another store, lender) counts as that best, and so does an unmeasured
  one. Equal workers then cost exactly the same, and noise decides nothing. Latency is not counted:
  it is the noisiest figure, and small.
- **Handover** (`plan_transfer`). STORE: prefill writes the KV into its store and decode reads it
  there; computing hides all writes but the last chunk's. DIRECT: decode reads the prefill worker's
  own cache, and the store is written later. Where neither works, decode computes the prompt again.
- **Prefixes** (`PrefixCosts`). What a prefill worker need not compute, from which stores it fetches
  that, and what the fetch costs.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from types import MappingProxyType
from typing import Protocol

from kvstore.node_ids import is_lender
from process.rpc_errors import Unavailable
from services.router.config import HandoverMode, RouterCosts, RoutingPolicy
from services.router.prefixes import NO_PREFIXES, FoundPrefixes, Layout, StoreRun, plan_runs
from services.router.worker_views import LinkView

PREFILL = "prefill"
DECODE = "decode"


class TransferPath(Enum):
    """Path that a prompt's KV takes from the prefill to the decode worker.

    STORE: through the prefill worker's store. DIRECT: out of the prefill worker's own cache.
    """

    STORE = "store"
    DIRECT = "direct"


@dataclass(frozen=True)
class WorkerLoad:
    """One worker as the policies see it: layout, capacity, load and links. A value."""

    worker_id: str
    fingerprint: str
    block_size: int
    block_bytes: int
    num_blocks: int
    num_free_blocks: int
    """Blocks that can be allocated now: free ones, and cached ones that no request uses."""
    num_requests: int
    """Requests that wait or run at the worker, from all routers."""
    num_queued_tokens: int
    """Prompt tokens that the worker still has to compute, for requests of all routers."""
    store_node_id: str
    """Node id of the worker's own store; empty: none."""
    transport: str = ""
    """Transport to the worker's own store."""
    remote_transport: str = ""
    """Transport for reads from other stores and lenders; empty: it cannot read them."""
    lender_node_id: str = ""
    """Node id under which decode workers read the worker's own cache; empty: they cannot."""
    links: Mapping[str, LinkView] = field(default_factory=dict)
    """Links that the worker measured, by node id."""
    is_suspect: bool = False
    incarnation: str = ""
    context_window: int = 0
    """Most tokens of one request, prompt and output; 0: no limit."""
    num_free_places: int | None = None
    """Samples that a decode worker can still take on; None: the worker does not report it."""

    @cached_property
    def layout(self) -> Layout:
        return self.fingerprint, self.block_size

    @cached_property
    def key(self) -> int:
        """64-bit hash of the worker id, for rendezvous hashing."""
        return int.from_bytes(hashlib.blake2b(self.worker_id.encode(), digest_size=8).digest())

    @cached_property
    def place(self) -> tuple[str, int, int, str, bool, str]:
        """Key that is equal for workers that hand over and fetch alike, measured links aside."""
        return (
            self.fingerprint,
            self.block_size,
            self.block_bytes,
            self.store_node_id,
            bool(self.remote_transport),
            self.transport,
        )

    @cached_property
    def kind(self) -> tuple[str, int, int, bool, bool, str, bool]:
        """Key that is equal for workers that hand over alike, wherever their stores are."""
        return (
            self.fingerprint,
            self.block_size,
            self.block_bytes,
            bool(self.store_node_id),
            bool(self.remote_transport),
            self.transport,
            bool(self.lender_node_id),
        )

    @cached_property
    def here(self) -> tuple[object, ...]:
        """Key that is equal where `place`, `kind` and the context window are equal."""
        return *self.place, bool(self.lender_node_id), self.context_window


NOTHING_LOCAL: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True)
class PlacementQuery:
    """One request as the policies see it. A value."""

    num_prompt_tokens: int
    max_tokens: int
    affinity: bytes
    prefixes: FoundPrefixes = NO_PREFIXES
    needs_decode: bool = True
    local: Mapping[str, int] = field(default_factory=lambda: NOTHING_LOCAL)
    """Number of leading prompt tokens with KV that should still be in a worker's own cache, by
    incarnation."""
    turn: int = 0
    """Number of requests that this router placed before this one."""
    max_own_tokens: int = 0
    """Most prompt tokens that a decode worker may compute itself; 0: it may compute none."""
    window: int = 0
    """Tokens of the prompt plus the longest output of one sample."""


@dataclass(frozen=True)
class Choice:
    """The chosen workers of a request, the KV's path, and the cost terms that decided. A value."""

    prefill_id: str | None
    """Prefill worker; None: the decode worker computes the prompt itself."""
    decode_id: str | None
    """Decode worker; None: the answer ends with its first token."""
    why: Mapping[str, float]
    """Cost terms by name, in the policy's unit; `cost` is their sum."""
    num_pairs: int
    """Number of pairs, and of decode workers alone, that could have served the request."""
    runs: tuple[StoreRun, ...] = ()
    """Stores from which the prefill worker fetches the prefix, in order."""
    path: TransferPath = TransferPath.STORE
    """Path of the prompt's KV to the decode worker."""
    num_computed: int = 0
    """Prompt tokens that are expected to be computed, at whichever worker."""
    prefill_life: str = ""
    """Incarnation of the prefill worker: after a restart it may hold another model."""

    @property
    def cost(self) -> float:
        return sum(self.why.values())


@dataclass(frozen=True)
class Pools:
    """Snapshot of the workers that may serve one request; ids are unique within a role."""

    prefill: tuple[WorkerLoad, ...]
    decode: tuple[WorkerLoad, ...]
    links: LinkCosts
    slow: Mapping[str, Mapping[str, SlowLink]]
    """Links that count as slower than their class, by worker id and node id; most have none."""

    @classmethod
    def of(
        cls, prefill: Sequence[WorkerLoad], decode: Sequence[WorkerLoad], costs: RouterCosts
    ) -> Pools:
        """Return the pools of these workers, with link costs from what they measured."""
        workers = [*prefill, *decode]
        links = LinkCosts(workers, costs)
        slow = {worker.worker_id: links.slow(worker) for worker in workers}
        return cls(
            tuple(prefill),
            tuple(decode),
            links,
            {name: found for name, found in slow.items() if found},
        )


@dataclass(frozen=True)
class Candidate:
    """One worker's cost terms, paired with the other worker of the chosen pair. A value."""

    worker_id: str
    role: str
    why: Mapping[str, float]
    is_chosen: bool = False

    @property
    def cost(self) -> float:
        return sum(self.why.values())


class Policy(Protocol):
    """Interface of a routing policy: it chooses the workers of a request."""

    @property
    def name(self) -> str:
        """Name of the policy in the settings."""
        ...

    @property
    def unit(self) -> str:
        """Unit of the policy's costs."""
        ...

    def choose(self, pools: Pools, ask: PlacementQuery) -> Choice:
        """Return the cheapest choice for `ask`. The workers of a pair have equal layouts. A suspect
        worker, or one without room, is chosen only where there is no other.

        Raises: Unavailable when a role has no worker, or no two workers have one layout.
        """
        ...

    def weigh(
        self, pools: Pools, ask: PlacementQuery, choice: Choice, limit: int
    ) -> list[Candidate]:
        """Return what `choose` compared: per role the chosen worker and the cheapest others, at
        most `limit`, each with the cost terms of its pair with the other chosen worker.
        """
        ...


def blocks_needed(num_prompt_tokens: int, max_tokens: int, block_size: int) -> int:
    """Return the blocks that hold the KV of the prompt and of all output tokens but the last."""
    return -(-(num_prompt_tokens + max_tokens - 1) // block_size)


_CLASS_FACTOR = 4
"""Factor within which links of one kind count as equal. Guessed: above the noise of one machine's
measurements, below the cost of a wrong path."""

_FAILED_FACTOR = 100
"""Divisor of the guessed rate for a link that failed its measurement. The link is expensive, not
forbidden: a worker that was busy when it started must not stay idle for ever. Guessed.
"""


SlowLink = tuple[float, bool]
"""Rate that a link counts with, in bytes per second, and whether the link is degraded."""


class Linked(Protocol):
    """The fields of a worker that `LinkCosts` reads."""

    @property
    def store_node_id(self) -> str:
        """Node id of the worker's own store; empty: none."""
        ...

    @property
    def links(self) -> Mapping[str, LinkView]:
        """Links that the worker measured, by node id."""
        ...


class _Kind(Enum):
    """Kind of a link: what is at its other end."""

    HOME = "the worker's own store"
    ELSEWHERE = "another node's store"
    LENDER = "another worker"


class LinkCosts:
    """Transfer times between workers and the stores or lenders, for one set of workers.

    Links count in classes, as the module docstring says.
    """

    def __init__(self, workers: Iterable[Linked], costs: RouterCosts) -> None:
        self._guess_bytes_per_s = costs.link_bytes_per_s
        self._best = dict.fromkeys(_Kind, 0.0)
        for worker in workers:
            for node_id, link in worker.links.items():
                if not link.is_degraded:
                    kind = _kind(worker, node_id)
                    self._best[kind] = max(self._best[kind], link.read_bytes_per_s)

    def move_s(
        self, worker: Linked, node_id: str, num_bytes: float, as_good_as: str | None = None
    ) -> float:
        """Return the seconds that `num_bytes` take from a store or lender into the worker.

        Args: as_good_as: another node. A link in the same class as the link to that node costs no
            more than that one.
        """
        rate = self._rate(worker, node_id)
        if as_good_as is not None:
            rate = _levelled(rate, max(rate, self._rate(worker, as_good_as)))
        return num_bytes / rate

    def slow(self, worker: Linked) -> Mapping[str, SlowLink]:
        """Return the worker's links that do not count as the best of their kind, by node id."""
        found = {}
        for node_id, link in worker.links.items():
            rate, kind = self._rate(worker, node_id), _kind(worker, node_id)
            if link.is_degraded or rate != (self._best[kind] or self._guess(kind)):
                found[node_id] = (rate, link.is_degraded)
        return found

    def _rate(self, worker: Linked, node_id: str) -> float:
        """Return the rate of the worker's link to a node: bytes per second, above 0."""
        link, kind = worker.links.get(node_id), _kind(worker, node_id)
        best = self._best[kind] or self._guess(kind)
        if link is None:
            return best
        return _levelled(link.read_bytes_per_s or self._guess(kind) / _FAILED_FACTOR, best)

    def _guess(self, kind: _Kind) -> float:
        # From another node's store the bytes cross a link once more.
        return self._guess_bytes_per_s / (2 if kind is _Kind.ELSEWHERE else 1)


def _kind(worker: Linked, node_id: str) -> _Kind:
    if node_id == worker.store_node_id:
        return _Kind.HOME
    return _Kind.LENDER if is_lender(node_id) else _Kind.ELSEWHERE


def _levelled(rate: float, best: float) -> float:
    return best if rate * _CLASS_FACTOR >= best else rate


_SHARED_MEMORY = "shm"


class TransferParty(Protocol):
    """The fields of a worker that `plan_transfer` reads; each as in `WorkerLoad`."""

    @property
    def block_size(self) -> int: ...
    @property
    def block_bytes(self) -> int: ...
    @property
    def store_node_id(self) -> str: ...
    @property
    def transport(self) -> str: ...
    @property
    def remote_transport(self) -> str: ...
    @property
    def lender_node_id(self) -> str: ...
    @property
    def links(self) -> Mapping[str, LinkView]: ...


@dataclass(frozen=True)
class TransferPlan:
    """Path of the KV between one pair of workers, and its cost in seconds by term. A value."""

    path: TransferPath
    link_s: float = 0.0
    """Transfer into the decode worker."""
    put_s: float = 0.0
    """Write into the store, as far as decode must wait for it."""
    compute_s: float = 0.0
    """Computing the prompt again at the decode worker, where no KV can be moved."""

    @property
    def seconds(self) -> float:
        return self.link_s + self.put_s + self.compute_s


def plan_transfer(
    p: TransferParty,
    d: TransferParty,
    num_tokens: int,
    mode: HandoverMode,
    costs: RouterCosts,
    links: LinkCosts,
) -> TransferPlan:
    """Return the transfer of `num_tokens` prompt tokens from prefill `p` to decode worker `d`.

    Mode "direct" is a preference: the store is used where `d` cannot read from `p`. Mode "auto"
    takes the faster path, but always the store where both workers map the same shared memory.
    """
    by_store = _by_store(p, d, num_tokens, costs, links)
    direct = None if mode == "store" else _direct(p, d, num_tokens, links)
    if direct is None:
        again_s = num_tokens / costs.prefill_tokens_per_s
        return by_store or TransferPlan(TransferPath.STORE, compute_s=again_s)
    if by_store is None or mode == "direct":
        return direct
    if _share_memory(p, d):
        return by_store
    return min(direct, by_store, key=lambda way: way.seconds)


def can_read(worker: TransferParty, node_id: str) -> bool:
    """Return whether the worker can read blocks of that store or lender."""
    return bool(node_id) and (node_id == worker.store_node_id or bool(worker.remote_transport))


def _by_store(
    p: TransferParty, d: TransferParty, num_tokens: int, costs: RouterCosts, links: LinkCosts
) -> TransferPlan | None:
    if not can_read(d, p.store_node_id):
        return None
    exposed = min(num_tokens, costs.exposed_put_tokens)
    return TransferPlan(
        TransferPath.STORE,
        link_s=links.move_s(d, p.store_node_id, num_bytes_of(num_tokens, d)),
        # The rate of reads stands in for that of writes.
        put_s=links.move_s(p, p.store_node_id, num_bytes_of(exposed, p)),
    )


def _direct(
    p: TransferParty, d: TransferParty, num_tokens: int, links: LinkCosts
) -> TransferPlan | None:
    if not can_read(d, p.lender_node_id):
        return None
    num_bytes = num_bytes_of(num_tokens, d)
    as_good_as = p.store_node_id if can_read(d, p.store_node_id) else None
    return TransferPlan(
        TransferPath.DIRECT, link_s=links.move_s(d, p.lender_node_id, num_bytes, as_good_as)
    )


def _share_memory(p: TransferParty, d: TransferParty) -> bool:
    """Return whether both workers map the same store's memory and neither found it degraded."""
    if not p.store_node_id or p.store_node_id != d.store_node_id:
        return False
    found = (worker.links.get(p.store_node_id) for worker in (p, d))
    is_slow = any(link is not None and link.is_degraded for link in found)
    return p.transport == d.transport == _SHARED_MEMORY and not is_slow


def num_bytes_of(num_tokens: int, worker: TransferParty) -> float:
    """Return the bytes of KV of `num_tokens` tokens in the worker's layout."""
    return num_tokens * worker.block_bytes / worker.block_size


PARTS = 10**9
"""Parts of one unit of cost."""

_LAST_CHOICE = 10**8 * PARTS
"""Penalty above every real estimate: the worker is chosen only where there is no other."""

NO_WAY = _LAST_CHOICE // 4
"""Cost of a pair between which no KV can be moved, for policies with a unit other than seconds."""

_MOST = 1e6
"""Upper bound of every other term, in units: no measurement may outweigh a penalty."""


NAMES = frozenset({"prefill_full", "prefill_suspect", "decode_full", "decode_suspect"})
"""Names of the terms that are penalties, not estimates."""


def penalty_parts(value: float) -> int:
    """Return a cost in whole parts, at most `_MOST` units."""
    return round(min(value, _MOST) * PARTS)


def prefill_penalties(p: WorkerLoad, ask: PlacementQuery) -> dict[str, int]:
    """Return the penalties of a prefill worker by name, in parts; 0 where there is none."""
    needed = blocks_needed(ask.num_prompt_tokens, 1, p.block_size)
    return {
        "prefill_full": _LAST_CHOICE // 2 if needed > p.num_blocks else 0,
        "prefill_suspect": _LAST_CHOICE if p.is_suspect else 0,
    }


def decode_penalties(d: WorkerLoad, ask: PlacementQuery) -> dict[str, int]:
    """Return the penalties of a decode worker by name, in parts; 0 where there is none."""
    needed = blocks_needed(ask.num_prompt_tokens, ask.max_tokens, d.block_size)
    return {
        "decode_full": _LAST_CHOICE // 2
        if needed > d.num_free_blocks or d.num_free_places == 0
        else 0,
        "decode_suspect": _LAST_CHOICE if d.is_suspect else 0,
    }


def prefill_penalty_sum(p: WorkerLoad, ask: PlacementQuery) -> int:
    """Return the sum of `prefill_penalties`, without a mapping: this runs for every worker."""
    cost = _LAST_CHOICE if p.is_suspect else 0
    if ask.num_prompt_tokens > p.num_blocks * p.block_size:
        cost += _LAST_CHOICE // 2
    return cost


def decode_penalty_sum(d: WorkerLoad, ask: PlacementQuery) -> int:
    """Return the sum of `decode_penalties`, without a mapping: this runs for every worker."""
    cost = _LAST_CHOICE if d.is_suspect else 0
    needed = ask.num_prompt_tokens + ask.max_tokens - 1
    if needed > d.num_free_blocks * d.block_size or d.num_free_places == 0:
        cost += _LAST_CHOICE // 2
    return cost


def fitting_workers(workers: Sequence[WorkerLoad], ask: PlacementQuery) -> list[WorkerLoad]:
    """Return the workers with a context window that holds the prompt and one output."""
    window = ask.window
    return [w for w in workers if window <= w.context_window or not w.context_window]


@dataclass(frozen=True)
class Prefix:
    """What a prompt's prefix saves and costs at one prefill worker. A value."""

    runs: tuple[StoreRun, ...]
    num_computed: int
    """Prompt tokens left to compute."""
    link: int
    """Cost of fetching what the worker's own store has, in parts."""
    pull: int
    """Cost of fetching what other stores have, in parts."""
    num_pulled: int
    """Prompt tokens that are fetched from other stores."""


class PrefixCosts:
    """Value of one prompt's prefix at each prefill worker.

    Made for one request. Results are kept per `place`, local tokens and slow links, so that workers
    at the same distance from the same stores are computed once.
    """

    def __init__(self, ask: PlacementQuery, costs: RouterCosts, pools: Pools) -> None:
        self._ask = ask
        self._costs = costs
        self._pools = pools
        self._known: dict[object, Prefix] = {}

    def of(self, p: WorkerLoad) -> Prefix:
        """Return the prefix at `p`."""
        num_local = self._ask.local.get(p.incarnation, 0) if self._ask.local else 0
        slow = self._pools.slow.get(p.worker_id) if self._pools.slow else None
        key = (p.place, num_local, tuple(sorted(slow.items())) if slow else None)
        prefix = self._known.get(key)
        if prefix is None:
            prefix = self._known[key] = self._reckon(p, num_local)
        return prefix

    def _reckon(self, p: WorkerLoad, num_local: int) -> Prefix:
        # The last prompt token is always computed: the first sample needs its logits.
        num_cacheable = self._ask.num_prompt_tokens - 1
        links, runs = self._pools.links, self._runs(p)
        done = 0
        link_s = pull_s = 0.0
        num_pulled = 0
        for run in runs:
            end = min(num_cacheable, (run.first_block + run.num_blocks) * p.block_size)
            # Tokens in the worker's own cache are not fetched.
            num_tokens = max(0, end - max(done, num_local))
            done = max(done, end)
            seconds = links.move_s(p, run.node_id, num_bytes_of(num_tokens, p))
            if run.node_id == p.store_node_id:
                link_s += seconds
            else:
                pull_s += seconds
                num_pulled += num_tokens
        done = max(done, min(num_local, num_cacheable))
        num_computed = self._ask.num_prompt_tokens - done
        return Prefix(runs, num_computed, penalty_parts(link_s), penalty_parts(pull_s), num_pulled)

    def _runs(self, p: WorkerLoad) -> tuple[StoreRun, ...]:
        """Return the runs that `p` should fetch, with their stores."""
        held = self._ask.prefixes.of(p.layout)
        if not held:
            return ()
        compute_s = p.block_size / self._costs.prefill_tokens_per_s
        links = self._pools.links

        def distance(node_id: str) -> float:
            if not can_read(p, node_id):
                return math.inf
            link, block_s = p.links.get(node_id), links.move_s(p, node_id, p.block_bytes)
            # Only a degraded link is left out: the rate of computing is a guess.
            if link is not None and link.is_degraded:
                is_worth_it = link.read_bytes_per_s > 0 and block_s < compute_s
                return block_s if is_worth_it else math.inf
            return block_s

        return plan_runs(held, p.store_node_id, distance)


_MASK = 2**64 - 1


class Scoring(Protocol):
    """Costs that `find_cheapest_pair` asks for, of one request, in parts; each at least 0."""

    def prefill_cost(self, p: WorkerLoad) -> int:
        """Return the cost of the prefill worker: `prefill_shared` plus `prefill_load`."""
        ...

    def prefill_shared(self, p: WorkerLoad) -> int:
        """Return the part that is equal for workers with equal `place`, slow links and local tokens
        of the prompt."""
        ...

    def prefill_load(self, p: WorkerLoad) -> int:
        """Return the part that depends on the worker's own load."""
        ...

    def decode_cost(self, d: WorkerLoad) -> int:
        """Return the cost of the decode worker, independent of the prefill worker."""
        ...

    def way_cost(self, p: WorkerLoad, d: WorkerLoad) -> int:
        """Return the cost of the handover; equal for workers with equal `place` and links."""
        ...

    def own_cost(self, d: WorkerLoad) -> int | None:
        """Return what a decode worker that computes the prompt itself costs beyond `decode_cost`;
        None: it may not."""
        ...


@dataclass(frozen=True)
class CheapestPair:
    """Result of the search: a pair, a prefill worker alone (the answer is one token), or a decode
    worker alone (it computes the prompt itself). A value."""

    prefill: WorkerLoad | None
    decode: WorkerLoad | None
    num_pairs: int


@dataclass
class _Cheapest:
    """The least cost so far, in parts (-1: none yet), and all workers with that cost."""

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
    """Decode workers with equal handover costs, except for which store is their own."""

    key: _Key
    by_store: dict[str, _Cheapest] = field(default_factory=dict)
    ordered: list[tuple[int, str]] = field(default_factory=list)
    """Least cost and node id of each store, ascending."""

    def elsewhere(self, store: str) -> _Cheapest | None:
        """Return the cheapest workers of the cheapest store other than `store`."""
        for _, other in self.ordered[:2]:
            if not store or other != store:
                return self.by_store[other]
        return None

    def as_cheap_elsewhere(self, store: str, cost: int) -> Iterable[WorkerLoad]:
        """Yield all workers of this cost that are not at `store`."""
        for of_store, other in self.ordered:
            if of_store > cost:
                return
            if of_store == cost and (not store or other != store):
                yield from self.by_store[other].loads


def find_cheapest_pair(pools: Pools, ask: PlacementQuery, scoring: Scoring) -> CheapestPair:
    """Return the cheapest workers for `ask`: a pair, or one worker alone where that is cheaper.

    The result equals that of trying all pairs. Ties are broken by rendezvous hashing of the
    affinity. A decode worker alone wins a tie with a pair.

    Raises: Unavailable when a role has no worker with a long enough window, or no two workers have
        one layout.
    """
    if not ask.needs_decode:
        return _prefill_only(pools, ask, scoring)
    decode = fitting_workers(pools.decode, ask)
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
        return CheapestPair(None, _nearest(alone.loads, ask.affinity), num_pairs)
    if pair is None:
        raise Unavailable("no prefill and decode worker hold the same model")
    return CheapestPair(pair[0], pair[1], num_pairs)


def _prefill_only(pools: Pools, ask: PlacementQuery, scoring: Scoring) -> CheapestPair:
    best = _Cheapest()
    prefill = fitting_workers(pools.prefill, ask)
    _need(PREFILL, pools.prefill, prefill)
    for p in prefill:
        best.offer(scoring.prefill_cost(p), p)
    return CheapestPair(_nearest(best.loads, ask.affinity), None, len(prefill))


class _PairFinder:
    """One search for a pair. `prefill`: the workers with a long enough context window."""

    def __init__(
        self, pools: Pools, ask: PlacementQuery, scoring: Scoring, decode: Sequence[WorkerLoad]
    ) -> None:
        self._ask = ask
        self._scoring = scoring
        self.prefill = fitting_workers(pools.prefill, ask)
        self.decode_costs = [scoring.decode_cost(d) for d in decode]
        self._decode = decode
        self._slow = slow = pools.slow
        self._slow_nodes = {n for d in decode for n in slow.get(d.worker_id, ())} if slow else set()
        self._classes = self._classed()
        self._groups = self._grouped()
        self._ways: dict[object, int] = {}

    @property
    def num_pairs(self) -> int:
        """Number of pairs with equal layouts."""
        decode = Counter(d.layout for d in self._decode)
        return sum(
            number * decode[layout]
            for layout, number in Counter(p.layout for p in self.prefill).items()
        )

    def find(self) -> tuple[int, tuple[WorkerLoad, WorkerLoad] | None]:
        """Return the least cost and the pair; (-1, None) where no two workers have one layout."""
        best = -1
        winners: list[_Cheapest] = []
        for group in sorted(self._groups, key=lambda group: group.cost):
            if 0 <= best < group.cost:
                break  # handovers and decode workers cost at least 0
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
        """Yield the cheapest decode workers for `p`, with the cost of decode plus handover.

        Complete up to cost `most`; of workers at different stores with equal costs, all are yielded
        only with `all_ties`.
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
        """Return the worker's link to its own store where that is slow, else None."""
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
        """Return groups of prefill workers with equal handover and prefix costs, each with its
        cheapest workers."""
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
    """Return the worker that rendezvous hashing gives this affinity; the order does not matter."""
    if len(loads) == 1:
        return loads[0]
    seed = int.from_bytes(affinity[:8])
    return max(loads, key=lambda load: (_mix(load.key ^ seed), load.worker_id))


def _mix(x: int) -> int:
    """Return the 64-bit finalizer of splitmix64: each result bit depends on each bit of `x`."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


Terms = Mapping[str, int]
"""Terms of a cost by name, each in parts."""


class Scorer(ABC):
    """Base of a policy's cost terms for one request among one set of pools; a `Scoring`.

    A subclass gives `prefill_own` and `decode_own` (what depends on the worker), `prefill_shared`
    (what is equal for workers with equal `place`), and the same costs term by term (`*_terms`). The
    penalties are added here.
    """

    def __init__(
        self, pools: Pools, ask: PlacementQuery, costs: RouterCosts, mode: HandoverMode
    ) -> None:
        self.pools = pools
        self.ask = ask
        self.costs = costs
        self.mode = mode
        self.prefixes = PrefixCosts(ask, costs, pools)

    @abstractmethod
    def prefill_own(self, p: WorkerLoad) -> int: ...
    def prefill_shared(self, p: WorkerLoad) -> int:
        """Return the part that is equal for workers with equal `place`; see `Scoring`."""
        return 0

    @abstractmethod
    def prefill_terms(self, p: WorkerLoad) -> Terms: ...
    @abstractmethod
    def decode_own(self, d: WorkerLoad) -> int: ...
    @abstractmethod
    def decode_terms(self, d: WorkerLoad) -> Terms: ...

    def way_terms(self, p: WorkerLoad, d: WorkerLoad) -> Terms:
        """Return the terms of the handover: `NO_WAY` where no KV can be moved, in any unit."""
        return {"decode_compute": NO_WAY if self.way(p, d).compute_s else 0}

    def own_terms(self, d: WorkerLoad) -> Terms:
        """Return the terms of a decode worker that computes the prompt itself, where it may."""
        return {}

    def way(self, p: WorkerLoad, d: WorkerLoad) -> TransferPlan:
        """Return the transfer from `p` to `d` of the prompt's KV that `d` should not have yet."""
        num_tokens = self.ask.num_prompt_tokens
        if self.ask.local:
            num_tokens -= min(num_tokens, self.ask.local.get(d.incarnation, 0))
        return plan_transfer(p, d, num_tokens, self.mode, self.costs, self.pools.links)

    # The methods of `Scoring`, for the search.

    def prefill_cost(self, p: WorkerLoad) -> int:
        return self.prefill_shared(p) + self.prefill_load(p)

    def prefill_load(self, p: WorkerLoad) -> int:
        return self.prefill_own(p) + prefill_penalty_sum(p, self.ask)

    def decode_cost(self, d: WorkerLoad) -> int:
        return self.decode_own(d) + decode_penalty_sum(d, self.ask)

    def way_cost(self, p: WorkerLoad, d: WorkerLoad) -> int:
        return sum(self.way_terms(p, d).values())

    def own_cost(self, d: WorkerLoad) -> int | None:
        if self.num_own(d) > self.ask.max_own_tokens:
            return None
        return sum(self.own_terms(d).values())

    def num_own(self, d: WorkerLoad) -> int:
        """Return the prompt tokens that `d` would compute if it served alone; at least 1."""
        num_tokens = self.ask.num_prompt_tokens
        return num_tokens - min(num_tokens - 1, self.ask.local.get(d.incarnation, 0))

    def terms(self, p: WorkerLoad | None, d: WorkerLoad | None) -> dict[str, int]:
        """Return all cost terms of a pair, or of one worker alone, by name."""
        terms: dict[str, int] = {}
        if p is not None:
            terms |= {**self.prefill_terms(p), **prefill_penalties(p, self.ask)}
        if p is not None and d is not None:
            terms |= self.way_terms(p, d)
        if d is not None:
            terms |= {**self.decode_terms(d), **decode_penalties(d, self.ask)}
            if p is None:
                terms |= self.own_terms(d)
        return terms


class ScoredPolicy(ABC):
    """Base of all policies: search for the cheapest pair by the costs of a `Scorer`."""

    name: str
    unit: str

    def __init__(self, costs: RouterCosts, mode: HandoverMode = "auto") -> None:
        self._costs = costs
        self._mode: HandoverMode = mode

    @abstractmethod
    def scorer(self, pools: Pools, ask: PlacementQuery) -> Scorer:
        """Return the policy's costs for one request among these pools."""

    def choose(self, pools: Pools, ask: PlacementQuery) -> Choice:
        """Return the cheapest choice, as `Policy.choose` specifies."""
        scorer = self.scorer(pools, ask)
        found = find_cheapest_pair(pools, ask, scorer)
        p, d = found.prefill, found.decode
        path = scorer.way(p, d).path if p and d else TransferPath.STORE
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

    def weigh(
        self, pools: Pools, ask: PlacementQuery, choice: Choice, limit: int
    ) -> list[Candidate]:
        """Return the compared workers, as `Policy.weigh` specifies."""
        scorer = self.scorer(pools, ask)
        p = next((p for p in pools.prefill if p.worker_id == choice.prefill_id), None)
        d = next((d for d in pools.decode if d.worker_id == choice.decode_id), None)
        chosen = p or d
        layout = chosen.layout if chosen is not None else None
        prefill = [each for each in fitting_workers(pools.prefill, ask) if each.layout == layout]
        decode = [each for each in fitting_workers(pools.decode, ask) if each.layout == layout]
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


class Joint(ScoredPolicy):
    """Policy that chooses the pair with the fewest estimated seconds until the answer can go on.

    Terms:

        prefill_queue    computing the prompt tokens queued before this request
        prefill_compute  computing the uncached rest of the prompt
        prefill_link     fetching what the prefill worker's own store holds
        prefill_pull     fetching what other stores hold
        prefill_scarce   a longer context window than needed, where others have a shorter one
        handover_put     writing the last chunk into the store
        decode_link      moving the prompt's KV, less what the decode worker should have
        decode_compute   computing the prompt at the decode worker
        decode_disturb   the delay of the requests that run there while it computes
        decode_load      the requests that run there
        decode_scarce    as for prefill
    """

    name = "joint"
    unit = "s"

    def scorer(self, pools: Pools, ask: PlacementQuery) -> Scorer:
        return _JointScorer(pools, ask, self._costs, self._mode)


class _JointScorer(Scorer):
    """The terms of `Joint`, in seconds."""

    def __init__(
        self, pools: Pools, ask: PlacementQuery, costs: RouterCosts, mode: HandoverMode
    ) -> None:
        super().__init__(pools, ask, costs, mode)
        # Parts per token and per request, so that the loop over workers multiplies integers only.
        self._token = penalty_parts(1.0 / costs.prefill_tokens_per_s)
        self._request = penalty_parts(costs.decode_request_s)
        self._scarce = penalty_parts(costs.scarce_window_s)
        self._windows = tuple(
            min([w.context_window for w in fitting_workers(workers, ask)], default=0)
            for workers in (pools.prefill, pools.decode)
        )
        """Shortest context window that is long enough, at prefill and at decode."""

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
            "handover_put": penalty_parts(way.put_s),
            "decode_link": penalty_parts(way.link_s),
            "decode_compute": penalty_parts(way.compute_s),
        }

    def own_terms(self, d: WorkerLoad) -> Terms:
        compute = self.num_own(d) * self._token
        # Each request that runs there waits while this prompt is computed.
        return {"decode_compute": compute, "decode_disturb": compute * d.num_requests}


class LeastLoad(ScoredPolicy):
    """Policy that chooses the least loaded workers.

    At prefill: the fewest prompt tokens under way, counted in prompts of this request's length. At
    decode: the fewest requests.

    Prefixes and link speeds do not count.
    """

    name = "least_load"
    unit = "requests"

    def scorer(self, pools: Pools, ask: PlacementQuery) -> Scorer:
        return _LoadScorer(pools, ask, self._costs, self._mode)


class _LoadScorer(Scorer):
    """The terms of `LeastLoad`, in requests."""

    def prefill_own(self, p: WorkerLoad) -> int:
        return penalty_parts(p.num_queued_tokens / self.ask.num_prompt_tokens)

    def prefill_terms(self, p: WorkerLoad) -> Terms:
        return {"prefill_queue": self.prefill_own(p)}

    def decode_own(self, d: WorkerLoad) -> int:
        return penalty_parts(d.num_requests)

    def decode_terms(self, d: WorkerLoad) -> Terms:
        return {"decode_load": self.decode_own(d)}


_LITTLE = PARTS // 1000
"""Cost of a token that must be fetched, not computed: it decides only between near equals."""


class PrefixAware(ScoredPolicy):
    """Policy that chooses the prefill worker with the fewest prompt tokens to compute, and the
    decode worker with the fewest requests, of equal ones the one with most of the prompt.

    The prefill worker's queued tokens count as well: else all prompts with one prefix would wait at
    one worker while others are idle. The unit is prompt tokens.
    """

    name = "prefix_aware"
    unit = "tokens"

    def scorer(self, pools: Pools, ask: PlacementQuery) -> Scorer:
        return _PrefixScorer(pools, ask, self._costs, self._mode)


class _PrefixScorer(Scorer):
    """The terms of `PrefixAware`, in prompt tokens."""

    def __init__(
        self, pools: Pools, ask: PlacementQuery, costs: RouterCosts, mode: HandoverMode
    ) -> None:
        super().__init__(pools, ask, costs, mode)
        self._request = penalty_parts(costs.decode_request_s * costs.prefill_tokens_per_s)

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


class RoundRobin(ScoredPolicy):
    """Policy that takes the workers in turn, in the order of their ids.

    The turn comes with the request (`PlacementQuery.turn`). A worker that may not be taken is
    skipped.
    """

    name = "round_robin"
    unit = "turns"

    def scorer(self, pools: Pools, ask: PlacementQuery) -> Scorer:
        return _TurnScorer(pools, ask, self._costs, self._mode)


class _TurnScorer(Scorer):
    """The terms of `RoundRobin`, in turns."""

    def __init__(
        self, pools: Pools, ask: PlacementQuery, costs: RouterCosts, mode: HandoverMode
    ) -> None:
        super().__init__(pools, ask, costs, mode)
        self._prefill = _turns(pools.prefill, ask.turn)
        self._decode = _turns(pools.decode, ask.turn)

    def prefill_own(self, p: WorkerLoad) -> int:
        return penalty_parts(self._prefill[p.worker_id])

    def prefill_terms(self, p: WorkerLoad) -> Terms:
        return {"prefill_turn": self.prefill_own(p)}

    def decode_own(self, d: WorkerLoad) -> int:
        return penalty_parts(self._decode[d.worker_id])

    def decode_terms(self, d: WorkerLoad) -> Terms:
        return {"decode_turn": self.decode_own(d)}


def _turns(workers: Sequence[WorkerLoad], turn: int) -> dict[str, int]:
    """Return how many workers come before each one, by worker id."""
    names = sorted(worker.worker_id for worker in workers)
    return {name: (place - turn) % len(names) for place, name in enumerate(names)}


def make(name: RoutingPolicy, costs: RouterCosts, mode: HandoverMode = "auto") -> Policy:
    """Return the policy with that name. `mode`: path of the KV from prefill to decode."""
    made: dict[RoutingPolicy, Policy] = {
        "joint": Joint(costs, mode),
        "prefix_aware": PrefixAware(costs, mode),
        "least_load": LeastLoad(costs, mode),
        "round_robin": RoundRobin(costs, mode),
    }
    return made[name]


__all__ = ["make"]
