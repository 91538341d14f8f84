"""The prefix cache against a naive model of it: what is cached, what is evicted next, and the
conservation law of the pool after every operation."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.errors import IntegrityError, NoBlocks
from engine.kv.block_pool import BlockPool
from engine.kv.prefix_cache import PrefixCache
from tests.conftest import examples

NUM_BLOCKS = 14
Path = tuple[int, ...]
PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=6).map(tuple)


def key(path: Path) -> bytes:
    """The chain hash of a path's last block: it binds all before it."""
    return "/".join(map(str, path)).encode()


def chain(path: Path) -> list[bytes]:
    return [key(path[: length + 1]) for length in range(len(path))]


@dataclass
class Owner:
    """A request: the path that its blocks hold, and how many of them it offered to the cache."""

    path: Path
    block_ids: list[int]
    num_offered: int


@dataclass
class Naive:
    """What must be cached and who must go next, recomputed over everything every time."""

    cached: dict[Path, int] = field(default_factory=dict)
    idle_since: dict[Path, int] = field(default_factory=dict)
    num_events: int = 0

    def length(self, path: Path) -> int:
        return next((n for n in range(len(path), 0, -1) if path[:n] in self.cached), 0)

    def children(self, path: Path) -> list[Path]:
        return [p for p in self.cached if p[:-1] == path]

    def settle(self, busy: set[int]) -> None:
        """Note who is idle since now: not busy, nor any block after it."""
        for path in sorted(self.cached, key=len, reverse=True):
            below = [b for p, b in self.cached.items() if p[: len(path)] == path]
            if busy & set(below):
                self.idle_since.pop(path, None)
            elif path not in self.idle_since:
                self.num_events += 1
                self.idle_since[path] = self.num_events

    def evict(self) -> int:
        leaves = [path for path in self.idle_since if not self.children(path)]
        path = min(leaves, key=self.idle_since.__getitem__)
        del self.idle_since[path]
        return self.cached.pop(path)

    def drop(self, path: Path) -> None:
        for other in [p for p in self.cached if p[: len(path)] == path]:
            del self.cached[other]
            self.idle_since.pop(other, None)


