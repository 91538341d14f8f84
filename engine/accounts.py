"""The engine's books: levels and counts for others, and the check that they are true.

Pure functions over the engine's own state; called from its thread, and cheap enough for every step
in a test and every idle moment of a worker.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from engine.errors import IntegrityError
from engine.group import Group
from engine.holdings import Holdings
from engine.request import STARTED, WITHOUT_BLOCKS, EngineStats, Request, State
from engine.sequence import HOLE, Sequence

_RUNNING = (State.RUNNING, State.PREFILLING)
_WAITING = (
    State.QUEUED,
    State.WAITING_FOR_GRAMMAR,
    State.WAITING,
    State.PREEMPTED,
    State.PARKED,
    State.SWAPPING,
)
_PREEMPTED = frozenset({State.PREEMPTED, State.PARKED, State.SWAPPING})


@dataclass
class Totals:
    """Counts since start."""

    num_steps: int = 0
    num_computed_tokens: int = 0
    num_computing_steps: int = 0
    num_decode_tokens: int = 0
    num_output_tokens: int = 0
    step_s: float = 0.0


def num_running_and_waiting(groups: Mapping[str, Group]) -> tuple[int, int]:
    """Requests; as `stats` counts them, which has more to count."""
    num_running = num_waiting = 0
    for group in groups.values():
        state = group.state
        if state in _RUNNING:
            num_running += 1
        elif state in _WAITING:
            num_waiting += 1
    return num_running, num_waiting


def stats(
    groups: Mapping[str, Group],
    holdings: Holdings,
    totals: Totals,
    num_preemptions: Mapping[str, int],
) -> EngineStats:
    """Levels now and counts since start, as one value."""
    states = Counter([group.state for group in groups.values()])
    pool, num_idle_blocks = holdings.pool, holdings.in_flight.num_idle_blocks
    num_preempted = sum(
        any(sequence.state in _PREEMPTED for sequence in group.samples.values())
        for group in (groups.values() if num_preemptions else ())
    )
    return EngineStats(
        num_reserved=states[State.RESERVED],
        num_waiting=sum(states[state] for state in _WAITING),
        num_running=sum(states[state] for state in _RUNNING),
        num_holding=states[State.HOLDING],
        num_blocks=pool.num_blocks,
        num_free_blocks=pool.num_free + num_idle_blocks + holdings.num_for_guesses,
        num_cached_blocks=pool.num_evictable,
        num_referenced_blocks=holdings.num_used,
        num_quarantined_blocks=pool.num_quarantined - num_idle_blocks,
        num_steps=totals.num_steps,
        num_computed_tokens=totals.num_computed_tokens,
        num_output_tokens=totals.num_output_tokens,
        num_local_prefix_tokens=holdings.num_local_prefix_tokens,
        num_evicted_blocks=pool.num_evicted,
        num_preempted=num_preempted,
        num_preemptions=tuple(sorted(num_preemptions.items())),
        num_computing_steps=totals.num_computing_steps,
        num_decode_tokens=totals.num_decode_tokens,
        step_s=totals.step_s,
    )


def check_integrity(groups: Mapping[str, Group], holdings: Holdings) -> None:
    """Recompute every block's class and reference count from the live requests, those that samples
    share included, each group's spare blocks, and the lent ones; and what is in flight.

    Raises: IntegrityError naming the block or the request.
    """
    references: Counter[int] = Counter(holdings.lent)
    for group in groups.values():
        references.update(group.spare_block_ids)
        for sequence in group.samples.values():
            references.update(sequence.held_block_ids)
            _check_sequence(sequence, holdings.block_size)
            _check_tail(sequence, holdings)
        _check_group(group, holdings)
    holdings.pool.check_integrity(references)
    holdings.in_flight.check_integrity(
        sequence for group in groups.values() for sequence in group.samples.values()
    )
    holdings.tree.check_integrity()


def num_by_adapter(requests: Iterable[Request]) -> Counter[str]:
    """Live requests by the adapter that they name."""
    return Counter(request.adapter for request in requests if request.adapter)


def _check_group(group: Group, holdings: Holdings) -> None:
    name = group.request.request_id
    if not group.samples:
        raise IntegrityError(f"{name} is live without samples")
    if not group.is_whole:
        if group.spare_block_ids:
            raise IntegrityError(f"{name} keeps blocks that it was not promised")
        return
    sequence = next(iter(group.samples.values()))
    if sequence.state in WITHOUT_BLOCKS | {State.RESERVED, State.WAITING_FOR_GRAMMAR}:
        return  # no blocks yet, or with holes
    num_rows = len(group.samples) if group.is_forked else group.num_rows
    num_promised = num_rows * group.num_own_blocks
    num_there = len(group.spare_block_ids) + holdings.num_distinct(group)
    if num_there != num_promised:
        raise IntegrityError(f"{name} has {num_there} blocks of its own, {num_promised} promised")


def _check_tail(sequence: Sequence, holdings: Holdings) -> None:
    """Of a quantized cache: of its computed tokens' blocks the unfilled one has a tail, and no
    other."""
    tails, size = holdings.kv.tails, holdings.block_size
    if tails is None or sequence.state not in STARTED:
        return
    num_computed = sequence.num_computed_tokens
    num_full = num_computed // size
    name = f"{sequence.request.request_id}/{sequence.sample_index}"
    for block_id in sequence.block_ids[:num_full]:
        if block_id in tails:
            raise IntegrityError(f"block {block_id} of {name} is full and has a tail")
    if num_computed % size and sequence.block_ids[num_full] not in tails:
        raise IntegrityError(f"{name} computed a part of a block that has no tail")


def _check_sequence(sequence: Sequence, block_size: int) -> None:
    name, state = f"{sequence.request.request_id}/{sequence.sample_index}", sequence.state
    if state not in (State.RESERVED, State.WAITING_FOR_GRAMMAR) and HOLE in sequence.block_ids:
        raise IntegrityError(f"{name} is {state.value} and misses a block")
    if state in WITHOUT_BLOCKS and sequence.block_ids:
        raise IntegrityError(f"{name} is {state.value} and has blocks")
    if not 0 <= sequence.num_computed_tokens <= len(sequence.token_ids):
        raise IntegrityError(f"{name} computed more tokens than it has")
    if sequence.num_computed_tokens > len(sequence.block_ids) * block_size:
        raise IntegrityError(f"{name} computed beyond its blocks")
    is_continued = sequence.group.is_continued
    if state in STARTED and sequence.num_pending_tokens < 1 and not is_continued:
        raise IntegrityError(f"{name} is {state.value} with nothing to compute")
