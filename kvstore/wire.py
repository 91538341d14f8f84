"""Values of this package to and from `baton.v1` messages. The only module here, beside server and
client, that knows the stubs; pure, any thread."""

from __future__ import annotations

import math
from collections.abc import Iterable

from kvstore.block import Block, Tier
from protos import common_pb2


def block_to_proto(block: Block) -> common_pb2.BlockRef:
    return common_pb2.BlockRef(
        chain_hash=block.chain_hash,
        frame=block.frame,
        generation=block.generation,
        checksum=block.checksum,
        num_tokens=block.num_tokens,
        tier=common_pb2.Tier.Name(block.tier.value),
    )


def block_from_proto(message: common_pb2.BlockRef) -> Block:
    """A tier that this version does not know becomes UNSPECIFIED."""
    number = int(message.tier)
    known = number in {int(tier) for tier in Tier}
    return Block(
        chain_hash=message.chain_hash,
        frame=message.frame,
        generation=message.generation,
        checksum=message.checksum,
        num_tokens=message.num_tokens,
        tier=Tier(number) if known else Tier.UNSPECIFIED,
    )


def blocks_from_proto(messages: Iterable[common_pb2.BlockRef]) -> list[Block]:
    return [block_from_proto(message) for message in messages]


def ttl_ms(ttl_s: float) -> int:
    """Milliseconds for the wire, rounded up so that a short time never becomes 'none'."""
    return max(0, math.ceil(ttl_s * 1000))
