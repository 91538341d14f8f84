"""BlockPool: which block of the device cache is whose. Knows numbers only: no tokens, no hashes, no
bytes.

Each block is in exactly one class, and that is the conservation law:

    free         nobody references it, its bytes mean nothing
    evictable    nobody references it, but the prefix cache maps a chain hash to it; taken last, the
                 least recently used one first
    referenced   one or more requests reference it, or it is pinned: a cached block that follows it
                 in a chain is referenced or quarantined, so it cannot be evicted before that one
    quarantined  nobody references it, but a transfer may still touch it: neither free nor
                 evictable until that is over

    free + evictable + referenced + quarantined == total

A hold (quarantine) and references are independent: a held block that is referenced counts as
referenced, and falls into quarantine with its last reference.

Cached blocks form chains: each knows the one before it (`_parent`), which stays out of `evictable`
as long as any block after it does. So in `evictable` every block stands before the one that it
follows, the first of them never has cached blocks after it, and eviction takes chains from their
tail with no search.

What is known of a block lies in arrays by its number, and neighbours are worked off by slices: a
long request's blocks come, are cached and go in the middle of everybody's steps. Called from the
engine's thread only.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress

from engine.errors import IntegrityError, NoBlocks, WrongState
from engine.kv.block_classes import name_what_is_wrong
from engine.kv.eviction_order import EvictionOrder
from engine.kv.free_runs import FreeRuns
from engine.kv.neighbours import MANY, Piece, all_are, runs

NO_BLOCK = -1
"""Stands for the block before a chain's first."""


@dataclass(frozen=True)
class Taken:
    """Blocks handed out, and those among them that were cached: their mappings must be forgotten
    now."""

    block_ids: tuple[int, ...]
    evicted: tuple[int, ...]