class CacheMachine(RuleBasedStateMachine):
    """Requests reserve, fill, fork, write, end, are forgotten and held, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.cache = PrefixCache(self.pool)
        self.naive = Naive()
        self.owners: list[Owner] = []
        self.held: list[int] = []

    def references(self) -> Counter[int]:
        return Counter(b for owner in self.owners for b in owner.block_ids)

    def settle(self) -> None:
        self.naive.settle(set(self.references()) | set(self.held))

    def pick(self, data: st.DataObject) -> Owner:
        return self.owners[data.draw(st.integers(0, len(self.owners) - 1))]

    def put_back(self, owner: Owner, block_ids: list[int], *, at_once: bool) -> None:
        if at_once:
            self.pool.put_back(block_ids)
        for block_id in block_ids:
            if not at_once:
                self.pool.put_back([block_id])
            owner.block_ids.remove(block_id)
            self.settle()
        self.owners.remove(owner)

    def evicted(self, num_taken: int, num_free: int) -> set[int]:
        return {self.naive.evict() for _ in range(max(0, num_taken - num_free))}

    @rule(path=PATHS, num_extra=st.integers(0, 2))
    def reserve(self, path: Path, num_extra: int) -> None:
        num_blocks, expected = len(path) + num_extra, self.naive.length(path)
        before = (self.pool.num_free, self.pool.num_evictable, len(self.cache))
        shared = [self.naive.cached[path[: n + 1]] for n in range(expected)]
        num_left = self.pool.num_available - sum(map(self.pool.is_evictable, shared))
        try:
            block_ids, num_shared = self.cache.reserve(chain(path), num_blocks)
        except NoBlocks:
            assert num_blocks - expected > num_left
            assert before == (self.pool.num_free, self.pool.num_evictable, len(self.cache))
            return
        assert num_blocks - expected <= num_left
        assert (num_shared, list(block_ids[:num_shared])) == (expected, shared)
        fresh = block_ids[num_shared:]
        assert not set(fresh) & (set(self.references()) | set(self.held))
        owner = Owner(path, shared, num_shared)
        self.owners.append(owner)
        self.settle()  # the prefix is in use before anything is evicted
        assert self.evicted(num_blocks - num_shared, before[0]) <= set(fresh)
        owner.block_ids += fresh
        assert sum(self.pool.is_cached(b) for b in fresh) == 0

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def insert(self, data: st.DataObject) -> None:
        owner = self.pick(data)
        index = owner.num_offered
        if index == len(owner.path):
            return
        owner.num_offered += 1
        path, block_id = owner.path[: index + 1], owner.block_ids[index]
        if self.pool.is_cached(block_id):  # by the request that this one was forked from
            return
        expected = path not in self.naive.cached and (index == 0 or path[:-1] in self.naive.cached)
        parent = key(path[:-1]) if index else b""
        num_before = len(self.cache)
        self.cache.insert(parent, [key(path)], [block_id])
        assert len(self.cache) - num_before == self.pool.is_cached(block_id) == expected
        if expected:
            self.naive.cached[path] = block_id
            self.settle()

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def insert_chain(self, data: st.DataObject) -> None:
        """All that an owner has left to offer, as if block by block."""
        owner = self.pick(data)
        first, num_blocks = owner.num_offered, min(len(owner.path), len(owner.block_ids))
        if first >= num_blocks:
            return
        owner.num_offered = num_blocks
        paths = [owner.path[: index + 1] for index in range(first, num_blocks)]
        parent = key(owner.path[:first]) if first else b""
        block_ids = owner.block_ids[first:num_blocks]
        self.cache.insert(parent, [key(path) for path in paths], block_ids)
        for path, block_id in zip(paths, block_ids, strict=True):
            if path not in self.naive.cached and (len(path) == 1 or path[:-1] in self.naive.cached):
                self.naive.cached[path] = block_id
        self.settle()

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), is_in_order=st.booleans(), at_once=st.booleans())
    def end(self, data: st.DataObject, is_in_order: bool, at_once: bool) -> None:
        owner = self.pick(data)
        block_ids = list(reversed(owner.block_ids))
        if not is_in_order:
            block_ids = data.draw(st.permutations(block_ids))
        self.put_back(owner, block_ids, at_once=at_once)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        owner = self.pick(data)
        self.pool.share(owner.block_ids)
        self.owners.append(Owner(owner.path, list(owner.block_ids), owner.num_offered))

    @precondition(lambda self: any(owner.block_ids for owner in self.owners))
    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        owner = self.pick(data)
        if not owner.block_ids:
            return
        index = data.draw(st.integers(0, len(owner.block_ids) - 1))
        old = owner.block_ids[index]
        is_own = self.references()[old] == 1 and old not in self.naive.cached.values()
        num_free, num_available = self.pool.num_free, self.pool.num_available
        try:
            block_id, source = self.cache.writable(old)
        except NoBlocks:
            assert not is_own and num_available == 0
            return
        assert (source is None) == is_own == (block_id == old)
        if not is_own:
            assert source == old
            assert self.evicted(1, num_free) <= {block_id}
            owner.block_ids[index] = block_id
            self.settle()
        assert self.references()[block_id] == 1 and not self.pool.is_cached(block_id)

    @precondition(lambda self: len(self.cache))
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        block_ids = data.draw(st.lists(st.integers(0, NUM_BLOCKS - 1), max_size=3))
        paths = [path for path, block_id in self.naive.cached.items() if block_id in block_ids]
        self.cache.forget(block_ids)
        for path in paths:
            self.naive.drop(path)
        self.settle()

    @precondition(lambda self: self.references())
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(sorted(self.references())))
        self.pool.hold([block_id])
        self.held.append(block_id)

    @rule(path=PATHS, first=st.integers(0, 3))
    def hold_chain(self, path: Path, first: int) -> None:
        """What is cached of a chain, referenced or not."""
        block_ids = self.cache.match(chain(path), first)
        self.pool.hold(block_ids)
        self.held += block_ids
        self.settle()

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def unhold(self, data: st.DataObject) -> None:
        block_ids = data.draw(st.permutations(self.held))[: data.draw(st.integers(1, 4))]
        self.pool.unhold(block_ids)
        for block_id in block_ids:
            self.held.remove(block_id)
            self.settle()

    @rule(path=PATHS)
    def match(self, path: Path) -> None:
        length = self.naive.length(path)
        assert self.cache.match_length(chain(path)) == length
        expected = tuple(self.naive.cached[path[: n + 1]] for n in range(length))
        assert self.cache.match(chain(path)) == expected
        num_evictable = sum(map(self.pool.is_evictable, expected))
        assert self.cache.match_counts(chain(path)) == (length, num_evictable)

    @invariant()
    def holds_its_law(self) -> None:
        references = self.references()
        self.pool.check_integrity(references)
        self.cache.check_integrity()
        assert len(self.cache) == len(self.naive.cached)
        idle = {self.naive.cached[path] for path in self.naive.idle_since}
        assert idle == {b for b in range(NUM_BLOCKS) if self.pool.is_evictable(b)}
        assert self.pool.num_evictable == len(idle)
        quarantined = set(self.held) - set(references)
        assert self.pool.num_quarantined == len(quarantined)
        pinned = set(self.naive.cached.values()) - idle - set(references) - quarantined
        assert pinned == {b for b in range(NUM_BLOCKS) if self.pool.is_pinned(b)}
        assert self.pool.num_referenced == len(references) + len(pinned)


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)


def fill(cache: PrefixCache, path: Path) -> tuple[int, ...]:
    """A request that computes `path` and ends; its blocks."""
    block_ids, num_shared = cache.reserve(chain(path), len(path))
    parent = key(path[:num_shared]) if num_shared else b""
    cache.insert(parent, chain(path)[num_shared:], block_ids[num_shared:])
    cache.pool.put_back(reversed(block_ids))
    return block_ids


def test_branches_share_their_trunk_and_are_forgotten_apart() -> None:
    pool = BlockPool(12)
    cache = PrefixCache(pool)
    trunk = fill(cache, (0, 1, 2, 3, 4, 5))
    fill(cache, (0, 1, 9, 9))
    fill(cache, (0, 1, 8))
    assert len(cache) == 9
    assert cache.match(chain((0, 1, 2, 3, 4, 5, 6))) == trunk
    assert cache.match(chain((0, 1, 2, 3, 4, 5, 6)), 4) == trunk[4:]
    assert cache.match(chain((0, 1, 2, 3, 4, 5, 6)), 6) == ()
    cache.forget(cache.match(chain((0, 1, 9)), 2))
    assert len(cache) == 7
    cache.forget(cache.match(chain((0, 1, 8)), 2))
    assert len(cache) == 6
    assert cache.match(chain((0, 1, 9, 9))) == trunk[:2]
    cache.check_integrity()
    pool.check_integrity({})


def test_a_block_is_not_evicted_before_those_that_follow_it() -> None:
    """Two requests compute one prompt at once: the second's copy stays private, but what it
    computes after it is cached behind the first's, and keeps it there."""
    pool = BlockPool(4)
    cache = PrefixCache(pool)
    (first,), (copy, second) = cache.take(1), cache.take(2)
    cache.insert(b"", [key((0,))], [first])
    cache.insert(b"", chain((0, 1)), [copy, second])
    assert [pool.is_cached(each) for each in (first, copy, second)] == [True, False, True]
    pool.put_back([first])
    assert pool.is_pinned(first) and pool.num_available == 1
    with pytest.raises(NoBlocks):
        cache.take(2)
    pool.put_back([second, copy])
    assert (pool.num_free, pool.num_evictable) == (2, 2)
    cache.take(2)
    assert cache.take(1) == (second,)
    assert cache.take(1) == (first,)


