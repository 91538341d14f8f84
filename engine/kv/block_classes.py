"""name_what_is_wrong: the block of a pool that is in no class, in two, or miscounted: its law block
by block, for when the pool knows that it does not hold."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Protocol

from engine.errors import IntegrityError


class Counted(Protocol):
    """A pool of blocks and its own counts (engine/kv/block_pool.py)."""

    num_blocks: int

    @property
    def num_free(self) -> int: ...
    @property
    def num_evictable(self) -> int: ...
    @property
    def num_referenced(self) -> int: ...
    @property
    def num_quarantined(self) -> int: ...
    def num_references(self, block_id: int) -> int: ...
    def is_cached(self, block_id: int) -> bool: ...
    def is_held(self, block_id: int) -> bool: ...
    def is_pinned(self, block_id: int) -> bool: ...


def name_what_is_wrong(
    pool: Counted, free: Set[int], evictable: Set[int], num_references: Mapping[int, int] | None
) -> None:
    """Args: num_references: of the blocks that have any, counted by others.
    Raises: IntegrityError naming the first block that is in no class, in two, or miscounted; or the
        classes that are.
    """
    counts = {"free": 0, "evictable": 0, "referenced": 0, "quarantined": 0}
    for block_id in range(pool.num_blocks):
        references = pool.num_references(block_id)
        if num_references is not None and num_references.get(block_id, 0) != references:
            raise IntegrityError(
                f"block {block_id} has {references} references in the pool, "
                f"{num_references.get(block_id, 0)} by count"
            )
        held, cached = pool.is_held(block_id), pool.is_cached(block_id)
        is_pinned = pool.is_pinned(block_id)
        classes = {
            "free": block_id in free,
            "evictable": block_id in evictable,
            "referenced": references > 0 or is_pinned,
            "quarantined": references == 0 and held,
        }
        members = [name for name, is_member in classes.items() if is_member]
        if len(members) != 1:
            raise IntegrityError(
                f"block {block_id} is in {len(members)} classes {members}, not in one"
            )
        is_idle = references == 0 and not held and not is_pinned
        if is_idle and cached != classes["evictable"]:
            raise IntegrityError(f"block {block_id}: cached is {cached} but it is {members[0]}")
        counts[members[0]] += 1
    expected = {
        "free": pool.num_free,
        "evictable": pool.num_evictable,
        "referenced": pool.num_referenced,
        "quarantined": pool.num_quarantined,
    }
    if counts != expected or sum(counts.values()) != pool.num_blocks:
        raise IntegrityError(
            f"blocks counted {counts}, the pool says {expected} of {pool.num_blocks}"
        )
