"""What a choice of workers is made from, and what it yields: values, and the Protocol that every
policy keeps.

A policy is a pure function of `Pools` (one frozen look at the workers that may serve the request)
and `PlacementQuery` (the request): no RPC, clock or randomness, so that all routers choose alike.
Nothing in them is another tenant's: what is cached is the asker's own, since hashes are keyed by
tenant. The policies are in `services/router/policies`.

What it costs to move KV between a worker and a store, or a worker that lends its blocks: by what
the workers measured, else by a guess. Pure.

A link is measured once, when the two meet, perhaps on a machine that is busy starting. So links
count in classes: those within a factor of the best healthy one of their kind (to a worker's own
store, to another one, to a lender) are as good as that, and so are those that nobody has measured
yet. Equal workers then cost exactly the same, and where a request goes is decided by load, prefixes
and affinity, not by noise. Latencies are not counted at all: they are the noisiest, and small
against what they would decide.

Which way a prompt's KV goes from one prefill to one decode worker, and what that costs. Pure.

    STORE    prefill writes it into its store, decode reads it there. The way into the store is
             hidden behind the computing, but for the last chunk's.
    DIRECT   decode reads the prefill worker's own cache; the store is written behind.

Where neither can be, decode computes the prompt again, and that is what the pair costs. Knows no
queue, no load and no clock.

What makes a worker the last choice, whatever the policy: suspicion, no room (blocks, or a place
in its steps), too small a window.

Costs are whole billionths of a policy's unit, so that sums are exact and equal workers tie exactly.
Pure.

What a prompt's prefix is worth at a prefill worker: how much of it need not be computed, from
where it comes, and what that takes. Pure; made for one request, and remembered for all workers that
have the same stores at the same distance.

The cheapest pair of workers, found without looking at every pair. Pure.

A pair costs what its prefill worker costs, plus its decode worker, plus the way between them; and
the way depends on few things only: layout, whether both have one store, transports, what the prompt
has lying at the decode worker. So decode workers are put into classes, of each class and store only
the cheapest counts, and prefill workers that hand over alike are one group, of which only the
cheapest counts. What was measured as slow breaks that for the nodes at its other end only: whoever
hands over through such a node is weighed against each decode worker by itself. The result is that
of trying all pairs (a test compares). O(workers + groups x stores).

Among pairs of equal cost the prefill worker, then the decode worker, is found by rendezvous with
the request's affinity: equal conversations meet the same workers, on whichever router.

What all policies are made of: a search for the cheapest pair, the way that its KV goes, and the
account of what was weighed. Pure.

A policy itself says no more than what a worker costs it, by name: `Scorer`.

Joint: the pair whose answer can go on soonest, in estimated seconds. Pure.

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

Least load: the prefill worker with the fewest prompt tokens under way (counted in prompts like
this one), and the decode worker with the fewest requests. Pure; knows no prefixes and no links.

Prefix aware: the prefill worker that has the fewest tokens to compute before this prompt is
done, its own uncached ones included; the decode worker with the fewest requests, of equal ones the
one with most of the prompt lying there. Pure; costs are prompt tokens.

The queue counts, or all prompts with one beginning would wait at one worker while others idle.

Round robin: whose turn it is, among the workers in the order of their ids. Pure: the turn comes
with the request. Who may not be taken is passed over by the next one.

The policies that a router can choose workers by, each in a module of its own; pure.

    joint         seconds until the answer could go on: queues, computing, bytes over links, load
    prefix_aware  prompt tokens to be computed, then load
    least_load    requests and tokens under way
    round_robin   whose turn it is

All of them search the pairs in one way (`search`), keep away from workers under suspicion or
without room (`penalties`), and tell what they weighed. `make` is where a setting becomes a policy.
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
    """See the module."""

    STORE = "store"
    DIRECT = "direct"


@dataclass(frozen=True)
class WorkerLoad:
    """One worker as a choice sees it."""

    worker_id: str
    fingerprint: str
    block_size: int
    block_bytes: int
    num_blocks: int
    num_free_blocks: int
    """Blocks that could be had now: free ones, and cached ones that nobody uses."""
    num_requests: int
    """Waiting and running there, of all routers."""
    num_queued_tokens: int
    """Prompt tokens sent there by all routers, as far as they must be computed, not answered yet.
    """
    store_node_id: str
    """Its own store; empty: none."""
    transport: str = ""
    """How it reaches its own store."""
    remote_transport: str = ""
    """How it reads what lies elsewhere; empty: never."""
    lender_node_id: str = ""
    """Where decode workers read its own cache; empty: nowhere."""
    links: Mapping[str, LinkView] = field(default_factory=dict)
    """What it measured, by node."""
    is_suspect: bool = False
    incarnation: str = ""
    context_window: int = 0
    """Tokens of one request that it can hold; 0: as many as it is asked for."""
    num_free_places: int | None = None
    """Of a decode worker: places for samples of further requests; None: it does not say."""

    @cached_property
    def layout(self) -> Layout:
        return self.fingerprint, self.block_size

    @cached_property
    def key(self) -> int:
        """64 bits of its id, for rendezvous."""
        return int.from_bytes(hashlib.blake2b(self.worker_id.encode(), digest_size=8).digest())

    @cached_property
    def place(self) -> tuple[str, int, int, str, bool, str]:
        """Equal for workers that hand over and fetch alike, but for what they measured."""
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
        """Equal for workers that hand over alike, wherever their stores are."""
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
        """`place` and `kind` together."""
        return *self.place, bool(self.lender_node_id), self.context_window


NOTHING_LOCAL: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True)
class PlacementQuery:
    """One request as a choice sees it."""

    num_prompt_tokens: int
    max_tokens: int
    affinity: bytes
    prefixes: FoundPrefixes = NO_PREFIXES
    needs_decode: bool = True
    local: Mapping[str, int] = field(default_factory=lambda: NOTHING_LOCAL)
    """Prompt tokens whose KV a worker should have in its own cache, since it had such a prompt
    lately; by incarnation."""
    turn: int = 0
    """How many requests this router has asked for before."""
    max_own_tokens: int = 0
    """Most prompt tokens that a decode worker may compute itself; 0: none, ever."""
    window: int = 0
    """Tokens of the prompt and its longest output together."""


@dataclass(frozen=True)
class Choice:
    """Who serves, and why: the terms of its cost."""

    prefill_id: str | None
    """None: the decode worker computes the prompt itself."""
    decode_id: str | None
    """None: the answer ends with its first token."""
    why: Mapping[str, float]
    """In the policy's unit; they add up to the cost."""
    num_pairs: int
    """Pairs that could have served, and decode workers that could alone."""
    runs: tuple[StoreRun, ...] = ()
    """Where the prefill worker finds the prefix."""
    path: TransferPath = TransferPath.STORE
    """Which way the prompt's KV goes to the decode worker."""
    num_computed: int = 0
    """Prompt tokens that should have to be computed."""
    prefill_life: str = ""
    """Incarnation of the prefill worker: another life under its id may hold another model."""

    @property
    def cost(self) -> float:
        return sum(self.why.values())


