"""The handle: what is written is what is read, and what is not for this request is refused by
name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from hypothesis import given
from hypothesis import strategies as st

from kvstore.block_refs import Block, Tier
from process.rpc_errors import Internal
from process.signing_keys import SigningKey, new_key
from protos import common_pb2
from services.worker import handle as handles
from services.worker.handle import HandleKeys

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
    handles.HandleRun,
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
    nonce=hashes,
    is_partial=st.booleans(),
)
KEYS = HandleKeys([new_key()])


def reason_of_changed(message: common_pb2.KvHandle) -> str:
    """Why one of ours that was changed is refused: its version says how it would be signed."""
    if message.version == handles.VERSION:
        return handles.SIGNATURE
    return handles.OTHER_VERSION


@given(any_handles)
def test_what_is_written_is_what_is_read(handle: handles.Handle) -> None:
    wire = handles.to_proto(handle, KEYS).SerializeToString()
    assert handles.from_proto(common_pb2.KvHandle.FromString(wire), KEYS) == handle


@given(any_handles, st.data())
def test_no_flipped_byte_goes_unseen(handle: handles.Handle, data: st.DataObject) -> None:
    """Whatever byte of the message is changed to whatever: it does not parse, it is refused, or it
    says exactly the same (a number's spare bits)."""
    wire = bytearray(handles.to_proto(handle, KEYS).SerializeToString())
    place = data.draw(st.integers(0, len(wire) - 1), label="place")
    wire[place] ^= data.draw(st.integers(1, 255), label="flip")
    try:
        message = common_pb2.KvHandle.FromString(bytes(wire))
    except DecodeError:
        return
    try:
        assert handles.from_proto(message, KEYS) == handle
    except handles.HandleRefused as refused:
        assert refused.reason == reason_of_changed(message)


def test_every_single_flipped_bit_of_a_handle_is_refused() -> None:
    """All of them, of one handle whose numbers have no spare bits."""
    wire = handles.to_proto(small_handle(), KEYS).SerializeToString()
    num_refused = 0
    for place in range(len(wire) * 8):
        changed = bytearray(wire)
        changed[place // 8] ^= 1 << place % 8
        try:
            message = common_pb2.KvHandle.FromString(bytes(changed))
        except DecodeError:
            continue
        with pytest.raises(handles.HandleRefused) as caught:
            handles.from_proto(message, KEYS)
        assert caught.value.reason == reason_of_changed(message)
        num_refused += 1
    assert num_refused > len(wire)  # the others are no messages at all


@given(any_handles, st.data())
def test_no_cut_or_longer_message_goes_unseen(handle: handles.Handle, data: st.DataObject) -> None:
    wire = handles.to_proto(handle, KEYS).SerializeToString()
    cut = data.draw(st.integers(0, len(wire) - 1))
    for changed in (wire[:cut], wire + wire[cut:]):
        try:
            message = common_pb2.KvHandle.FromString(changed)
        except DecodeError:
            continue
        try:
            assert handles.from_proto(message, KEYS) == handle
        except handles.HandleRefused as refused:
            assert refused.reason == reason_of_changed(message)


def set_another(message: Message, field: FieldDescriptor) -> None:
    """Change one field to another value, whatever its type: a field that is added to the proto and
    forgotten in the signature fails the tests that use this."""
    if field.is_repeated:
        getattr(message, field.name).add()
    elif field.message_type is not None:
        if message.HasField(field.name):
            message.ClearField(field.name)
        else:
            getattr(message, field.name).SetInParent()
    else:
        value = getattr(message, field.name)
        if isinstance(value, bool):
            setattr(message, field.name, not value)
        elif isinstance(value, int):
            setattr(message, field.name, value ^ 1)
        else:
            setattr(message, field.name, value + ("x" if isinstance(value, str) else b"x"))


def parts_of(message: common_pb2.KvHandle) -> list[Message]:
    runs = [*message.runs, message.tail]
    return [message, *runs]


def test_every_field_of_every_part_is_signed() -> None:
    full = handles.to_proto(small_handle(), KEYS)
    assert full.HasField("tail")
    num_changes = 0
    for place, part in enumerate(parts_of(full)):
        for field in part.DESCRIPTOR.fields:
            changed = common_pb2.KvHandle.FromString(full.SerializeToString())
            set_another(parts_of(changed)[place], field)
            assert changed != full, field.full_name
            with pytest.raises(handles.HandleRefused) as caught:
                handles.from_proto(changed, KEYS)
            assert caught.value.reason == reason_of_changed(changed), field.full_name
            num_changes += 1
    num_fields = {
        kind: len(kind.DESCRIPTOR.fields) for kind in (common_pb2.KvHandle, common_pb2.BlockRun)
    }
    assert num_changes == sum(num_fields[type(part)] for part in parts_of(full))


@given(any_handles, any_handles)
def test_no_two_handles_have_the_same_signed_bytes(
    one: handles.Handle, other: handles.Handle
) -> None:
    signed = [handles.signed_bytes(handles.to_proto(handle, KEYS)) for handle in (one, other)]
    assert (signed[0] == signed[1]) == (one == other)


def test_without_a_valid_key_or_a_signature_nothing_but_the_version_is_looked_at() -> None:
    foreign = HandleKeys([new_key()])
    same_name = HandleKeys([SigningKey(KEYS.key_ids[0], bytes(32))])
    for keys in (foreign, same_name, HandleKeys(())):
        message = handles.to_proto(small_handle(), KEYS)
        message.nonce = b"short"  # would be refused by name
        with pytest.raises(handles.HandleRefused) as caught:
            handles.from_proto(message, keys)
        assert caught.value.reason == handles.SIGNATURE
    for signature in (b"", b"short", bytes(32), bytes(64)):
        message = handles.to_proto(small_handle(), KEYS)
        message.signature = signature
        with pytest.raises(handles.HandleRefused) as caught:
            handles.from_proto(message, KEYS)
        assert caught.value.reason == handles.SIGNATURE
    with pytest.raises(Internal, match="handle_keys_file"):
        handles.to_proto(small_handle(), HandleKeys(()))


def small_handle() -> handles.Handle:
    full = tuple(Block(bytes([i]) * 16, i, 2, 0, 4) for i in range(3))
    run = handles.HandleRun("n", "a", b"i" * 16, "lease", 0, full)
    tail = dataclasses.replace(run, first_block=3, blocks=(Block(b"", 9, 2, 0, 2),))
    return handles.Handle(
        *("r", "t", "", "ab" * 32, "p", b"p" * 16, 4, 14, (run,), tail, 1_000_000, b"n" * 16)
    )


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
    ("field", "value", "reason"),
    [
        ("version", 0, "version"),
        ("version", 1, "version"),
        ("version", 4, "version"),
        ("nonce", b"short", "fingerprint"),
        ("producer_incarnation", b"short", "incarnation"),
    ],
)
def test_what_no_producer_writes_is_refused(field: str, value: object, reason: str) -> None:
    message = handles.to_proto(small_handle(), KEYS)
    setattr(message, field, value)
    handles.sign(message, KEYS)
    with pytest.raises(handles.HandleRefused) as caught:
        handles.from_proto(message, KEYS)
    assert caught.value.reason == reason


OF_VERSION_2 = bytes.fromhex(
    "08021201721a01742220abababababababababababababababababababababababababababababababab2a01703210"
    "707070707070707070707070707070703804400a4a670a016e1201611a106969696969696969696969696969696922"
    "056c6561736532210a1000000000000000000000000000000000180221070000000000000028043002"
    "32230a10010101010101010101010101010101011001180221070000000000000028043002522b0a016e1201611a10"
    "6969696969696969696969696969696922056c6561736532023208100918022802300258c0843d62016b6a20914a16"
    "c6cd679154e8260b92207b2ec6719176f07eca1bd98521b21dabf45e6b8a01106e6e6e6e6e6e6e6e6e6e6e6e6e6e6e"
    "6e"
)
"""As a worker of that version signed it, with the key "k" of 32 zeros: two blocks and a tail, each
a message in field 6 of its run."""


def test_a_handle_of_the_version_before_is_told_from_a_forged_one() -> None:
    """Whoever has its key or not: how it was signed is not known here."""
    for keys in (HandleKeys([SigningKey("k", bytes(32))]), KEYS, HandleKeys(())):
        message = common_pb2.KvHandle.FromString(OF_VERSION_2)
        assert (message.version, message.key_id, len(message.signature)) == (2, "k", 32)
        assert message.runs[0].lease_id == "lease" and not message.runs[0].blocks
        with pytest.raises(handles.HandleRefused, match="version 2, ours is 3") as caught:
            handles.from_proto(message, keys)
        assert caught.value.reason == "version"
        message.version = handles.VERSION
        with pytest.raises(handles.HandleRefused) as caught:
            handles.from_proto(message, keys)
        assert caught.value.reason == handles.SIGNATURE


@pytest.mark.parametrize("is_tail", [False, True])
@pytest.mark.parametrize("cut", [lambda data: data[:-1], lambda data: data[:-1] + b"\x07"])
def test_blocks_that_no_producer_packs_are_refused(
    cut: Callable[[bytes], bytes], is_tail: bool
) -> None:
    message = handles.to_proto(small_handle(), KEYS)
    run = message.tail if is_tail else message.runs[0]
    run.blocks = cut(run.blocks)
    handles.sign(message, KEYS)
    with pytest.raises(handles.HandleRefused) as caught:
        handles.from_proto(message, KEYS)
    assert caught.value.reason == "fingerprint"


def frames_of(found: list[handles.Stretch]) -> list[int]:
    return [block.frame for stretch in found for block in stretch.blocks(0, 99)]


def read_back(handle: handles.Handle) -> handles.Handle:
    wire = handles.to_proto(handle, KEYS).SerializeToString()
    return handles.from_proto(common_pb2.KvHandle.FromString(wire), KEYS)


@pytest.mark.parametrize("came", [lambda handle: handle, read_back], ids=["made here", "came"])
def test_blocks_come_in_order_as_far_as_they_are_ours(
    came: Callable[[handles.Handle], handles.Handle],
) -> None:
    handle = came(small_handle())
    found, why = handles.stretches(handle, OURS)
    assert frames_of(found) == [0, 1, 2]
    assert why is None
    found, why = handles.stretches(handle, OURS[:2])
    assert (frames_of(found), why) == ([0, 1], "fingerprint")
    found, why = handles.stretches(handle, [OURS[0], b"x" * 16, OURS[2]])
    assert (frames_of(found), why) == ([0], "fingerprint")
    late = dataclasses.replace(handle.runs[0], first_block=1)
    found, why = handles.stretches(dataclasses.replace(handle, runs=(late,)), OURS)
    assert (found, why) == ([], "fingerprint")
    short = dataclasses.replace(handle, block_size=8)
    assert handles.stretches(short, OURS) == ([], "fingerprint")


@given(st.lists(st.integers(0, 3), max_size=5), st.integers(0, 16), st.integers(0, 16))
def test_a_stretch_gives_what_is_asked_for_of_it(sizes: list[int], first: int, end: int) -> None:
    """However the blocks are cut into runs, and whatever part is asked for."""
    ours = [bytes([i]) * 16 for i in range(sum(sizes))]
    cut, made = 0, []
    for size in sizes:
        run = tuple(Block(ours[i], i, 2, 0, 4) for i in range(cut, cut + size))
        made.append(dataclasses.replace(small_handle().runs[0], first_block=cut, blocks=run))
        cut += size
    handle = read_back(dataclasses.replace(small_handle(), runs=tuple(made), tail=None))
    found, why = handles.stretches(handle, ours)
    assert why is None
    asked = [block.frame for stretch in found for block in stretch.blocks(first, end)]
    assert asked == list(range(len(ours)))[first:end]


def test_the_tail_must_continue_the_full_blocks_exactly() -> None:
    handle = small_handle()
    assert handle.tail is not None
    found = handles.tail_stretch(handle, 3)
    assert found is not None and frames_of([found]) == [9]
    assert handles.tail_stretch(handle, 2) is None
    for change in (
        {"chain_hash": OURS[0]},
        {"num_tokens": 0},
        {"num_tokens": 4},
        {"num_tokens": 1},
    ):
        block = dataclasses.replace(handle.tail.blocks[0], **change)  # type: ignore[arg-type]
        tail = dataclasses.replace(handle.tail, blocks=(block,))
        assert handles.tail_stretch(dataclasses.replace(handle, tail=tail), 3) is None
    assert handle.lease_ids == ("lease",)
