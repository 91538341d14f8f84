"""BlockPool: which block of the device cache is whose. Knows numbers only: no tokens, no hashes, no
bytes.

Each block is in exactly one class, and that is the conservation law:

    free         nobody references it, its bytes mean nothing
    evictable    nobody references it, but the prefix cache maps a chain hash to it; taken last, the
                 least recently used one first
    referenced   one or more requests reference it
    quarantined  nobody references it, but a transfer may still touch it: neither free nor
                 evictable until that is over

    free + evictable + referenced + quarantined == total

A hold (quarantine) and references are independent: a held block that is referenced counts as
referenced, and falls into quarantine with its last reference. Called from the engine's thread only.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from engine.errors import IntegrityError, NoBlocks, WrongState


@dataclass(frozen=True)
class Taken:
    """Blocks handed out, and those among them that were cached: their mappings must be forgotten
    now."""

    block_ids: tuple[int, ...]
    evicted: tuple[int, ...]


class BlockPool:
    """Reference counts and the free list."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError("a pool needs at least one block")
        self.num_blocks = num_blocks
        self.num_evicted = 0
        self._free: list[int] = list(
            range(num_blocks)
        )  # ascending, so that runs of neighbours are found
        self._evictable: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._num_references = [0] * num_blocks
        self._is_cached = [False] * num_blocks
        self._num_holds: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_evictable(self) -> int:
        return len(self._evictable)

    @property
    def num_available(self) -> int:
        """What `take` can hand out."""
        return len(self._free) + len(self._evictable)

    @property
    def num_quarantined(self) -> int:
        return sum(1 for block_id in self._num_holds if not self._num_references[block_id])

    @property
    def num_referenced(self) -> int:
        return self.num_blocks - self.num_available - self.num_quarantined

    def num_references(self, block_id: int) -> int:
        return self._num_references[block_id]

    def is_cached(self, block_id: int) -> bool:
        return self._is_cached[block_id]

    def is_evictable(self, block_id: int) -> bool:
        return block_id in self._evictable

    def is_held(self, block_id: int) -> bool:
        return block_id in self._num_holds

    def take(self, num_blocks: int) -> Taken:
        """Reference `num_blocks` blocks once each: free ones first, neighbours preferred, then the
        least recently used.

        Neighbours matter for transfers (one descriptor for a run) and for the CPU's caches.
        Raises: NoBlocks, and nothing was taken.
        """
        if num_blocks > self.num_available:
            raise NoBlocks(
                f"{num_blocks} blocks wanted, {self.num_available} are free or evictable"
            )
        block_ids = self._take_free(min(num_blocks, len(self._free)))
        evicted: list[int] = []
        while len(block_ids) + len(evicted) < num_blocks:
            block_id, _ = self._evictable.popitem(last=False)
            self._is_cached[block_id] = False
            evicted.append(block_id)
        self.num_evicted += len(evicted)
        block_ids = sorted(block_ids + evicted)
        for block_id in block_ids:
            self._num_references[block_id] = 1
        return Taken(tuple(block_ids), tuple(evicted))

    def _take_free(self, num_blocks: int) -> list[int]:
        if num_blocks == 0:
            return []
        free = self._free
        start = 0
        for index in range(len(free) - num_blocks + 1):
            if free[index + num_blocks - 1] - free[index] == num_blocks - 1:
                start = index
                break
        taken = free[start : start + num_blocks]
        del free[start : start + num_blocks]
        return taken

    def reference(self, block_id: int) -> None:
        """One more request uses a cached or referenced block."""
        if self._num_references[block_id] == 0:
            if not self._is_cached[block_id]:
                raise IntegrityError(
                    f"block {block_id} is neither referenced nor cached: nothing to share"
                )
            self._evictable.pop(block_id, None)  # absent where the block is quarantined
        self._num_references[block_id] += 1

    def put_back(self, block_ids: Iterable[int]) -> None:
        """Give up one reference of each, in this order: of blocks left at zero, the first given is
        evicted first."""
        for block_id in block_ids:
            if self._num_references[block_id] < 1:
                raise IntegrityError(f"block {block_id} was put back once too often")
            self._num_references[block_id] -= 1
            self._settle(block_id)

    def _settle(self, block_id: int) -> None:
        """File a block that may have lost its last reference or hold where it belongs."""
        if self._num_references[block_id] or block_id in self._num_holds:
            return
        if self._is_cached[block_id]:
            self._evictable[block_id] = None
        else:
            insort(self._free, block_id)

    def mark_cached(self, block_id: int) -> None:
        """The prefix cache maps a hash to this block now. It must be referenced."""
        if self._num_references[block_id] < 1:
            raise IntegrityError(
                f"block {block_id} is not referenced and cannot enter the prefix cache"
            )
        self._is_cached[block_id] = True

    def unmark_cached(self, block_id: int) -> None:
        """The prefix cache maps nothing to this block any more."""
        self._is_cached[block_id] = False
        if block_id in self._evictable:
            del self._evictable[block_id]
            insort(self._free, block_id)

    def hold(self, block_ids: Iterable[int]) -> None:
        """Quarantine: keep each out of use once its references are gone, until as many `unhold`."""
        for block_id in block_ids:
            if self._num_references[block_id] == 0:
                raise IntegrityError(
                    f"block {block_id} is not referenced: it cannot be held any more"
                )
            self._num_holds[block_id] = self._num_holds.get(block_id, 0) + 1

    def unhold(self, block_ids: Iterable[int]) -> None:
        """End one hold of each. Raises: WrongState naming a block that is not held; nothing was
        done."""
        block_ids = tuple(block_ids)
        for block_id in block_ids:
            if self._num_holds.get(block_id, 0) < block_ids.count(block_id):
                raise WrongState(f"block {block_id} is not quarantined")
        for block_id in block_ids:
            self._num_holds[block_id] -= 1
            if self._num_holds[block_id] == 0:
                del self._num_holds[block_id]
                self._settle(block_id)

    def check_integrity(self, num_references: Mapping[int, int] | None = None) -> None:
        """Recompute every class from scratch; `num_references`, counted by the caller, must equal
        the pool's own counts.

        Raises: IntegrityError naming the first block that is in no class, in two, or miscounted.
        """
        free, evictable = set(self._free), set(self._evictable)
        if len(free) != len(self._free) or self._free != sorted(self._free):
            raise IntegrityError("the free list has a block twice or is out of order")
        counts = {"free": 0, "evictable": 0, "referenced": 0, "quarantined": 0}
        for block_id in range(self.num_blocks):
            references = self._num_references[block_id]
            if num_references is not None and num_references.get(block_id, 0) != references:
                raise IntegrityError(
                    f"block {block_id} has {references} references in the pool, "
                    f"{num_references.get(block_id, 0)} by count"
                )
            held, cached = block_id in self._num_holds, self._is_cached[block_id]
            classes = {
                "free": block_id in free,
                "evictable": block_id in evictable,
                "referenced": references > 0,
                "quarantined": references == 0 and held,
            }
            members = [name for name, is_member in classes.items() if is_member]
            if len(members) != 1:
                raise IntegrityError(
                    f"block {block_id} is in {len(members)} classes {members}, not in one"
                )
            if references == 0 and not held and cached != classes["evictable"]:
                raise IntegrityError(f"block {block_id}: cached is {cached} but it is {members[0]}")
            counts[members[0]] += 1
        expected = {
            "free": self.num_free,
            "evictable": self.num_evictable,
            "referenced": self.num_referenced,
            "quarantined": self.num_quarantined,
        }
        if counts != expected or sum(counts.values()) != self.num_blocks:
            raise IntegrityError(
                f"blocks counted {counts}, the pool says {expected} of {self.num_blocks}"
            )