def test_a_block_whose_parent_is_gone_stays_private() -> None:
    pool = BlockPool(4)
    cache = PrefixCache(pool)
    first, second = cache.take(2)
    cache.insert(b"", [key((0,))], [first])
    cache.forget([first])
    cache.insert(key((0,)), [key((0, 1))], [second])
    pool.put_back([second, first])
    assert (pool.num_free, len(cache)) == (4, 0)


def test_what_follows_a_forgotten_block_is_forgotten_with_it() -> None:
    pool = BlockPool(8)
    cache = PrefixCache(pool)
    block_ids = fill(cache, (0, 1, 2, 3))
    fill(cache, (0, 1, 7))
    cache.forget(block_ids[1:2])
    assert cache.match(chain((0, 1, 2))) == block_ids[:1]
    assert (pool.num_free, len(cache)) == (7, 1)
    cache.check_integrity()


def test_copy_on_write() -> None:
    pool = BlockPool(4)
    cache = PrefixCache(pool)
    (block_id,) = cache.take(1)
    assert cache.writable(block_id) == (block_id, None)
    pool.share([block_id])
    fresh, source = cache.writable(block_id)
    assert source == block_id != fresh
    assert cache.writable(block_id) == (block_id, None)  # the other's alone again
    cache.insert(b"", [key((0,))], [block_id])
    assert cache.writable(block_id)[1] == block_id  # cached: others may find it
    assert cache.match(chain((0,))) == (block_id,)
    cache.take(2)  # the last free one, and the cached one that is no longer referenced
    with pytest.raises(NoBlocks):
        pool.share([fresh])
        cache.writable(fresh)
    assert pool.num_references(fresh) == 2


