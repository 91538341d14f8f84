"""BlockPool: which block of the device cache is free, cached or in use. It knows numbers of blocks
only: no tokens, no hashes, no bytes. engine/kv/prefix_cache.py maps hashes to blocks.

Each block is in exactly one class, and that is the conservation law:

    free         no request references it, and its bytes mean nothing
    evictable    cached, and neither referenced, held nor pinned; taken when no block is free, the
                 least recently used one first
    referenced   one or more requests reference it, or it is pinned: a cached block that follows it
                 in a chain is in use, so it cannot be evicted before that one
    quarantined  held and not referenced: a transfer may still touch it, so it is neither free nor
                 evictable until the transfer is over

    free + evictable + referenced + quarantined == total

References and holds are counted apart: a held block that is referenced counts as referenced, and is
quarantined when its last reference ends.

Cached blocks form chains: each knows its parent, the block before it, and pins it while in use. So
the parent of an evictable block is in use, or evictable and later in the order of eviction, which
therefore takes chains from their tail without a search.

A list of blocks is worked off in one loop: blocks of long requests come, are cached, held and freed
between the steps of all others. Called from the engine's thread only.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, compress, islice, pairwise, starmap

from engine.errors import IntegrityError, NoBlocks, WrongState

NO_BLOCK = -1
"""The parent of a chain's first block: no block."""

_NOT_CACHED = -2
"""The entry in `_parents` of a block that is not cached."""

_NUM_RUNS_TRIED = 32
"""Free runs that `FreeRuns.take` inspects for one that is long enough. A pool with more is
fragmented."""


@dataclass(frozen=True)
class TakenBlocks:
    """Blocks that `BlockPool.take` referenced. `evicted` are those of them that were cached: the
    prefix cache must forget their hashes before anything else."""

    block_ids: tuple[int, ...]
    evicted: tuple[int, ...]