class BlockPool:
    """Reference counts and the free list."""

    def __init__(self, num_blocks: int, many: int = MANY) -> None:
        """many: so many neighbours are worked off by slices."""
        if num_blocks < 1:
            raise ValueError("a pool needs at least one block")
        self.num_blocks = num_blocks
        self.num_evicted = 0
        self._many = many
        self._free = FreeRuns(num_blocks)
        self.numbers = array("q", range(num_blocks))
        """0, 1, 2 and so on: to copy slices from, and to compare them with."""
        self._evictable = EvictionOrder(self.numbers, many)
        self._num_references = array("q", (0,)) * num_blocks
        self._is_cached = bytearray(num_blocks)
        self._num_holds: dict[int, int] = {}
        self._num_quarantined = 0  # held blocks without a reference
        self._parent = array("q", (NO_BLOCK,)) * num_blocks  # of a cached block: that before it
        # What keeps a block from being free or evictable beside references: cached blocks after it
        # that are not evictable, and one more if it is held.
        self._num_pins = array("q", (0,)) * num_blocks

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
        """Held blocks that no request references."""
        return self._num_quarantined

    @property
    def num_referenced(self) -> int:
        """Pinned blocks are among them."""
        return self.num_blocks - self.num_available - self.num_quarantined

    def num_references(self, block_id: int) -> int:
        return self._num_references[block_id]

    def is_cached(self, block_id: int) -> bool:
        return bool(self._is_cached[block_id])

    def cached(self) -> set[int]:
        """All that are."""
        return set(compress(self.numbers, self._is_cached))

    def parent_of(self, block_id: int) -> int:
        """The block before a cached one in its chain, or NO_BLOCK."""
        return self._parent[block_id]

    def is_evictable(self, block_id: int) -> bool:
        return block_id in self._evictable

    def is_pinned(self, block_id: int) -> bool:
        """Nobody references or holds it, but a cached block after it is in use."""
        return self._num_pins[block_id] > 0 and not self.is_used(block_id)

    def is_used(self, block_id: int) -> bool:
        """Somebody references or holds it."""
        return self._num_references[block_id] > 0 or block_id in self._num_holds

    def is_held(self, block_id: int) -> bool:
        return block_id in self._num_holds

    def num_holds(self, block_id: int) -> int:
        """How often it is held."""
        return self._num_holds.get(block_id, 0)

    def take(self, num_blocks: int) -> Taken:
        """Reference `num_blocks` blocks once each: free ones first, neighbours preferred, then the
        least recently used.

        Raises: NoBlocks, and nothing was taken.
        """
        if num_blocks > self.num_available:
            raise NoBlocks(
                f"{num_blocks} blocks wanted, {self.num_available} are free or evictable"
            )
        block_ids = self._free.take(min(num_blocks, len(self._free)))
        num_evicted = num_blocks - len(block_ids)
        evicted = self._evictable.take_first(num_evicted)
        self.num_evicted += num_evicted
        block_ids = sorted(block_ids + evicted)
        num_references = self._num_references
        if block_ids and block_ids[-1] - block_ids[0] == num_blocks - 1:  # none is there twice
            start, end = block_ids[0], block_ids[-1] + 1
            num_references[start:end] = array("q", (1,)) * num_blocks
            self._is_cached[start:end] = bytes(num_blocks)
            self._parent[start:end] = array("q", (NO_BLOCK,)) * num_blocks
        else:
            for block_id in block_ids:
                num_references[block_id] = 1
            for block_id in evicted:
                self._is_cached[block_id] = False
                self._parent[block_id] = NO_BLOCK
        return Taken(tuple(block_ids), tuple(evicted))

    def reference(self, block_id: int) -> None:
        """One more request uses a cached or referenced block."""
        if self._num_references[block_id] == 0:
            if not self._is_cached[block_id]:
                raise IntegrityError(
                    f"block {block_id} is neither referenced nor cached: nothing to share"
                )
            self._wake(block_id)
            self._num_quarantined -= block_id in self._num_holds
        self._num_references[block_id] += 1

    def put_back(self, block_ids: Iterable[int]) -> None:
        """Give up one reference of each, in this order: of blocks left at zero, the first given is
        evicted first."""
        upwards = array("q", [*block_ids])
        upwards.reverse()  # mostly a chain from its tail on
        for start, end, is_run in reversed([*runs(upwards, self.numbers, self._many)]):
            if is_run and self._put_back_run(upwards[start], upwards[end - 1] + 1):
                continue
            self._put_back_each(reversed(upwards[start:end]))

    def _put_back_each(self, block_ids: Iterable[int]) -> None:
        num_references, idle = self._num_references, list[int]()
        try:
            for block_id in block_ids:
                num_left = num_references[block_id] - 1
                if num_left < 0:
                    raise IntegrityError(f"block {block_id} was put back once too often")
                num_references[block_id] = num_left
                if not num_left:
                    self._num_quarantined += block_id in self._num_holds
                    self._settle(block_id, idle)
        finally:
            self._evictable.extend(idle)

    def _put_back_run(self, start: int, end: int) -> bool:
        """`put_back` of [start, end), the last of them first, if nobody else uses them and they are
        the end of a chain, or not cached, or one behind the other. False: they are something else,
        and nothing was done."""
        middle = self._is_cached.find(0, start, end)  # where the chain ends
        middle = end if middle < 0 else middle
        is_known = all_are(self._num_references[start:end], 1)
        is_known = is_known and self._is_cached.find(1, middle, end) < 0
        is_known = is_known and all_are(self._num_pins[middle:end], 0)
        if not is_known or (start < middle and not self._is_chain_end(start, middle - 1)):
            return False
        self._num_references[start:end] = array("q", (0,)) * (end - start)
        if middle < end:
            self._free.give_run(middle, end)
        if start < middle:
            self._num_pins[start:middle] = array("q", (0,)) * (middle - start)
            self._evictable.extend_down(start, middle)
            self._unpin(self._parent[start])
        return True

    def _is_chain_end(self, start: int, last: int) -> bool:
        """Of cached neighbours: each follows the one below it, and is pinned by nothing but the one
        above it."""
        if self._num_pins[last] or not all_are(self._num_pins[start:last], 1):
            return False
        return self._parent[start + 1 : last + 1] == self.numbers[start:last]

    def _settle(self, block_id: int, idle: list[int]) -> None:
        """File a block that may have lost its last reference, or what pinned it, where it belongs,
        and then those before it. Takes those that are evictable now into `idle`."""
        num_references, num_pins = self._num_references, self._num_pins
        while not (num_references[block_id] or num_pins[block_id]):
            if not self._is_cached[block_id]:
                self._free.give(block_id)
                return
            idle.append(block_id)
            block_id = self._parent[block_id]
            if block_id == NO_BLOCK:
                return
            num_pins[block_id] -= 1

    def _unpin(self, block_id: int) -> None:
        """What pinned a block is over, or one that pinned it: nothing for NO_BLOCK."""
        if block_id != NO_BLOCK:
            idle: list[int] = []
            self._num_pins[block_id] -= 1
            self._settle(block_id, idle)
            self._evictable.extend(idle)

    def _wake(self, block_id: int) -> None:
        """A cached block is in use from now on: neither it nor those before it are evictable."""
        while block_id in self._evictable:
            self._evictable.remove(block_id)
            block_id = self._parent[block_id]
            if block_id == NO_BLOCK:
                return
            self._num_pins[block_id] += 1

    def mark_cached(self, block_id: int, parent: int = NO_BLOCK) -> None:
        """The prefix cache maps a hash to this block now. It must be referenced, and `parent`, the
        block before it in its chain, cached."""
        if self._num_references[block_id] < 1 or self._is_cached[block_id]:
            raise IntegrityError(
                f"block {block_id} is not referenced, or cached already: it cannot enter the "
                f"prefix cache"
            )
        if parent != NO_BLOCK:
            if not self._is_cached[parent]:
                raise IntegrityError(f"block {block_id} follows {parent}, which is not cached")
            self._wake(parent)
            self._num_pins[parent] += 1
            self._parent[block_id] = parent
        self._is_cached[block_id] = True

    def mark_chain(self, block_ids: Sequence[int], parent: int) -> list[Piece]:
        """`mark_cached` for blocks that follow one another, the first of them `parent`, which is
        cached and referenced. They are referenced. Returns: their runs."""
        chain = array("q", block_ids)
        pieces = [*runs(chain, self.numbers, self._many)]
        is_sound = self._is_cached[parent] and self._num_references[parent]
        if not is_sound or not all(self._may_enter(chain[i:j], is_run) for i, j, is_run in pieces):
            wrong = (one for one in block_ids if not self._may_enter(array("q", (one,)), False))
            raise IntegrityError(
                f"block {next(wrong, parent)} is not referenced, or cached already: it cannot "
                f"enter the prefix cache behind {parent}"
            )
        for i, j, is_run in pieces:
            start, end = chain[i], chain[i] + j - i
            if is_run and all_are(self._num_pins[start:end], 0):
                self._num_pins[parent] += 1
                self._num_pins[start : end - 1] = array("q", (1,)) * (j - i - 1)
                self._parent[start] = parent
                self._parent[start + 1 : end] = self.numbers[start : end - 1]
                self._is_cached[start:end] = b"\1" * (j - i)
                parent = end - 1
                continue
            pins, parents, is_cached = self._num_pins, self._parent, self._is_cached
            for block_id in chain[i:j]:
                pins[parent] += 1
                parents[block_id] = parent
                is_cached[block_id] = True
                parent = block_id
        return pieces

    def _may_enter(self, block_ids: array[int], is_run: bool) -> bool:
        """They are referenced, and not cached."""
        if is_run:
            start, end = block_ids[0], block_ids[-1] + 1
            if self._is_cached.find(1, start, end) >= 0:
                return False
            counts = self._num_references[start:end]
            return all_are(counts, 1) or 0 not in counts
        is_cached = any(map(self._is_cached.__getitem__, block_ids))
        return not is_cached and all(map(self._num_references.__getitem__, block_ids))

    def unmark_cached(self, block_id: int) -> None:
        """The prefix cache maps nothing to this block any more. Those after it were unmarked
        before."""
        num_pins = self._num_pins[block_id] - self.is_held(block_id)
        if not self._is_cached[block_id] or num_pins:
            raise IntegrityError(f"block {block_id} is not cached, or has cached blocks after it")
        self._is_cached[block_id] = False
        parent, self._parent[block_id] = self._parent[block_id], NO_BLOCK
        if block_id in self._evictable:
            self._evictable.remove(block_id)
            self._free.give(block_id)
        else:
            self._unpin(parent)

    def hold(self, block_ids: Iterable[int]) -> None:
        """Quarantine: keep each out of use once its references are gone, until as many `unhold`."""
        for block_id in block_ids:
            if self._num_references[block_id] == 0:
                raise IntegrityError(
                    f"block {block_id} is not referenced: it cannot be held any more"
                )
            if block_id not in self._num_holds:
                self._num_pins[block_id] += 1
            self._num_holds[block_id] = self._num_holds.get(block_id, 0) + 1

    def hold_chain(self, block_ids: Sequence[int]) -> None:
        """`hold` of cached blocks that follow one another, referenced or not."""
        if block_ids:
            self._wake(block_ids[-1])  # and those before it
        for block_id in block_ids:
            num_holds = self._num_holds.get(block_id, 0)
            if num_holds == 0:
                self._num_pins[block_id] += 1
                self._num_quarantined += not self._num_references[block_id]
            self._num_holds[block_id] = num_holds + 1

    def unhold(self, block_ids: Iterable[int]) -> None:
        """End one hold of each. Raises: WrongState naming a block that is not held; nothing was
        done."""
        block_ids = tuple(block_ids)
        for block_id, num_ended in Counter(block_ids).items():
            if self._num_holds.get(block_id, 0) < num_ended:
                raise WrongState(f"block {block_id} is not quarantined")
        for block_id in block_ids:
            self._num_holds[block_id] -= 1
            if self._num_holds[block_id] == 0:
                del self._num_holds[block_id]
                self._num_quarantined -= not self._num_references[block_id]
                self._unpin(block_id)

    def check_integrity(self, num_references: Mapping[int, int] | None = None) -> None:
        """Recompute every class from scratch; `num_references`, counted by the caller, must equal
        the pool's own counts.

        Raises: IntegrityError naming the first block that is in no class, in two, or miscounted.
        """
        self._free.check_integrity()
        self._evictable.check_integrity()
        self._check_chains()
        if not self._is_sound(num_references):
            name_what_is_wrong(self, set(self._free), set(self._evictable), num_references)
            raise IntegrityError("the blocks' classes do not add up")

    def _is_sound(self, num_references: Mapping[int, int] | None) -> bool:
        """The laws over whole classes, whose members are counted in C: a worker is asked in the
        middle of everybody's answers.
        """
        free, evictable = set(self._free), set(self._evictable)
        counts = dict(compress(enumerate(self._num_references), self._num_references))
        if num_references is not None and counts != num_references:
            return False
        quarantined = self._num_holds.keys() - counts.keys()
        pinned = set(compress(self.numbers, self._num_pins))
        pinned -= self._num_holds.keys() | counts.keys()
        cached = self.cached()
        classes = (free, evictable, counts.keys() | pinned, quarantined)
        num_there = (self.num_free, self.num_evictable, self.num_referenced, self.num_quarantined)
        return (
            tuple(map(len, classes)) == num_there
            and sum(num_there) == self.num_blocks == len(set().union(*classes))
            and all(n > 0 for n in counts.values())
            and evictable <= cached
            and free.isdisjoint(cached)
        )

    def _check_chains(self) -> None:
        """Parents are cached and stand behind their children in `evictable`; what pins a block is
        counted right."""
        place = {block_id: index for index, block_id in enumerate(self._evictable)}
        num_pins = array("q", (0,)) * self.num_blocks
        for block_id in self._num_holds:
            num_pins[block_id] = 1
        for block_id in compress(self.numbers, map(NO_BLOCK.__ne__, self._parent)):
            parent = self._parent[block_id]
            if not self._is_cached[block_id] or not self._is_cached[parent]:
                raise IntegrityError(f"block {block_id} follows {parent}: one is not cached")
            if block_id not in place:
                num_pins[parent] += 1
            elif parent in place and place[parent] < place[block_id]:
                raise IntegrityError(f"block {parent} would be evicted before {block_id} after it")
        if num_pins != self._num_pins:
            raise IntegrityError("what pins cached or held blocks is miscounted")
