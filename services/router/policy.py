"""Which prefill and which decode worker serve a request: chosen together, by a pure function over
values.

The cost of a pair is an estimate in seconds: waiting behind other prompts at P, computing what P's
store does not hold, moving KV over links, and the load D has. Ties go by rendezvous hash of the
request's affinity, so that equal conversations meet the same workers. Every choice carries why.
Knows no RPC and no clock.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from process.errors import Unavailable
from services.router.config import RouterCosts

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
    is_suspect: bool = False


@dataclass(frozen=True)
class Ask:
    """One request as the choice sees it."""

    num_prompt_tokens: int
    max_tokens: int
    prefix_tokens: Mapping[tuple[str, str], int]
    """Prompt tokens that a store holds, by (model fingerprint, store node)."""
    affinity: bytes
    needs_decode: bool = True


@dataclass(frozen=True)
class Choice:
    """The pair, and why: the terms of its cost in seconds."""

    prefill_id: str
    decode_id: str | None
    why: Mapping[str, float]
    num_pairs: int


def choose(
    prefill: Sequence[WorkerLoad], decode: Sequence[WorkerLoad], ask: Ask, costs: RouterCosts
) -> Choice:
    """The cheapest pair that can exchange KV.

    Raises: Unavailable naming the role that is missing, or saying that no two workers fit.
    """
    _need(PREFILL, prefill)
    if ask.needs_decode:
        _need(DECODE, decode)
    best: tuple[tuple[float, bytes], WorkerLoad, WorkerLoad | None, dict[str, float]] | None = None
    num_pairs = 0
    for p, d in _pairs(prefill, decode, ask):
        num_pairs += 1
        why = {**_prefill_terms(p, ask, costs), **(_decode_terms(p, d, ask, costs) if d else {})}
        rank = (sum(why.values()), _tie_break(ask.affinity, p, d))
        if best is None or rank < best[0]:
            best = (rank, p, d, why)
    if best is None:
        raise Unavailable("no prefill and decode worker hold the same model")
    _, p, d, why = best
    return Choice(p.worker_id, d.worker_id if d else None, why, num_pairs)


def blocks_needed(num_prompt_tokens: int, max_tokens: int, block_size: int) -> int:
    """Blocks that hold a prompt and all output tokens but the last, whose KV nobody needs."""
    return -(-(num_prompt_tokens + max_tokens - 1) // block_size)


def _need(role: str, workers: Sequence[WorkerLoad]) -> None:
    if not workers:
        raise Unavailable(f"no {role} worker is available")


def _pairs(
    prefill: Sequence[WorkerLoad], decode: Sequence[WorkerLoad], ask: Ask
) -> Iterable[tuple[WorkerLoad, WorkerLoad | None]]:
    if not ask.needs_decode:
        return [(p, None) for p in prefill]
    return [
        (p, d)
        for p in prefill
        for d in decode
        if p.fingerprint == d.fingerprint and p.block_size == d.block_size
    ]


def _prefill_terms(p: WorkerLoad, ask: Ask, costs: RouterCosts) -> dict[str, float]:
    held = ask.prefix_tokens.get((p.fingerprint, p.store_node_id), 0)
    # The last prompt token is always computed: its logits are what the first draw needs.
    num_cached = max(0, min(held, ask.num_prompt_tokens - 1))
    return {
        "prefill_queue": p.num_queued_tokens / costs.prefill_tokens_per_s,
        "prefill_compute": (ask.num_prompt_tokens - num_cached) / costs.prefill_tokens_per_s,
        "prefill_link": _bytes_of(num_cached, p) / costs.link_bytes_per_s,
        "prefill_suspect": _LAST_CHOICE_S if p.is_suspect else 0.0,
    }


def _decode_terms(p: WorkerLoad, d: WorkerLoad, ask: Ask, costs: RouterCosts) -> dict[str, float]:
    moved = _bytes_of(ask.num_prompt_tokens, d)
    # From one node's store to the other's worker the bytes cross a link once more.
    num_links = 1 if p.store_node_id == d.store_node_id else 2
    needed = blocks_needed(ask.num_prompt_tokens, ask.max_tokens, d.block_size)
    has_room = needed <= d.num_free_blocks
    return {
        "decode_link": num_links * moved / costs.link_bytes_per_s,
        "decode_load": d.num_requests * costs.decode_request_s,
        "decode_full": 0.0 if has_room else _LAST_CHOICE_S / 2,
        "decode_suspect": _LAST_CHOICE_S if d.is_suspect else 0.0,
    }


def _bytes_of(num_tokens: int, worker: WorkerLoad) -> float:
    return num_tokens * worker.block_bytes / worker.block_size


def _tie_break(affinity: bytes, p: WorkerLoad, d: WorkerLoad | None) -> bytes:
    pair = f"{p.worker_id}\0{d.worker_id if d else ''}".encode()
    return hashlib.blake2b(pair, key=affinity[:64], digest_size=8).digest()
