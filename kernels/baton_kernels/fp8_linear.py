"""Linear layers in fp8 (e4m3): one scale per output channel of the weight, one per row of x.

Half the bytes of bfloat16 for few rows, twice its rate for many. Knows no model and no checkpoint.
Invariant: equal inputs give equal bits; a row is quantized by itself, so with `exact` its result
does not depend on the other rows. Engine thread only, per device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import linear as torch_linear
from torch.nn.functional import silu

from baton_kernels import layer_ops
from baton_kernels.dispatch import Backend, runs_triton
from baton_kernels.kv_quantization import scale_for
from baton_kernels.linear import Activation, Extras, check_extras, check_rows

FP8 = torch.float8_e4m3fn
_GREATEST = 448.0


@dataclass(frozen=True)
class Fp8Weight:
    """A weight [N, K] in fp8 with one scale per row; a number is its value times the scale of its
    row."""

    values: torch.Tensor
    """Quantized numbers, [N, K] float8_e4m3fn, rows dense."""

    scales: torch.Tensor
    """Scale of each row, [N] float32."""

    def __post_init__(self) -> None:
        if self.values.ndim != 2 or self.values.dtype != FP8 or self.values.stride(1) != 1:
            raise ValueError(f"values are {self.values.dtype}: [N, K] {FP8}, rows dense, expected")
        if self.scales.shape != self.values.shape[:1] or self.scales.dtype != torch.float32:
            raise ValueError(f"scales are {tuple(self.scales.shape)} {self.scales.dtype}")


def quantize_weight(weight: torch.Tensor) -> Fp8Weight:
    """Quantize each row of a weight [N, K] with the scale by which its greatest magnitude just fits
    e4m3."""
    scales = scale_for(weight.abs().amax(dim=1), "fp8_e4m3")
    return Fp8Weight(_rounded(weight, scales), scales)


def quantize_rows(
    x: torch.Tensor,
    *,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
    backend: Backend = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize each row of x with the scale by which its greatest magnitude just fits e4m3; a row
    of zeros has scale 1.

    Args:
        x: [M, K] bfloat16 or float32, rows dense.
        norm_weight: [K]: x goes through RMSNorm first, with no rounding in between.
    Returns: (values [M, K] float8_e4m3fn, scales [M] float32).
    Raises: ValueError naming what does not fit.
    """
    check_extras(x, x, Extras(norm_weight=norm_weight, norm_eps=norm_eps))
    if runs_triton(backend, x) and x.shape[0] > 0:
        from baton_kernels import fp8_linear_triton

        return fp8_linear_triton.quantize_rows(x, norm_weight, norm_eps)
    if norm_weight is not None:
        x = layer_ops.rms_norm_reference(x.float(), norm_weight, norm_eps)
    scales = scale_for(x.abs().amax(dim=1), "fp8_e4m3")
    return _rounded(x, scales), scales


def fp8_linear(
    x: torch.Tensor,
    weight: Fp8Weight,
    bias: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
    activation: Activation | None = None,
    out: torch.Tensor | None = None,
    backend: Backend = "auto",
    exact: bool = False,
) -> torch.Tensor:
    """Compute `linear` with both operands of the product in fp8.

    Args:
        x: [M, K], bfloat16 or float32; the others as in `linear`, in x's dtype.
        weight: fp8 weight [N, K]; [2N, K] with `activation`.
    Returns: [M, N] in x's dtype.
    Raises: ValueError naming what does not fit.
    """
    if activation not in (None, "silu_mul"):
        raise ValueError(f"activation {activation!r} is none of None, silu_mul")
    extras = Extras(bias, residual, norm_weight, norm_eps, activation is not None)
    width = check_extras(x, weight.values, extras)
    if out is None:
        out = x.new_empty(x.shape[0], width)
    else:
        check_rows("out", out, (x.shape[0], width), x)
    if x.shape[0] == 0:
        return out
    rows, scales = quantize_rows(x, norm_weight=norm_weight, norm_eps=norm_eps, backend=backend)
    if not runs_triton(backend, x):
        return out.copy_(_product_reference(rows, scales, weight, extras, x.dtype, exact))
    from baton_kernels import fp8_linear_triton, linear_triton

    tile = fp8_linear_triton.choose_tile(
        rows, weight.values, extras.is_gated, exact, backend == "triton"
    )
    if tile is None:
        product = fp8_linear_triton.library_product(
            rows, scales, weight.values, weight.scales, bias, x.dtype
        )
        if extras.is_gated:
            product = layer_ops.silu_mul(product)
        return out.copy_(product) if residual is None else torch.add(product, residual, out=out)
    return linear_triton.launch(
        rows,
        weight.values,
        out,
        tile,
        bias=bias,
        residual=residual,
        x_scales=scales,
        weight_scales=weight.scales,
        is_gated=extras.is_gated,
    )


def fp8_linear_reference(
    x: torch.Tensor, weight: Fp8Weight, extras: Extras, *, exact: bool = False
) -> torch.Tensor:
    """Compute `fp8_linear` in plain torch: the product in float32 of the numbers that the quantized
    values stand for."""
    rows, scales = quantize_rows(
        x, norm_weight=extras.norm_weight, norm_eps=extras.norm_eps, backend="reference"
    )
    return _product_reference(rows, scales, weight, extras, x.dtype, exact)


def _product_reference(
    rows: torch.Tensor,
    scales: torch.Tensor,
    weight: Fp8Weight,
    extras: Extras,
    dtype: torch.dtype,
    exact: bool,
) -> torch.Tensor:
    wide, columns = rows.float(), weight.values.float()
    if exact:  # row by row: a library's product of many rows sums in an order of its own
        product = torch.cat([torch_linear(row[None], columns) for row in wide])
    else:
        product = torch_linear(wide, columns)
    product = product * scales[:, None] * weight.scales
    if extras.bias is not None:
        product = product + extras.bias.float()
    product = product.to(dtype)
    if extras.is_gated:
        gate, up = product.chunk(2, dim=-1)
        product = silu(gate) * up
    return product if extras.residual is None else product + extras.residual


def _rounded(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return (x.float() / scales[:, None]).clamp(-_GREATEST, _GREATEST).to(FP8)
