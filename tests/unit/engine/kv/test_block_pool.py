"""The pool against a model of it: every block in exactly one class, whatever happens."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.errors import IntegrityError, NoBlocks, WrongState
from engine.kv.block_pool import NO_BLOCK, BlockPool, EvictionOrder, FreeRuns
from engine.kv.prefix_cache import PrefixCache
from tests.conftest import examples

NUM_BLOCKS = 12


class PoolMachine(RuleBasedStateMachine):
    """Owners take, share, cache, put back, hold and unhold blocks in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.cache = PrefixCache(self.pool)
        self.owners: list[list[int]] = []
        self.held: list[int] = []
        self.num_hashes = 0

    def references(self) -> dict[int, int]:
        counts: dict[int, int] = {}
        for owner in self.owners:
            for block_id in owner:
                counts[block_id] = counts.get(block_id, 0) + 1
        return counts

    @rule(count=st.integers(0, NUM_BLOCKS + 2))
    def take(self, count: int) -> None:
        available = self.pool.num_available
        before = (self.pool.num_free, self.pool.num_evictable, len(self.cache))
        try:
            taken = self.cache.take(count)
        except NoBlocks:
            assert count > available
            assert before == (self.pool.num_free, self.pool.num_evictable, len(self.cache))
            return
        assert count <= available
        assert len(set(taken)) == count
        assert not set(taken) & set(self.references())
        assert not set(taken) & set(self.held)
        self.owners.append(list(taken))

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def put_back(self, data: st.DataObject) -> None:
        owner = self.owners.pop(data.draw(st.integers(0, len(self.owners) - 1)))
        self.pool.put_back(reversed(owner))

    @precondition(lambda self: any(self.owners))
    @rule(data=st.data())
    def insert(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(sorted(self.references())))
        if not self.pool.is_cached(block_id):
            self.num_hashes += 1
            self.cache.insert(b"", [self.num_hashes.to_bytes(16, "little")], [block_id])
            assert self.pool.is_cached(block_id)

    @precondition(lambda self: self.num_hashes)
    @rule(data=st.data(), extra=st.integers(0, 3))
    def reserve_shared(self, data: st.DataObject, extra: int) -> None:
        number = data.draw(st.integers(1, self.num_hashes))
        chain = [number.to_bytes(16, "little")]
        try:
            block_ids, num_shared = self.cache.reserve(chain, 1 + extra)
        except NoBlocks:
            return
        assert len(set(block_ids)) == 1 + extra
        assert num_shared == int(self.cache.match(chain) == block_ids[:1])
        self.owners.append(list(block_ids))

    @precondition(lambda self: len(self.cache))
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        self.cache.forget([data.draw(st.integers(0, NUM_BLOCKS - 1))])

    @precondition(lambda self: any(self.owners))
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(sorted(self.references())))
        self.pool.hold([block_id])
        self.held.append(block_id)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def unhold(self, data: st.DataObject) -> None:
        self.pool.unhold([self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))])

    @invariant()
    def holds_its_law(self) -> None:
        self.pool.check_integrity(self.references())
        self.cache.check_integrity()
        assert self.pool.num_referenced == len(self.references())
        assert self.pool.num_quarantined == len(set(self.held) - set(self.references()))


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)


def test_neighbours_are_preferred() -> None:
    pool = BlockPool(10)
    pool.take(10)
    pool.put_back([0, 2, 3, 5, 6, 7, 9])
    assert pool.take(3).block_ids == (5, 6, 7)
    assert pool.take(2).block_ids == (2, 3)
    assert pool.take(2).block_ids == (0, 9)


def test_the_least_recently_used_is_evicted_first_and_a_chain_from_its_tail() -> None:
    pool = BlockPool(6)
    cache = PrefixCache(pool)
    first, second = cache.take(3), cache.take(3)
    cache.insert(b"", [b"first 0", b"first 1", b"first 2"], first)
    cache.insert(b"", [b"second 0", b"second 1", b"second 2"], second)
    pool.put_back(reversed(second))
    pool.put_back(reversed(first))
    assert cache.take(1) == (second[2],)
    assert cache.take(1) == (second[1],)
    cache.reserve([b"first 0"], 1)  # touching a chain's head keeps the head
    assert sorted(cache.take(3)) == sorted((second[0], first[2], first[1]))


