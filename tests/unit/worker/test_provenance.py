"""A leg's parts sum to its prompt, and a stage clock's stages to the time that passed."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kvstore.block_refs import Block, Tier
from kvstore.node_ids import is_lender, lender_node_id
from protos import common_pb2
from services.worker.provenance import (
    HandoverPath,
    LegProvenance,
    StageClock,
    WorkerCounts,
    leg_to_proto,
)

SIZE = 4


@given(st.integers(1, 60), st.data())
def test_the_parts_of_a_leg_sum_to_its_prompt(num_prompt_tokens: int, data: st.DataObject) -> None:
    num_local = data.draw(st.integers(0, (num_prompt_tokens - 1) // SIZE)) * SIZE
    num_blocks = data.draw(st.integers(0, -(-(num_prompt_tokens - num_local) // SIZE)))
    tiers = data.draw(st.lists(st.sampled_from(Tier), min_size=num_blocks, max_size=num_blocks))
    leg = LegProvenance(num_prompt_tokens, num_tokens_local=num_local)
    rest = num_prompt_tokens - num_local
    loaded = [Block(b"", 0, 2, 0, min(SIZE, rest - i * SIZE), tier) for i, tier in enumerate(tiers)]
    end = data.draw(st.integers(num_prompt_tokens - 1, num_prompt_tokens + 5))
    num_early, num_home = (data.draw(st.integers(0, num_blocks)) for _ in range(2))
    away = data.draw(st.sampled_from(["away", lender_node_id("away")]))
    leg.store_node_id = "home"
    first = num_local
    for index, block in enumerate(loaded):
        node_id = None if index < num_home else away
        is_early = index < num_early
        leg.count_loaded(first, end, [block], block_bytes=32, node_id=node_id, is_early=is_early)
        first += block.num_tokens
    assert leg.num_tokens_computed >= 0
    total = leg.num_tokens_computed + leg.num_tokens_local + leg.num_tokens_from_store
    assert total == num_prompt_tokens
    assert leg.bytes_by_place.total() == 32 * num_blocks
    early = sum(block.num_tokens for block in loaded[:num_early])
    assert leg.num_tokens_early == min(early, leg.num_tokens_from_store)
    on_wire = leg_to_proto(leg, role="decode", worker_id="w", incarnation="", dtype="float32")
    by_node = Counter[str]()
    for count in on_wire.from_store:
        by_node[count.node_id] += count.num_bytes
    assert by_node["home"] == 32 * num_home and by_node[away] == 32 * (num_blocks - num_home)
    assert sum(count.num_tokens for count in on_wire.from_store) == leg.num_tokens_from_store
    assert on_wire.num_tokens_early == leg.num_tokens_early
    lent = sum(count.num_tokens for count in on_wire.from_store if is_lender(count.node_id))
    assert on_wire.num_tokens_direct == leg.num_tokens_direct == lent
    assert on_wire.handover == common_pb2.HANDOVER_PATH_UNSPECIFIED
    counts = WorkerCounts()
    counts.add(leg)
    assert counts.num_prompt_tokens_from_store == leg.num_tokens_from_store
    assert counts.num_prompt_tokens_early == leg.num_tokens_early
    assert counts.num_prompt_tokens_direct == lent and not counts.handovers


def test_a_handover_is_counted_by_its_way() -> None:
    counts = WorkerCounts()
    for path in (HandoverPath.STORE, HandoverPath.DIRECT, HandoverPath.DIRECT):
        leg = LegProvenance(5, handover=path, num_blocks_behind=2)
        on_wire = leg_to_proto(leg, role="prefill", worker_id="w", incarnation="", dtype="float32")
        assert (on_wire.handover, on_wire.num_blocks_behind) == (int(path), 2)
        counts.add(leg)
    assert counts.handovers == {HandoverPath.STORE: 1, HandoverPath.DIRECT: 2}


@given(st.lists(st.tuples(st.sampled_from(["a", "b", None]), st.integers(0, 100)), max_size=10))
def test_stages_follow_one_another_without_gap(walk: list[tuple[str | None, int]]) -> None:
    now = 0.0
    clock = StageClock(lambda: now)
    expected: dict[str, float] = {}
    for stage, length in walk:
        clock.enter(stage)
        now += length
        if stage is not None:
            expected[stage] = expected.get(stage, 0.0) + length
    clock.enter(None)
    assert clock.seconds == expected
