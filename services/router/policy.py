"""Which prefill and which decode worker serve a request: chosen together, by a pure function over
values.

The cost of a pair is an estimate in seconds: waiting behind other prompts at P, fetching what the
stores hold of the prefix, computing the rest, moving KV to D the cheaper way, and the load D has.
Ties go by rendezvous hash of the request's affinity, so that equal conversations meet the same
workers. Every choice carries why. Nothing in it is another tenant's: hits are the asker's own,
since hashes are keyed by tenant. Knows no RPC and no clock.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from process.errors import Unavailable
from services.router import handover
from services.router.config import HandoverMode, RouterCosts
from services.router.link_costs import LinkCosts
from services.router.prefix_runs import NO_PREFIXES, Layout, Prefixes, Run, plan_runs
from services.router.views import Link

PREFILL = "prefill"
DECODE = "decode"

# A worker that just failed, or has no room by its own account, is taken only when there is no
# other. Any number of seconds above every real estimate does.
_LAST_CHOICE_S = 1e6


@dataclass(frozen=True)
class WorkerLoad:
    """One worker as the choice sees it."""

    worker_id: str
    fingerprint: str
    block_size: int
    block_bytes: int
    num_blocks: int
    num_free_blocks: int
    """Blocks that could be had now: free ones, and cached ones that nobody uses."""
    num_requests: int
    """Waiting and running there, by its own account or ours, whichever is more."""
    num_queued_tokens: int
    """Prompt tokens that this router has sent there and that are not answered."""
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

    @property
    def layout(self) -> Layout:
        return self.fingerprint, self.block_size


@dataclass(frozen=True)
class Ask:
    """One request as the choice sees it."""

    num_prompt_tokens: int
    max_tokens: int
    affinity: bytes
    prefixes: Prefixes = NO_PREFIXES
    needs_decode: bool = True


@dataclass(frozen=True)
class Choice:
    """The pair, and why: the terms of its cost in seconds."""

    prefill_id: str
    decode_id: str | None
    why: Mapping[str, float]
    num_pairs: int
    runs: tuple[Run, ...] = ()
    """Where the prefill worker finds the prefix."""
    path: handover.Path = handover.Path.STORE
    """Which way the prompt's KV goes to the decode worker."""


def choose(
    prefill: Sequence[WorkerLoad],
    decode: Sequence[WorkerLoad],
    ask: Ask,
    costs: RouterCosts,
    mode: HandoverMode = "auto",
) -> Choice:
    """The cheapest pair of equal layout, and the way between the two.

    Raises: Unavailable naming the role that is missing, or saying that no two workers fit.
    """
    _need(PREFILL, prefill)
    if ask.needs_decode:
        _need(DECODE, decode)
    best: tuple[tuple[float, bytes], Choice] | None = None
    num_pairs = 0
    links = LinkCosts([*prefill, *decode], costs)
    for p in prefill:
        runs = _runs(p, ask, costs, links)
        terms = _prefill_terms(p, runs, ask, costs, links)
        for d in _partners(p, decode, ask):
            num_pairs += 1
            why, path = terms, handover.Path.STORE
            if d is not None:
                way = handover.plan(p, d, ask.num_prompt_tokens, mode, costs, links)
                why, path = {**terms, **_decode_terms(d, way, ask, costs)}, way.path
            rank = (sum(why.values()), _tie_break(ask.affinity, p, d))
            if best is None or rank < best[0]:
                best = (rank, Choice(p.worker_id, d.worker_id if d else None, why, 0, runs, path))
    if best is None:
        raise Unavailable("no prefill and decode worker hold the same model")
    return replace(best[1], num_pairs=num_pairs)


def blocks_needed(num_prompt_tokens: int, max_tokens: int, block_size: int) -> int:
    """Blocks that hold a prompt and all output tokens but the last, whose KV nobody needs."""
    return -(-(num_prompt_tokens + max_tokens - 1) // block_size)


def _need(role: str, workers: Sequence[WorkerLoad]) -> None:
    if not workers:
        raise Unavailable(f"no {role} worker is available")


def _partners(p: WorkerLoad, decode: Sequence[WorkerLoad], ask: Ask) -> Iterable[WorkerLoad | None]:
    if not ask.needs_decode:
        return (None,)
    return (d for d in decode if d.layout == p.layout)


def _runs(p: WorkerLoad, ask: Ask, costs: RouterCosts, links: LinkCosts) -> tuple[Run, ...]:
    """What P should take from which store."""
    compute_s = p.block_size / costs.prefill_tokens_per_s

    def distance(node_id: str) -> float:
        if not handover.can_read(p, node_id):
            return math.inf
        link, block_s = p.links.get(node_id), links.move_s(p, node_id, p.block_bytes)
        # Only a link known to be bad is left out: the rate of computing is a guess.
        if link is not None and link.is_degraded:
            is_worth_it = link.read_bytes_per_s > 0 and block_s < compute_s
            return block_s if is_worth_it else math.inf
        return block_s

    return plan_runs(ask.prefixes.of(p.layout), p.store_node_id, distance)


def _prefill_terms(
    p: WorkerLoad, runs: Sequence[Run], ask: Ask, costs: RouterCosts, links: LinkCosts
) -> dict[str, float]:
    # The last prompt token is always computed: its logits are what the first draw needs.
    left = num_cacheable = ask.num_prompt_tokens - 1
    link_s = pull_s = 0.0
    for run in runs:
        num_tokens = min(left, run.num_blocks * p.block_size)
        left -= num_tokens
        seconds = links.move_s(p, run.node_id, handover.num_bytes_of(num_tokens, p))
        if run.node_id == p.store_node_id:
            link_s += seconds
        else:
            pull_s += seconds
    num_computed = ask.num_prompt_tokens - (num_cacheable - left)
    return {
        "prefill_queue": p.num_queued_tokens / costs.prefill_tokens_per_s,
        "prefill_compute": num_computed / costs.prefill_tokens_per_s,
        "prefill_link": link_s,
        "prefill_pull": pull_s,
        "prefill_suspect": _LAST_CHOICE_S if p.is_suspect else 0.0,
    }


def _decode_terms(
    d: WorkerLoad, way: handover.Handover, ask: Ask, costs: RouterCosts
) -> dict[str, float]:
    needed = blocks_needed(ask.num_prompt_tokens, ask.max_tokens, d.block_size)
    has_room = needed <= d.num_free_blocks
    return {
        "handover_put": way.put_s,
        "decode_link": way.link_s,
        "decode_compute": way.compute_s,
        "decode_load": d.num_requests * costs.decode_request_s,
        "decode_full": 0.0 if has_room else _LAST_CHOICE_S / 2,
        "decode_suspect": _LAST_CHOICE_S if d.is_suspect else 0.0,
    }


def _tie_break(affinity: bytes, p: WorkerLoad, d: WorkerLoad | None) -> bytes:
    pair = f"{p.worker_id}\0{d.worker_id if d else ''}".encode()
    return hashlib.blake2b(pair, key=affinity[:64], digest_size=8).digest()
