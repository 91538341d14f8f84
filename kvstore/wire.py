"""Values of this package to and from `baton.v1` messages; pure, any thread."""

from __future__ import annotations

import math
from collections.abc import Iterable

from kvstore import block_hash
from kvstore.block_hash import CHAIN_HASH_BYTES
from kvstore.blocks import Block, PackedBlocks, Tier
from kvstore.push import PeerBlocks
from kvstore.source import ChainToReserve, StoreInfo, WorkerInfo
from kvstore.transport.device import Shared
from kvstore.transport.nixl_agent import Region
from process.errors import InvalidArgument
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

_TIER_NAMES = {tier: common_pb2.Tier.Name(tier.value) for tier in Tier}
_TIERS = {tier.value: tier for tier in Tier}


def block_to_proto(block: Block) -> common_pb2.BlockRef:
    return common_pb2.BlockRef(
        chain_hash=block.chain_hash,
        frame=block.frame,
        generation=block.generation,
        checksum=block.checksum,
        num_tokens=block.num_tokens,
        tier=_TIER_NAMES[block.tier],
    )


def block_from_proto(message: common_pb2.BlockRef) -> Block:
    """A tier that this version does not know becomes UNSPECIFIED."""
    return Block(
        chain_hash=message.chain_hash,
        frame=message.frame,
        generation=message.generation,
        checksum=message.checksum,
        num_tokens=message.num_tokens,
        tier=_TIERS.get(message.tier, Tier.UNSPECIFIED),
    )


def blocks_from_proto(messages: Iterable[common_pb2.BlockRef]) -> list[Block]:
    return [block_from_proto(message) for message in messages]


def hashes_from_proto(data: bytes) -> list[bytes]:
    """Chain hashes that lie side by side. Raises: InvalidArgument for a part of one."""
    if len(data) % CHAIN_HASH_BYTES:
        raise InvalidArgument("chain_hashes", f"a chain hash has {CHAIN_HASH_BYTES} bytes")
    return [data[at : at + CHAIN_HASH_BYTES] for at in range(0, len(data), CHAIN_HASH_BYTES)]


def packed_from_proto(data: bytes) -> PackedBlocks:
    """Raises: InvalidArgument for what are no rows of blocks."""
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
    """Milliseconds for the wire, rounded up so that a short time never becomes 'none'."""
    return max(0, math.ceil(ttl_s * 1000))


def checksum_of(message: Checked) -> int:
    """Of everything in the message but its own field `checksum`, which is unset when this returns.

    It is carried by the messages that say where to write: NIXL's writes ask nobody, and one that
    went elsewhere would be found by whoever reads there next, or never. And NIXL ends a process
    that gives it spoiled metadata (seen: SIGSEGV for one turned bit in a hundred).
    """
    message.ClearField("checksum")
    return block_hash.checksum(message.SerializeToString(deterministic=True))


def is_whole(message: Checked) -> bool:
    """Whether the message's checksum is its own; the field is unset when this returns."""
    told = message.checksum
    return checksum_of(message) == told


def need_whole(request: kvstore_pb2.AttachRequest | kvstore_pb2.PushRequest) -> None:
    """Raises: InvalidArgument for a request with another checksum than its own."""
    if not is_whole(request):
        raise InvalidArgument("checksum", "the message was spoiled on its way")


def worker_from_proto(request: kvstore_pb2.AttachRequest) -> WorkerInfo:
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
    """With its checksum."""
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


def info_from_proto(reply: kvstore_pb2.AttachReply) -> StoreInfo:
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


def chains_from_proto(request: kvstore_pb2.ReserveRequest) -> list[ChainToReserve]:
    """Raises: InvalidArgument."""
    return [
        ChainToReserve(
            chain.parent, hashes_from_proto(chain.chain_hashes), chain.tail_name, chain.tenant
        )
        for chain in request.chains
    ]
