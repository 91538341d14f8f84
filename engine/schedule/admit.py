"""admit: who gets a place in steps, and blocks, next. Pure; any thread.

All who wait are tried in the order of engine/schedule/order.py. Who does not fit is skipped, and a
later one that fits passes it, until it was passed `max_passes` times: from then on nobody who wants
what it lacks goes before it. (One that has its blocks already may still pass one that lacks only
blocks: it takes none, and gives some back when it ends.)

Where the order depends on who came when alone (all policies but "cache_aware"), those behind the
last one let in are not looked at: what each takes is asked for when its turn comes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from engine.schedule.compatibility import BatchTraits, may_share_batch
from engine.schedule.order import Key, Policy, Waiting, is_pass, rank


class Room(NamedTuple):
    """What there is to give."""

    num_blocks: int
    """Free or evictable, less what is kept for those that run."""

    num_tokens: int
    """Of the step's budget, after what those that take part already need. Who joins a step gets at
    least one."""

    batch: BatchTraits
    max_num_rows: int
    max_num_adapters: int = 0


@dataclass(frozen=True)
class Admission:
    """The outcome."""

    keys: tuple[Key, ...]
    """In the order in which they were let in."""

    num_passes: Mapping[Key, int]
    """How often each of the others was passed just now; those that were not are not in it."""


def admit(waiting: Iterable[Waiting], room: Room, policy: Policy, max_passes: int) -> Admission:
    """Choose. What is let in fits into `room` together; nobody is passed more than `max_passes`
    times in all."""
    ranked = sorted(waiting, key=lambda one: rank(one, policy, max_passes))
    return admit_ranked(ranked, room, policy, max_passes)


def admit_ranked(
    ranked: Iterable[Waiting], room: Room, policy: Policy, max_passes: int
) -> Admission:
    """`admit` for those that are in order already (order.py:rank).

    Args:
        ranked: taken from one by one, and no further once nobody can be let in any more; but for
            "cache_aware" all at once.
    """
    num_blocks, num_tokens, batch = room.num_blocks, room.num_tokens, room.batch
    keys: list[Key] = []
    passes: Counter[Key] = Counter()
    lacks_only_blocks: set[Key] = set()
    # Who may be passed: those that were tried in vain, and of whom comes later only those that
    # somebody's cached prefix goes before.
    left: dict[Key, Waiting] = {}
    if policy == "cache_aware":
        ranked = tuple(ranked)
        left = {one.key: one for one in ranked}

    def may_go(one: Waiting) -> bool:
        return all(
            other.num_passes + passes[other.key] < max_passes and not other.is_preempted
            for other in left.values()
            if is_passed_by(other, one)
        )

    def is_passed_by(other: Waiting, one: Waiting) -> bool:
        is_harmless = one.num_blocks == 0 and other.key in lacks_only_blocks
        return is_pass(other, one, policy) and not is_harmless

    coming = iter(ranked)
    while num_tokens > 0 and batch.num_rows < room.max_num_rows:
        one = next(coming, None)
        if one is None:
            break
        can_share = may_share_batch(
            batch,
            num_rows=one.num_places,
            adapter=one.adapter,
            max_num_rows=room.max_num_rows,
            max_num_adapters=room.max_num_adapters,
        )
        if not (can_share and one.num_blocks <= num_blocks and may_go(one)):
            if can_share and one.num_blocks > num_blocks:
                lacks_only_blocks.add(one.key)
            left[one.key] = one
            continue
        left.pop(one.key, None)
        passes.update(other.key for other in left.values() if is_passed_by(other, one))
        keys.append(one.key)
        num_blocks -= one.num_blocks
        num_tokens -= one.num_tokens
        adapters = batch.adapters | {one.adapter} if one.adapter else batch.adapters
        batch = BatchTraits(batch.num_rows + one.num_places, adapters)
    let_in = set(keys)
    return Admission(tuple(keys), {key: n for key, n in passes.items() if key not in let_in})
