"""Whole blocks move as bytes: exactly, only where told, and whatever their length and address."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from baton_kernels import block_ops

Tensors = Callable[..., torch.Tensor]
BACKENDS = ("triton", "reference")


def cache_of(width: int, dtype: torch.dtype, part: slice, device: str, seed: int) -> torch.Tensor:
    """A part of each of 9 blocks, random bytes."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, 255, (9, width * dtype.itemsize), generator=generator)
    if dtype.is_floating_point:
        return torch.randn(9, width, generator=generator).to(device, dtype)[:, part]
    return numbers.to(torch.uint8).to(device).view(dtype)[:, part]


PARTS = [
    (torch.bfloat16, 4096, slice(0, 4096)),
    (torch.bfloat16, 300, slice(100, 201)),  # neither its address nor its length is even
    (torch.float32, 77, slice(1, 77)),
    (torch.int8, 50, slice(3, 46)),
    (torch.float32, 20000, slice(0, 20000)),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("dtype", "width", "part"), PARTS)
def test_out_and_back(
    dtype: torch.dtype, width: int, part: slice, backend: block_ops.Backend, device: str, seed: int
) -> None:
    cache = cache_of(width, dtype, part, device, seed)
    before = cache.clone()
    ids = torch.tensor([7, -1, 0, 3], dtype=torch.int32, device=device)
    out = torch.full((4, cache.shape[1]), 5, dtype=dtype, device=device)
    assert block_ops.gather_blocks(cache, ids, out=out, backend=backend) is out
    for row, block in ((0, 7), (2, 0), (3, 3)):
        assert torch.equal(out[row], before[block])
    assert (out[1] == 5).all()
    assert torch.equal(cache, before)

    targets = torch.tensor([2, 8, -1, 1], dtype=torch.int32, device=device)
    block_ops.scatter_blocks(cache, targets, out, backend=backend)
    expected = before.clone()
    expected[2], expected[8], expected[1] = before[7], 5, before[3]
    assert torch.equal(cache, expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("dtype", "width", "part"), PARTS[:4])
def test_copy_and_clear(
    dtype: torch.dtype, width: int, part: slice, backend: block_ops.Backend, device: str, seed: int
) -> None:
    cache = cache_of(width, dtype, part, device, seed)
    expected = cache.clone()
    pairs = torch.tensor([[4, 6], [-1, 2], [4, 0], [3, -1]], dtype=torch.int32, device=device)
    block_ops.copy_blocks(cache, pairs, backend=backend)
    expected[6] = expected[0] = expected[4]
    assert torch.equal(cache, expected)
    ids = torch.tensor([8, -1, 4], dtype=torch.int32, device=device)
    block_ops.clear_blocks(cache, ids, backend=backend)
    expected[8], expected[4] = 0, 0
    assert torch.equal(cache, expected)


def test_nothing_beside_a_part_is_touched(device: str, seed: int) -> None:
    """A rank's columns: its neighbours' bytes stay."""
    whole = cache_of(300, torch.float32, slice(0, 300), device, seed)
    expected = whole.clone()
    expected[5, 100:200] = 0
    ids = torch.tensor([5], dtype=torch.int32, device=device)
    block_ops.clear_blocks(whole[:, 100:200], ids, backend="triton")
    assert torch.equal(whole, expected)


def test_no_blocks_is_no_error(device: str) -> None:
    cache = torch.zeros(3, 8, device=device)
    ids = torch.zeros(0, dtype=torch.int32, device=device)
    assert block_ops.gather_blocks(cache, ids, backend="triton").shape == (0, 8)


def test_refuses(device: str) -> None:
    cache = torch.zeros(3, 8, device=device)
    ids = torch.zeros(2, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="cache"):
        block_ops.gather_blocks(cache.t(), ids)
    with pytest.raises(ValueError, match="block_ids"):
        block_ops.gather_blocks(cache, ids.long())
    with pytest.raises(ValueError, match="out"):
        block_ops.gather_blocks(cache, ids, out=torch.zeros(2, 9, device=device))
    with pytest.raises(ValueError, match="staging"):
        block_ops.scatter_blocks(cache, ids, torch.zeros(2, 8, dtype=torch.int8, device=device))
    with pytest.raises(ValueError, match="pairs"):
        block_ops.copy_blocks(cache, ids)
    with pytest.raises(ValueError, match="pairs"):
        block_ops.copy_blocks(cache, ids[None].expand(3, 2)[:, :1])
