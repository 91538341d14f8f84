"""What the slices must look at before they are taken: one block each that is not like its run."""

from __future__ import annotations

from array import array

import pytest

from engine.errors import IntegrityError
from engine.kv import neighbours
from engine.kv.block_pool import BlockPool
from engine.kv.eviction_order import EvictionOrder
from engine.kv.radix_tree import RadixTree

N = 48


def chain(n: int = N) -> tuple[BlockPool, RadixTree, tuple[int, ...]]:
    pool = BlockPool(N)
    tree = RadixTree(pool)
    hashes = [b"%d" % i for i in range(n)]
    ids, _ = tree.reserve(hashes, n)
    tree.insert_chain(b"", hashes, ids)
    return pool, tree, ids


def test_the_last_of_a_chain_that_is_held_is_quarantined() -> None:
    pool, _, ids = chain()
    pool.hold([ids[-1]])
    pool.put_back(reversed(ids))
    pool.check_integrity({})
    assert (pool.num_evictable, pool.num_quarantined) == (0, 1)


@pytest.mark.parametrize("place", [0, 20, N - 1])
def test_a_block_of_a_run_that_another_has_stays_his(place: int) -> None:
    pool, _, ids = chain()
    pool.reference(ids[place])
    pool.put_back(reversed(ids))
    pool.check_integrity({ids[place]: 1})
    assert pool.num_evictable == N - 1 - place


def test_a_block_of_a_run_that_is_cached_behind_one_that_is_not_is_evictable() -> None:
    pool, _, ids = chain(10)
    rest = pool.take(N - 10).block_ids
    pool.mark_cached(rest[20])
    pool.put_back(reversed(ids + rest))
    pool.check_integrity({})
    assert pool.num_evictable == 11


def test_blocks_that_are_held_when_they_are_cached_stay_pinned_by_it() -> None:
    pool = BlockPool(N)
    tree = RadixTree(pool)
    hashes = [b"%d" % i for i in range(N)]
    ids, _ = tree.reserve(hashes, N)
    pool.hold(ids[20:25])
    tree.insert_chain(b"", hashes, ids)
    pool.check_integrity(dict.fromkeys(ids, 1))
    pool.put_back(reversed(ids))
    pool.unhold(ids[20:25])
    pool.check_integrity({})


def test_an_unreferenced_block_in_a_run_may_not_enter() -> None:
    pool = BlockPool(N)
    first, *rest = pool.take(N).block_ids
    pool.mark_cached(first)
    pool.put_back([rest[9]])
    with pytest.raises(IntegrityError, match=f"block {rest[9]} is not referenced"):
        pool.mark_chain(rest, first)
    assert sum(map(pool.is_cached, range(N))) == 1


def test_runs_whose_ends_alone_fit_are_none() -> None:
    ids = [*range(N)]
    ids[5], ids[6] = ids[6], ids[5]
    pieces = [*neighbours.runs(array("q", ids), array("q", range(N)))]
    assert not any(
        is_run and ids[i:j] != [*range(ids[i], ids[i] + j - i)] for i, j, is_run in pieces
    )


def test_what_was_taken_in_a_run_is_out_both_ways() -> None:
    order = EvictionOrder(array("q", range(N)))
    order.extend_down(0, N)
    order.take_first(40)
    order.check_integrity()
    assert all(order._before[b] == -1 for b in range(N) if b not in order)


def test_evicted_blocks_have_no_hash_left() -> None:
    pool, tree, ids = chain()
    pool.put_back(reversed(ids))
    tree.take(40)
    assert sum(map(bool, tree._hash_of)) == len(tree) == 8


def test_blocks_that_become_evictable_out_of_order_are_cut_one_by_one() -> None:
    """An earlier turn's end became so later than the rest, with something else between."""
    pool, tree, ids = chain()
    pool.put_back(reversed(ids))
    tree.share(ids[:6])
    other = tree.take(0)
    assert other == ()
    pool.put_back(reversed(ids[:6]))
    tree.take(N)
    tree.check_integrity()
    assert len(tree) == 0