def test_a_chain_that_breaks_the_law_spoils_nothing() -> None:
    """A hash that comes twice, or behind another block already, is passed over."""
    for hashes in (["a", "b", "b", "c"], ["a", "x", "b"], ["x", "a", "b"]):
        cache = PrefixCache(BlockPool(8))
        (other,) = cache.take(1)
        cache.insert(b"", [b"x"], [other])
        block_ids = cache.take(len(hashes))
        cache.insert(b"", [name.encode() for name in hashes], block_ids)
        cache.check_integrity()
        assert cache.match([b"x"]) == (other,)


def test_hashes_that_are_no_chain_are_noticed() -> None:
    cache = PrefixCache(BlockPool(4))
    fill(cache, (0, 1, 2))
    with pytest.raises(IntegrityError, match="do not bind"):
        cache.match([key((0,)), key((0, 1, 2))])


def test_integrity_notices_maps_that_disagree() -> None:
    """check_integrity must be able to fail."""
    for breakage in (
        lambda cache: cache._block_of.pop(key((0,))),
        lambda cache: cache._block_of.update({key((0, 1, 2)): cache._block_of.pop(key((0, 1)))}),
        lambda cache: cache._block_of.update({key((0,)): cache._block_of.pop(key((0,)))}),
        lambda cache: cache._hash_of.__setitem__(3, key((0,))),
        lambda cache: cache._hash_of.reverse(),
        lambda cache: cache.pool.unmark_cached(2),
    ):
        cache = PrefixCache(BlockPool(4))
        fill(cache, (0, 1, 2))
        cache.check_integrity()
        breakage(cache)
        with pytest.raises(IntegrityError):
            cache.check_integrity()


def test_evicted_blocks_have_no_hash_left() -> None:
    cache = PrefixCache(BlockPool(48))
    fill(cache, tuple(range(48)))
    cache.take(40)
    assert sum(map(bool, cache._hash_of)) == len(cache) == 8


def test_blocks_that_become_evictable_out_of_order_are_all_evicted() -> None:
    """An earlier turn's end became so later than the rest."""
    cache = PrefixCache(BlockPool(48))
    block_ids = fill(cache, tuple(range(48)))
    cache.pool.share(block_ids[:6])
    cache.pool.put_back(reversed(block_ids[:6]))
    cache.take(48)
    cache.check_integrity()
    assert len(cache) == 0