@dataclass(frozen=True)
class Pools:
    """The workers that may serve one request, as of one moment; ids are unique within a role."""

    prefill: tuple[WorkerLoad, ...]
    decode: tuple[WorkerLoad, ...]
    links: LinkCosts
    slow: Mapping[str, Mapping[str, SlowLink]]
    """By worker, and the node at the other end; most have none."""

    @classmethod
    def of(
        cls, prefill: Sequence[WorkerLoad], decode: Sequence[WorkerLoad], costs: RouterCosts
    ) -> Pools:
        """With link costs by what these workers measured."""
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
    """One worker as a policy weighed it, beside the other one of the winning pair."""

    worker_id: str
    role: str
    why: Mapping[str, float]
    is_chosen: bool = False

    @property
    def cost(self) -> float:
        return sum(self.why.values())


class Policy(Protocol):
    """Chooses the workers of a request."""

    @property
    def name(self) -> str:
        """As the setting names it."""
        ...

    @property
    def unit(self) -> str:
        """What its costs are counted in."""
        ...

    def choose(self, pools: Pools, ask: PlacementQuery) -> Choice:
        """The cheapest way to serve `ask`. Workers of a pair have equal layouts; a worker under
        suspicion, or one without room, is taken only where there is no other.

        Raises: Unavailable naming the role that is missing, or saying that no two workers fit.
        """
        ...

    def weigh(
        self, pools: Pools, ask: PlacementQuery, choice: Choice, limit: int
    ) -> list[Candidate]:
        """What `choose` compared: of each role the chosen worker and the cheapest others, at most
        `limit` of a role, each with the terms of its pair with the other chosen one.
        """
        ...


