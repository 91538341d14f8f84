"""Values survive the wire."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstore import wire
from kvstore.blocks import Block, Tier
from protos import common_pb2

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
