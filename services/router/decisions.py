"""The why-record: each choice of workers that this router made lately, with the very values that it
was made from, by request.

Policies are pure, so what was weighed against what is worked out when somebody asks (`weighed`),
not for every request. Bounded: the oldest request is forgotten first, and of one request the
oldest choices but the first. Nothing of a prompt is kept but its length. One asyncio loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from process.errors import Internal
from services.router.policy import Ask, Candidate, Choice, Policy, Pools

MAX_CANDIDATES = 8
"""Of each role, in one record."""

_MAX_PER_REQUEST = 8

Key = tuple[str, str]
"""Tenant and request id."""


@dataclass(frozen=True)
class Decision:
    """One choice."""

    occasion: str
    """Why there was something to choose: "first", or what went before."""
    policy: Policy
    pools: Pools
    ask: Ask
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


class Decisions:
    """See the module."""

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._by_request: dict[Key, deque[Decision]] = {}

    def add(self, tenant: str, request_id: str, decision: Decision) -> None:
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

    def find(self, request_id: str = "", tenant: str = "") -> tuple[Key, Sequence[Decision]] | None:
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
