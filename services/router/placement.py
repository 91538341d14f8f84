"""The why-record: each choice of workers that this router made lately, with the very values that it
was made from, by request.

Policies are pure, so what was weighed against what is worked out when somebody asks (`weighed`),
not for every request. Bounded: the oldest request is forgotten first, and of one request the
oldest choices but the first. Nothing of a prompt is kept but its length. One asyncio loop.

Placer: each request's choices of workers, made by the policy from what is known now, recorded
with their reasons, and counted.

Joins the pure policy with the candidates, with what workers should still have of a conversation,
with whom this router mistrusts, and with the record of choices. Knows no RPC: what comes of a
choice it is told. Of one model. One asyncio loop.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from kvstore import block_hash
from process import logs
from process.rpc_errors import Internal, Unavailable
from services.router import policies
from services.router.circuit_breaker import Probation
from services.router.metrics import RouterMetrics
from services.router.policies import Candidate, Choice, PlacementQuery, Policy, Pools, WorkerLoad
from services.router.prefixes import FoundPrefixes, Layout, PrefixAffinity
from services.router.worker_directory import AdapterContent, WorkerDirectory
from services.router.worker_views import WorkerView

MAX_CANDIDATES = 8
"""Of each role, in one record."""

_MAX_PER_REQUEST = 8

Key = tuple[str, str]
"""Tenant and request id."""


@dataclass(frozen=True)
class PlacementDecision:
    """One choice."""

    occasion: str
    """Why there was something to choose: "first", or what went before."""
    policy: Policy
    pools: Pools
    ask: PlacementQuery
    choice: Choice
    took_s: float
    decided_unix_s: float

    def weighed(self) -> list[Candidate]:
        """The chosen workers and the best of the others."""
        return self.policy.weigh(self.pools, self.ask, self.choice, MAX_CANDIDATES)

    def attributes(self) -> Mapping[str, str | int | float | bool]:
        """For a span: what was chosen, and why."""
        choice = self.choice
        return {
            "baton.choice.occasion": self.occasion,
            "baton.choice.policy": self.policy.name,
            "baton.choice.unit": self.policy.unit,
            "baton.choice.prefill": choice.prefill_id or "",
            "baton.choice.decode": choice.decode_id or "",
            "baton.choice.cost": choice.cost,
            "baton.choice.num_prefill": len(self.pools.prefill),
            "baton.choice.num_decode": len(self.pools.decode),
            "baton.choice.num_pairs": choice.num_pairs,
            "baton.choice.handover": choice.path.value,
            **{f"baton.choice.why.{name}": value for name, value in choice.why.items()},
        }


class PlacementLog:
    """See the module."""

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._by_request: dict[Key, deque[PlacementDecision]] = {}

    def add(self, tenant: str, request_id: str, decision: PlacementDecision) -> None:
        """Keep it; a choice that is somebody's first forgets an earlier attempt of the same id."""
        key = (tenant, request_id)
        prefixes = decision.ask.prefixes
        if prefixes.chains:
            # No policy reads them, and those of one long prompt are half a megabyte.
            ask = replace(decision.ask, prefixes=replace(prefixes, chains={}))
            decision = replace(decision, ask=ask)
        if decision.occasion == FIRST:
            self._by_request.pop(key, None)
        of_request = self._by_request.setdefault(key, deque())
        if len(of_request) == _MAX_PER_REQUEST:
            del of_request[1]
        of_request.append(decision)
        if len(self._by_request) > self._max_requests:
            del self._by_request[next(iter(self._by_request))]

    def find(
        self, request_id: str = "", tenant: str = ""
    ) -> tuple[Key, Sequence[PlacementDecision]] | None:
        """The latest request of this id and tenant (empty: of any), and its choices, oldest first;
        None when it is not known (any more)."""
        for key in reversed(self._by_request):
            if tenant in ("", key[0]) and request_id in ("", key[1]):
                return key, tuple(self._by_request[key])
        return None

    def ids_with(self, prefix: str, tenant: str = "") -> set[str]:
        """The ids that begin so, of requests of this tenant (empty: of any)."""
        return {
            request_id
            for of_tenant, request_id in self._by_request
            if tenant in ("", of_tenant) and request_id.startswith(prefix)
        }

    def check_integrity(self) -> None:
        """Raises: Internal when more is kept than may be."""
        if len(self._by_request) > self._max_requests:
            raise Internal(f"{len(self._by_request)} requests in the record of choices")
        if any(not 0 < len(kept) <= _MAX_PER_REQUEST for kept in self._by_request.values()):
            raise Internal("the record of choices keeps too many of one request, or none")