class BlockPool:
    """The pool of KV blocks: counts references and holds, and keeps chains of cached blocks."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError("a pool needs at least one block")
        self.num_blocks = num_blocks
        self.num_evicted = 0
        """Number of blocks evicted since the pool was made."""
        self.num_quarantined = 0
        """Number of held blocks that no request references."""
        self._free = FreeRuns(num_blocks)
        self._evictable = EvictionOrder(num_blocks)
        self._num_references = [0] * num_blocks
        self._num_holds = [0] * num_blocks
        self._num_pins = [0] * num_blocks  # cached blocks in use whose parent this one is
        self._parents = [_NOT_CACHED] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_evictable(self) -> int:
        return len(self._evictable)

    @property
    def num_available(self) -> int:
        """The number of blocks that `take` can return: free and evictable ones."""
        return len(self._free) + len(self._evictable)

    @property
    def num_referenced(self) -> int:
        """The number of blocks that are referenced, the pinned ones included."""
        return self.num_blocks - self.num_available - self.num_quarantined

    def num_references(self, block_id: int) -> int:
        return self._num_references[block_id]

    def num_holds(self, block_id: int) -> int:
        return self._num_holds[block_id]

    def is_held(self, block_id: int) -> bool:
        return self._num_holds[block_id] > 0

    def is_used(self, block_id: int) -> bool:
        """Whether the block is referenced or held."""
        return self._num_references[block_id] > 0 or self._num_holds[block_id] > 0

    def is_pinned(self, block_id: int) -> bool:
        """Whether the block is neither referenced nor held, and a cached block after it in its
        chain is in use, so that it cannot be evicted."""
        return self._num_pins[block_id] > 0 and not self.is_used(block_id)

    def is_cached(self, block_id: int) -> bool:
        return self._parents[block_id] != _NOT_CACHED

    def is_evictable(self, block_id: int) -> bool:
        is_idle = not (self._num_pins[block_id] or self.is_used(block_id))
        return is_idle and self._parents[block_id] != _NOT_CACHED

    def parent_of(self, block_id: int) -> int:
        """Return the block before a cached block in its chain, or NO_BLOCK for the first one."""
        return self._parents[block_id]

    def chain_to(self, block_id: int, num_blocks: int) -> tuple[int, ...]:
        """Return the last `num_blocks` blocks of the chain that ends with the cached block
        `block_id`, in order; the whole chain where it is shorter."""
        parents, block_ids = self._parents, list[int]()
        while block_id != NO_BLOCK and len(block_ids) < num_blocks:
            block_ids.append(block_id)
            block_id = parents[block_id]
        block_ids.reverse()
        return tuple(block_ids)

    def cached(self) -> set[int]:
        """Return the ids of all cached blocks."""
        return set(compress(range(self.num_blocks), map(_NOT_CACHED.__ne__, self._parents)))

    def take(self, num_blocks: int) -> TakenBlocks:
        """Reference `num_blocks` blocks once each: free ones first, adjacent ones preferred, then
        the least recently used evictable ones.

        Raises: NoBlocks if fewer are free or evictable; no block is taken then.
        """
        if num_blocks > self.num_available:
            raise NoBlocks(
                f"{num_blocks} blocks wanted, {self.num_available} are free or evictable"
            )
        block_ids = self._free.take(min(num_blocks, len(self._free)))
        evicted = self._evictable.take_first(num_blocks - len(block_ids))
        self.num_evicted += len(evicted)
        for block_id in evicted:
            self._parents[block_id] = _NOT_CACHED
        block_ids = sorted(block_ids + evicted)
        num_references = self._num_references
        for block_id in block_ids:
            num_references[block_id] = 1
        return TakenBlocks(tuple(block_ids), tuple(evicted))

    # -- references and holds

    def share(self, block_ids: Sequence[int]) -> None:
        """Add one reference to each block. Raises: IntegrityError for a free block."""
        num_held, _ = self._begin_use(block_ids, self._num_references, self._num_holds)
        self.num_quarantined -= num_held

    def put_back(self, block_ids: Iterable[int]) -> None:
        """Drop one reference of each block, in the order given: of blocks that become evictable,
        the first given is evicted first, but never before the blocks that follow it in its
        chain.

        Raises: IntegrityError for a block that has no reference.
        """
        num_held, _ = self._end_use(block_ids, self._num_references, self._num_holds)
        self.num_quarantined += num_held

    def hold(self, block_ids: Sequence[int]) -> None:
        """Add one hold to each block, which must be referenced, held or cached. A held block is
        neither free nor evictable until `unhold` was called as often. Raises: IntegrityError for
        a free block."""
        _, num_unused = self._begin_use(block_ids, self._num_holds, self._num_references)
        self.num_quarantined += num_unused

    def unhold(self, block_ids: Collection[int]) -> None:
        """Drop one hold of each block. Raises: WrongState naming a block that is not held; no hold
        is dropped then."""
        num_holds = self._num_holds
        if 0 in map(num_holds.__getitem__, block_ids) or len({*block_ids}) < len(block_ids):
            for block_id, num_ended in Counter(block_ids).items():
                if num_holds[block_id] < num_ended:
                    raise WrongState(f"block {block_id} is not quarantined")
        _, num_unused = self._end_use(block_ids, num_holds, self._num_references)
        self.num_quarantined -= num_unused

    def _begin_use(
        self, block_ids: Sequence[int], counts: list[int], others: list[int]
    ) -> tuple[int, int]:
        """Add one use to each block in `counts`, its references or its holds; `others` are the uses
        of the other kind. Evictable blocks are removed from the order of eviction, and so are
        the blocks before them, which they pin.

        Args: block_ids: the evictable ones must be last, and follow one another in a chain.
        Returns: of the blocks without a use of this kind, how many had one of the other kind, and
            how many had none.
        """
        pins, num_used, num_unused = self._num_pins, 0, 0
        first_idle = bisect_left(block_ids, True, key=self.is_evictable)
        for block_id in block_ids[:first_idle]:
            count = counts[block_id]
            if not count:
                if others[block_id]:
                    num_used += 1
                elif pins[block_id]:
                    num_unused += 1
                else:
                    raise IntegrityError(f"block {block_id} is free: it cannot be used")
            counts[block_id] = count + 1
        idle = block_ids[first_idle:]
        if not idle:
            return num_used, num_unused
        self._evictable.remove(idle)
        self._pin(self._parents[idle[0]])
        for block_id in idle:
            counts[block_id] = pins[block_id] = 1
        pins[block_id] = 0  # no block of them follows the last
        return num_used, num_unused + len(idle)

    def _pin(self, block_id: int) -> None:
        """Count one more cached block in use after this one, so that neither it nor those before it
        are evictable. Does nothing for NO_BLOCK."""
        while block_id != NO_BLOCK and self.is_evictable(block_id):
            self._evictable.remove((block_id,))
            self._num_pins[block_id] = 1
            block_id = self._parents[block_id]
        if block_id != NO_BLOCK:
            self._num_pins[block_id] += 1

    def _end_use(
        self, block_ids: Iterable[int], counts: list[int], others: list[int]
    ) -> tuple[int, int]:
        """Drop one use of each block in `counts`, as `_begin_use` adds it. A block without uses and
        pins becomes free, or evictable if it is cached, and so may blocks before it.

        Returns: of the blocks without a use of this kind now, how many have one of the other kind,
            and how many have none.
        """
        references, holds, pins = self._num_references, self._num_holds, self._num_pins
        parents = self._parents
        num_used, num_unused, evictable, free = 0, 0, list[int](), list[int]()
        for block_id in block_ids:
            num_left = counts[block_id] - 1
            counts[block_id] = num_left
            if num_left:
                if num_left < 0:
                    raise IntegrityError(f"block {block_id} was put back once too often")
            elif others[block_id]:
                num_used += 1
            else:
                num_unused += 1
                if not pins[block_id]:
                    parent = parents[block_id]
                    if parent == _NOT_CACHED:
                        free.append(block_id)
                        continue
                    evictable.append(block_id)
                    while parent >= 0:
                        num_left = pins[parent] - 1
                        pins[parent] = num_left
                        if num_left or references[parent] or holds[parent]:
                            break
                        evictable.append(parent)
                        parent = parents[parent]
        self._evictable.append(evictable)
        self._free.give(free)
        return num_used, num_unused

    # -- chains of cached blocks

    def mark_cached(self, block_ids: Sequence[int], parent: int = NO_BLOCK) -> None:
        """Mark referenced blocks as cached: they follow one another in a chain, and the first of
        them follows `parent`, a cached block, or NO_BLOCK.

        Raises: IntegrityError for a block that is cached already or not referenced, or a parent
            that is not cached; nothing is marked then.
        """
        if not block_ids:
            return
        references, pins, parents = self._num_references, self._num_pins, self._parents
        if parent != NO_BLOCK and parents[parent] == _NOT_CACHED:
            raise IntegrityError(f"block {block_ids[0]} follows {parent}, which is not cached")
        for block_id in block_ids:
            if not references[block_id] or parents[block_id] != _NOT_CACHED:
                raise IntegrityError(
                    f"block {block_id} is not referenced, or cached already: it cannot enter the "
                    f"prefix cache"
                )
        self._pin(parent)
        for block_id in block_ids:
            parents[block_id] = parent
            pins[block_id] = 1
            parent = block_id
        pins[parent] = 0  # no block follows the last one

    def unmark_cached(self, block_id: int) -> None:
        """Mark a block as not cached; it becomes free if it was evictable. Raises: IntegrityError
        if it is not cached, or if cached blocks after it are in use."""
        parent = self._parents[block_id]
        if parent == _NOT_CACHED or self._num_pins[block_id]:
            raise IntegrityError(f"block {block_id} is not cached, or has cached blocks after it")
        if self.is_evictable(block_id):
            self._evictable.remove((block_id,))
            self._free.give((block_id,))
        elif parent != NO_BLOCK:  # its pin ends as if it were a reference
            self._num_pins[parent] -= 1
            self._num_references[parent] += 1
            self._end_use((parent,), self._num_references, self._num_holds)
        self._parents[block_id] = _NOT_CACHED

    # -- invariants

    def check_integrity(self, num_references: Mapping[int, int] | None = None) -> None:
        """Recompute every class of blocks and compare it with the counts.

        Args: num_references: the expected references of each block that has any; None: not
            compared.
        Raises: IntegrityError naming the first block that is in no class, in two, or miscounted.
        """
        self._free.check_integrity()
        self._evictable.check_integrity()
        order = [*self._evictable]
        self._check_chains(order)
        free, evictable, cached = set(self._free), set(order), self.cached()
        numbers = range(self.num_blocks)
        counts = dict(compress(enumerate(self._num_references), self._num_references))
        held = set(compress(numbers, self._num_holds))
        pinned = set(compress(numbers, self._num_pins)) - held - counts.keys()
        classes = (free, evictable, counts.keys() | pinned, held - counts.keys())
        sizes = (self.num_free, self.num_evictable, self.num_referenced, self.num_quarantined)
        is_sound = (
            (num_references is None or counts == num_references)
            and tuple(map(len, classes)) == sizes
            and len(set().union(*classes)) == sum(sizes) == self.num_blocks
            and all(
                count > 0 for count in (*counts.values(), *map(self._num_holds.__getitem__, held))
            )
            and evictable <= cached
            and free.isdisjoint(cached)
        )
        if is_sound:
            return
        for block_id in numbers:
            count = counts.get(block_id, 0)
            if num_references is not None and num_references.get(block_id, 0) != count:
                raise IntegrityError(
                    f"block {block_id} has {count} references in the pool, "
                    f"{num_references.get(block_id, 0)} by count"
                )
            names = ("free", "evictable", "referenced", "quarantined")
            there = [
                name for name, blocks in zip(names, classes, strict=True) if block_id in blocks
            ]
            if len(there) != 1 or (block_id in evictable) != self.is_evictable(block_id):
                is_cached = self.is_cached(block_id)
                raise IntegrityError(f"block {block_id} is in classes {there}, cached: {is_cached}")
        raise IntegrityError(f"blocks counted {[*map(len, classes)]}, the pool says {sizes}")

    def _check_chains(self, order: Sequence[int]) -> None:
        """Raises: IntegrityError where a parent is not cached, would be evicted before a block that
        follows it, or is pinned by a wrong count."""
        place = {block_id: index for index, block_id in enumerate(order)}
        num_pins = [0] * self.num_blocks
        for block_id, parent in enumerate(self._parents):
            if parent < 0:
                continue
            if self._parents[parent] == _NOT_CACHED:
                raise IntegrityError(f"block {block_id} follows {parent}, which is not cached")
            if block_id not in place:
                num_pins[parent] += 1
            elif place.get(parent, len(place)) < place[block_id]:
                raise IntegrityError(f"block {parent} would be evicted before {block_id} after it")
        if num_pins != self._num_pins:
            raise IntegrityError("what pins cached blocks is miscounted")


class EvictionOrder:
    """The evictable blocks in order of eviction, the least recently used first: a doubly linked
    list indexed by block number, so that removing a block costs O(1)."""

    def __init__(self, num_blocks: int) -> None:
        self._end = num_blocks  # the place before the first block and after the last one
        self._next = [self._end] * (num_blocks + 1)
        self._previous = [self._end] * (num_blocks + 1)
        self._num_blocks = 0

    def __len__(self) -> int:
        return self._num_blocks

    def __iter__(self) -> Iterator[int]:
        block_id = self._next[self._end]
        while block_id != self._end:
            yield block_id
            block_id = self._next[block_id]

    def append(self, block_ids: Sequence[int]) -> None:
        """Append blocks that are not in the list, to be evicted after all others, in the order
        given."""
        following, previous = self._next, self._previous
        last = previous[self._end]
        for block_id in block_ids:
            following[last] = block_id
            previous[block_id] = last
            last = block_id
        following[last], previous[self._end] = self._end, last
        self._num_blocks += len(block_ids)

    def remove(self, block_ids: Sequence[int]) -> None:
        """Remove blocks, which must be in the list."""
        following = self._next
        first = last = NO_BLOCK
        for block_id in block_ids:
            if following[block_id] == first:  # a chain: it lies before those in front of it
                first = block_id
            else:
                self._cut(first, last)
                first = last = block_id
        self._cut(first, last)
        self._num_blocks -= len(block_ids)

    def _cut(self, first: int, last: int) -> None:
        """Link the block before `first` to the block after `last`."""
        if first != NO_BLOCK:
            before, after = self._previous[first], self._next[last]
            self._next[before], self._previous[after] = after, before

    def take_first(self, num_blocks: int) -> list[int]:
        """Remove and return the first `num_blocks` blocks; the list must have as many."""
        taken = [*islice(self, num_blocks)]
        if taken:
            first = self._next[taken[-1]]
            self._next[self._end], self._previous[first] = first, self._end
        self._num_blocks -= num_blocks
        return taken

    def check_integrity(self) -> None:
        """Check the links and the count. Raises: IntegrityError where the links of two blocks
        disagree, or the count is wrong."""
        block_id, num_passed = self._end, 0
        while num_passed <= self._num_blocks:
            after = self._next[block_id]
            if self._previous[after] != block_id:
                raise IntegrityError(f"the order of eviction is broken after block {block_id}")
            block_id, num_passed = after, num_passed + 1
            if block_id == self._end:
                break
        if block_id != self._end or num_passed != self._num_blocks + 1:
            raise IntegrityError(
                f"{num_passed - 1} blocks or more are in the order of eviction, "
                f"{self._num_blocks} by count"
            )


class FreeRuns:
    """The free blocks as runs of adjacent ones, the longest unused run first. A run is a half-open
    interval [start, end), and two runs never touch.

    Adjacent blocks matter to transfers (one descriptor for a run) and to the CPU's attention (one
    view of the cache). `take` looks for a long enough run among the first few only, so giving and
    taking a block is O(1) however many runs there are.
    """

    def __init__(self, num_blocks: int) -> None:
        self._end_of: OrderedDict[int, int] = OrderedDict({0: num_blocks})
        self._start_of: dict[int, int] = {num_blocks: 0}
        self._num_blocks = num_blocks

    def __len__(self) -> int:
        """The number of free blocks."""
        return self._num_blocks

    def __iter__(self) -> Iterator[int]:
        """Iterate over the free blocks, ascending within a run."""
        return chain.from_iterable(starmap(range, self._end_of.items()))

    def give(self, block_ids: Sequence[int]) -> None:
        """Add blocks that are not in the runs. Adjacent block numbers that follow one another in
        the list, ascending or descending, are added as one run."""
        start = end = -1
        for block_id in block_ids:
            if block_id == start - 1:
                start = block_id
            elif block_id == end:
                end += 1
            else:
                self._give_run(start, end)
                start, end = block_id, block_id + 1
        self._give_run(start, end)

    def _give_run(self, first: int, behind: int) -> None:
        """Add blocks [first, behind)."""
        if first == behind:
            return
        start, end = self._start_of.pop(first, first), self._end_of.pop(behind, behind)
        self._end_of[start] = end
        self._start_of[end] = start
        self._num_blocks += behind - first

    def take(self, num_blocks: int) -> list[int]:
        """Remove and return `num_blocks` blocks, of which there must be as many: from one run if
        one of the first runs is long enough, else from several runs."""
        if num_blocks == 0:
            return []
        for start, end in islice(self._end_of.items(), _NUM_RUNS_TRIED):
            if end - start >= num_blocks:
                return self._cut(start, num_blocks)
        taken: list[int] = []
        while len(taken) < num_blocks:
            start, end = next(iter(self._end_of.items()))
            taken += self._cut(start, min(end - start, num_blocks - len(taken)))
        return taken

    def _cut(self, start: int, num_blocks: int) -> list[int]:
        """Remove and return the first `num_blocks` blocks of the run that begins at `start`."""
        end = self._end_of.pop(start)
        middle = start + num_blocks
        if middle < end:
            self._end_of[middle] = end
            self._end_of.move_to_end(middle, last=False)
            self._start_of[end] = middle
        else:
            del self._start_of[end]
        self._num_blocks -= num_blocks
        return list(range(start, middle))

    def check_integrity(self) -> None:
        """Check the runs. Raises: IntegrityError where the two maps disagree, two runs touch, or
        the count is wrong."""
        runs = sorted(self._end_of.items())
        if {end: start for start, end in runs} != self._start_of:
            raise IntegrityError("the free runs' two maps disagree")
        for (_, end), (start, _) in pairwise(runs):
            if start <= end:
                raise IntegrityError(f"free runs touch or overlap at block {start}")
        if any(start >= end for start, end in runs) or self._num_blocks != sum(
            end - start for start, end in runs
        ):
            raise IntegrityError("free blocks are miscounted")
