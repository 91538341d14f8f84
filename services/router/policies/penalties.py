"""What makes a worker the last choice, whatever the policy: suspicion, no room (blocks, or a place
in its steps), too small a window.

Costs are whole billionths of a policy's unit, so that sums are exact and equal workers tie exactly.
Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.router.policy import Ask, WorkerLoad, blocks_needed

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


def parts(value: float) -> int:
    """A cost in whole parts, bounded."""
    return round(min(value, _MOST) * PARTS)


def of_prefill(p: WorkerLoad, ask: Ask) -> dict[str, int]:
    """By name; 0 where nothing is wrong."""
    needed = blocks_needed(ask.num_prompt_tokens, 1, p.block_size)
    return {
        "prefill_full": _LAST_CHOICE // 2 if needed > p.num_blocks else 0,
        "prefill_suspect": _LAST_CHOICE if p.is_suspect else 0,
    }


def of_decode(d: WorkerLoad, ask: Ask) -> dict[str, int]:
    """By name; 0 where nothing is wrong."""
    needed = blocks_needed(ask.num_prompt_tokens, ask.max_tokens, d.block_size)
    return {
        "decode_full": _LAST_CHOICE // 2
        if needed > d.num_free_blocks or d.num_free_places == 0
        else 0,
        "decode_suspect": _LAST_CHOICE if d.is_suspect else 0,
    }


def prefill_sum(p: WorkerLoad, ask: Ask) -> int:
    """All of `of_prefill`, without a mapping: this runs for every worker."""
    cost = _LAST_CHOICE if p.is_suspect else 0
    if ask.num_prompt_tokens > p.num_blocks * p.block_size:
        cost += _LAST_CHOICE // 2
    return cost


def decode_sum(d: WorkerLoad, ask: Ask) -> int:
    """All of `of_decode`, without a mapping."""
    cost = _LAST_CHOICE if d.is_suspect else 0
    needed = ask.num_prompt_tokens + ask.max_tokens - 1
    if needed > d.num_free_blocks * d.block_size or d.num_free_places == 0:
        cost += _LAST_CHOICE // 2
    return cost


def fitting(workers: Sequence[WorkerLoad], ask: Ask) -> list[WorkerLoad]:
    """Those whose window holds the prompt and one output."""
    window = ask.window
    return [w for w in workers if window <= w.context_window or not w.context_window]