FIRST = "first"


logger = logging.getLogger(__name__)

REFUSED = "decode refused"
RESERVED = "decode reserved"
PREFILL_FAILED = "prefill failed"
DECODE_LEFT = "decode left"


@dataclass(frozen=True)
class RoutingQuery:
    """One request while its workers are chosen."""

    tenant: str
    request_id: str
    adapter: AdapterContent
    ask: PlacementQuery
    decision: PlacementDecision | None = None
    """The last one."""
    fingerprint: str = ""
    """Of the model that has drawn something already: no other may go on. Empty: any may."""
    left: frozenset[str] = frozenset()
    """Lives of decode workers that left the request: they are not asked again."""
    has_kv: bool = False
    """Whether all that is known is handed over already: no prefill worker is needed."""

    def details(self) -> Mapping[str, str | int | float | bool]:
        """Of the last choice, for a trace."""
        return self.decision.attributes() if self.decision is not None else {}

    def may_use(self, load: WorkerLoad) -> bool:
        """Whether it is another worker's turn, and of the right model."""
        is_right = not self.fingerprint or load.fingerprint == self.fingerprint
        return is_right and load.incarnation not in self.left

    def with_prefixes(self, prefixes: FoundPrefixes) -> RoutingQuery:
        """The index was asked anew."""
        return replace(self, ask=replace(self.ask, prefixes=prefixes))


