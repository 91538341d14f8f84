"""Whether a store can have answered that: every answer is looked at here before it becomes values.

gRPC does not say when a bit has turned on the way. What would be written to, counted with or kept
by must fit the question: as many blocks as were asked for, the same hashes in the same order,
frames that exist, generations odd while writing and even after it. What cannot be told from a right
answer (a wrong checksum, another frame's reference) is found when the block is read. Knows no
connection: `StoreConnection.checking_reply` breaks it for a spoiled answer. Pure, any thread.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore import wire
from kvstore.blocks import PackedBlocks
from kvstore.lending.told import Told
from protos import common_pb2, kvstore_pb2

_INCARNATION_BYTES = 16


class SpoiledAnswer(Exception):
    """No store can have said that."""


def check_attached(reply: kvstore_pb2.AttachReply, request: kvstore_pb2.AttachRequest) -> None:
    """Raises: SpoiledAnswer."""
    if not wire.is_whole(reply):
        raise SpoiledAnswer("a handshake with another checksum")
    if not (reply.node_id and reply.attachment_id):
        raise SpoiledAnswer("an attachment without a name")
    if len(reply.incarnation) != _INCARNATION_BYTES:
        raise SpoiledAnswer("an incarnation of another length")
    if reply.frame_bytes != request.block_bytes or reply.num_frames < 1:
        raise SpoiledAnswer("frames of another layout")


def check_matched(
    reply: kvstore_pb2.MatchReply, request: kvstore_pb2.MatchRequest, num_frames: int
) -> None:
    """Raises: SpoiledAnswer."""
    if len(reply.blocks) > len(request.chain_hashes):
        raise SpoiledAnswer("more blocks than were asked for")
    for asked, block in zip(request.chain_hashes, reply.blocks, strict=False):
        # A block in a page only, which nobody pinned, has generation 0.
        _check_committed(block, asked, num_frames, least=2 if request.pin else 0)
    if request.lease_id:
        _check_lease(reply.lease_id, request.lease_id)
    elif request.pin and reply.blocks and not reply.lease_id:
        raise SpoiledAnswer("blocks pinned under no lease")


def check_reserved(
    reply: kvstore_pb2.ReserveReply, request: kvstore_pb2.ReserveRequest, num_frames: int
) -> None:
    """Raises: SpoiledAnswer. What passes has one answer for each hash, frames that are named once,
    and no room behind the first that had none."""
    if not wire.is_whole(reply):
        raise SpoiledAnswer("frames with another checksum")
    if len(reply.blocks) != len(request.chain_hashes):
        raise SpoiledAnswer("not one answer for each block")
    if reply.HasField("tail") != bool(request.tail_name):
        raise SpoiledAnswer("a tail for none, or none for a tail")
    _check_lease(reply.lease_id, request.lease_id)
    asked, answers = list(request.chain_hashes), list(reply.blocks)
    if request.tail_name:
        asked.append(b"")
        answers.append(reply.tail)
    frames: set[int] = set()
    has_room = True
    for chain_hash, answer in zip(asked, answers, strict=True):
        state, block = answer.state, answer.block
        if state == kvstore_pb2.RESERVE_STATE_NO_ROOM:
            has_room = False
        elif state == kvstore_pb2.RESERVE_STATE_PRESENT and chain_hash:
            _check_committed(block, chain_hash, num_frames)
        elif state == kvstore_pb2.RESERVE_STATE_RESERVED:
            if block.chain_hash != chain_hash or block.frame in frames:
                raise SpoiledAnswer("a frame for another block")
            if block.frame >= num_frames or block.generation % 2 == 0:
                raise SpoiledAnswer("a frame that was not reserved")
            frames.add(block.frame)
        else:
            raise SpoiledAnswer("a state that is none")
        if not has_room and state != kvstore_pb2.RESERVE_STATE_NO_ROOM:
            raise SpoiledAnswer("room behind the block that had none")


def check_written(
    reply: kvstore_pb2.CommitReply,
    request: kvstore_pb2.CommitRequest,
    chain_hashes: Sequence[bytes],
    num_frames: int,
) -> None:
    """Raises: SpoiledAnswer. chain_hashes: of the request's blocks, empty for a tail."""
    if len(reply.blocks) != len(request.blocks):
        raise SpoiledAnswer("not one block for each that was written")
    for sent, chain_hash, block in zip(request.blocks, chain_hashes, reply.blocks, strict=True):
        _check_committed(block, chain_hash, num_frames)
        told = (block.generation, block.checksum, block.num_tokens)
        if block.frame == sent.frame:  # else another writer was faster
            if told != (sent.generation + 1, sent.checksum, sent.num_tokens):
                raise SpoiledAnswer("another block than the one that was written")
        elif not chain_hash:
            raise SpoiledAnswer("a tail in another frame")


