"""Whether a store can have answered that: every answer is looked at here before it becomes values.

gRPC does not say when a bit has turned on the way. What would be written to, counted with or kept
by must fit the question: as many blocks as were asked for, the same hashes in the same order,
frames that exist, generations odd while writing and even after it. What cannot be told from a right
answer (a wrong checksum, another frame's reference) is found when the block is read. Knows no
connection: `StoreConnection.checking_reply` breaks it for a spoiled answer. Pure, any thread.
"""

from __future__ import annotations

import numpy as np

from kvstore import wire
from kvstore.block_hash import CHAIN_HASH_BYTES
from kvstore.blocks import PackedBlocks
from kvstore.exported_blocks import LeaseUpdate
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
    """Raises: SpoiledAnswer. What passes has one answer for each chain, and rows for the leading
    blocks of each; a frame to be written belongs to one block only."""
    if not wire.is_whole(reply):
        raise SpoiledAnswer("frames with another checksum")
    if len(reply.chains) != len(request.chains):
        raise SpoiledAnswer("not one answer for each chain")
    if not all(chain.lacks_parent for chain in reply.chains):
        _check_lease(reply.lease_id, request.lease_id)
    chains = [_packed(chain.blocks) for chain in reply.chains]
    for asked, chain, blocks in zip(request.chains, reply.chains, chains, strict=True):
        if blocks and chain.lacks_parent:
            raise SpoiledAnswer("frames behind a block that is missing")
        num_full = min(len(blocks), len(asked.chain_hashes) // CHAIN_HASH_BYTES)
        if not blocks[:num_full].has_hashes(asked.chain_hashes[: num_full * CHAIN_HASH_BYTES]):
            raise SpoiledAnswer("another block than was asked for")
        rest = blocks[num_full:]
        if len(rest) > bool(asked.tail_name) or any(tail.chain_hash for tail in rest):
            raise SpoiledAnswer("a place for what was not asked for")
        if rest and not rest.are_reserved.all():
            raise SpoiledAnswer("a tail that was there before")
        _check_frames(blocks, num_frames)
    reserved = wire.to_be_written(reply)
    if len(set(reserved.frames.tolist())) != len(set(reserved.rows)):
        raise SpoiledAnswer("a frame for two blocks")


def written(reply: kvstore_pb2.CommitReply, sent: PackedBlocks, num_frames: int) -> PackedBlocks:
    """The blocks of the answer; `sent`: those of the request. Raises: SpoiledAnswer."""
    blocks = _packed(reply.blocks)
    if not blocks.names_same(sent):
        raise SpoiledAnswer("not one block for each that was written")
    if not blocks:
        return blocks
    _check_frames(blocks, num_frames)
    if blocks.are_reserved.any():
        raise SpoiledAnswer("a block that is not committed")
    is_ours = blocks.frames == sent.frames  # of the others another writer was faster
    is_right = blocks.generations == sent.generations + np.uint64(1)
    is_right &= blocks.checksums == sent.checksums
    is_right &= blocks.num_tokens == sent.num_tokens
    if not (is_right | ~is_ours).all():
        raise SpoiledAnswer("another block than the one that was written")
    if any(not block.chain_hash for block in blocks.take(~is_ours)):
        raise SpoiledAnswer("a tail in another frame")
    return blocks


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


def read_hold(
    reply: kvstore_pb2.HoldReply, request: kvstore_pb2.HoldRequest
) -> tuple[float, set[int]]:
    """For how many seconds the blocks are held, and which of them are stale. Raises:
    SpoiledAnswer."""
    # What it says wrongly of a hold is found by nothing behind it.
    if not wire.is_whole(reply):
        raise SpoiledAnswer("a hold with another checksum")
    if any(index >= len(request.frames) for index in reply.stale):
        raise SpoiledAnswer("a block that was not asked for")
    if reply.held_ms > request.ttl_ms:
        raise SpoiledAnswer("held for longer than was asked for")
    return reply.held_ms / 1000, set(reply.stale)


def read_rest(
    reply: kvstore_pb2.AwaitLentReply,
    request: kvstore_pb2.AwaitLentRequest,
    asked_s: float,
    now_s: float,
) -> tuple[LeaseUpdate, float]:
    """What it says, and until when all of it is held; 0: it is not. asked_s, now_s: of the question
    and of the answer here. Raises: SpoiledAnswer."""
    blocks = _packed(reply.blocks)
    if reply.num_unsealed > len(blocks):
        raise SpoiledAnswer("more blocks without a checksum than there are")
    if reply.held_ms and not (wire.is_whole(reply) and reply.held_ms <= request.hold_ms):
        raise SpoiledAnswer("a hold that cannot have been promised")
    waited_s, held_s = reply.waited_us / 1e6, reply.held_ms / 1000
    update = LeaseUpdate(blocks, reply.is_all, reply.num_unsealed, held_s)
    if not held_s or waited_s > now_s - asked_s:  # by what clock?
        return update, 0.0
    # The question came later than it was asked: the hold ends no sooner than this.
    return update, asked_s + waited_s + held_s


def _check_committed(
    block: common_pb2.BlockRef, chain_hash: bytes, num_frames: int, least: int = 2
) -> None:
    if block.chain_hash != chain_hash:
        raise SpoiledAnswer("another block than was asked for")
    if block.frame >= num_frames:
        raise SpoiledAnswer("a frame that does not exist")
    if block.generation % 2 or block.generation < least:
        raise SpoiledAnswer("a committed block at a generation of none")


def _packed(data: bytes) -> PackedBlocks:
    try:
        return PackedBlocks(data)
    except ValueError as error:
        raise SpoiledAnswer(str(error)) from error


def _check_frames(blocks: PackedBlocks, num_frames: int) -> None:
    if blocks and not ((blocks.frames < num_frames) & (blocks.generations > 0)).all():
        raise SpoiledAnswer("a frame that does not exist")


def _check_lease(told: str, asked: str) -> None:
    if not told or (asked and told != asked):
        raise SpoiledAnswer("another lease")