@dataclass(frozen=True)
class Placer:
    """See the module."""

    candidates: WorkerDirectory
    policy: Policy
    decisions: PlacementLog
    conversations: PrefixAffinity
    probation: Probation
    metrics: RouterMetrics
    max_own_tokens: int
    """Most prompt tokens that a decode worker may compute itself; 0: none, ever."""
    turns: Iterator[int]

    @classmethod
    def of(
        cls,
        candidates: WorkerDirectory,
        policy: Policy,
        probation: Probation,
        metrics: RouterMetrics,
        *,
        max_own_tokens: int,
        num_decisions_kept: int,
        num_prefixes_kept: int,
    ) -> Placer:
        """With nothing recorded yet."""
        return cls(
            candidates,
            policy,
            PlacementLog(num_decisions_kept),
            PrefixAffinity(num_prefixes_kept),
            probation,
            metrics,
            max_own_tokens,
            itertools.count(),
        )

    def asking(
        self,
        tenant: str,
        request_id: str,
        adapter: AdapterContent,
        ask: PlacementQuery,
        *,
        may_skip_prefill: bool,
    ) -> RoutingQuery:
        """`ask`, with what this router knows beside: whose turn it is, and what lies where."""
        num_blocks = self.candidates.num_blocks
        local = {
            incarnation: num_there * size
            for (_, size), chain in ask.prefixes.chains.items()
            for incarnation, num_there in self.conversations.find(chain, num_blocks).items()
        }
        most = self.max_own_tokens if may_skip_prefill and ask.needs_decode else 0
        ask = replace(ask, local=local, turn=next(self.turns), max_own_tokens=most)
        return RoutingQuery(tenant, request_id, adapter, ask)

    def choose(
        self, asking: RoutingQuery, refused: Collection[str] = (), occasion: str = FIRST
    ) -> tuple[Choice, RoutingQuery]:
        """Who serves, but for decode workers that refused. `occasion`: of the first choice.

        Raises: Unavailable.
        """
        pools = self.pools(asking, refused)
        if asking.has_kv:
            # Whoever it is has nothing to compute, and no prefill worker to wait for.
            there = {load.incarnation: asking.ask.num_prompt_tokens for load in pools.decode}
            ask = replace(asking.ask, local=there, max_own_tokens=asking.ask.num_prompt_tokens)
            asking, pools = replace(asking, ask=ask), replace(pools, prefill=())
        return self._decide(asking, pools, occasion)

    def pools(
        self, asking: RoutingQuery, refused: Collection[str] = (), failed: Collection[str] = ()
    ) -> Pools:
        """Who may be chosen from, but for decode workers that refused and prefill workers that
        failed."""
        pools = self.candidates.pools(asking.adapter, not_prefill=failed, not_decode=refused)
        if not (asking.fingerprint or asking.left):
            return pools
        return replace(
            pools,
            prefill=tuple(load for load in pools.prefill if asking.may_use(load)),
            decode=tuple(load for load in pools.decode if asking.may_use(load)),
        )

    def reserved(
        self, asking: RoutingQuery, choice: Choice, num_local: int
    ) -> tuple[Choice, RoutingQuery]:
        """The decode worker has set blocks aside, and said how many prompt tokens it has already:
        whether it computes the rest itself is decided by that.
        """
        if not asking.ask.max_own_tokens or choice.decode_id is None:
            return choice, asking
        rest = asking.ask.num_prompt_tokens - num_local
        if choice.prefill_id is not None and rest > asking.ask.max_own_tokens:
            return choice, asking
        pools = self.pools(asking)
        pools = self.candidates.with_decode(pools, choice.decode_id, asking.ask)
        incarnation = pools.decode[0].incarnation
        if asking.ask.local.get(incarnation, 0) == num_local:
            return choice, asking  # as it was thought
        local = {**asking.ask.local, incarnation: num_local}
        asking = replace(asking, ask=replace(asking.ask, local=local))
        return self._decide(asking, pools, RESERVED)

    def again(
        self, asking: RoutingQuery, failed: Collection[str], decode_id: str | None
    ) -> tuple[Choice, RoutingQuery] | None:
        """Another prefill worker, for the decode worker that has blocks reserved already if there
        is one; None: there is nobody else.
        """
        pools = self.pools(asking, failed=failed)
        if decode_id is not None:
            pools = self.candidates.with_decode(pools, decode_id, asking.ask)
        if not pools.prefill:
            return None
        ask = replace(asking.ask, needs_decode=decode_id is not None, max_own_tokens=0)
        choice, asked = self._decide(replace(asking, ask=ask), pools, PREFILL_FAILED)
        # The request still needs what it needed, though its decode worker be gone by now.
        whole = replace(asked.ask, needs_decode=asking.ask.needs_decode)
        return choice, replace(asked, ask=whole)

    @contextmanager
    def trial(self, worker: WorkerView) -> Iterator[None]:
        """A request's call to `worker` runs in the body; its failure is held against it."""
        try:
            with self.probation.trial(worker.worker_id, worker.incarnation):
                yield
        except Unavailable:
            self.metrics.on_suspect(worker.role)
            raise

    def failed(self, worker_id: str) -> None:
        """A worker broke what it had begun."""
        worker = self.candidates.find(worker_id)
        if worker is not None:
            self.probation.failed(worker_id, worker.incarnation)
            self.metrics.on_suspect(worker.role)

    def note_prompt(self, asking: RoutingQuery, layout: Layout, worker_ids: Sequence[str]) -> None:
        """These workers have the prompt's KV now."""
        workers = [self.candidates.find(worker_id) for worker_id in worker_ids]
        chain = asking.ask.prefixes.chains.get(layout)
        if chain:
            lives = [worker.incarnation for worker in workers if worker is not None]
            self.conversations.note(chain, lives)

    def note_answer(
        self,
        asking: RoutingQuery,
        tenant_salt: bytes,
        prompt: Sequence[int],
        drawn: Sequence[int],
        worker_id: str,
    ) -> None:
        """This worker has the KV of the prompt, and of what it drew after it."""
        worker = self.candidates.find(worker_id)
        if worker is None:
            return
        fingerprint, size = worker.fingerprint, worker.block_size
        chain = asking.ask.prefixes.chains.get((fingerprint, size))
        if chain is None:
            return
        root = block_hash.root_key(tenant_salt, fingerprint, asking.adapter.digest)
        hashes = block_hash.chain_on(root, chain, (prompt, drawn), size)
        self.conversations.note(hashes, [worker.incarnation])

    def check_integrity(self) -> None:
        """Raises: Internal when a law of its parts is broken."""
        self.candidates.check_integrity()
        self.decisions.check_integrity()
        self.conversations.check_integrity()

    def _decide(
        self, asking: RoutingQuery, pools: Pools, occasion: str
    ) -> tuple[Choice, RoutingQuery]:
        begin_s = time.perf_counter()
        choice = self.policy.choose(pools, asking.ask)
        took_s = time.perf_counter() - begin_s
        decision = PlacementDecision(
            occasion, self.policy, pools, asking.ask, choice, took_s, time.time()
        )
        self.decisions.add(asking.tenant, asking.request_id, decision)
        # What makes a worker the last choice is no time that anybody waits.
        real = {name: cost for name, cost in choice.why.items() if name not in policies.NAMES}
        self.metrics.on_choice(self.policy.name, self.policy.unit, real, took_s)
        logs.event(
            logger,
            "chosen",
            level=logging.DEBUG,
            request_id=asking.request_id,
            occasion=occasion,
            prefill=choice.prefill_id,
            decode=choice.decode_id,
            why=dict(choice.why),
            num_pairs=choice.num_pairs,
            runs=[(run.node_id, run.num_blocks) for run in choice.runs],
            handover=choice.path.value,
        )
        return choice, replace(asking, decision=decision)
