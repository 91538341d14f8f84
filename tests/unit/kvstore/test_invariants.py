"""The store recomputes its laws in slices: calls are served between them, a change in the middle
costs a check and no false alarm, and a broken law is found all the same.
"""

from __future__ import annotations

import asyncio

import pytest

from kvstore import invariants
from kvstore.block_store import BlockStore
from kvstore.invariants import SlicedCheck
from kvstore.prefix_tree import TreeNode
from tests.unit.kvstore.store_driver import StoreBench

NUM_BLOCKS = 300


@pytest.fixture
def bench() -> StoreBench:
    """`NUM_BLOCKS` committed blocks, as one chain."""
    made = StoreBench(NUM_BLOCKS)
    made.put([index.to_bytes(16, "big") for index in range(1, NUM_BLOCKS + 1)])
    return made


@pytest.fixture
def made(bench: StoreBench) -> SlicedCheck:
    # A turn of the loop after each 64 steps, however fast the machine is.
    return SlicedCheck(bench.store, lambda: 0.0, slice_s=0.0)


def entry_of(bench: StoreBench) -> TreeNode:
    node = bench.store.tree.find((7).to_bytes(16, "big"))
    assert node is not None
    return node


async def test_calls_are_served_in_the_middle_of_a_check(made: SlicedCheck) -> None:
    check = asyncio.ensure_future(made.check(budget_s=60.0))
    num_turns = 0
    while not check.done():
        await asyncio.sleep(0)
        num_turns += 1
    assert check.result() == ""
    # About ten passes over all blocks, 64 steps a slice.
    assert num_turns > 5 * NUM_BLOCKS // 64


async def test_a_change_in_the_middle_begins_the_check_again(
    bench: StoreBench, made: SlicedCheck
) -> None:
    check = asyncio.ensure_future(made.check(budget_s=60.0))
    for index in range(20):
        await asyncio.sleep(0)
        made.num_calls += 1
        lease = bench.store.match([(1).to_bytes(16, "big")], pin=True, ttl_s=9.0, now_s=0.0)
        if index % 2:
            bench.store.release([lease.lease_id], now_s=0.0)
    assert await check == ""


async def test_a_broken_law_is_found_and_a_later_check_finds_it_mended(
    bench: StoreBench, made: SlicedCheck
) -> None:
    node = entry_of(bench)
    node.num_hits += 1  # no law
    node.num_pins += 1
    assert "pins kept" in await made.check(budget_s=60.0)
    node.num_pins -= 1
    assert await made.check(budget_s=60.0) == ""


async def test_without_time_the_result_of_the_last_check_is_given(
    bench: StoreBench, made: SlicedCheck
) -> None:
    node = entry_of(bench)
    node.num_pins += 1
    assert await made.check(budget_s=0.0) == ""
    assert "pins kept" in await made.check(budget_s=60.0)
    assert "pins kept" in await made.check(budget_s=0.0)


async def test_no_check_is_begun_that_cannot_end_in_time(
    bench: StoreBench, made: SlicedCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a million blocks, for which each status would wait in vain."""
    budget_s = NUM_BLOCKS * invariants.LEAST_S_PER_FRAME
    begun: list[BlockStore] = []
    monkeypatch.setattr(invariants, "check_store", lambda store: iter(begun.append(store) or ()))
    assert await made.check(budget_s / 2) == "" and begun == []
    assert await made.check(budget_s * 2) == "" and begun == [bench.store]
