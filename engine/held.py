"""Held: a started request that is taken out of the steps as it stands, to go on elsewhere: it draws
no more here, and its KV stays readable until it is released. One function over the engine's state,
between two steps, and the value that says what is left. Engine thread only.

Only a request of one sample that is drawn, not searched: of several samples, or beams, each has
blocks of its own behind the prompt, and nobody could take them over.

Invariant: nothing of it is in flight afterwards, so no byte of its blocks changes before `release`;
the draw of a step that was launched ahead is thrown away, and drawn again by whoever goes on.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.constraints import Constraints
from engine.errors import WrongState
from engine.group import Group
from engine.kv.cache_manager import KVCacheManager
from engine.preemptor import Preemptor
from engine.request import STARTED, WITHOUT_BLOCKS, State
from engine.scheduler import Scheduler

_MAY_HOLD = STARTED | {
    State.WAITING_FOR_GRAMMAR,
    State.PREEMPTED,
    State.PARKED,
    State.SWAPPING,
}


@dataclass(frozen=True)
class Held:
    """What a request had when it was taken out."""

    token_ids: tuple[int, ...]
    """Prompt and output."""

    num_computed_tokens: int
    """Tokens, from the first on, whose KV lies in `block_ids` and can be taken over: all but the
    last one for a request that was drawing, fewer for one that was not there yet."""

    block_ids: tuple[int, ...]
    """Where they lie; the last block may be unfilled."""

    chain_hashes: tuple[bytes, ...]
    """Of the full ones among them."""


def hold(
    group: Group,
    cache_manager: KVCacheManager,
    scheduler: Scheduler,
    preemptor: Preemptor,
    constraints: Constraints,
) -> Held:
    """Any state after the start -> HOLDING. What a preempted request lost is not brought back: it
    holds what the prefix cache still has.

    Raises: WrongState for a request that was not started or has ended, or of several samples;
    nothing changed.
    """
    name = group.request.request_id
    if group.num_rows > 1 or group.request.beam is not None:
        raise WrongState(f"request {name} has several samples or beams")
    sequence = group.prompt
    if sequence.state not in _MAY_HOLD or group.request.hold_after is not None:
        raise WrongState(f"request {name} is {sequence.state.value}")
    cache_manager.in_flight.let_go(sequence)
    cache_manager.in_flight.settle()
    cache_manager.free_draft_blocks(sequence)
    scheduler.remove(sequence)
    constraints.forget(group)
    preemptor.forget(sequence)
    if sequence.state in WITHOUT_BLOCKS:
        cache_manager.share_cached(sequence)
    sequence.move(State.HOLDING)
    size = cache_manager.block_size
    num_computed = cache_manager.num_resumable(sequence.num_computed_tokens)
    num_full = num_computed // size
    if num_full:
        sequence.chain_hash(num_full - 1, size)  # and all before it
    return Held(
        tuple(sequence.token_ids),
        num_computed,
        tuple(sequence.block_ids[: -(-num_computed // size)]),
        tuple(sequence.chain_hashes[:num_full]),
    )
