"""Values survive the wire. Answers that fit the question pass; one that no store can have given is
refused, whatever is wrong with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from kvstore import block_hash, wire
from kvstore.block_refs import ROW_BYTES, Block, PackedBlocks, Tier
from kvstore.exported_blocks import LeaseUpdate
from kvstore.wire import SpoiledAnswer
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


def _block(index: int, frame: int, generation: int = 4, checksum: int = 7) -> Block:
    return Block(HASHES[index] if index >= 0 else b"", frame, generation, checksum, 16)


def _rows(*blocks: Block) -> bytes:
    return PackedBlocks.of(blocks).data


def _reserve() -> tuple[Any, Any]:
    """A chain with a tail, one without room for its last block, one whose parent is missing; the
    first two have a block in common."""
    chains = [
        kvstore_pb2.ReserveChain(chain_hashes=b"".join(HASHES[:2]), tail_name="tail"),
        kvstore_pb2.ReserveChain(parent=HASHES[0], chain_hashes=b"".join(HASHES[1:])),
        kvstore_pb2.ReserveChain(parent=b"p" * 16, chain_hashes=b"q" * 16),
    ]
    request = kvstore_pb2.ReserveRequest(chains=chains, lease_id=LEASE)
    common = _block(1, 2, 5)
    reply = kvstore_pb2.ReserveReply(
        lease_id=LEASE,
        chains=[
            kvstore_pb2.ReservedChain(blocks=_rows(_block(0, 1), common, _block(-1, 3, 1))),
            kvstore_pb2.ReservedChain(blocks=_rows(common)),
            kvstore_pb2.ReservedChain(lacks_parent=True),
        ],
    )
    return reply, request


SENT = PackedBlocks.of([_block(0, 2, 3), _block(1, 3, 3, 9), _block(-1, 4, 3)])


def _commit() -> tuple[Any, Any]:
    request = kvstore_pb2.CommitRequest(blocks=SENT.data)
    # The second's other writer was faster.
    blocks = _rows(_block(0, 2), _block(1, 6, 8), _block(-1, 4))
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
            wire.read_attached(reply, request)
        case "match":
            wire.read_matched(reply, request, NUM_FRAMES)
        case "reserve":
            wire.check_reserved(reply, request, NUM_FRAMES)
        case "commit":
            wire.read_written(reply, SENT, NUM_FRAMES)
        case "pin":
            wire.read_pinned(reply, request)
        case "push":
            wire.check_pushed(reply, request, BLOCK_BYTES)


@pytest.mark.parametrize("name", QUESTIONS)
def test_what_fits_passes(name: str) -> None:
    _check(name, *QUESTIONS[name]())


def _row(index: int, of_chain: int | None = None, /, **changes: Any) -> Callable[[Any], None]:
    """Change one row of a message's blocks, or of those of one of its chains."""

    def change(reply: Any) -> None:
        message = reply if of_chain is None else reply.chains[of_chain]
        blocks = list(PackedBlocks(message.blocks))
        blocks[index] = dataclasses.replace(blocks[index], **changes)
        message.blocks = _rows(*blocks)

    return change


def _cut(num: int, of_chain: int | None = None) -> Callable[[Any], None]:
    """Leave bytes out at the end of the blocks, or say the last row again."""

    def change(reply: Any) -> None:
        message = reply if of_chain is None else reply.chains[of_chain]
        data = message.blocks
        message.blocks = data[:-num] if num > 0 else data + data[-ROW_BYTES:]

    return change


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
    ("reserve", _set("chains.del", None)),
    ("reserve", _set("chains.add", None)),
    ("reserve", _cut(1, 0)),
    ("reserve", _cut(-1, 0)),
    ("reserve", _cut(-1, 1)),
    ("reserve", _row(0, 0, generation=0)),
    ("reserve", _row(0, 0, frame=NUM_FRAMES)),
    ("reserve", _row(0, 0, chain_hash=b"")),
    ("reserve", _row(1, 0, frame=NUM_FRAMES)),
    ("reserve", _row(1, 0, chain_hash=HASHES[2])),
    ("reserve", _row(2, 0, frame=2)),
    ("reserve", _row(2, 0, generation=2)),
    ("reserve", _row(2, 0, chain_hash=HASHES[2])),
    ("reserve", _row(0, 1, chain_hash=HASHES[2])),
    ("reserve", _row(0, 1, generation=7)),
    ("reserve", _row(0, 1, frame=3)),
    ("reserve", _set("chains.0.lacks_parent", True)),
    ("commit", _cut(ROW_BYTES)),
    ("commit", _cut(-1)),
    ("commit", _cut(1)),
    ("commit", _row(0, chain_hash=HASHES[1])),
    ("commit", _row(0, generation=6)),
    ("commit", _row(0, checksum=8)),
    ("commit", _row(0, num_tokens=15)),
    ("commit", _row(0, frame=NUM_FRAMES)),
    ("commit", _row(1, generation=7)),
    ("commit", _row(2, frame=5)),
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
        if spoiled == reply:  # another way to write the same value
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
    """Its sender computed the checksum with them; this version does not know them."""
    later = bytes([0x98, 0x06, 0x05])  # field 99, as any later one, behind all that there are
    reply, request = _reserve()
    chain = reply.chains[-1].SerializeToString()
    if place == "nested":
        reply.chains[-1].MergeFromString(later)
        data = reply.SerializeToString()
        assert chain + later in data
    else:
        data = reply.SerializeToString() + later
    spoken = type(reply).FromString(data)
    spoken.checksum = block_hash.checksum(data)
    heard = type(reply).FromString(spoken.SerializeToString())
    _look("reserve", heard, request)
    assert wire.checksum_of(heard) != wire.checksum_of(_reserve()[0])


