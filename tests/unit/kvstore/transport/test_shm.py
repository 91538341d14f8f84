"""Copies whose checksums are computed on the way: the same bytes and the same checksums as of a
plain copy that is hashed afterwards."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from kvstore import block_hash
from kvstore.transport import shm
from kvstore.transport.shm import PIECE_BYTES, CheckedCopy

NUM_BLOCKS, NUM_FRAMES = 24, 30
SIZES = [1, 24, 4096, 5000, PIECE_BYTES // 3, PIECE_BYTES, PIECE_BYTES + 1, 2 * PIECE_BYTES + 240]


def _memories(seed: int, block_bytes: int, gap: int) -> tuple[Any, Any]:
    draw = np.random.default_rng(seed)
    own = draw.integers(0, 256, (NUM_BLOCKS, block_bytes), dtype=np.uint8)
    return own, draw.integers(0, 256, (NUM_FRAMES, block_bytes + gap), dtype=np.uint8)


def _rows(draw: random.Random, kind: str) -> tuple[Any, Any]:
    """Frames and blocks: neighbours, scattered, or runs of both."""
    num = draw.randrange(1, NUM_BLOCKS)
    blocks, frames = list(range(num)), list(range(3, num + 3))
    if kind != "neighbours":
        blocks = draw.sample(range(NUM_BLOCKS), num)
        frames = draw.sample(range(NUM_FRAMES), num)
    if kind == "runs":
        blocks, frames = sorted(blocks), sorted(frames)
    return np.array(frames, dtype=np.int64), np.array(blocks, dtype=np.int64)


@pytest.mark.parametrize("kind", ["neighbours", "scattered", "runs"])
@pytest.mark.parametrize("gap", [0, 16])
@pytest.mark.parametrize("block_bytes", SIZES)
def test_bytes_and_checksums_are_those_of_a_plain_copy(
    block_bytes: int, gap: int, kind: str, seed: int
) -> None:
    frames, blocks = _rows(random.Random(seed), kind)

    own, slab = _memories(seed, block_bytes, gap)
    expected = slab.copy()
    expected[frames, :block_bytes] = own[blocks]
    checksums = CheckedCopy(own, slab).put(frames, blocks)
    assert np.array_equal(slab, expected)
    assert checksums == [block_hash.checksum(own[block]) for block in blocks]

    own, slab = _memories(seed + 1, block_bytes, gap)
    expected = own.copy()
    expected[blocks] = slab[frames, :block_bytes]
    checksums = CheckedCopy(own, slab).get(blocks, frames)
    assert np.array_equal(own, expected)
    assert checksums == [block_hash.checksum(own[block]) for block in blocks]


def test_nothing_to_copy(seed: int) -> None:
    copies = CheckedCopy(*_memories(seed, 24, 0))
    none = np.array([], dtype=np.int64)
    assert copies.put(none, none) == copies.get(none, none) == []


@pytest.mark.parametrize("block_bytes", [5000, PIECE_BYTES + 5000])
def test_what_a_copy_breaks_shows_in_the_checksums_of_its_reader(
    block_bytes: int, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Both directions hash the worker's bytes: a writer tells what it has, a reader what it got."""
    own, slab = _memories(seed, block_bytes, 0)
    real = np.copyto

    def broken(target: Any, source: Any) -> None:
        real(target, source)
        target[..., -1] ^= 1

    copies = CheckedCopy(own, slab)
    rows = np.array([2, 3, 9], dtype=np.int64)
    monkeypatch.setattr(shm.np, "copyto", broken)
    written = copies.put(rows, rows)
    read = copies.get(rows + 10, rows)
    monkeypatch.undo()
    assert written == [block_hash.checksum(own[row]) for row in rows]
    assert read == [block_hash.checksum(own[row]) for row in rows + 10]
    assert not set(read) & {block_hash.checksum(slab[row]) for row in rows}
