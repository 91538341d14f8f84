"""Converts the values of this package to and from `baton.v1` protobuf messages, and checks each
answer of a store; pure, any thread.

Every answer is checked before it becomes a value: whether a store can have given it. gRPC does not
say when a bit has turned on the way. What is written to, counted with or kept by must fit the
question: as many blocks as were asked for, the same hashes in the same order, frames that exist,
generations odd while writing and even after it. What looks like a right answer (a wrong checksum,
another frame's reference) is found when the block is read. A SpoiledAnswer breaks the connection
(`StoreConnection.checking_reply`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from kvstore import block_hash
from kvstore.block_hash import CHAIN_HASH_BYTES
from kvstore.block_refs import Block, PackedBlocks, Tier
from kvstore.block_source import ChainToReserve, MatchResult, StoreInfo, WorkerInfo
from kvstore.exported_blocks import LeaseUpdate
from kvstore.nixl_push import PeerBlocks
from kvstore.transport.device import Shared
from kvstore.transport.nixl_agent import Region
from process.rpc_errors import InvalidArgument
from protos import common_pb2, kvstore_pb2

Checked = (
    kvstore_pb2.AttachRequest
    | kvstore_pb2.AttachReply
    | kvstore_pb2.ReserveReply
    | kvstore_pb2.PushRequest
    | kvstore_pb2.AwaitLentReply
    | kvstore_pb2.HoldReply
)
"""Messages that say where to write, or promise something: they carry a checksum of themselves."""

_INCARNATION_BYTES = 16
_TIER_NAMES = {tier: common_pb2.Tier.Name(tier.value) for tier in Tier}
_TIERS = {tier.value: tier for tier in Tier}


def block_to_proto(block: Block) -> common_pb2.BlockRef:
    """Convert a block reference to a message."""
    return common_pb2.BlockRef(
        chain_hash=block.chain_hash,
        frame=block.frame,
        generation=block.generation,
        checksum=block.checksum,
        num_tokens=block.num_tokens,
        tier=_TIER_NAMES[block.tier],
    )


def add_blocks(messages: Any, blocks: Iterable[Block]) -> None:
    """Append block references to a repeated field of a message: half the time of making a list
    first."""
    for block in blocks:
        messages.add(
            chain_hash=block.chain_hash,
            frame=block.frame,
            generation=block.generation,
            checksum=block.checksum,
            num_tokens=block.num_tokens,
            tier=block.tier,
        )


def block_from_proto(message: common_pb2.BlockRef) -> Block:
    """Convert a message to a block reference. A tier that this version does not know becomes
    UNSPECIFIED."""
    return Block(
        chain_hash=message.chain_hash,
        frame=message.frame,
        generation=message.generation,
        checksum=message.checksum,
        num_tokens=message.num_tokens,
        tier=_TIERS.get(message.tier, Tier.UNSPECIFIED),
    )


def blocks_from_proto(messages: Iterable[common_pb2.BlockRef]) -> list[Block]:
    """Convert messages to block references, in order."""
    return [block_from_proto(message) for message in messages]


def hashes_from_proto(data: bytes) -> list[bytes]:
    """Cut up chain hashes that lie side by side. Raises: InvalidArgument for a part of one."""
    if len(data) % CHAIN_HASH_BYTES:
        raise InvalidArgument("chain_hashes", f"a chain hash has {CHAIN_HASH_BYTES} bytes")
    return [data[at : at + CHAIN_HASH_BYTES] for at in range(0, len(data), CHAIN_HASH_BYTES)]


def packed_from_proto(data: bytes) -> PackedBlocks:
    """Unpack rows of blocks from a request. Raises: InvalidArgument for what are no rows of
    blocks."""
    try:
        return PackedBlocks(data)
    except ValueError as error:
        raise InvalidArgument("blocks", str(error)) from error


def to_be_written(reply: kvstore_pb2.ReserveReply) -> PackedBlocks:
    """The blocks of a reservation whose frames are still to be written, in order. Two chains that
    begin alike name the same frame twice. Raises: ValueError for what are no rows of blocks."""
    blocks = PackedBlocks(b"".join(chain.blocks for chain in reply.chains))
    return blocks.take(blocks.are_reserved)


def ttl_ms(ttl_s: float) -> int:
    """Convert seconds to milliseconds for the wire, rounded up so that a short time never becomes
    'none'."""
    return max(0, math.ceil(ttl_s * 1000))


def checksum_of(message: Checked) -> int:
    """The checksum of everything in the message but its own field `checksum`, which is unset when
    this returns.

    It is carried by the messages that say where to write: the owner of the memory does not see
    NIXL's writes, and one that went elsewhere would be found by the next reader there, or never.
    And NIXL ends a process that gives it spoiled metadata (seen: SIGSEGV for one turned bit in a
    hundred).
    """
    message.ClearField("checksum")
    return block_hash.checksum(message.SerializeToString(deterministic=True))


def is_whole(message: Checked) -> bool:
    """Whether a message has the checksum of its own content; its field `checksum` is unset when
    this returns."""
    stated = message.checksum
    return checksum_of(message) == stated


def need_whole(request: kvstore_pb2.AttachRequest | kvstore_pb2.PushRequest) -> None:
    """Check that a request has the checksum of its own content. Raises: InvalidArgument."""
    if not is_whole(request):
        raise InvalidArgument("checksum", "the message was spoiled on its way")


def worker_from_proto(request: kvstore_pb2.AttachRequest) -> WorkerInfo:
    """Convert an AttachRequest to a WorkerInfo."""
    peer: PeerBlocks | None = None
    if request.transport == "nixl":
        num_blocks = request.region_num_blocks
        region = Region(
            request.region_address,
            num_blocks * request.block_bytes,
            request.region_memory or "DRAM",
            request.region_device_id,
        )
        peer = PeerBlocks(request.nixl_metadata, region, num_blocks, request.block_bytes)
    return WorkerInfo(
        worker_id=request.worker_id,
        worker_incarnation=request.worker_incarnation,
        model_fingerprint=request.model_fingerprint,
        block_bytes=request.block_bytes,
        transport=request.transport,
        peer=peer,
        host_id=request.host_id,
    )


def info_to_proto(info: StoreInfo) -> kvstore_pb2.AttachReply:
    """Convert the answer to Attach to a message with its checksum."""
    shared = info.shared
    reply = kvstore_pb2.AttachReply(
        attachment_id=info.attachment_id,
        node_id=info.node_id,
        incarnation=info.incarnation,
        frame_bytes=info.frame_bytes,
        num_frames=info.num_frames,
        slab_path=info.slab_path,
        nixl_metadata=info.nixl_metadata,
        region_address=info.region_address,
        ipc_handle=shared.handle if shared is not None else b"",
        ipc_offset_bytes=shared.offset_bytes if shared is not None else 0,
        keeps_history=info.keeps_history,
    )
    reply.checksum = checksum_of(reply)
    return reply


def chains_from_proto(request: kvstore_pb2.ReserveRequest) -> list[ChainToReserve]:
    """The chains of a ReserveRequest. Raises: InvalidArgument."""
    return [
        ChainToReserve(
            chain.parent, hashes_from_proto(chain.chain_hashes), chain.tail_name, chain.tenant
        )
        for chain in request.chains
    ]


# ---- answers


class SpoiledAnswer(Exception):
    """An answer that no store can have given: it was damaged on the way."""


def read_attached(reply: kvstore_pb2.AttachReply, request: kvstore_pb2.AttachRequest) -> StoreInfo:
    """Read the answer to Attach. Raises: SpoiledAnswer where it is damaged, or cannot belong to the
    request."""
    if not is_whole(reply):
        raise SpoiledAnswer("a handshake with another checksum")
    if not (reply.node_id and reply.attachment_id):
        raise SpoiledAnswer("an attachment without a name")
    if len(reply.incarnation) != _INCARNATION_BYTES:
        raise SpoiledAnswer("an incarnation of another length")
    if reply.frame_bytes != request.block_bytes or reply.num_frames < 1:
        raise SpoiledAnswer("frames of another layout")
    return StoreInfo(
        attachment_id=reply.attachment_id,
        node_id=reply.node_id,
        incarnation=reply.incarnation,
        frame_bytes=reply.frame_bytes,
        num_frames=reply.num_frames,
        slab_path=reply.slab_path,
        nixl_metadata=reply.nixl_metadata,
        region_address=reply.region_address,
        shared=Shared(reply.ipc_handle, reply.ipc_offset_bytes) if reply.ipc_handle else None,
        keeps_history=reply.keeps_history,
    )


def read_matched(
    reply: kvstore_pb2.MatchReply, request: kvstore_pb2.MatchRequest, num_frames: int
) -> MatchResult:
    """Read the answer to Match. Raises: SpoiledAnswer unless it is a leading part of the chain that
    was asked for, at frames and generations that can be."""
    if len(reply.blocks) > len(request.chain_hashes):
        raise SpoiledAnswer("more blocks than were asked for")
    for asked, block in zip(request.chain_hashes, reply.blocks, strict=False):
        # A block in a page only, which is not pinned, has generation 0.
        _check_committed(block, asked, num_frames, least=2 if request.pin else 0)
    if request.lease_id:
        _check_lease(reply.lease_id, request.lease_id)
    elif request.pin and reply.blocks and not reply.lease_id:
        raise SpoiledAnswer("blocks pinned under no lease")
    return MatchResult(tuple(blocks_from_proto(reply.blocks)), reply.lease_id, reply.num_hits)


def check_reserved(
    reply: kvstore_pb2.ReserveReply, request: kvstore_pb2.ReserveRequest, num_frames: int
) -> None:
    """Check that a ReserveReply can be the answer to its request.

    Raises: SpoiledAnswer unless it is undamaged and under the lease that was asked for, answers
        each chain with leading blocks of it in order (then at most its tail), names only frames
        below `num_frames`, and lets each frame be written for one block only.
    """
    if not is_whole(reply):
        raise SpoiledAnswer("frames with another checksum")
    if len(reply.chains) != len(request.chains):
        raise SpoiledAnswer("not one answer for each chain")
    if not all(chain.lacks_parent for chain in reply.chains):
        _check_lease(reply.lease_id, request.lease_id)
    chains = [_packed(chain.blocks) for chain in reply.chains]
    for asked, chain, blocks in zip(request.chains, reply.chains, chains, strict=True):
        if blocks and chain.lacks_parent:
            raise SpoiledAnswer("frames after a block that is missing")
        num_full = min(len(blocks), len(asked.chain_hashes) // CHAIN_HASH_BYTES)
        if not blocks[:num_full].has_hashes(asked.chain_hashes[: num_full * CHAIN_HASH_BYTES]):
            raise SpoiledAnswer("another block than was asked for")
        rest = blocks[num_full:]
        if len(rest) > bool(asked.tail_name) or any(tail.chain_hash for tail in rest):
            raise SpoiledAnswer("a place for what was not asked for")
        if rest and not rest.are_reserved.all():
            raise SpoiledAnswer("a tail that was there before")
        _check_frames(blocks, num_frames)
    reserved = to_be_written(reply)
    if len(set(reserved.frames.tolist())) != len(set(reserved.rows)):
        raise SpoiledAnswer("a frame for two blocks")


def read_written(
    reply: kvstore_pb2.CommitReply, sent: PackedBlocks, num_frames: int
) -> PackedBlocks:
    """Read the answer to Commit. sent: the blocks of the request. Returns: the blocks as the store
    has them. Raises: SpoiledAnswer."""
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


def read_pinned(reply: kvstore_pb2.PinReply, request: kvstore_pb2.PinRequest) -> tuple[str, int]:
    """Read the answer to Pin. Returns: the lease, and how many blocks it pins. Raises:
    SpoiledAnswer."""
    if reply.num_pinned > len(request.blocks):
        raise SpoiledAnswer("more blocks pinned than were asked for")
    if bool(reply.lease_id) != bool(reply.num_pinned):
        raise SpoiledAnswer("blocks pinned under no lease, or a lease for none")
    return reply.lease_id, reply.num_pinned


def check_pushed(
    reply: kvstore_pb2.PushReply, request: kvstore_pb2.PushRequest, block_bytes: int
) -> None:
    """Check that a PushReply can be the answer to its request. Raises: SpoiledAnswer; whether the
    push is over must be asked then."""
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
    """Read the answer to Hold. Returns: for how many seconds the blocks are held, and which of them
    are stale. Raises: SpoiledAnswer."""
    # A wrong promise of a hold would be found by nothing later.
    if not is_whole(reply):
        raise SpoiledAnswer("a hold with another checksum")
    if any(index >= len(request.frames) for index in reply.stale):
        raise SpoiledAnswer("a block that was not asked for")
    if reply.held_ms > request.ttl_ms:
        raise SpoiledAnswer("held for longer than was asked for")
    return reply.held_ms / 1000, set(reply.stale)


def read_lease_update(
    reply: kvstore_pb2.AwaitLentReply,
    request: kvstore_pb2.AwaitLentRequest,
    asked_s: float,
    now_s: float,
) -> tuple[LeaseUpdate, float]:
    """Read the answer to AwaitLent. Returns: the update, and until when all of it is held, on this
    process' monotonic clock; 0: it is not.

    Args: asked_s, now_s: when the question was asked, and when its answer came here.
    Raises: SpoiledAnswer.
    """
    blocks = _packed(reply.blocks)
    if reply.num_unsealed > len(blocks):
        raise SpoiledAnswer("more blocks without a checksum than there are")
    if reply.held_ms and not (is_whole(reply) and reply.held_ms <= request.hold_ms):
        raise SpoiledAnswer("a hold that cannot have been promised")
    waited_s, held_s = reply.waited_us / 1e6, reply.held_ms / 1000
    update = LeaseUpdate(blocks, reply.is_all, reply.num_unsealed, waited_s, held_s)
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


def _check_lease(answered: str, asked: str) -> None:
    if not answered or (asked and answered != asked):
        raise SpoiledAnswer("another lease")
