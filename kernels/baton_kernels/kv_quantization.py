"""Quantized KV in plain torch: one byte per number, and scales. No state; any thread.

A number x is kept as q = x / s, rounded to the nearest of int8 (-127 to 127, symmetrical) or of fp8
e4m3 (greatest 448, three bits of mantissa), and read as q * s. The bytes are int8 in both cases.
"""

from __future__ import annotations

import torch

_GREATEST = {"int8": 127.0, "fp8_e4m3": 448.0}


def scale_for(greatest: torch.Tensor, dtype: str) -> torch.Tensor:
    """Return the scale with which numbers up to `greatest` just fit the format; 1 where all of them
    are 0."""
    # By a tensor: CUDA multiplies by the reciprocal of a plain number, and the bits would differ.
    scale = greatest.float() / torch.full((), _GREATEST[dtype], device=greatest.device)
    return torch.where(scale == 0, torch.ones_like(scale), scale)


def quantize(
    x: torch.Tensor, dtype: str, num_scales: int, fixed_scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize matrices to one byte per number, each matrix by itself.

    Args:
        x: [..., P, D].
        dtype: "int8" or "fp8_e4m3".
        num_scales: P: one per row; 1: one per matrix.
        fixed_scale: one scale for every matrix in place of computed ones; larger numbers are
            clamped to the greatest that it can hold.
    Returns: ([..., P, D] int8, of fp8 too, whose bytes they are; scales [..., num_scales] float32,
        [..., 1] with `fixed_scale`).
    """
    x = x.float()
    if fixed_scale is not None:
        scales = x.new_full((*x.shape[:-2], 1), fixed_scale)
    else:
        greatest = x.abs().amax(dim=-1)
        if num_scales == 1:
            greatest = greatest.amax(dim=-1, keepdim=True)
        scales = scale_for(greatest, dtype)
    limit = _GREATEST[dtype]
    scaled = (x / scales[..., None]).clamp(-limit, limit)
    if dtype == "int8":
        return scaled.round().to(torch.int8), scales
    return scaled.to(torch.float8_e4m3fn).view(torch.int8), scales


def dequantize(
    quantized: torch.Tensor, scales: torch.Tensor, dtype: str, out_dtype: torch.dtype
) -> torch.Tensor:
    """Dequantize [..., P, D] int8 with scales [..., P] or [..., 1] float32 to [..., P, D] of
    `out_dtype`."""
    if dtype != "int8":
        quantized = quantized.view(torch.float8_e4m3fn)
    return (quantized.float() * scales[..., None]).to(out_dtype)