def test_free_blocks_go_before_cached_ones() -> None:
    pool = BlockPool(3)
    cache = PrefixCache(pool)
    (block_id,) = cache.take(1)
    cache.insert(b"", [b"h" * 16], [block_id])
    pool.put_back([block_id])
    assert block_id not in cache.take(2)
    assert cache.match([b"h" * 16]) == (block_id,)


def test_a_hash_keeps_its_first_block() -> None:
    pool = BlockPool(4)
    cache = PrefixCache(pool)
    a, b = cache.take(2)
    cache.insert(b"", [b"h" * 16], [a])
    cache.insert(b"", [b"h" * 16], [b])
    assert cache.match([b"h" * 16]) == (a,)
    pool.put_back([b, a])
    assert (pool.num_free, pool.num_evictable) == (3, 1)


def test_holds_nest_and_end_in_the_right_class() -> None:
    pool = BlockPool(2)
    (block_id,) = pool.take(1).block_ids
    pool.hold([block_id])
    pool.hold([block_id])
    pool.put_back([block_id])
    pool.unhold([block_id])
    assert pool.num_quarantined == 1
    pool.unhold([block_id])
    assert (pool.num_quarantined, pool.num_free) == (0, 2)
    with pytest.raises(WrongState):
        pool.unhold([block_id])


def test_unhold_of_an_unheld_block_changes_nothing() -> None:
    pool = BlockPool(3)
    held, other = pool.take(2).block_ids
    pool.hold([held])
    with pytest.raises(WrongState, match=f"block {other}"):
        pool.unhold([held, other])
    pool.put_back([held])
    assert pool.num_quarantined == 1


def test_integrity_notices_a_miscount() -> None:
    """check_integrity must be able to fail."""
    pool = BlockPool(3)
    (block_id,) = pool.take(1).block_ids
    with pytest.raises(IntegrityError, match=f"block {block_id}"):
        pool.check_integrity({})
    pool._free.give([block_id])
    with pytest.raises(IntegrityError):
        pool.check_integrity({block_id: 1})


@pytest.mark.parametrize("damage", range(12))
def test_integrity_notices_whatever_is_damaged(damage: int) -> None:
    pool = BlockPool(12)
    used, cached, held, idle = (pool.take(2).block_ids for _ in range(4))
    pool.mark_cached(cached)
    pool.hold(held)
    pool.put_back([*reversed(cached), *held, *idle])
    references = dict.fromkeys(used, 1)
    pool.check_integrity(references)
    if damage == 0:
        pool._num_references[used[0]] = 2
    elif damage == 1:
        pool._num_references[idle[0]] = references[idle[0]] = 1  # and is free
    elif damage == 2:
        pool._free.give(held[:1])
    elif damage == 3:
        pool._evictable.append(idle[:1])
    elif damage == 4:
        pool._evictable.remove(cached[:1])
    elif damage == 5:
        pool._parents[idle[0]] = NO_BLOCK  # cached
    elif damage == 6:
        pool._parents[cached[1]] = -2  # not cached
    elif damage == 7:
        pool._num_holds[held[0]] = 0
    elif damage == 8:
        pool._num_references[used[0]] = references[used[0]] = -1
    elif damage == 9:
        pool._num_pins[used[0]] = 1
    elif damage == 10:
        pool.num_quarantined = 1
    elif damage == 11:
        pool._evictable.remove(cached)
        pool._evictable.append(cached)  # the parent first
    with pytest.raises(IntegrityError):
        pool.check_integrity(references)


def test_putting_back_twice_is_noticed() -> None:
    pool = BlockPool(3)
    taken = pool.take(1).block_ids
    pool.put_back(taken)
    with pytest.raises(IntegrityError, match="once too often"):
        pool.put_back(taken)