def blocks_needed(num_prompt_tokens: int, max_tokens: int, block_size: int) -> int:
    """Blocks that hold a prompt and all output tokens but the last, whose KV nobody needs."""
    return -(-(num_prompt_tokens + max_tokens - 1) // block_size)


_CLASS_FACTOR = 4
"""Guessed: above what one machine's measurements differ by, below what a wrong path costs."""

_FAILED_FACTOR = 100
"""A link that failed its measurement may still carry something: dear, not forbidden, since a worker
that was busy when it started must not stay idle for ever. Guessed.
"""


SlowLink = tuple[float, bool]
"""What a link counts as, in bytes per second, and whether it is degraded."""


class Linked(Protocol):
    """A worker as far as this module cares."""

    @property
    def store_node_id(self) -> str:
        """Its own store; empty: none."""
        ...

    @property
    def links(self) -> Mapping[str, LinkView]:
        """What it measured, by node."""
        ...


class _Kind(Enum):
    """Of a link, by what is at its other end."""

    HOME = "the worker's own store"
    ELSEWHERE = "another node's store"
    LENDER = "another worker"


class LinkCosts:
    """For one choice among `workers`."""

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
        """Seconds that `num_bytes` take from a store or lender into the worker.

        Args: as_good_as: another node, whose link this one is weighed against: in the same class it
            costs no more than that.
        """
        rate = self._rate(worker, node_id)
        if as_good_as is not None:
            rate = _levelled(rate, max(rate, self._rate(worker, as_good_as)))
        return num_bytes / rate

    def slow(self, worker: Linked) -> Mapping[str, SlowLink]:
        """Those of its links that do not count like the best of their kind, by node."""
        found = {}
        for node_id, link in worker.links.items():
            rate, kind = self._rate(worker, node_id), _kind(worker, node_id)
            if link.is_degraded or rate != (self._best[kind] or self._guess(kind)):
                found[node_id] = (rate, link.is_degraded)
        return found

    def _rate(self, worker: Linked, node_id: str) -> float:
        """Bytes per second, above 0."""
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
    """A worker as far as this module cares; each field as in `policy.WorkerLoad`."""

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
    """One pair's way, and its cost in seconds, term by term."""

    path: TransferPath
    link_s: float = 0.0
    """Into the decode worker."""
    put_s: float = 0.0
    """Into the store, as far as decode must wait for it."""
    compute_s: float = 0.0
    """The prompt once more, since nothing can be moved."""

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
    """The way of `num_tokens` prompt tokens from prefill worker `p` to decode worker `d`.

    "direct" is a wish: it is followed where it can be. Where decode maps the slab that prefill
    writes into, "auto" stays with the store: no wire is as good as the same memory.
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
    """Whether a worker can read blocks of that store or lender at all."""
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
        # Reckoned as if it were read from there.
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
    """Whether both have the same slab mapped, and neither found it slow."""
    if not p.store_node_id or p.store_node_id != d.store_node_id:
        return False
    found = (worker.links.get(p.store_node_id) for worker in (p, d))
    is_slow = any(link is not None and link.is_degraded for link in found)
    return p.transport == d.transport == _SHARED_MEMORY and not is_slow


def num_bytes_of(num_tokens: int, worker: TransferParty) -> float:
    """KV of so many tokens."""
    return num_tokens * worker.block_bytes / worker.block_size


PARTS = 10**9
"""Of one unit."""

_LAST_CHOICE = 10**8 * PARTS
"""Above every real estimate: taken only when there is no other."""

NO_WAY = _LAST_CHOICE // 4
"""Nothing can be moved between the two, for a policy that does not reckon in time."""

_MOST = 1e6
"""No other term is larger: a peer's measurement must not outweigh a suspicion."""


NAMES = frozenset({"prefill_full", "prefill_suspect", "decode_full", "decode_suspect"})
"""The terms that are no estimates."""


def penalty_parts(value: float) -> int:
    """A cost in whole parts, bounded."""
    return round(min(value, _MOST) * PARTS)


def prefill_penalties(p: WorkerLoad, ask: PlacementQuery) -> dict[str, int]:
    """By name; 0 where nothing is wrong."""
    needed = blocks_needed(ask.num_prompt_tokens, 1, p.block_size)
    return {
        "prefill_full": _LAST_CHOICE // 2 if needed > p.num_blocks else 0,
        "prefill_suspect": _LAST_CHOICE if p.is_suspect else 0,
    }


def decode_penalties(d: WorkerLoad, ask: PlacementQuery) -> dict[str, int]:
    """By name; 0 where nothing is wrong."""
    needed = blocks_needed(ask.num_prompt_tokens, ask.max_tokens, d.block_size)
    return {
        "decode_full": _LAST_CHOICE // 2
        if needed > d.num_free_blocks or d.num_free_places == 0
        else 0,
        "decode_suspect": _LAST_CHOICE if d.is_suspect else 0,
    }


def prefill_penalty_sum(p: WorkerLoad, ask: PlacementQuery) -> int:
    """All of `prefill_penalties`, without a mapping: this runs for every worker."""
    cost = _LAST_CHOICE if p.is_suspect else 0
    if ask.num_prompt_tokens > p.num_blocks * p.block_size:
        cost += _LAST_CHOICE // 2
    return cost


def decode_penalty_sum(d: WorkerLoad, ask: PlacementQuery) -> int:
    """All of `decode_penalties`, without a mapping."""
    cost = _LAST_CHOICE if d.is_suspect else 0
    needed = ask.num_prompt_tokens + ask.max_tokens - 1
    if needed > d.num_free_blocks * d.block_size or d.num_free_places == 0:
        cost += _LAST_CHOICE // 2
    return cost


def fitting_workers(workers: Sequence[WorkerLoad], ask: PlacementQuery) -> list[WorkerLoad]:
    """Those whose window holds the prompt and one output."""
    window = ask.window
    return [w for w in workers if window <= w.context_window or not w.context_window]


@dataclass(frozen=True)
class Prefix:
    """At one worker."""

    runs: tuple[StoreRun, ...]
    num_computed: int
    """Prompt tokens left to compute."""
    link: int
    """Cost of what its own store has, in parts."""
    pull: int
    """Cost of what other stores have."""
    num_pulled: int
    """Prompt tokens that other stores have."""


class PrefixCosts:
    """See the module."""

    def __init__(self, ask: PlacementQuery, costs: RouterCosts, pools: Pools) -> None:
        self._ask = ask
        self._costs = costs
        self._pools = pools
        self._known: dict[object, Prefix] = {}

    def of(self, p: WorkerLoad) -> Prefix:
        """At `p`."""
        num_local = self._ask.local.get(p.incarnation, 0) if self._ask.local else 0
        slow = self._pools.slow.get(p.worker_id) if self._pools.slow else None
        key = (p.place, num_local, tuple(sorted(slow.items())) if slow else None)
        prefix = self._known.get(key)
        if prefix is None:
            prefix = self._known[key] = self._reckon(p, num_local)
        return prefix

    def _reckon(self, p: WorkerLoad, num_local: int) -> Prefix:
        # The last prompt token is always computed: its logits are what the first draw needs.
        num_cacheable = self._ask.num_prompt_tokens - 1
        links, runs = self._pools.links, self._runs(p)
        done = 0
        link_s = pull_s = 0.0
        num_pulled = 0
        for run in runs:
            end = min(num_cacheable, (run.first_block + run.num_blocks) * p.block_size)
            # What lies in its own cache is not fetched.
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
        """What `p` should take from which store."""
        held = self._ask.prefixes.of(p.layout)
        if not held:
            return ()
        compute_s = p.block_size / self._costs.prefill_tokens_per_s
        links = self._pools.links

        def distance(node_id: str) -> float:
            if not can_read(p, node_id):
                return math.inf
            link, block_s = p.links.get(node_id), links.move_s(p, node_id, p.block_bytes)
            # Only a link known to be bad is left out: the rate of computing is a guess.
            if link is not None and link.is_degraded:
                is_worth_it = link.read_bytes_per_s > 0 and block_s < compute_s
                return block_s if is_worth_it else math.inf
            return block_s

        return plan_runs(held, p.store_node_id, distance)


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
class CheapestPair:
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


def find_cheapest_pair(pools: Pools, ask: PlacementQuery, scoring: Scoring) -> CheapestPair:
    """See the module. Raises: Unavailable naming the role that is missing, or saying that no two
    workers fit.
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
    """One search. `prefill`: those whose window the request fits."""

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


Terms = Mapping[str, int]
"""Parts of a cost, by name."""


class Scorer(ABC):
    """One request among one pool, as one policy weighs it: the `Scoring` of its search.

    `*_own` are what it reckons for each worker, `prefill_shared` what is equal for workers at the
    same place; what makes a worker the last choice is added to them.
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
        """See `find_cheapest_pair.Scoring`."""
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

    def way(self, p: WorkerLoad, d: WorkerLoad) -> TransferPlan:
        """How KV gets from `p` to `d`: what `d` should not have already."""
        num_tokens = self.ask.num_prompt_tokens
        if self.ask.local:
            num_tokens -= min(num_tokens, self.ask.local.get(d.incarnation, 0))
        return plan_transfer(p, d, num_tokens, self.mode, self.costs, self.pools.links)

    # What the search asks for: services.router.policies.search.Scoring.

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
        """Prompt tokens that `d` would have to compute by itself."""
        num_tokens = self.ask.num_prompt_tokens
        return num_tokens - min(num_tokens - 1, self.ask.local.get(d.incarnation, 0))

    def terms(self, p: WorkerLoad | None, d: WorkerLoad | None) -> dict[str, int]:
        """All of what a pair costs, by name."""
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
    """See the module."""

    name: str
    unit: str

    def __init__(self, costs: RouterCosts, mode: HandoverMode = "auto") -> None:
        self._costs = costs
        self._mode: HandoverMode = mode

    @abstractmethod
    def scorer(self, pools: Pools, ask: PlacementQuery) -> Scorer:
        """What the policy says of one request."""

    def choose(self, pools: Pools, ask: PlacementQuery) -> Choice:
        """As `services.router.policy.Policy` says."""
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
        """As `services.router.policy.Policy` says."""
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
    """See the module."""

    name = "joint"
    unit = "s"

    def scorer(self, pools: Pools, ask: PlacementQuery) -> Scorer:
        return _JointScorer(pools, ask, self._costs, self._mode)


class _JointScorer(Scorer):
    def __init__(
        self, pools: Pools, ask: PlacementQuery, costs: RouterCosts, mode: HandoverMode
    ) -> None:
        super().__init__(pools, ask, costs, mode)
        # Whole parts for each, so that what runs for every worker is a product of integers.
        self._token = penalty_parts(1.0 / costs.prefill_tokens_per_s)
        self._request = penalty_parts(costs.decode_request_s)
        self._scarce = penalty_parts(costs.scarce_window_s)
        self._windows = tuple(
            min([w.context_window for w in fitting_workers(workers, ask)], default=0)
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
            "handover_put": penalty_parts(way.put_s),
            "decode_link": penalty_parts(way.link_s),
            "decode_compute": penalty_parts(way.compute_s),
        }

    def own_terms(self, d: WorkerLoad) -> Terms:
        compute = self.num_own(d) * self._token
        # Each request that runs there waits as long as this one computes.
        return {"decode_compute": compute, "decode_disturb": compute * d.num_requests}


class LeastLoad(ScoredPolicy):
    """See the module."""

    name = "least_load"
    unit = "requests"

    def scorer(self, pools: Pools, ask: PlacementQuery) -> Scorer:
        return _LoadScorer(pools, ask, self._costs, self._mode)


class _LoadScorer(Scorer):
    def prefill_own(self, p: WorkerLoad) -> int:
        return penalty_parts(p.num_queued_tokens / self.ask.num_prompt_tokens)

    def prefill_terms(self, p: WorkerLoad) -> Terms:
        return {"prefill_queue": self.prefill_own(p)}

    def decode_own(self, d: WorkerLoad) -> int:
        return penalty_parts(d.num_requests)

    def decode_terms(self, d: WorkerLoad) -> Terms:
        return {"decode_load": self.decode_own(d)}


_LITTLE = PARTS // 1000
"""What a token costs that is only further away: nearer is better, where all else is equal."""


class PrefixAware(ScoredPolicy):
    """See the module."""

    name = "prefix_aware"
    unit = "tokens"

    def scorer(self, pools: Pools, ask: PlacementQuery) -> Scorer:
        return _PrefixScorer(pools, ask, self._costs, self._mode)


class _PrefixScorer(Scorer):
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
    """See the module."""

    name = "round_robin"
    unit = "turns"

    def scorer(self, pools: Pools, ask: PlacementQuery) -> Scorer:
        return _TurnScorer(pools, ask, self._costs, self._mode)


class _TurnScorer(Scorer):
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
    """How many come before each."""
    names = sorted(worker.worker_id for worker in workers)
    return {name: (place - turn) % len(names) for place, name in enumerate(names)}


def make(name: RoutingPolicy, costs: RouterCosts, mode: HandoverMode = "auto") -> Policy:
    """The policy of that name. `mode`: which way KV goes from prefill to decode."""
    made: dict[RoutingPolicy, Policy] = {
        "joint": Joint(costs, mode),
        "prefix_aware": PrefixAware(costs, mode),
        "least_load": LeastLoad(costs, mode),
        "round_robin": RoundRobin(costs, mode),
    }
    return made[name]


__all__ = ["make"]
