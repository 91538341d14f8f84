"""Triton kernels of `baton_kernels.lora`: shrink to the rank, in parts of K side by side; then add
the parts in order and expand. lora.py checks the arguments. No state; any thread."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from baton_kernels.dispatch import overlap_options
from baton_kernels.linear_tiles import ceil_div

_PART = 1024
"""Columns of x per program of the shrink kernel, few enough that a few rows make many programs."""


def add_lora(
    out: torch.Tensor,
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    row_ids: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """Launch the shrink and expand kernels, which add the adapters' output for x to out."""
    num_tiles, tile_rows = row_ids.shape
    _, rank, depth = a.shape
    width = b.shape[2]
    block_r = max(16, 1 << (rank - 1).bit_length())
    block_n, block_k = 128, 128 if block_r <= 64 else 64
    if x.dtype == torch.float32:  # no matrix unit: all of it is unrolled
        block_n, block_k = 16, 32
    num_parts = ceil_div(depth, _PART)
    shrunk = torch.empty(
        num_parts, num_tiles, tile_rows, block_r, dtype=torch.float32, device=x.device
    )
    options = {
        "TILE_ROWS": tile_rows,
        "BLOCK_R": block_r,
        "UPCASTS": not x.is_cuda,
        "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
        "num_warps": 4,
        **overlap_options(x),
    }
    shrink_kernel[(num_tiles, num_parts)](
        x, a, shrunk, row_ids, slots, rank, depth, x.stride(0), num_tiles,
        BLOCK_K=block_k, NUM_STEPS=_PART // block_k, **options,
    )  # fmt: skip
    expand_kernel[(num_tiles, ceil_div(width, block_n))](
        out, b, shrunk, row_ids, slots, rank, width, out.stride(0), num_tiles,
        NUM_PARTS=num_parts, BLOCK_N=block_n, **options,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_tiles"])  # type: ignore[untyped-decorator]
def shrink_kernel(  # type: ignore[no-untyped-def]
    x, a, shrunk, row_ids, slots, R, K, x_stride, num_tiles,
    TILE_ROWS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
    NUM_STEPS: tl.constexpr, UPCASTS: tl.constexpr, PRECISION: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Compute one part of the shrink in float32: [tile's rows, part of K] x [R, part of K] ->
    [rows, R]."""
    tile = tl.program_id(0)
    part = tl.program_id(1)
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    slot = tl.load(slots + tile)
    if slot < 0:
        return
    lane = tl.arange(0, TILE_ROWS)
    row = tl.load(row_ids + tile * TILE_ROWS + lane)
    r = tl.arange(0, BLOCK_R)
    k = part * (NUM_STEPS * BLOCK_K) + tl.arange(0, BLOCK_K)
    x_rows = x + row[:, None].to(tl.int64) * x_stride
    a_rows = a + (slot.to(tl.int64) * R + r[:, None]) * K
    acc = tl.zeros((TILE_ROWS, BLOCK_R), dtype=tl.float32)
    for step in tl.range(NUM_STEPS):
        columns = k + step * BLOCK_K
        inside = columns[None, :] < K
        xs = tl.load(x_rows + columns[None, :], mask=(row >= 0)[:, None] & inside, other=0.0)
        factors = tl.load(a_rows + columns[None, :], mask=(r < R)[:, None] & inside, other=0.0)
        if UPCASTS:
            xs = xs.to(tl.float32)
            factors = factors.to(tl.float32)
        acc = tl.dot(xs, tl.trans(factors), acc, input_precision=PRECISION)
    place = (part * num_tiles + tile) * TILE_ROWS + lane
    tl.store(shrunk + place[:, None].to(tl.int64) * BLOCK_R + r[None, :], acc)


@triton.jit(do_not_specialize=["num_tiles"])  # type: ignore[untyped-decorator]
def expand_kernel(  # type: ignore[no-untyped-def]
    out, b, shrunk, row_ids, slots, R, N, out_stride, num_tiles,
    TILE_ROWS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
    NUM_PARTS: tl.constexpr, UPCASTS: tl.constexpr, PRECISION: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Add the parts in order, multiply [rows, R] x [R, N], and add the result to out."""
    tile = tl.program_id(0)
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    slot = tl.load(slots + tile)
    if slot < 0:
        return
    lane = tl.arange(0, TILE_ROWS)
    row = tl.load(row_ids + tile * TILE_ROWS + lane)
    r = tl.arange(0, BLOCK_R)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    small = tl.zeros((TILE_ROWS, BLOCK_R), dtype=tl.float32)
    for part in tl.static_range(NUM_PARTS):
        place = (part * num_tiles + tile) * TILE_ROWS + lane
        small += tl.load(shrunk + place[:, None].to(tl.int64) * BLOCK_R + r[None, :])
    factors = tl.load(
        b + (slot.to(tl.int64) * R + r[:, None]) * N + n[None, :],
        mask=(r < R)[:, None] & (n < N)[None, :],
        other=0.0,
    )
    if UPCASTS:
        factors = factors.to(tl.float32)
    delta = tl.dot(small.to(factors.dtype), factors, input_precision=PRECISION)
    place = out + row[:, None].to(tl.int64) * out_stride + n[None, :]
    inside = (row >= 0)[:, None] & (n < N)[None, :]
    before = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    tl.store(place, (before + delta).to(out.dtype.element_ty), mask=inside)
