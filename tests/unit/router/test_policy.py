"""The choice of a pair: pure, total, and for the reasons it gives."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from process.errors import Unavailable
from services.router.config import RouterCosts
from services.router.policy import Ask, WorkerLoad, blocks_needed, choose

COSTS = RouterCosts(prefill_tokens_per_s=1000, link_bytes_per_s=1e6, decode_request_s=0.1)
ASK = Ask(num_prompt_tokens=160, max_tokens=17, prefix_tokens={}, affinity=b"a")


def _load(worker_id: str, **changes: object) -> WorkerLoad:
    base = WorkerLoad(
        worker_id=worker_id,
        fingerprint="f",
        block_size=16,
        block_bytes=1600,
        num_blocks=100,
        num_free_blocks=100,
        num_requests=0,
        num_queued_tokens=0,
        store_node_id="s",
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def test_the_shorter_queue() -> None:
    prefill = [_load("p0", num_queued_tokens=500), _load("p1")]
    choice = choose(prefill, [_load("d0")], ASK, COSTS)
    assert (choice.prefill_id, choice.decode_id, choice.num_pairs) == ("p1", "d0", 2)
    assert choice.why["prefill_compute"] == pytest.approx(0.16)
    assert choice.why["prefill_queue"] == 0


def test_a_cached_prefix_is_worth_a_queue_but_not_any_queue() -> None:
    ask = replace(ASK, prefix_tokens={("f", "s1"): 160})
    near = _load("p1", store_node_id="s1")
    choice = choose([_load("p0"), replace(near, num_queued_tokens=100)], [_load("d0")], ask, COSTS)
    assert choice.prefill_id == "p1"
    assert choice.why["prefill_compute"] == pytest.approx(0.001)  # the last token always
    choice = choose([_load("p0"), replace(near, num_queued_tokens=300)], [_load("d0")], ask, COSTS)
    assert choice.prefill_id == "p0"


def test_a_prefix_of_another_model_is_worth_nothing() -> None:
    ask = replace(ASK, prefix_tokens={("other", "s"): 160})
    choice = choose([_load("p0")], [_load("d0")], ask, COSTS)
    assert choice.why["prefill_compute"] == pytest.approx(0.16)


def test_bytes_over_the_link_count() -> None:
    """Of two pairs the one that shares a store, although its decode worker is a little busier."""
    decode = [_load("far", store_node_id="t"), _load("near", num_requests=0)]
    assert choose([_load("p0")], decode, ASK, COSTS).decode_id == "near"


def test_the_less_loaded_decode_worker() -> None:
    decode = [_load("d0", num_requests=3), _load("d1", num_requests=2)]
    assert choose([_load("p0")], decode, ASK, COSTS).decode_id == "d1"


def test_room_beats_load() -> None:
    assert blocks_needed(160, 17, 16) == 11
    decode = [_load("d0", num_free_blocks=10), _load("d1", num_free_blocks=11, num_requests=9)]
    assert choose([_load("p0")], decode, ASK, COSTS).decode_id == "d1"


def test_a_suspect_is_the_last_choice_but_a_choice() -> None:
    prefill = [_load("p0", is_suspect=True), _load("p1", num_queued_tokens=10_000)]
    decode = [_load("d0", is_suspect=True)]
    choice = choose(prefill, decode, ASK, COSTS)
    assert (choice.prefill_id, choice.decode_id) == ("p1", "d0")


def test_one_token_needs_no_decode_worker() -> None:
    choice = choose([_load("p0")], [], replace(ASK, needs_decode=False), COSTS)
    assert choice.decode_id is None


def test_missing_roles_are_named() -> None:
    with pytest.raises(Unavailable, match="no prefill worker"):
        choose([], [_load("d0")], ASK, COSTS)
    with pytest.raises(Unavailable, match="no decode worker"):
        choose([_load("p0")], [], ASK, COSTS)
    with pytest.raises(Unavailable, match="same model"):
        choose([_load("p0")], [_load("d0", fingerprint="g")], ASK, COSTS)
    with pytest.raises(Unavailable, match="same model"):
        choose([_load("p0")], [_load("d0", block_size=32)], ASK, COSTS)


def test_ties_follow_affinity_and_spread() -> None:
    prefill = [_load(f"p{i}") for i in range(4)]
    decode = [_load(f"d{i}") for i in range(4)]
    pairs = set()
    for number in range(200):
        ask = replace(ASK, affinity=number.to_bytes(2, "big"))
        first = choose(prefill, decode, ask, COSTS)
        again = choose(prefill[::-1], decode[::-1], ask, COSTS)
        assert (first.prefill_id, first.decode_id) == (again.prefill_id, again.decode_id)
        pairs.add((first.prefill_id, first.decode_id))
    assert len(pairs) == 16


loads = st.builds(
    _load,
    st.sampled_from(["a", "b", "c", "d"]),
    fingerprint=st.sampled_from(["f", "g"]),
    num_requests=st.integers(0, 50),
    num_queued_tokens=st.integers(0, 10_000),
    num_free_blocks=st.integers(0, 100),
    store_node_id=st.sampled_from(["s", "t"]),
    is_suspect=st.booleans(),
)


@given(prefill=st.lists(loads, max_size=4), decode=st.lists(loads, max_size=4))
def test_the_choice_is_a_valid_pair_of_least_cost(
    prefill: list[WorkerLoad], decode: list[WorkerLoad]
) -> None:
    ask = replace(ASK, prefix_tokens={("f", "t"): 64})
    pairs = [(p, d) for p in prefill for d in decode if p.fingerprint == d.fingerprint]
    try:
        choice = choose(prefill, decode, ask, COSTS)
    except Unavailable:
        assert not pairs
        return
    cost = sum(choice.why.values())
    alone = [sum(choose([p], [d], ask, COSTS).why.values()) for p, d in pairs]
    assert cost == pytest.approx(min(alone))
    assert (choice.prefill_id, choice.decode_id) in {(p.worker_id, d.worker_id) for p, d in pairs}
