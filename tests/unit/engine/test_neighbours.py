"""Runs of neighbours in a list of blocks, and what is done to them by slices: as if one by one."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable

import pytest

from engine.errors import IntegrityError
from engine.kv import neighbours
from engine.kv.block_pool import BlockPool
from engine.kv.eviction_order import EvictionOrder
from engine.kv.radix_tree import RadixTree

NUM_BLOCKS = 48
NUMBERS = array("q", range(NUM_BLOCKS))


def pieces(block_ids: list[int]) -> list[tuple[int, int, bool]]:
    return [*neighbours.runs(array("q", block_ids), NUMBERS)]


def shuffled_runs(rng: random.Random) -> list[int]:
    """All kinds of lists: sorted, in pieces, backwards, with blocks named twice, empty."""
    block_ids: list[int] = []
    while rng.random() < 0.8 and len(block_ids) < 3 * NUM_BLOCKS:
        start = rng.randrange(NUM_BLOCKS)
        run = list(range(start, rng.randint(start, NUM_BLOCKS)))
        block_ids += rng.choice([run, run, run[::-1], rng.sample(run, len(run))])
    return sorted(block_ids) if rng.random() < 0.3 else block_ids


def test_a_list_is_cut_into_runs_and_the_rest(seed: int, scale: Callable[[int], int]) -> None:
    rng = random.Random(seed)
    for _ in range(scale(2000)):
        block_ids, places = shuffled_runs(rng), []
        for start, end, is_run in pieces(block_ids):
            places += range(start, end)
            first = block_ids[start]
            if is_run:
                assert end - start >= neighbours.MANY
                assert block_ids[start:end] == list(range(first, first + end - start))
        assert places == list(range(len(block_ids)))


def test_runs_of_what_the_pool_hands_out_are_found() -> None:
    many = neighbours.MANY
    first, second = list(range(many)), list(range(many + 2, NUM_BLOCKS))
    assert pieces(first) == [(0, many, True)]
    assert pieces(first[:-1]) == [(0, many - 1, False)]
    assert pieces([NUM_BLOCKS - 1, *first]) == [(0, 1, False), (1, many + 1, True)]
    assert pieces(first + second) == [(0, many, True), (many, many + len(second), False)]


class Twin:
    """A pool with a tree on it, in which so many neighbours are `many`."""

    def __init__(self, many: int) -> None:
        self.pool = BlockPool(NUM_BLOCKS, many=many)
        self.tree = RadixTree(self.pool)

    def state(self) -> dict[str, object]:
        """All there is, in the order in which blocks will be taken."""
        pool, tree, blocks = self.pool, self.tree, range(NUM_BLOCKS)
        return {
            "free": list(pool._free._end_of.items()),
            "evictable": list(pool._evictable),
            "references": [pool.num_references(b) for b in blocks],
            "pins": list(pool._num_pins),
            "cached": [pool.is_cached(b) for b in blocks],
            "parents": [pool.parent_of(b) for b in blocks],
            "blocks": tree._block_of,
            "hashes": tree._hash_of,
            "depths": [tree._depth_of[b] for b in blocks if pool.is_cached(b)],
            "runs": tree.num_nodes,
        }


class Twins:
    """The same is done to both."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.twins = (Twin(2), Twin(NUM_BLOCKS + 1))
        self.owners: list[tuple[list[bytes], list[int]]] = []
        self.held: list[int] = []

    def both(self, work: Callable[[RadixTree], object]) -> object:
        found = [work(twin.tree) for twin in self.twins]
        assert found[0] == found[1]
        assert self.twins[0].state() == self.twins[1].state()
        return found[0]

    def begin(self) -> None:
        """A prompt that may share its first blocks with others."""
        tenant, turn = self.rng.randrange(3), self.rng.randrange(2)
        common, own = self.rng.randint(0, 12), self.rng.randint(0, 12)
        chain = [f"{tenant}/{i}".encode() for i in range(common)]
        chain += [f"{tenant}/{common}/{turn}/{i}".encode() for i in range(own)]
        num_blocks = len(chain) + self.rng.randint(0, 6)
        if num_blocks <= self.twins[0].pool.num_available - len(chain):
            found = self.both(lambda tree: tree.reserve(chain, num_blocks))
            assert isinstance(found, tuple)
            self.owners.append((chain, list(found[0])))
            if self.rng.random() < 0.8:
                self.cache(found[1])

    def cache(self, first: int) -> None:
        """What the newest owner computed behind its first so many blocks."""
        chain, block_ids = self.owners[-1]
        parent = chain[first - 1] if first else b""
        last = self.rng.randint(first, len(chain))
        self.both(lambda tree: tree.insert_chain(parent, chain[first:last], block_ids[first:last]))

    def end(self) -> None:
        if self.owners:
            _, block_ids = self.owners.pop(self.rng.randrange(len(self.owners)))
            self.both(lambda tree: tree.pool.put_back(reversed(block_ids)))

    def hold(self) -> None:
        if self.owners and self.owners[-1][1]:
            block_id = self.rng.choice(self.owners[-1][1])
            self.held.append(block_id)
            self.both(lambda tree: tree.pool.hold([block_id]))

    def unhold(self) -> None:
        if self.held:
            block_id = self.held.pop()
            self.both(lambda tree: tree.pool.unhold([block_id]))

    def forget(self) -> None:
        block_id = self.rng.randrange(NUM_BLOCKS)
        self.both(lambda tree: tree.forget(block_id))


