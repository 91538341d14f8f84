"""`Placer` chooses the workers of each request: it runs the routing policy over the candidates and
records why.

It joins the pure policy with the `WorkerDirectory` (candidates), `PrefixAffinity` (which workers
should still have the KV of a conversation) and `Probation` (suspect workers). One placer serves one
model. It makes no RPC: callers report how the chosen workers did.

`PlacementLog` keeps the latest choices by request, each as a `PlacementDecision` with the exact
inputs of the policy. Policies are pure, so the comparison of the candidates is computed only on
request (`weighed`). The log is bounded: the oldest request goes first, and of one request the
oldest choice but the first. Of a prompt only its length is kept. One asyncio loop.
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
"""Most candidates of each role that one record shows."""

_MAX_PER_REQUEST = 8

Key = tuple[str, str]
"""Tenant and request id."""


@dataclass(frozen=True)
class PlacementDecision:
    """One choice of workers, with the inputs of the policy. A value."""

    occasion: str
    """Reason for the choice: "first", or the event that made another choice necessary."""
    policy: Policy
    pools: Pools
    ask: PlacementQuery
    choice: Choice
    took_s: float
    decided_unix_s: float

    def weighed(self) -> list[Candidate]:
        """Return the chosen workers and the cheapest of the others, with their cost terms."""
        return self.policy.weigh(self.pools, self.ask, self.choice, MAX_CANDIDATES)

    def attributes(self) -> Mapping[str, str | int | float | bool]:
        """Return span attributes: what was chosen, and the cost terms."""
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
    """Bounded log of placement decisions, by tenant and request id."""

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._by_request: dict[Key, deque[PlacementDecision]] = {}

    def add(self, tenant: str, request_id: str, decision: PlacementDecision) -> None:
        """Keep the decision; a request's first one replaces those of an earlier attempt."""
        key = (tenant, request_id)
        prefixes = decision.ask.prefixes
        if prefixes.chains:
            # No policy reads the chains, and those of one long prompt take half a megabyte.
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
        """Return the latest request with this id and tenant (empty: any) and its decisions, oldest
        first; None when it is not known (any more)."""
        for key in reversed(self._by_request):
            if tenant in ("", key[0]) and request_id in ("", key[1]):
                return key, tuple(self._by_request[key])
        return None

    def ids_with(self, prefix: str, tenant: str = "") -> set[str]:
        """Return the request ids that begin with `prefix`, of this tenant (empty: of any)."""
        return {
            request_id
            for of_tenant, request_id in self._by_request
            if tenant in ("", of_tenant) and request_id.startswith(prefix)
        }

    def check_integrity(self) -> None:
        """Check the bounds of the log. Raises: Internal when more is kept than allowed."""
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
    """One request while its workers are chosen. A value: each step returns a new one."""

    tenant: str
    request_id: str
    adapter: AdapterContent
    ask: PlacementQuery
    decision: PlacementDecision | None = None
    """Latest decision for the request."""
    fingerprint: str = ""
    """Fingerprint of the model that has produced output already: no other may continue. Empty: any
    may serve."""
    left: frozenset[str] = frozenset()
    """Incarnations of decode workers that abandoned the request: they are not asked again."""
    has_kv: bool = False
    """Whether the KV of all known tokens is handed over already: no prefill worker is needed."""

    def details(self) -> Mapping[str, str | int | float | bool]:
        """Return span attributes of the latest decision."""
        return self.decision.attributes() if self.decision is not None else {}

    def may_use(self, load: WorkerLoad) -> bool:
        """Return whether the worker has the right model and has not abandoned the request."""
        is_right = not self.fingerprint or load.fingerprint == self.fingerprint
        return is_right and load.incarnation not in self.left

    def with_prefixes(self, prefixes: FoundPrefixes) -> RoutingQuery:
        """Return the query with the result of a new prefix lookup."""
        return replace(self, ask=replace(self.ask, prefixes=prefixes))


@dataclass(frozen=True)
class Placer:
    """Chooser of the workers for the requests of one model; it records and counts its choices."""

    candidates: WorkerDirectory
    policy: Policy
    decisions: PlacementLog
    conversations: PrefixAffinity
    probation: Probation
    metrics: RouterMetrics
    max_own_tokens: int
    """Most prompt tokens that a decode worker may compute itself; 0: it may compute none."""
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
        """Return a placer with an empty log."""
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
        """Return the query for a request: `ask` plus the turn and the KV that workers have."""
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
        """Return the workers for a request, without decode workers that refused it.

        Args: occasion: reason for the choice, for the log.
        Raises: Unavailable when a role has no worker, or no two workers fit.
        """
        pools = self.pools(asking, refused)
        if asking.has_kv:
            # No decode worker has to compute anything or to wait for a prefill worker.
            there = {load.incarnation: asking.ask.num_prompt_tokens for load in pools.decode}
            ask = replace(asking.ask, local=there, max_own_tokens=asking.ask.num_prompt_tokens)
            asking, pools = replace(asking, ask=ask), replace(pools, prefill=())
        return self._decide(asking, pools, occasion)

    def pools(
        self, asking: RoutingQuery, refused: Collection[str] = (), failed: Collection[str] = ()
    ) -> Pools:
        """Return the workers that may serve, without decode workers that refused and without
        prefill workers that failed."""
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
        """Return the choice after the decode worker reserved blocks and reported `num_local`.

        Args: num_local: leading prompt tokens that the decode worker has KV of. With it the policy
            decides again whether the worker computes the rest of the prompt itself.
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
            return choice, asking  # as expected
        local = {**asking.ask.local, incarnation: num_local}
        asking = replace(asking, ask=replace(asking.ask, local=local))
        return self._decide(asking, pools, RESERVED)

    def again(
        self, asking: RoutingQuery, failed: Collection[str], decode_id: str | None
    ) -> tuple[Choice, RoutingQuery] | None:
        """Return another prefill worker after `failed` ones; None: there is no other.

        Args: decode_id: the decode worker that has reserved blocks already, if there is one.
        """
        pools = self.pools(asking, failed=failed)
        if decode_id is not None:
            pools = self.candidates.with_decode(pools, decode_id, asking.ask)
        if not pools.prefill:
            return None
        ask = replace(asking.ask, needs_decode=decode_id is not None, max_own_tokens=0)
        choice, asked = self._decide(replace(asking, ask=ask), pools, PREFILL_FAILED)
        # The request needs decode or not as before, even if its decode worker is gone by now.
        whole = replace(asked.ask, needs_decode=asking.ask.needs_decode)
        return choice, replace(asked, ask=whole)

    @contextmanager
    def trial(self, worker: WorkerView) -> Iterator[None]:
        """Run a request's call to `worker` in the body; a failure makes the worker suspect."""
        try:
            with self.probation.trial(worker.worker_id, worker.incarnation):
                yield
        except Unavailable:
            self.metrics.on_suspect(worker.role)
            raise

    def failed(self, worker_id: str) -> None:
        """Record that a worker failed in the middle of a request."""
        worker = self.candidates.find(worker_id)
        if worker is not None:
            self.probation.failed(worker_id, worker.incarnation)
            self.metrics.on_suspect(worker.role)

    def note_prompt(self, asking: RoutingQuery, layout: Layout, worker_ids: Sequence[str]) -> None:
        """Record that these workers have the prompt's KV."""
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
        """Record that this worker has the KV of the prompt and of the tokens it generated."""
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
        """Check the parts. Raises: Internal when an invariant of one is broken."""
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
        # Penalties are no estimates: they stay out of the metrics.
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
