"""Blocks' checksums where they lie: xxhash's own numbers, from the kernel and from plain torch."""

from __future__ import annotations

import pytest
import torch
import xxhash
from baton_kernels import block_checksums as door
from baton_kernels.block_checksums import block_checksums
from baton_kernels.dispatch import Backend

from tests.kernels.conftest import DEVICE

LENGTHS = (248, 256, 1024, 1032, 1088, 1096, 2048, 5000, 8192, 9216, 17 * 1024 + 8, 98304)
"""Around the borders of stripes (64), pieces (1,024), and of what one program takes."""


def _expected(cache: torch.Tensor, block_ids: list[int]) -> list[int]:
    whole = cache.cpu().view(torch.uint8).numpy()
    return [xxhash.xxh3_64_intdigest(whole[block_id].tobytes()) for block_id in block_ids]


def _found(cache: torch.Tensor, block_ids: list[int], backend: Backend) -> list[int]:
    ids = torch.tensor(block_ids, dtype=torch.int32, device=cache.device)
    out = torch.full((len(block_ids),), -1, dtype=torch.int64, device=cache.device)
    found = block_checksums(cache, ids, out=out, backend=backend)
    assert found is out
    return [number % 2**64 for number in found.tolist()]


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("num_bytes", LENGTHS)
def test_checksums_are_those_of_xxhash(backend: Backend, num_bytes: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    cache = torch.randint(0, 256, (9, num_bytes), dtype=torch.uint8, generator=generator)
    for block_ids in ([4], [8, 0, 3, 3, 7]):
        expected = _expected(cache, block_ids)
        assert _found(cache.to(DEVICE), block_ids, backend) == expected


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_every_bit_counts(backend: Backend, seed: int) -> None:
    """Also of blocks of other numbers, of all zeros, and of the greatest numbers that there are."""
    num_bytes = 3 * 1024 + 3 * 64 + 8
    for fill in (0, 255):
        whole = torch.full((2, num_bytes), fill, dtype=torch.uint8)
        cache = whole.view(torch.bfloat16).to(DEVICE)
        before = _found(cache, [1], backend)
        assert before == _expected(cache, [1])
        for at in (0, 1023, 1024, 3 * 1024 + 191, num_bytes - 1):
            whole[1, at] ^= 0x80
            changed = whole.view(torch.bfloat16).to(DEVICE)
            assert _found(changed, [1], backend) == _expected(changed, [1]) != before
            whole[1, at] ^= 0x80


def test_a_part_of_wider_rows_and_rows_far_away() -> None:
    wide = torch.randint(0, 256, (5, 4096), dtype=torch.uint8).to(DEVICE)
    part = wide[:, 1024:3000]
    whole = part.contiguous()
    assert _found(part, [4, 1], "triton") == _expected(whole, [4, 1])
    assert _found(part, [4, 1], "reference") == _expected(whole, [4, 1])


@pytest.mark.skipif(DEVICE == "cpu", reason="NO GPU TEST: 9 GB of blocks")
def test_blocks_beyond_what_32_bits_count() -> None:
    cache = torch.zeros(4500, 1 << 21, dtype=torch.uint8, device=DEVICE)
    cache[4499, 77], cache[2100, -1] = 3, 9
    ids = [4499, 2100, 0]
    rows = torch.stack([cache[block_id] for block_id in ids])
    assert _found(cache, ids, "triton") == _expected(rows, [0, 1, 2])


def test_what_does_not_fit_is_named() -> None:
    ids = torch.tensor([0], dtype=torch.int32)
    for cache, what in (
        (torch.zeros(2, 240, dtype=torch.uint8), "at least 241"),
        (torch.zeros(2, 300, dtype=torch.uint8), "multiple of 8"),
        (torch.zeros(600, dtype=torch.uint8), "dense"),
        (torch.zeros(2, 300, dtype=torch.uint8)[:, 4:260], "begin at multiples of 8"),
    ):
        with pytest.raises(ValueError, match=f"cache: .*{what}"):
            block_checksums(cache, ids)
    cache = torch.zeros(2, 512, dtype=torch.uint8)
    with pytest.raises(ValueError, match="block_ids"):
        block_checksums(cache, ids.long())
    with pytest.raises(ValueError, match="out"):
        block_checksums(cache, ids, out=torch.zeros(2, dtype=torch.int64))
    few = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match="sums: room for 8 int64"):
        block_checksums(cache, ids, sums=few, backend="triton")
    assert block_checksums(cache, ids[:0]).shape == (0,)
    assert door.fits(2**21) and not door.fits(240) and not door.fits(1002)