def test_many_at_once_are_as_one_by_one(seed: int, scale: Callable[[int], int]) -> None:
    rng = random.Random(seed)
    for _ in range(scale(60)):
        twins = Twins(rng)
        steps = [twins.begin, twins.begin, twins.end, twins.hold, twins.unhold, twins.forget]
        for _ in range(60):
            rng.choices(steps, weights=[4, 2, 5, 1, 1, 0.3])[0]()
            for twin in twins.twins:
                twin.pool.check_integrity()
                twin.tree.check_integrity()


def test_cached_neighbours_that_are_no_chain_are_none() -> None:
    """The first is pinned, as if by the second: by another block after it, which is held."""
    pool = BlockPool(4, many=2)
    first, second, after = pool.take(3).block_ids
    pool.mark_cached(first)
    pool.mark_cached(after, first)
    pool.mark_cached(second)
    pool.hold([after])
    pool.put_back([after])
    pool.put_back([second, first])
    pool.check_integrity()
    assert (pool.is_pinned(first), pool.is_evictable(second)) == (True, True)
    pool.unhold([after])
    assert list(pool._evictable) == [second, after, first]


def test_a_block_put_back_once_too_often_among_many_is_noticed() -> None:
    pool = BlockPool(NUM_BLOCKS)
    block_ids = pool.take(NUM_BLOCKS).block_ids
    pool.put_back([block_ids[7]])
    with pytest.raises(IntegrityError, match=f"block {block_ids[7]} was put back once too often"):
        pool.put_back(reversed(block_ids))


def test_many_enter_the_prefix_cache_or_none() -> None:
    pool = BlockPool(NUM_BLOCKS)
    first, *rest = pool.take(NUM_BLOCKS).block_ids
    pool.mark_cached(first)
    pool.mark_cached(rest[9])
    with pytest.raises(IntegrityError, match=f"block {rest[9]} is not referenced, or cached"):
        pool.mark_chain(rest, first)
    assert sum(pool.is_cached(block_id) for block_id in range(NUM_BLOCKS)) == 2


def test_the_order_of_eviction_is_a_list(seed: int, scale: Callable[[int], int]) -> None:
    rng = random.Random(seed)
    for _ in range(scale(100)):
        order, expected = EvictionOrder(NUMBERS), []
        for _ in range(80):
            others = [b for b in range(NUM_BLOCKS) if b not in expected]
            kind = rng.choice(["append", "down", "remove", "take"])
            if kind == "append" and others:
                expected.append(rng.choice(others))
                order.extend(expected[-1:])
            elif kind == "down" and others:
                start = end = rng.choice(others)
                while end in others and end - start < 9:
                    end += 1
                order.extend_down(start, end)
                expected += range(end - 1, start - 1, -1)
            elif kind == "remove" and expected:
                order.remove(expected.pop(rng.randrange(len(expected))))
            elif kind == "take":
                num = rng.randint(0, min(5, len(expected)))
                assert order.take_first(num) == expected[:num]
                del expected[:num]
            order.check_integrity()
            assert (list(order), len(order)) == (expected, len(expected))
            assert [b in order for b in range(NUM_BLOCKS)] == [
                b in expected for b in range(NUM_BLOCKS)
            ]


@pytest.mark.parametrize("damage", range(5))
def test_integrity_notices_a_broken_order(damage: int) -> None:
    order = EvictionOrder(NUMBERS)
    order.extend_down(3, 9)
    order.check_integrity()
    if damage == 0:
        order._after[5] = 3
    elif damage == 1:
        order._before[5] = 3
    elif damage == 2:
        order._num_blocks += 1
    elif damage == 3:
        order._after[20] = 21
    elif damage == 4:
        order._after[5] = -1
    with pytest.raises(IntegrityError):
        order.check_integrity()
