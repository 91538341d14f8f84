"""Which way a prompt's KV goes from one prefill to one decode worker, and what that costs. Pure.

    STORE    prefill writes it into its store, decode reads it there. The way into the store is
             hidden behind the computing, but for the last chunk's.
    DIRECT   decode reads the prefill worker's own cache; the store is written behind.

Where neither can be, decode computes the prompt again, and that is what the pair costs. Knows no
queue, no load and no clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from services.router.config import HandoverMode, RouterCosts
from services.router.link_costs import LinkCosts
from services.router.views import Link

_SHARED_MEMORY = "shm"


class Path(Enum):
    """See the module."""

    STORE = "store"
    DIRECT = "direct"


class Party(Protocol):
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
    def links(self) -> Mapping[str, Link]: ...


@dataclass(frozen=True)
class Handover:
    """One pair's way, and its cost in seconds, term by term."""

    path: Path
    link_s: float = 0.0
    """Into the decode worker."""
    put_s: float = 0.0
    """Into the store, as far as decode must wait for it."""
    compute_s: float = 0.0
    """The prompt once more, since nothing can be moved."""

    @property
    def seconds(self) -> float:
        return self.link_s + self.put_s + self.compute_s


def plan(
    p: Party, d: Party, num_tokens: int, mode: HandoverMode, costs: RouterCosts, links: LinkCosts
) -> Handover:
    """The way of `num_tokens` prompt tokens from prefill worker `p` to decode worker `d`.

    "direct" is a wish: it is followed where it can be. Where decode maps the slab that prefill
    writes into, "auto" stays with the store: no wire is as good as the same memory.
    """
    by_store = _by_store(p, d, num_tokens, costs, links)
    direct = None if mode == "store" else _direct(p, d, num_tokens, links)
    if direct is None:
        again_s = num_tokens / costs.prefill_tokens_per_s
        return by_store or Handover(Path.STORE, compute_s=again_s)
    if by_store is None or mode == "direct":
        return direct
    if _share_memory(p, d):
        return by_store
    return min(direct, by_store, key=lambda way: way.seconds)


def can_read(worker: Party, node_id: str) -> bool:
    """Whether a worker can read blocks of that store or lender at all."""
    return bool(node_id) and (node_id == worker.store_node_id or bool(worker.remote_transport))


def _by_store(
    p: Party, d: Party, num_tokens: int, costs: RouterCosts, links: LinkCosts
) -> Handover | None:
    if not can_read(d, p.store_node_id):
        return None
    exposed = min(num_tokens, costs.exposed_put_tokens)
    return Handover(
        Path.STORE,
        link_s=links.move_s(d, p.store_node_id, num_bytes_of(num_tokens, d)),
        # Reckoned as if it were read from there.
        put_s=links.move_s(p, p.store_node_id, num_bytes_of(exposed, p)),
    )


def _direct(p: Party, d: Party, num_tokens: int, links: LinkCosts) -> Handover | None:
    if not can_read(d, p.lender_node_id):
        return None
    num_bytes = num_bytes_of(num_tokens, d)
    as_good_as = p.store_node_id if can_read(d, p.store_node_id) else None
    return Handover(Path.DIRECT, link_s=links.move_s(d, p.lender_node_id, num_bytes, as_good_as))


def _share_memory(p: Party, d: Party) -> bool:
    """Whether both have the same slab mapped, and neither found it slow."""
    if not p.store_node_id or p.store_node_id != d.store_node_id:
        return False
    found = (worker.links.get(p.store_node_id) for worker in (p, d))
    is_slow = any(link is not None and link.is_degraded for link in found)
    return p.transport == d.transport == _SHARED_MEMORY and not is_slow


def num_bytes_of(num_tokens: int, worker: Party) -> float:
    """KV of so many tokens."""
    return num_tokens * worker.block_bytes / worker.block_size