@pytest.mark.parametrize("data", [b"1", bytes(ROW_BYTES - 1) + b"\x05"])
def test_what_is_no_row_of_blocks_is_no_lenders_word(data: bytes) -> None:
    assert len(_rest(kvstore_pb2.AwaitLentReply())[0].blocks) == 0
    with pytest.raises(SpoiledAnswer):
        _rest(kvstore_pb2.AwaitLentReply(blocks=data))


def _rest(
    reply: kvstore_pb2.AwaitLentReply, took_s: float = 1.0, hold_ms: int = 100
) -> tuple[LeaseUpdate, float]:
    """Asked at 50 s."""
    request = kvstore_pb2.AwaitLentRequest(hold_ms=hold_ms)
    return wire.read_lease_update(reply, request, 50.0, 50.0 + took_s)


def test_no_more_blocks_wait_for_a_checksum_than_there_are() -> None:
    data = PackedBlocks.of([Block(b"x" * 16, 1, 2, 0, 16)]).data
    told, _ = _rest(kvstore_pb2.AwaitLentReply(blocks=data, num_unsealed=1))
    assert told.num_unsealed == len(told.blocks) == 1 and not told.is_all
    with pytest.raises(SpoiledAnswer, match="than there are"):
        _rest(kvstore_pb2.AwaitLentReply(blocks=data, num_unsealed=2))


def _promise(held_ms: int, waited_us: int = 0) -> kvstore_pb2.AwaitLentReply:
    reply = kvstore_pb2.AwaitLentReply(held_ms=held_ms, waited_us=waited_us)
    reply.checksum = wire.checksum_of(reply)
    return reply


def test_a_promise_counts_from_when_the_question_can_have_come_at_the_earliest() -> None:
    told, held_until_s = _rest(_promise(80, 700_000))
    assert told.held_s == 0.08 and held_until_s == pytest.approx(50.78)
    assert _rest(kvstore_pb2.AwaitLentReply())[1] == 0.0
    longer_than_it_took = _rest(_promise(80, 700_000), 0.6)
    assert longer_than_it_took[1] == 0.0


def test_a_promise_that_was_not_asked_for_or_was_spoiled_is_none() -> None:
    with pytest.raises(SpoiledAnswer):
        _rest(_promise(101))
    for field in ("held_ms", "waited_us", "num_unsealed"):
        spoiled = _promise(50)
        setattr(spoiled, field, getattr(spoiled, field) ^ 1)
        with pytest.raises(SpoiledAnswer):
            _rest(spoiled)


def _hold(held_ms: int, *stale: int) -> kvstore_pb2.HoldReply:
    reply = kvstore_pb2.HoldReply(held_ms=held_ms, stale=stale)
    reply.checksum = wire.checksum_of(reply)
    return reply


def test_a_hold_is_of_what_was_asked_for_and_as_it_was_said() -> None:
    request = kvstore_pb2.HoldRequest(frames=[3, 9], generations=[2, 4], ttl_ms=100)
    assert wire.read_hold(_hold(80, 1), request) == (0.08, {1})
    assert wire.read_hold(_hold(0), request) == (0.0, set())
    without = kvstore_pb2.HoldReply(held_ms=80)
    flipped = _hold(80, 1)
    flipped.held_ms ^= 4
    for spoiled in (_hold(80, 2), _hold(101), without, flipped):
        with pytest.raises(SpoiledAnswer):
            wire.read_hold(spoiled, request)


BLOCKS = st.builds(
    Block,
    chain_hash=st.binary(min_size=16, max_size=16) | st.just(b""),
    frame=st.integers(0, 2**32 - 1),
    generation=st.integers(0, 2**64 - 1),
    checksum=st.integers(0, 2**64 - 1),
    num_tokens=st.integers(0, 2**32 - 1),
    tier=st.sampled_from(Tier),
)


@given(BLOCKS)
def test_a_block_comes_back_as_it_went(block: Block) -> None:
    data = wire.block_to_proto(block).SerializeToString()
    assert wire.block_from_proto(common_pb2.BlockRef.FromString(data)) == block


def test_a_tier_of_a_later_version_is_unspecified() -> None:
    message = common_pb2.BlockRef.FromString(bytes([6 << 3, 99]))
    assert wire.block_from_proto(message).tier is Tier.UNSPECIFIED


def test_a_short_time_never_becomes_none() -> None:
    assert wire.ttl_ms(0.0001) == 1
    assert wire.ttl_ms(0) == 0
    assert wire.ttl_ms(1.5) == 1500
