"""Handles over one or several stores: no gap, no block twice, no store named for nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvstore.block_refs import Block
from services.worker.handle_builder import HandleBuilder, LeasedBlocks, runs_of

SIZE = 4


def part(node: int, num_blocks: int) -> LeasedBlocks:
    """Blocks 0.. at one node; the frame says whose they are."""
    name = f"store-{node}"
    client: Any = SimpleNamespace(node_id=name, address=f"{name}:1", incarnation=bytes([node]) * 16)
    refs = [Block(bytes([i]) * 16, 100 * node + i, 2, 7, SIZE) for i in range(num_blocks)]
    return LeasedBlocks(client, f"lease-{node}", refs)


@given(st.lists(st.integers(0, 20), max_size=6))
def test_runs_cover_the_longest_prefix_once_from_the_first_store_that_has_it(
    lengths: list[int],
) -> None:
    parts = [part(node, length) for node, length in enumerate(lengths)]
    runs = runs_of(parts)
    covered = 0
    for run in runs:
        assert run.first_block == covered
        assert run.blocks, "a run without blocks"
        for block in run.blocks:
            first = next(node for node, length in enumerate(lengths) if length > covered)
            assert run.node_id == f"store-{first}"
            assert (run.lease_id, run.store_incarnation) == (f"lease-{first}", bytes([first]) * 16)
            assert block.chain_hash == bytes([covered]) * 16
            assert block.frame == 100 * first + covered
            covered += 1
    assert covered == max(lengths, default=0)
    assert len({run.node_id for run in runs}) == len(runs)


def maker(num_tokens: int) -> HandleBuilder:
    ask: Any = SimpleNamespace(request_id="r", tenant="t", adapter="")
    core: Any = SimpleNamespace(
        model=SimpleNamespace(block_size=SIZE, fingerprint="ab"),
        identity=SimpleNamespace(worker_id="prefill-0", incarnation=bytes(16)),
    )
    return HandleBuilder(core, ask, num_tokens)


TAIL = Block(b"", 9, 2, 7, 2)


def test_the_tail_lies_where_the_writer_writes() -> None:
    handle = maker(18).whole([part(0, 2), part(1, 4)], TAIL, 5.0)
    assert handle is not None and handle.tail is not None
    assert handle.num_tokens == 18
    assert [(run.node_id, run.first_block, len(run.blocks)) for run in handle.runs] == [
        ("store-0", 0, 2),
        ("store-1", 2, 2),
    ]
    assert (handle.tail.node_id, handle.tail.first_block) == ("store-1", 4)
    assert handle.lease_ids == ("lease-0", "lease-1")


def test_no_tail_behind_blocks_that_are_missing() -> None:
    handle = maker(18).whole([part(0, 3)], TAIL, 5.0)
    assert handle is not None
    assert (handle.tail, handle.num_tokens) == (None, 12)


def test_a_partial_handle_says_so_and_no_two_are_alike() -> None:
    made = maker(18)
    one, two = (made.partial([part(0, 2)], 5.0) for _ in range(2))
    assert one is not None and two is not None
    assert one.is_partial and one.tail is None and one.num_tokens == 8
    assert one.nonce != two.nonce
    whole = made.whole([part(0, 2)], None, 5.0)
    assert whole is not None and not whole.is_partial