def test_a_block_put_back_once_too_often_among_many_is_noticed() -> None:
    pool = BlockPool(48)
    block_ids = pool.take(48).block_ids
    pool.put_back([block_ids[7]])
    with pytest.raises(IntegrityError, match=f"block {block_ids[7]} was put back once too often"):
        pool.put_back(reversed(block_ids))


def test_a_free_block_can_be_neither_shared_nor_held() -> None:
    pool = BlockPool(3)
    for use in (pool.share, pool.hold):
        with pytest.raises(IntegrityError, match="block 1 is free"):
            use([1])


# -- chains


def cached_chain(num_blocks: int) -> tuple[BlockPool, tuple[int, ...]]:
    """A pool of 48 blocks, and a referenced chain."""
    pool = BlockPool(48)
    block_ids = pool.take(num_blocks).block_ids
    pool.mark_cached(block_ids)
    return pool, block_ids


def test_the_last_of_a_chain_that_is_held_is_quarantined() -> None:
    pool, block_ids = cached_chain(48)
    pool.hold(block_ids[-1:])
    pool.put_back(reversed(block_ids))
    pool.check_integrity({})
    assert (pool.num_evictable, pool.num_quarantined) == (0, 1)


@pytest.mark.parametrize("is_idle", [False, True])
def test_every_block_of_a_held_chain_is_quarantined_when_it_is_no_longer_cached(
    is_idle: bool,
) -> None:
    """Blocks of a request that failed: none is given out before the writer that holds them ends."""
    pool, block_ids = cached_chain(40)
    if is_idle:
        pool.put_back(reversed(block_ids))
    pool.hold(block_ids)
    assert pool.num_evictable == 0
    if not is_idle:
        pool.put_back(reversed(block_ids))
    for block_id in reversed(block_ids):
        pool.unmark_cached(block_id)
    pool.check_integrity({})
    assert (pool.num_quarantined, pool.num_available) == (40, 8)
    assert not set(pool.take(8).block_ids) & set(block_ids)
    pool.unhold(block_ids)
    assert (pool.num_quarantined, pool.num_free) == (0, 40)


def test_holding_the_end_of_an_idle_chain_keeps_the_blocks_before_it() -> None:
    pool, block_ids = cached_chain(10)
    pool.put_back(reversed(block_ids))
    pool.hold(block_ids[6:8])
    pool.check_integrity({})
    assert [pool.is_pinned(each) for each in block_ids] == [True] * 6 + [False] * 4
    assert [pool.is_evictable(each) for each in block_ids] == [False] * 8 + [True] * 2
    pool.unhold(block_ids[6:8])
    pool.check_integrity({})
    assert pool.num_evictable == 10
    assert pool.take(48).evicted == (9, 8, 7, 6, 5, 4, 3, 2, 1, 0)


@pytest.mark.parametrize("place", [0, 20, 47])
def test_a_block_of_a_chain_that_another_request_has_stays_referenced(place: int) -> None:
    pool, block_ids = cached_chain(48)
    pool.share([block_ids[place]])
    pool.put_back(reversed(block_ids))
    pool.check_integrity({block_ids[place]: 1})
    assert pool.num_evictable == 47 - place


def test_blocks_that_are_held_when_they_are_cached_stay_quarantined() -> None:
    pool = BlockPool(48)
    block_ids = pool.take(48).block_ids
    pool.hold(block_ids[20:25])
    pool.mark_cached(block_ids)
    pool.check_integrity(dict.fromkeys(block_ids, 1))
    pool.put_back(reversed(block_ids))
    assert (pool.num_quarantined, pool.num_evictable) == (5, 23)
    pool.unhold(block_ids[20:25])
    pool.check_integrity({})
    assert pool.num_evictable == 48


def test_two_chains_after_one_block_keep_it_until_both_are_idle() -> None:
    pool = BlockPool(4)
    first, second, after = pool.take(3).block_ids
    pool.mark_cached([first])
    pool.mark_cached([after], first)
    pool.mark_cached([second])
    pool.hold([after])
    pool.put_back([after])
    pool.put_back([second, first])
    pool.check_integrity()
    assert (pool.is_pinned(first), pool.is_evictable(second)) == (True, True)
    pool.unhold([after])
    assert list(pool._evictable) == [second, after, first]


