"""Triton kernels and launchers of fp8 linear layers: rows quantized by one program each, tiles of
one byte a number, and the library's product with a scale per row and column. fp8_linear.py checks
the arguments. No state but the counters of linear_triton.py; engine thread only, per device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn.functional import ScalingType, scaled_mm

from baton_kernels.dispatch import overlap_options
from baton_kernels.linear_tiles import Tile, split_for

_MAX_ROWS = 64
"""Most rows of x for the Triton kernel; above it the library is faster."""

_LIBRARY_ALIGNMENT = 16
"""Multiple that K and N must have for the library's product, in numbers."""


def quantize_rows(
    x: torch.Tensor, norm_weight: torch.Tensor | None, norm_eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch `quantize_kernel` over the rows of x [M, K]; returns values [M, K] float8_e4m3fn and
    scales [M] float32."""
    num_rows, depth = x.shape
    values = torch.empty(num_rows, depth, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    quantize_kernel[(num_rows,)](
        x, norm_weight, values, scales, depth, x.stride(0), norm_eps,
        HAS_NORM=norm_weight is not None, BLOCK=1 << (depth - 1).bit_length(),
        num_warps=4 if depth <= 2048 else 8 if depth <= 8192 else 16, **overlap_options(x),
    )  # fmt: skip
    return values, scales


@triton.jit  # type: ignore[untyped-decorator]
def quantize_kernel(  # type: ignore[no-untyped-def]
    x, norm_weight, values, scales, K, x_stride, norm_eps,
    HAS_NORM: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Quantize one row per program. The division is rounded to nearest, so that the bytes equal
    those of the reference."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    numbers = tl.load(x + row * x_stride + k, mask=k < K, other=0.0).to(tl.float32)
    if HAS_NORM:
        factor = tl.rsqrt(tl.sum(numbers * numbers, axis=0) / K + norm_eps)
        numbers *= factor * tl.load(norm_weight + k, mask=k < K, other=0.0).to(tl.float32)
    scale = tl.math.div_rn(tl.max(tl.abs(numbers), axis=0), 448.0)
    scale = tl.where(scale == 0.0, 1.0, scale)
    quantized = tl.math.div_rn(numbers, tl.zeros_like(numbers) + scale)
    quantized = rounded_to_e4m3(tl.minimum(tl.maximum(quantized, -448.0), 448.0))
    tl.store(values + row * K + k, quantized.to(tl.float8e4nv), mask=k < K)
    tl.store(scales + row, scale)


@triton.jit
def rounded_to_e4m3(x):  # type: ignore[no-untyped-def]
    """Round to the nearest number of e4m3, ties to even, and stay float32, so that the conversion
    that follows does not round (Triton's interpreter would not round as the hardware does)."""
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000  # three bits of mantissa stay
    small = (x + 24576.0) - 24576.0  # below 2 ** -6 numbers are 2 ** -9 apart
    return tl.where(tl.abs(x) < 0.015625, small, bits.to(tl.float32, bitcast=True))


def choose_tile(
    rows: torch.Tensor, weight: torch.Tensor, is_gated: bool, exact: bool, is_forced: bool
) -> Tile | None:
    """Choose the tile of the Triton kernel; None: the library is faster and supports these
    shapes."""
    num_rows, depth = rows.shape
    width = weight.shape[0] // (2 if is_gated else 1)
    fits = depth % _LIBRARY_ALIGNMENT == 0 and weight.shape[0] % _LIBRARY_ALIGNMENT == 0
    if num_rows > _MAX_ROWS and fits and not exact and not is_forced:
        return None
    split = split_for(width, 64, depth, 256)
    if exact:  # one matrix instruction and one order of columns, whatever the rows
        return Tile(16 if num_rows <= 16 else 64, 64, 256, split, num_stages=3)
    if num_rows == 1:
        return Tile(0, 2, 2048, num_stages=1)
    if num_rows <= 16:
        split = 1 if is_gated else split_for(width, 16, depth, 512, num_programs=700, most=4)
        stages = 3 if split == 1 else 1
        return Tile(
            8 if num_rows <= 8 else 16, 16, 512, split, num_stages=stages, splits_warps=True
        )
    return Tile(32 if num_rows <= 32 else 64, 64, 256, split, num_stages=3)


def library_product(
    rows: torch.Tensor,
    scales: torch.Tensor,
    weight: torch.Tensor,
    weight_scales: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Compute [M, K] x [N, K] -> [M, N] in `dtype` with the library's scaled product."""
    product = scaled_mm(
        rows,
        weight.t(),
        scales[:, None],
        ScalingType.RowWise,
        weight_scales[None, :],
        ScalingType.RowWise,
        bias=bias if dtype == torch.bfloat16 else None,
        output_dtype=torch.bfloat16,
    )
    if dtype == torch.bfloat16:
        return product
    product = product.to(dtype)
    return product if bias is None else product + bias