def check_pinned(reply: kvstore_pb2.PinReply, request: kvstore_pb2.PinRequest) -> None:
    """Raises: SpoiledAnswer."""
    if reply.num_pinned > len(request.blocks):
        raise SpoiledAnswer("more blocks pinned than were asked for")
    if bool(reply.lease_id) != bool(reply.num_pinned):
        raise SpoiledAnswer("blocks pinned under no lease, or a lease for none")


def check_pushed(
    reply: kvstore_pb2.PushReply, request: kvstore_pb2.PushRequest, block_bytes: int
) -> None:
    """Raises: SpoiledAnswer: whether the push is over must be asked."""
    if reply.push_id != request.push_id:
        raise SpoiledAnswer("another push")
    stale = set(reply.stale)
    if len(stale) != len(reply.stale) or any(index >= len(request.blocks) for index in stale):
        raise SpoiledAnswer("a block that was not asked for")
    if reply.terminal and reply.num_bytes != (len(request.blocks) - len(stale)) * block_bytes:
        raise SpoiledAnswer("another number of bytes")


def check_confirmed(reply: kvstore_pb2.ConfirmReply, request: kvstore_pb2.ConfirmRequest) -> None:
    """Raises: SpoiledAnswer."""
    if any(index >= len(request.frames) for index in reply.stale):
        raise SpoiledAnswer("a block that was not asked for")


def read_rest(
    reply: kvstore_pb2.AwaitLentReply, request: kvstore_pb2.AwaitLentRequest, took_s: float
) -> Told:
    """What it says. took_s: from the question to the answer, here. Raises: SpoiledAnswer."""
    try:
        blocks = PackedBlocks(reply.blocks)
    except ValueError as error:
        raise SpoiledAnswer(str(error)) from error
    if reply.num_unsealed > len(blocks):
        raise SpoiledAnswer("more blocks without a checksum than there are")
    if reply.num_unsealed and not request.takes_unsealed:
        raise SpoiledAnswer("blocks without a checksum for who takes none")
    waited_s = reply.waited_us / 1e6
    # What a promise says is found wrong by nothing behind it.
    if reply.held_ms and not (wire.is_whole(reply) and reply.held_ms <= request.hold_ms):
        raise SpoiledAnswer("a promise that cannot have been given")
    held_s = reply.held_ms / 1000 if waited_s <= took_s else 0.0  # by whose clock?
    return Told(blocks, reply.is_all, reply.num_unsealed, held_s, waited_s)


def _check_committed(
    block: common_pb2.BlockRef, chain_hash: bytes, num_frames: int, least: int = 2
) -> None:
    if block.chain_hash != chain_hash:
        raise SpoiledAnswer("another block than was asked for")
    if block.frame >= num_frames:
        raise SpoiledAnswer("a frame that does not exist")
    if block.generation % 2 or block.generation < least:
        raise SpoiledAnswer("a committed block at a generation of none")


def _check_lease(told: str, asked: str) -> None:
    if not told or (asked and told != asked):
        raise SpoiledAnswer("another lease")
