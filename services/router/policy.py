"""What a choice of workers is made from, and what it yields: values, and the Protocol that every
policy keeps.

A policy is a pure function of `Pools` (one frozen look at the workers that may serve the request)
and `Ask` (the request): no RPC, no clock, no randomness; equal values give equal choices on every
router. Nothing in them is another tenant's: what is cached is the asker's own, since hashes are
keyed by tenant. The policies are in `services/router/policies`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Protocol

from services.router.config import RouterCosts
from services.router.handover import Path
from services.router.link_costs import LinkCosts, SlowLink
from services.router.prefix_runs import NO_PREFIXES, Layout, Prefixes, Run
from services.router.views import Link

PREFILL = "prefill"
DECODE = "decode"


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
    links: Mapping[str, Link] = field(default_factory=dict)
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
class Ask:
    """One request as a choice sees it."""

    num_prompt_tokens: int
    max_tokens: int
    affinity: bytes
    prefixes: Prefixes = NO_PREFIXES
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
    runs: tuple[Run, ...] = ()
    """Where the prefill worker finds the prefix."""
    path: Path = Path.STORE
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

    def choose(self, pools: Pools, ask: Ask) -> Choice:
        """The cheapest way to serve `ask`. Workers of a pair have equal layouts; a worker under
        suspicion, or one without room, is taken only where there is no other.

        Raises: Unavailable naming the role that is missing, or saying that no two workers fit.
        """
        ...

    def weigh(self, pools: Pools, ask: Ask, choice: Choice, limit: int) -> list[Candidate]:
        """What `choose` compared: of each role the chosen worker and the cheapest others, at most
        `limit` of a role, each with the terms of its pair with the other chosen one.
        """
        ...


def blocks_needed(num_prompt_tokens: int, max_tokens: int, block_size: int) -> int:
    """Blocks that hold a prompt and all output tokens but the last, whose KV nobody needs."""
    return -(-(num_prompt_tokens + max_tokens - 1) // block_size)