@pytest.mark.parametrize("is_cached", [False, True])
def test_many_enter_the_prefix_cache_or_none(is_cached: bool) -> None:
    pool = BlockPool(48)
    first, *rest = pool.take(48).block_ids
    pool.mark_cached([first])
    if is_cached:
        pool.mark_cached([rest[9]])
    else:
        pool.put_back([rest[9]])
    with pytest.raises(IntegrityError, match=f"block {rest[9]} is not referenced, or cached"):
        pool.mark_cached(rest, first)
    with pytest.raises(IntegrityError, match=f"follows {rest[0]}, which is not cached"):
        pool.mark_cached(rest[1:], rest[0])
    assert sum(map(pool.is_cached, range(48))) == 1 + is_cached


# -- the order of eviction, and the free blocks


def test_the_order_of_eviction_is_a_list(seed: int, scale: Callable[[int], int]) -> None:
    rng = random.Random(seed)
    for _ in range(scale(100)):
        order, expected = EvictionOrder(48), list[int]()
        for _ in range(80):
            others = [b for b in range(48) if b not in expected]
            kind = rng.choice(["append", "remove", "remove chain", "take"])
            if kind == "append":
                some = rng.sample(others, rng.randint(0, min(9, len(others))))
                order.append(some)
                expected += some
            elif kind == "remove":
                some = rng.sample(expected, rng.randint(0, min(4, len(expected))))
                order.remove(some)
                expected = [b for b in expected if b not in some]
            elif kind == "remove chain":
                start = rng.randint(0, len(expected))
                end = rng.randint(start, len(expected))
                order.remove(expected[start:end][::-1])
                del expected[start:end]
            elif kind == "take":
                num = rng.randint(0, min(5, len(expected)))
                assert order.take_first(num) == expected[:num]
                del expected[:num]
            order.check_integrity()
            assert (list(order), len(order)) == (expected, len(expected))


@pytest.mark.parametrize("damage", range(4))
def test_integrity_notices_a_broken_order(damage: int) -> None:
    order = EvictionOrder(48)
    order.append([*range(3, 9)])
    order.check_integrity()
    if damage == 0:
        order._next[5] = 3
    elif damage == 1:
        order._previous[5] = 3
    elif damage == 2:
        order._num_blocks += 1
    elif damage == 3:
        order._num_blocks -= 1
    with pytest.raises(IntegrityError):
        order.check_integrity()


def test_free_runs_are_a_set_that_prefers_adjacent_blocks(
    seed: int, scale: Callable[[int], int]
) -> None:
    rng = random.Random(seed)
    for _ in range(scale(200)):
        num_blocks = rng.randint(1, 40)
        runs, free, used = FreeRuns(num_blocks), set(range(num_blocks)), list[int]()
        for _ in range(60):
            if used and rng.random() < 0.6:
                given = [used.pop(rng.randrange(len(used)))]
                if rng.random() < 0.5:
                    given, used = rng.sample([*used, *given], len(used) + 1), []
                runs.give(given)
                free.update(given)
            else:
                count = rng.randint(0, len(free))
                starts = [s for s in free if all(s + i in free for i in range(count))]
                taken = runs.take(count)
                assert len(set(taken)) == count and set(taken) <= free
                if starts and count:  # fewer runs than are looked at: a fit is found
                    assert taken == list(range(taken[0], taken[0] + count))
                free -= set(taken)
                used += taken
            runs.check_integrity()
            assert (set(runs), len(runs)) == (free, len(free))


def test_integrity_notices_a_block_given_twice() -> None:
    """check_integrity must be able to fail."""
    runs = FreeRuns(8)
    runs.take(3)
    runs.give([1])
    runs.give([1])
    with pytest.raises(IntegrityError):
        runs.check_integrity()
