"""Packed blocks are the very blocks: whatever is asked of them, they say what a tuple would."""

from __future__ import annotations

import dataclasses
import itertools
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.block_refs import ROW_BYTES, Block, PackedBlocks, PackedItems, Tier, block_of
from kvstore.transport.base import GetItems
from tests.conftest import LONG

any_blocks = st.lists(
    st.builds(
        Block,
        chain_hash=st.binary(min_size=16, max_size=16) | st.just(b"") | st.just(bytes(16)),
        frame=st.integers(0, 2**32 - 1),
        generation=st.integers(0, 2**64 - 1),
        checksum=st.integers(0, 2**64 - 1),
        num_tokens=st.integers(0, 2**32 - 1),
        tier=st.sampled_from(Tier),
    ),
    max_size=4,
).map(tuple)
some = settings(max_examples=200 if LONG else 40)
edges = st.none() | st.integers(-6, 6)


@some
@given(any_blocks)
def test_what_is_packed_comes_out(blocks: tuple[Block, ...]) -> None:
    packed = PackedBlocks.of(blocks)
    assert len(packed.data) == ROW_BYTES * len(blocks)
    again = PackedBlocks(packed.data)
    assert tuple(again) == blocks and len(again) == len(blocks)
    assert again == packed == blocks and repr(again) == repr(blocks)
    assert [again[index] for index in range(-len(blocks), len(blocks))] == [*blocks, *blocks]
    with pytest.raises(IndexError):
        again[len(blocks)]


@some
@given(any_blocks, any_blocks)
def test_equal_bytes_are_equal_blocks(one: tuple[Block, ...], other: tuple[Block, ...]) -> None:
    packed = PackedBlocks.of(one), PackedBlocks.of(other)
    assert (packed[0].data == packed[1].data) == (one == other)
    assert packed[0] + packed[1] == one + other


@some
@given(any_blocks, any_blocks, any_blocks)
def test_leading_blocks_that_are_the_same(
    both: tuple[Block, ...], one: tuple[Block, ...], other: tuple[Block, ...]
) -> None:
    ours, theirs = (*both, *one), (*both, *other)
    pairs = zip(ours, theirs, strict=False)
    num_same = next(
        (at for at, (a, b) in enumerate(pairs) if a != b), min(map(len, (ours, theirs)))
    )
    assert PackedBlocks.of(ours).num_same(PackedBlocks.of(theirs)) == num_same


@some
@given(any_blocks, edges, edges)
def test_any_part_is_that_part(blocks: tuple[Block, ...], start: int, stop: int) -> None:
    part = PackedBlocks.of(blocks)[start:stop]
    assert tuple(part) == blocks[start:stop] and PackedBlocks(part.data) == part
    with pytest.raises(ValueError, match="one piece"):
        PackedBlocks.of(blocks)[::2]


@some
@given(any_blocks, st.data())
def test_they_match_as_far_as_hash_and_tokens_do(
    blocks: tuple[Block, ...], data: st.DataObject
) -> None:
    """Against a loop. A block without a hash matches none, not even the hash that is all zeros."""
    ours = [
        block.chain_hash if block.chain_hash and data.draw(st.integers(0, 4)) else bytes(16)
        for block in blocks
    ][: data.draw(st.integers(0, 4))]
    num_tokens = data.draw(st.sampled_from([16, *(block.num_tokens for block in blocks)]))
    expected = 0
    for block, chain_hash in zip(blocks, ours, strict=False):
        if (block.chain_hash, block.num_tokens) != (chain_hash, num_tokens):
            break
        expected += 1
    assert PackedBlocks.of(blocks).num_matching(ours, num_tokens) == expected


@some
@given(any_blocks, st.data())
def test_a_flipped_bit_is_another_block_or_none(
    blocks: tuple[Block, ...], data: st.DataObject
) -> None:
    packed = bytearray(PackedBlocks.of(blocks).data)
    if not packed:
        return
    place = data.draw(st.integers(0, len(packed) - 1))
    if place % ROW_BYTES == ROW_BYTES - 2:
        return  # a tier that this version does not know is UNSPECIFIED
    packed[place] ^= data.draw(st.sampled_from([1 << bit for bit in range(8)]))
    try:
        assert tuple(PackedBlocks(bytes(packed))) != blocks
    except ValueError:
        return


