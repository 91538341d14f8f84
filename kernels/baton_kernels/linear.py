"""Linear layers fused with their neighbours: RMSNorm before, bias, SwiGLU or residual after.

For few rows (decoding) one Triton kernel streams the weight and does the rest beside it; for many,
the library's product and the kernels of layer_ops. Knows no model. Invariant: equal inputs give
equal bits, run after run; with `exact` a row's bits do not depend on the other rows either. Engine
thread only, per device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn.functional import linear as torch_linear
from torch.nn.functional import silu

from baton_kernels import layer_ops
from baton_kernels.dispatch import Backend, runs_triton

Activation = Literal["silu_mul"]

_FEWEST_GATED_ROWS = 1024
_FEWEST_ROWS_OF_LARGE = 129
"""Rows from which on SwiGLU is computed in the launch of the product, where the device can; fewer
suffice for weights with more than 2^25 numbers. Measured: with fewer rows the library's product and
a second launch are as fast."""


@dataclass(frozen=True)
class Extras:
    """Operands fused into one product; `linear` checks them."""

    bias: torch.Tensor | None = None
    """Bias, one number per row of the weight."""

    residual: torch.Tensor | None = None
    """Residual, [M, N], added at the end."""

    norm_weight: torch.Tensor | None = None
    """Weight [K] of the RMSNorm that is applied to x first."""

    norm_eps: float = 1e-6

    is_gated: bool = False
    """Whether the weight is [2N, K], gate rows then up rows, and the result is silu(gate) * up."""


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
    activation: Activation | None = None,
    half_norm: HalfNorm | None = None,
    leaves: HalfNorm | None = None,
    out: torch.Tensor | None = None,
    backend: Backend = "auto",
    exact: bool = False,
) -> torch.Tensor:
    """Compute act(rms_norm(x) @ weight.T + bias) + residual.

    Args:
        x: [M, K], bfloat16 or float32, rows dense.
        weight: [N, K] of x's dtype, rows dense; [2N, K] with `activation`: gate rows, then up rows.
        bias: one number per row of the weight.
        residual: [M, N], rows dense; may be `out`.
        norm_weight: [K]: x is normed first (its mean of squares in float32).
        activation: "silu_mul": silu(gate) * up.
        half_norm: the unfinished RMSNorm of x, in place of `norm_weight`: made by
            `between_products` and filled by the product that wrote x.
        leaves: made by `between_products` and filled here, for the product that reads the result.
        out: [M, N], rows dense; not x.
        exact: a row's result has the same bits whatever M and whatever the other rows.
    Returns: [M, N].
    Raises: ValueError naming what does not fit.
    """
    if activation not in (None, "silu_mul"):
        raise ValueError(f"activation {activation!r} is none of None, silu_mul")
    extras = Extras(bias, residual, norm_weight, norm_eps, activation is not None)
    width = check_extras(x, weight, extras)
    if out is None:
        out = x.new_empty(x.shape[0], width)
    else:
        check_rows("out", out, (x.shape[0], width), x)
    if half_norm is not None or leaves is not None:
        can = runs_triton(backend, x) and not exact
        _check_halves(x, out, half_norm, leaves, norm_weight, can=can)
    if x.shape[0] == 0:
        return out
    if not runs_triton(backend, x):
        return out.copy_(linear_reference(x, weight, extras, exact=exact))
    from baton_kernels import linear_triton
    from baton_kernels.linear_tiles import Product, choose_tile, exact_gated_tile, takes_norm

    if exact and extras.is_gated:
        tile = exact_gated_tile(x.shape[0], weight.shape[0], x.shape[1], x.element_size())
        if tile is None or residual is not None:
            return _exact_gated(x, weight, extras, out, backend)
        if norm_weight is not None:
            x = layer_ops.rms_norm(x, norm_weight, norm_eps, backend=backend)
        return linear_triton.launch(x, weight, out, tile, bias=bias, is_gated=True, rounds=True)
    product = Product(x.shape[0], weight.shape[0], x.shape[1], x.element_size(), extras.is_gated)
    tile = choose_tile(product, exact=exact, forced=backend == "triton")
    if tile is None:
        if half_norm is not None or leaves is not None:
            raise ValueError("half_norm, leaves: the library computes this product")
        return _library(x, weight, extras, out)
    if norm_weight is not None and not takes_norm(tile, product):
        x = layer_ops.rms_norm(x, norm_weight, norm_eps, backend=backend)
        norm_weight = None
    return linear_triton.launch(
        x,
        weight,
        out,
        tile,
        bias=bias,
        residual=residual,
        norm_weight=norm_weight,
        norm_eps=norm_eps,
        half_norm=half_norm,
        leaves=leaves,
        is_gated=extras.is_gated,
    )


def _check_halves(
    x: torch.Tensor,
    out: torch.Tensor,
    half_norm: HalfNorm | None,
    leaves: HalfNorm | None,
    norm_weight: torch.Tensor | None,
    *,
    can: bool,
) -> None:
    if not can:
        raise ValueError("half_norm, leaves: only Triton's products that are not exact know them")
    if half_norm is not None:
        half_norm.check("half_norm", x)
        if norm_weight is not None:
            raise ValueError("norm_weight and half_norm: one norm of x, not two")
    if leaves is not None:
        leaves.check("leaves", out)


def _exact_gated(
    x: torch.Tensor, weight: torch.Tensor, extras: Extras, out: torch.Tensor, backend: Backend
) -> torch.Tensor:
    """Compute an exact product with all gate and up rows, then SwiGLU in a second launch: a tile of
    many rows has no room for two accumulators."""
    product = linear(
        x,
        weight,
        extras.bias,
        norm_weight=extras.norm_weight,
        norm_eps=extras.norm_eps,
        backend=backend,
        exact=True,
    )
    if extras.residual is None:
        return layer_ops.silu_mul(product, out=out, backend=backend)
    inner = layer_ops.silu_mul(product, backend=backend)
    return torch.add(inner, extras.residual, out=out)


def linear_reference(
    x: torch.Tensor, weight: torch.Tensor, extras: Extras, *, exact: bool = False
) -> torch.Tensor:
    """Compute `linear` in plain torch, step by step in x's dtype (float64 is accepted, too). With
    `exact` row by row: a library's product of many rows sums in an order of its own."""
    if extras.norm_weight is not None:
        wide = x if x.dtype == torch.float64 else x.float()
        factor = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + extras.norm_eps)
        x = (wide * factor * extras.norm_weight.to(wide.dtype)).to(x.dtype)
    if exact:
        rows = [torch_linear(row[None], weight, extras.bias) for row in x]
        product = torch.cat(rows) if rows else torch_linear(x, weight, extras.bias)
    else:
        product = torch_linear(x, weight, extras.bias)
    if extras.is_gated:
        gate, up = product.chunk(2, dim=-1)
        product = silu(gate) * up
    return product if extras.residual is None else product + extras.residual


