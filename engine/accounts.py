"""The engine's books: levels and counts for others, and the check that they are true.

Pure functions over the engine's own state; called from its thread, and cheap enough for every step
in a test and every idle moment of a worker.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from engine.errors import IntegrityError
from engine.kv.block_pool import BlockPool
from engine.kv.prefix_cache import PrefixCache
from engine.request import STARTED, EngineStats, State
from engine.sequence import HOLE, Sequence


@dataclass
class Totals:
    """Counts since start."""

    num_steps: int = 0
    num_computed_tokens: int = 0
    num_output_tokens: int = 0
    num_local_prefix_tokens: int = 0


def stats(sequences: Mapping[str, Sequence], pool: BlockPool, totals: Totals) -> EngineStats:
    """Levels now and counts since start, as one value."""
    states = Counter(sequence.state for sequence in sequences.values())
    return EngineStats(
        num_reserved=states[State.RESERVED],
        num_waiting=states[State.WAITING],
        num_running=states[State.PREFILLING] + states[State.RUNNING],
        num_holding=states[State.HOLDING],
        num_blocks=pool.num_blocks,
        num_free_blocks=pool.num_free,
        num_cached_blocks=pool.num_evictable,
        num_referenced_blocks=pool.num_referenced,
        num_quarantined_blocks=pool.num_quarantined,
        num_steps=totals.num_steps,
        num_computed_tokens=totals.num_computed_tokens,
        num_output_tokens=totals.num_output_tokens,
        num_local_prefix_tokens=totals.num_local_prefix_tokens,
        num_evicted_blocks=pool.num_evicted,
    )


def check_integrity(
    sequences: Mapping[str, Sequence], pool: BlockPool, cache: PrefixCache, block_size: int
) -> None:
    """Recompute every block's class and reference count from the live requests.

    Raises: IntegrityError naming the block or the request.
    """
    references: Counter[int] = Counter()
    for sequence in sequences.values():
        references.update(sequence.held_block_ids)
        _check_sequence(sequence, block_size)
    pool.check_integrity(references)
    cache.check_integrity()


def _check_sequence(sequence: Sequence, block_size: int) -> None:
    name, state = sequence.request.request_id, sequence.state
    if state is not State.RESERVED and HOLE in sequence.block_ids:
        raise IntegrityError(f"{name} is {state.value} and misses a block")
    if not 0 <= sequence.num_computed_tokens <= len(sequence.token_ids):
        raise IntegrityError(f"{name} computed more tokens than it has")
    if sequence.num_computed_tokens > len(sequence.block_ids) * block_size:
        raise IntegrityError(f"{name} computed beyond its blocks")
    if state in STARTED and sequence.num_pending_tokens < 1:
        raise IntegrityError(f"{name} is {state.value} with nothing to compute")