def test_a_block_without_a_hash_does_not_match_zeros() -> None:
    blocks = [Block(bytes(16), 0, 2, 0, 16), Block(b"", 0, 2, 0, 16)]
    assert PackedBlocks.of(blocks).num_matching([bytes(16), bytes(16)], 16) == 1


def test_what_cannot_be_packed_is_refused() -> None:
    block = Block(bytes(16), 0, 2, 0, 16)
    with pytest.raises(ValueError, match="16 bytes"):
        PackedBlocks.of([dataclasses.replace(block, chain_hash=b"short")])
    with pytest.raises(struct.error):
        PackedBlocks.of([dataclasses.replace(block, frame=2**32)])
    row = PackedBlocks.of([block]).data
    unknown = PackedBlocks(row[:-2] + b"\x63" + row[-1:])
    assert unknown[0].tier is Tier.UNSPECIFIED
    with pytest.raises(ValueError, match="bytes each"):
        PackedBlocks(row[:-1])
    with pytest.raises(ValueError, match="has one"):
        PackedBlocks(b"\x01" + row[1:-1] + b"\x00")


@some
@given(any_blocks)
def test_rows_are_blocks_and_the_other_way_round(blocks: tuple[Block, ...]) -> None:
    packed = PackedBlocks.of(blocks)
    assert tuple(block_of(each) for each in packed.rows) == blocks
    assert PackedBlocks.of_rows(packed.rows) == packed
    assert packed.frames.tolist() == [each.frame for each in blocks]
    assert packed.generations.tolist() == [each.generation for each in blocks]
    assert packed.checksums.tolist() == [each.checksum for each in blocks]


@some
@given(any_blocks, st.integers(0, 4), st.lists(st.integers(0, 2**64 - 1), max_size=4))
def test_other_checksums_change_nothing_else(
    blocks: tuple[Block, ...], first: int, found: list[int]
) -> None:
    found = found[: max(0, len(blocks) - first)]
    packed = PackedBlocks.of(blocks)
    other = packed.with_checksums(first, found)
    assert packed == blocks, "it is another value"
    for at, (before, after) in enumerate(zip(blocks, other, strict=True)):
        changed = found[at - first] if first <= at < first + len(found) else before.checksum
        assert after == dataclasses.replace(before, checksum=changed)


@some
@given(any_blocks)
def test_neighbours_in_one_tier_are_counted_together(blocks: tuple[Block, ...]) -> None:
    expected = []
    for tier, group in itertools.groupby(blocks, key=lambda block: block.tier):
        counts = [block.num_tokens for block in group]
        expected.append((tier, len(counts), sum(counts)))
    assert PackedBlocks.of(blocks).tiers() == expected


@some
@given(any_blocks, edges, edges)
def test_items_are_blocks_with_their_places(
    blocks: tuple[Block, ...], start: int | None, stop: int | None
) -> None:
    places = range(50, 50 + len(blocks))
    pairs = list(zip(blocks, places, strict=True))
    items = PackedItems(PackedBlocks.of(blocks), places)
    assert list(items) == pairs and len(items) == len(pairs)
    assert [items[at] for at in range(-len(pairs), len(pairs))] == pairs + pairs
    assert list(items[start:stop] + items) == pairs[start:stop] + pairs
    with pytest.raises(ValueError, match="places"):
        PackedItems(PackedBlocks.of(blocks), range(len(blocks) + 1))
    one_by_one, packed = GetItems(pairs, 7.5), GetItems(items, 7.5)
    for each in (one_by_one, packed):
        assert list(each) == [each[at] for at in range(len(each))] == pairs
        assert list(each[start:stop]) == pairs[start:stop] and each[start:stop].held_until_s == 7.5
        assert each.block_ids == list(places)
        assert each.checksums == [block.checksum for block in blocks]
    for a, b in zip(one_by_one.columns(), packed.columns(), strict=True):
        assert a.dtype == b.dtype and a.tolist() == b.tolist()