def _library(
    x: torch.Tensor, weight: torch.Tensor, extras: Extras, out: torch.Tensor
) -> torch.Tensor:
    """Compute a product of many rows on CUDA with the library, which fuses one addend."""
    if extras.norm_weight is not None:
        x = layer_ops.rms_norm(x, extras.norm_weight, extras.norm_eps)
    columns = weight.t()
    if extras.is_gated:
        if _is_gated_at_once(x, weight, extras, out):
            from baton_kernels import gated_linear_hopper

            return gated_linear_hopper.silu_gated(x, weight, out)
        product = torch_linear(x, weight, extras.bias)
        if extras.residual is None:
            return layer_ops.silu_mul(product, out=out)
        return torch.add(layer_ops.silu_mul(product), extras.residual, out=out)
    if extras.bias is not None and extras.residual is not None:
        return torch.add(torch.addmm(extras.bias, x, columns), extras.residual, out=out)
    addend = extras.residual if extras.bias is None else extras.bias
    if addend is None:
        return torch.mm(x, columns, out=out)
    return torch.addmm(addend, x, columns, out=out)


def _is_gated_at_once(
    x: torch.Tensor, weight: torch.Tensor, extras: Extras, out: torch.Tensor
) -> bool:
    """Return whether SwiGLU is computed in the launch of the product."""
    fewest = _FEWEST_ROWS_OF_LARGE if weight.numel() > 1 << 25 else _FEWEST_GATED_ROWS
    if x.shape[0] < fewest or extras.bias is not None or extras.residual is not None:
        return False
    from baton_kernels import hopper_support

    return hopper_support.can_gate(x, weight, out)


