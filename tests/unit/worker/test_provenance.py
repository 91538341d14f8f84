"""A leg's parts sum to its prompt, and a stage clock's stages to the time that passed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstore.block import Block, Tier
from services.worker.provenance import Leg, StageClock, WorkerCounts

SIZE = 4


@given(st.integers(1, 60), st.data())
def test_the_parts_of_a_leg_sum_to_its_prompt(num_prompt_tokens: int, data: st.DataObject) -> None:
    num_local = data.draw(st.integers(0, (num_prompt_tokens - 1) // SIZE)) * SIZE
    num_blocks = data.draw(st.integers(0, -(-(num_prompt_tokens - num_local) // SIZE)))
    tiers = data.draw(st.lists(st.sampled_from(Tier), min_size=num_blocks, max_size=num_blocks))
    leg = Leg(num_prompt_tokens, num_tokens_local=num_local)
    rest = num_prompt_tokens - num_local
    loaded = [Block(b"", 0, 2, 0, min(SIZE, rest - i * SIZE), tier) for i, tier in enumerate(tiers)]
    end = data.draw(st.integers(num_prompt_tokens - 1, num_prompt_tokens + 5))
    leg.count_loaded(num_local, end, loaded, block_bytes=32)
    assert leg.num_tokens_computed >= 0
    total = leg.num_tokens_computed + leg.num_tokens_local + leg.num_tokens_from_store
    assert total == num_prompt_tokens
    assert leg.bytes_by_tier.total() == 32 * num_blocks
    counts = WorkerCounts()
    counts.add(leg)
    assert counts.num_prompt_tokens_from_store == leg.num_tokens_from_store


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
