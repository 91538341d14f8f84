"""Answers that fit the question pass; one that no store can have given is refused, whatever is
wrong with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.message import DecodeError

from kvstore import answer_checks, block_hash, wire
from kvstore.answer_checks import SpoiledAnswer
from kvstore.blocks import ROW_BYTES, Block, PackedBlocks
from kvstore.lending.told import Told
from protos import common_pb2, kvstore_pb2

NUM_FRAMES = 8
BLOCK_BYTES = 4096
HASHES = [bytes([i]) * 16 for i in range(1, 4)]
LEASE = "ab" * 16


def _ref(index: int, frame: int, generation: int = 4) -> common_pb2.BlockRef:
    chain_hash = HASHES[index] if index >= 0 else b""
    return common_pb2.BlockRef(
        chain_hash=chain_hash, frame=frame, generation=generation, checksum=7, num_tokens=16
    )


def _attach() -> tuple[Any, Any]:
    request = kvstore_pb2.AttachRequest(block_bytes=BLOCK_BYTES, transport="nixl")
    reply = kvstore_pb2.AttachReply(
        node_id="here",
        incarnation=bytes(range(16)),
        frame_bytes=BLOCK_BYTES,
        num_frames=NUM_FRAMES,
        attachment_id=LEASE,
        region_address=1 << 40,
    )
    return reply, request


def _match() -> tuple[Any, Any]:
    request = kvstore_pb2.MatchRequest(chain_hashes=HASHES, pin=True)
    blocks = [_ref(0, 1), _ref(1, 5)]
    return kvstore_pb2.MatchReply(blocks=blocks, lease_id=LEASE), request


def _reserve() -> tuple[Any, Any]:
    request = kvstore_pb2.ReserveRequest(chain_hashes=HASHES, tail_name="tail", lease_id=LEASE)
    reserved, present = kvstore_pb2.RESERVE_STATE_RESERVED, kvstore_pb2.RESERVE_STATE_PRESENT
    reply = kvstore_pb2.ReserveReply(
        lease_id=LEASE,
        blocks=[
            kvstore_pb2.ReservedBlock(state=present, block=_ref(0, 1)),
            kvstore_pb2.ReservedBlock(state=reserved, block=_ref(1, 2, 5)),
            kvstore_pb2.ReservedBlock(state=reserved, block=_ref(2, 3, 1)),
        ],
        tail=kvstore_pb2.ReservedBlock(
            state=kvstore_pb2.RESERVE_STATE_NO_ROOM, block=common_pb2.BlockRef()
        ),
    )
    return reply, request


def _commit() -> tuple[Any, Any]:
    sent = [
        kvstore_pb2.CommitBlock(frame=2, generation=3, checksum=7, num_tokens=16),
        kvstore_pb2.CommitBlock(frame=3, generation=3, checksum=9, num_tokens=16),
        kvstore_pb2.CommitBlock(frame=4, generation=3, checksum=7, num_tokens=16),
    ]
    request = kvstore_pb2.CommitRequest(blocks=sent)
    blocks = [_ref(0, 2), _ref(1, 6, 8), _ref(-1, 4)]  # the second's other writer was faster
    return kvstore_pb2.CommitReply(blocks=blocks), request


def _pin() -> tuple[Any, Any]:
    request = kvstore_pb2.PinRequest(blocks=[_ref(0, 1), _ref(1, 2)])
    return kvstore_pb2.PinReply(lease_id=LEASE, num_pinned=1), request


def _push() -> tuple[Any, Any]:
    request = kvstore_pb2.PushRequest(blocks=[_ref(0, 1), _ref(1, 2)], push_id=LEASE)
    reply = kvstore_pb2.PushReply(push_id=LEASE, terminal=True, num_bytes=BLOCK_BYTES, stale=[1])
    return reply, request


QUESTIONS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "attach": _attach,
    "match": _match,
    "reserve": _reserve,
    "commit": _commit,
    "pin": _pin,
    "push": _push,
}


def _check(name: str, reply: Any, request: Any) -> None:
    if name in ("attach", "reserve"):
        reply.checksum = wire.checksum_of(reply)
    _look(name, reply, request)


def _look(name: str, reply: Any, request: Any) -> None:
    match name:
        case "attach":
            answer_checks.check_attached(reply, request)
        case "match":
            answer_checks.check_matched(reply, request, NUM_FRAMES)
        case "reserve":
            answer_checks.check_reserved(reply, request, NUM_FRAMES)
        case "commit":
            answer_checks.check_written(reply, request, [*HASHES[:2], b""], NUM_FRAMES)
        case "pin":
            answer_checks.check_pinned(reply, request)
        case "push":
            answer_checks.check_pushed(reply, request, BLOCK_BYTES)


@pytest.mark.parametrize("name", QUESTIONS)
def test_what_fits_passes(name: str) -> None:
    _check(name, *QUESTIONS[name]())


def _reserved_twice(reply: Any) -> None:
    reply.blocks[2].block.frame = reply.blocks[1].block.frame


def _room_behind_none(reply: Any) -> None:
    reply.blocks[1].state = kvstore_pb2.RESERVE_STATE_NO_ROOM


def _exchanged(reply: Any) -> None:
    first, second = (common_pb2.BlockRef() for _ in range(2))
    first.CopyFrom(reply.blocks[0])
    second.CopyFrom(reply.blocks[1])
    reply.blocks[0].CopyFrom(second)
    reply.blocks[1].CopyFrom(first)


def _set(path: str, value: Any) -> Callable[[Any], None]:
    """Set `a.0.b` of a message; or, at the end of a way, `del`, `add` or `clear`."""

    def change(reply: Any) -> None:
        *way, last = path.split(".")
        for step in way:
            reply = reply[int(step)] if step.isdigit() else getattr(reply, step)
        if last == "del":
            del reply[-1]
        elif last == "add":
            reply.add() if value is None else reply.append(value)
        elif last == "clear":
            reply.ClearField(value)
        else:
            setattr(reply, last, value)

    return change


SPOILT: list[tuple[str, Callable[[Any], None]]] = [
    ("attach", _set("node_id", "")),
    ("attach", _set("attachment_id", "")),
    ("attach", _set("incarnation", b"1234")),
    ("attach", _set("frame_bytes", BLOCK_BYTES + 1)),
    ("attach", _set("num_frames", 0)),
    ("match", _set("blocks.0.frame", NUM_FRAMES)),
    ("match", _set("blocks.0.generation", 5)),
    ("match", _set("blocks.0.generation", 0)),
    ("match", _set("blocks.0.chain_hash", HASHES[2])),
    ("match", _exchanged),
    ("match", lambda reply: reply.blocks.extend([_ref(2, 3), _ref(2, 4)])),
    ("match", _set("lease_id", "")),
    ("reserve", _set("lease_id", "cd" * 16)),
    ("reserve", _set("blocks.del", None)),
    ("reserve", _set("blocks.add", None)),
    ("reserve", _set("clear", "tail")),
    ("reserve", _set("blocks.0.state", 0)),
    ("reserve", _set("blocks.0.state", 9)),
    ("reserve", _set("blocks.0.block.generation", 5)),
    ("reserve", _set("blocks.0.block.frame", NUM_FRAMES)),
    ("reserve", _set("blocks.1.block.generation", 4)),
    ("reserve", _set("blocks.1.block.frame", NUM_FRAMES)),
    ("reserve", _set("blocks.1.block.chain_hash", HASHES[2])),
    ("reserve", _reserved_twice),
    ("reserve", _room_behind_none),
    ("reserve", _set("tail.state", kvstore_pb2.RESERVE_STATE_PRESENT)),
    ("commit", _set("blocks.del", None)),
    ("commit", _set("blocks.add", None)),
    ("commit", _exchanged),
    ("commit", _set("blocks.0.generation", 6)),
    ("commit", _set("blocks.0.checksum", 8)),
    ("commit", _set("blocks.0.num_tokens", 15)),
    ("commit", _set("blocks.0.frame", NUM_FRAMES)),
    ("commit", _set("blocks.1.generation", 7)),
    ("commit", _set("blocks.2.frame", 5)),
    ("pin", _set("num_pinned", 3)),
    ("pin", _set("num_pinned", 0)),
    ("pin", _set("lease_id", "")),
    ("push", _set("push_id", "")),
    ("push", _set("num_bytes", 2 * BLOCK_BYTES)),
    ("push", _set("stale.add", 1)),
    ("push", _set("stale.add", 2)),
    ("push", _set("stale.del", None)),
]


@pytest.mark.parametrize(("name", "spoil"), SPOILT)
def test_what_cannot_be_is_refused(name: str, spoil: Callable[[Any], None]) -> None:
    reply, request = QUESTIONS[name]()
    spoil(reply)
    with pytest.raises(SpoiledAnswer):
        _check(name, reply, request)


@pytest.mark.parametrize("name", ["attach", "reserve"])
def test_no_bit_of_what_says_where_to_write_may_turn(name: str) -> None:
    reply, request = QUESTIONS[name]()
    reply.checksum = wire.checksum_of(reply)
    data = reply.SerializeToString()
    for bit in range(8 * len(data)):
        turned = bytearray(data)
        turned[bit // 8] ^= 1 << bit % 8
        try:
            spoiled = type(reply).FromString(bytes(turned))
        except DecodeError:
            continue
        with pytest.raises(SpoiledAnswer):
            _look(name, spoiled, request)


def test_a_request_that_says_where_to_write_has_its_own_checksum() -> None:
    request = kvstore_pb2.PushRequest(push_id=LEASE, destinations=[3, 4])
    request.checksum = wire.checksum_of(request)
    again = kvstore_pb2.PushRequest.FromString(request.SerializeToString())
    assert wire.is_whole(again)
    request.destinations[0] = 2
    assert not wire.is_whole(request)
    assert not wire.is_whole(kvstore_pb2.PushRequest(push_id=LEASE))


@pytest.mark.parametrize("place", ["whole", "nested"])
def test_fields_of_a_later_version_are_covered_and_do_no_harm(place: str) -> None:
    """Its sender computed the checksum with them; here nobody knows them."""
    later = bytes([0x98, 0x06, 0x05])  # field 99, as any later one, behind all that there are
    reply, request = _reserve()
    tail = reply.tail.SerializeToString()
    if place == "nested":
        reply.tail.MergeFromString(later)
        data = reply.SerializeToString()
        assert tail + later in data
    else:
        data = reply.SerializeToString() + later
    spoken = type(reply).FromString(data)
    spoken.checksum = block_hash.checksum(data)
    heard = type(reply).FromString(spoken.SerializeToString())
    _look("reserve", heard, request)
    assert wire.checksum_of(heard) != wire.checksum_of(_reserve()[0])


@pytest.mark.parametrize("data", [b"1", bytes(ROW_BYTES - 1) + b"\x05"])
def test_what_is_no_row_of_blocks_is_no_lenders_word(data: bytes) -> None:
    assert len(_rest(kvstore_pb2.AwaitLentReply()).blocks) == 0
    with pytest.raises(SpoiledAnswer):
        _rest(kvstore_pb2.AwaitLentReply(blocks=data))


def _rest(reply: kvstore_pb2.AwaitLentReply, took_s: float = 1.0, **asked: Any) -> Told:
    return answer_checks.read_rest(reply, kvstore_pb2.AwaitLentRequest(**asked), took_s)


def test_no_more_blocks_wait_for_a_checksum_than_there_are() -> None:
    data = PackedBlocks.of([Block(b"x" * 16, 1, 2, 0, 16)]).data
    one = kvstore_pb2.AwaitLentReply(blocks=data, num_unsealed=1)
    told = _rest(one, takes_unsealed=True)
    assert told.num_unsealed == len(told.blocks) == 1 and not told.is_all
    with pytest.raises(SpoiledAnswer, match="for who takes none"):
        _rest(one)
    with pytest.raises(SpoiledAnswer, match="than there are"):
        _rest(kvstore_pb2.AwaitLentReply(blocks=data, num_unsealed=2), takes_unsealed=True)


def _promise(held_ms: int, waited_us: int = 0) -> kvstore_pb2.AwaitLentReply:
    reply = kvstore_pb2.AwaitLentReply(held_ms=held_ms, waited_us=waited_us)
    reply.checksum = wire.checksum_of(reply)
    return reply


def test_a_promise_counts_from_when_the_question_can_have_come_at_the_earliest() -> None:
    told = _rest(_promise(80, 700_000), hold_ms=100)
    assert (told.held_s, told.waited_s) == (0.08, 0.7)
    assert told.word(asked_s=50.0).held_until_s == pytest.approx(50.78)
    assert _rest(kvstore_pb2.AwaitLentReply(), hold_ms=100).word(50.0).held_until_s == 0.0
    longer_than_it_took = _rest(_promise(80, 700_000), 0.6, hold_ms=100)
    assert longer_than_it_took.word(50.0).held_until_s == 0.0


def test_a_promise_that_was_not_asked_for_or_was_spoiled_is_none() -> None:
    with pytest.raises(SpoiledAnswer):
        _rest(_promise(101), hold_ms=100)
    for field in ("held_ms", "waited_us", "num_unsealed"):
        spoiled = _promise(50)
        setattr(spoiled, field, getattr(spoiled, field) ^ 1)
        with pytest.raises(SpoiledAnswer):
            _rest(spoiled, hold_ms=100, takes_unsealed=True)