def check_extras(x: torch.Tensor, weight: torch.Tensor, extras: Extras) -> int:
    """Check all operands except the weight's dtype where it is one byte wide.

    Returns: N.
    Raises: ValueError naming what does not fit.
    """
    if x.dtype not in (torch.bfloat16, torch.float32, torch.float64):
        raise ValueError(f"x is {x.dtype}: bfloat16 and float32 are computed")
    if x.ndim != 2 or x.stride(1) != 1:
        raise ValueError(f"x is {tuple(x.shape)}: [M, K] with dense rows expected")
    height = weight.shape[0]
    like = x if weight.element_size() > 1 else weight
    check_rows("weight", weight, (height, x.shape[1]), like)
    if extras.is_gated and height % 2 != 0:
        raise ValueError(f"weight has {height} rows: as many gate rows as up rows expected")
    width = height // 2 if extras.is_gated else height
    if extras.bias is not None:
        _check_vector("bias", extras.bias, height, x)
    if extras.norm_weight is not None:
        _check_vector("norm_weight", extras.norm_weight, x.shape[1], x)
    if extras.residual is not None:
        check_rows("residual", extras.residual, (x.shape[0], width), x)
    return width


def check_rows(name: str, tensor: torch.Tensor, shape: tuple[int, int], like: torch.Tensor) -> None:
    if tuple(tensor.shape) != shape or tensor.stride(1) != 1:
        raise ValueError(f"{name} is {tuple(tensor.shape)}: {shape} with dense rows expected")
    if tensor.dtype != like.dtype or tensor.device != like.device:
        raise ValueError(
            f"{name} is {tensor.dtype} on {tensor.device}, x {like.dtype} on {like.device}"
        )


def _check_vector(name: str, tensor: torch.Tensor, length: int, like: torch.Tensor) -> None:
    if tuple(tensor.shape) != (length,) or tensor.stride(0) != 1:
        raise ValueError(f"{name} is {tuple(tensor.shape)}: ({length},), dense, expected")
    if tensor.dtype != like.dtype or tensor.device != like.device:
        raise ValueError(
            f"{name} is {tensor.dtype} on {tensor.device}, x {like.dtype} on {like.device}"
        )


@dataclass(frozen=True)
class HalfNorm:
    """Rows passed from one product to the next whose RMSNorm is half done. The product that
    computes the rows also writes them multiplied by the norm's weight, and sums of squares; the
    product that reads them multiplies its result by each row's factor, so the norm needs no launch.

    Made empty by `between_products`, filled by `linear(leaves=)`, read by `linear(half_norm=)`.
    Only between products of few rows that Triton computes, both of one device. Invariant: a row's
    factor is summed in one order, run after run.
    """

    weight: torch.Tensor
    """Weight of the norm, [K]."""

    eps: float

    scaled: torch.Tensor
    """Rows times `weight`, [M, K]."""

    squares: torch.Tensor
    """Sum of squares of each row over each run of columns, [runs, M] float32."""

    def of(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute `scaled` [n, K] and the transpose of `squares` [n, runs] for rows [n, K] that
        were not written by a product. The first run holds all squares."""
        wide = rows.float()
        squares = self.squares.new_zeros(rows.shape[0], self.squares.shape[0])
        squares[:, 0] = wide.square().sum(dim=1)
        return (wide * self.weight.float()).to(self.scaled.dtype), squares

    def check(self, name: str, rows: torch.Tensor) -> None:
        """Check that this is for rows of the shape [M, K] and dtype of `rows`. Raises: ValueError
        naming `name`."""
        if self.scaled.shape != rows.shape or self.scaled.dtype != rows.dtype:
            raise ValueError(
                f"{name} is of {tuple(self.scaled.shape)} {self.scaled.dtype}: "
                f"{tuple(rows.shape)} {rows.dtype} expected"
            )


def between_products(
    x: torch.Tensor,
    maker: torch.Tensor,
    taker: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_eps: float,
    *,
    is_gated: bool,
    backend: Backend = "auto",
) -> HalfNorm | None:
    """Allocate a HalfNorm for two products in sequence; None where a separate norm is faster or the
    backend is not Triton.

    Args:
        x: [M, any], the input of the first product.
        maker: weight [K, any] of the first product, whose result is [M, K].
        taker: weight [N, K] of the second product.
        is_gated: the second product has the `activation` of `linear`.
    """
    num_rows, depth = x.shape[0], maker.shape[0]
    if num_rows < 2 or not runs_triton(backend, x):
        return None
    from baton_kernels.linear_tiles import Product, ceil_div, choose_tile

    forced, size = backend == "triton", x.element_size()
    first = choose_tile(
        Product(num_rows, depth, maker.shape[1], size, False), exact=False, forced=forced
    )
    second = choose_tile(
        Product(num_rows, taker.shape[0], depth, size, is_gated), exact=False, forced=forced
    )
    if first is None or second is None or first.is_row or second.is_row:
        return None
    return HalfNorm(
        norm_weight,
        norm_eps,
        x.new_empty(num_rows, depth),
        x.new_empty(ceil_div(depth, first.block_n), num_rows, dtype=torch.float32),
    )
