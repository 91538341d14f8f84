"""The handle: what is written is what is read, and what is not for this request is refused by
name.
"""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.block import Block, Tier
from protos import common_pb2
from services.worker import handle as handles

hashes = st.binary(min_size=16, max_size=16)
blocks = st.builds(
    Block,
    chain_hash=hashes,
    frame=st.integers(0, 2**32 - 1),
    generation=st.integers(0, 2**64 - 1),
    checksum=st.integers(0, 2**64 - 1),
    num_tokens=st.integers(0, 2**32 - 1),
    tier=st.sampled_from(Tier),
)
runs = st.builds(
    handles.Run,
    node_id=st.text(max_size=8),
    store_address=st.text(max_size=8),
    store_incarnation=hashes,
    lease_id=st.text(max_size=8),
    first_block=st.integers(0, 2**32 - 1),
    blocks=st.lists(blocks, max_size=4).map(tuple),
)
any_handles = st.builds(
    handles.Handle,
    request_id=st.text(max_size=8),
    tenant=st.text(max_size=8),
    adapter=st.text(max_size=8),
    model_fingerprint=st.binary(max_size=32).map(bytes.hex),
    producer_id=st.text(max_size=8),
    producer_incarnation=hashes,
    block_size=st.integers(1, 64),
    num_tokens=st.integers(0, 2**32 - 1),
    runs=st.lists(runs, max_size=3).map(tuple),
    tail=st.none() | runs,
    deadline_unix_ms=st.integers(-(2**63), 2**63 - 1),
)


@given(any_handles)
def test_what_is_written_is_what_is_read(handle: handles.Handle) -> None:
    wire = handles.to_proto(handle).SerializeToString()
    assert handles.from_proto(common_pb2.KvHandle.FromString(wire)) == handle
    assert not handles.to_proto(handle).signature


def small_handle() -> handles.Handle:
    full = tuple(Block(bytes([i]) * 16, i, 2, 0, 4) for i in range(3))
    run = handles.Run("n", "a", b"i" * 16, "lease", 0, full)
    tail = dataclasses.replace(run, first_block=3, blocks=(Block(b"", 9, 2, 0, 2),))
    return handles.Handle("r", "t", "", "ab" * 32, "p", b"p" * 16, 4, 14, (run,), tail, 1_000_000)


OURS = [bytes([i]) * 16 for i in range(3)]


def check(handle: handles.Handle, now_s: float = 1000.0) -> None:
    handles.check(
        handle,
        request_id="r",
        tenant="t",
        adapter="",
        model_fingerprint="AB" * 32,
        block_size=4,
        now=lambda: now_s,
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"request_id": "x"}, "fingerprint"),
        ({"tenant": "x"}, "fingerprint"),
        ({"adapter": "x"}, "fingerprint"),
        ({"model_fingerprint": "00" * 32}, "fingerprint"),
        ({"block_size": 8}, "fingerprint"),
        ({"deadline_unix_ms": 997_999}, "deadline"),
    ],
)
def test_a_handle_of_anything_else_is_refused(change: dict[str, object], reason: str) -> None:
    check(small_handle())
    with pytest.raises(handles.HandleRefused) as caught:
        check(dataclasses.replace(small_handle(), **change))  # type: ignore[arg-type]
    assert caught.value.reason == reason


def test_clocks_may_differ_by_the_slack_and_no_more() -> None:
    check(small_handle(), 1000 + handles.CLOCK_SLACK_S)
    with pytest.raises(handles.HandleRefused):
        check(small_handle(), 1000 + handles.CLOCK_SLACK_S + 0.01)


@pytest.mark.parametrize(
    ("field", "value"), [("version", 2), ("version", 0), ("producer_incarnation", b"short")]
)
def test_what_no_producer_writes_is_refused(field: str, value: object) -> None:
    message = handles.to_proto(small_handle())
    setattr(message, field, value)
    with pytest.raises(handles.HandleRefused):
        handles.from_proto(message)


def test_blocks_come_in_order_as_far_as_they_are_ours() -> None:
    handle = small_handle()
    found, why = handles.blocks_in_order(handle, OURS)
    assert [block.frame for _, block in found] == [0, 1, 2]
    assert why is None
    found, why = handles.blocks_in_order(handle, OURS[:2])
    assert (len(found), why) == (2, "fingerprint")
    found, why = handles.blocks_in_order(handle, [OURS[0], b"x" * 16, OURS[2]])
    assert (len(found), why) == (1, "fingerprint")
    late = dataclasses.replace(handle.runs[0], first_block=1)
    found, why = handles.blocks_in_order(dataclasses.replace(handle, runs=(late,)), OURS)
    assert (found, why) == ([], "fingerprint")


def test_the_tail_must_continue_the_full_blocks_exactly() -> None:
    handle = small_handle()
    assert handle.tail is not None
    found = handles.tail_block(handle, 3)
    assert found is not None and found[1].frame == 9
    assert handles.tail_block(handle, 2) is None
    for change in (
        {"chain_hash": OURS[0]},
        {"num_tokens": 0},
        {"num_tokens": 4},
        {"num_tokens": 1},
    ):
        block = dataclasses.replace(handle.tail.blocks[0], **change)  # type: ignore[arg-type]
        tail = dataclasses.replace(handle.tail, blocks=(block,))
        assert handles.tail_block(dataclasses.replace(handle, tail=tail), 3) is None
    assert handle.lease_ids == ("lease",)
