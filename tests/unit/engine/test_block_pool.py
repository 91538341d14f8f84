"""The pool against a model of it: every block in exactly one class, whatever happens."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.errors import IntegrityError, NoBlocks, WrongState
from engine.kv.block_pool import BlockPool
from engine.kv.radix_tree import RadixTree
from tests.conftest import examples

NUM_BLOCKS = 12


class PoolMachine(RuleBasedStateMachine):
    """Owners take, share, cache, put back, hold and unhold blocks in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.cache = RadixTree(self.pool)
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
            assert self.cache.insert(b"", self.num_hashes.to_bytes(16, "little"), block_id)

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
        self.cache.forget(data.draw(st.integers(0, NUM_BLOCKS - 1)))

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
    cache = RadixTree(pool)
    first, second = cache.take(3), cache.take(3)
    for chain, name in ((first, "first"), (second, "second")):
        for index, block_id in enumerate(chain):
            parent = f"{name} {index - 1}".encode() if index else b""
            cache.insert(parent, f"{name} {index}".encode(), block_id)
    pool.put_back(reversed(second))
    pool.put_back(reversed(first))
    assert cache.take(1) == (second[2],)
    assert cache.take(1) == (second[1],)
    cache.reserve([b"first 0"], 1)  # touching a chain's head keeps the head
    assert sorted(cache.take(3)) == sorted((second[0], first[2], first[1]))


def test_free_blocks_go_before_cached_ones() -> None:
    pool = BlockPool(3)
    cache = RadixTree(pool)
    (block_id,) = cache.take(1)
    cache.insert(b"", b"h" * 16, block_id)
    pool.put_back([block_id])
    assert block_id not in cache.take(2)
    assert cache.match([b"h" * 16]) == (block_id,)


def test_a_hash_keeps_its_first_block() -> None:
    pool = BlockPool(4)
    cache = RadixTree(pool)
    a, b = cache.take(2)
    assert cache.insert(b"", b"h" * 16, a)
    assert not cache.insert(b"", b"h" * 16, b)
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
    pool._free.give(block_id)
    with pytest.raises(IntegrityError):
        pool.check_integrity({block_id: 1})


@pytest.mark.parametrize("damage", range(9))
def test_integrity_notices_whatever_is_damaged(damage: int) -> None:
    pool = BlockPool(12)
    tree = RadixTree(pool)
    used, cached, held, idle = (pool.take(2).block_ids for _ in range(4))
    for number, block_id in enumerate(cached):
        assert tree.insert(b"", number.to_bytes(16, "little"), block_id)
    pool.hold(held)
    pool.put_back([*cached, *held, *idle])
    references = dict.fromkeys(used, 1)
    pool.check_integrity(references)
    if damage == 0:
        pool._num_references[used[0]] = 2
    elif damage == 1:
        pool._num_references[idle[0]] = references[idle[0]] = 1  # and is free
    elif damage == 2:
        pool._free.give(held[0])
    elif damage == 3:
        pool._evictable.extend(idle[:1])
    elif damage == 4:
        pool._evictable.remove(cached[0])
    elif damage == 5:
        pool._is_cached[idle[0]] = True
    elif damage == 6:
        pool._is_cached[cached[0]] = False
    elif damage == 7:
        del pool._num_holds[held[0]]
    elif damage == 8:
        pool._num_references[used[0]] = references[used[0]] = -1
    with pytest.raises(IntegrityError):
        pool.check_integrity(references)


def test_putting_back_twice_is_noticed() -> None:
    pool = BlockPool(3)
    taken = pool.take(1).block_ids
    pool.put_back(taken)
    with pytest.raises(IntegrityError, match="once too often"):
        pool.put_back(taken)
