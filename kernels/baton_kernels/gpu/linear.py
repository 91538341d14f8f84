"""Launches the kernels of gpu/one_row.py and gpu/skinny.py: the workspace of split sums, and the
arguments. Checked by the doors (linear.py, fp8_linear.py); gpu/tiles.py says how a product is cut.

Invariant: a launch takes counters that no other launch in flight has (a ring, far longer than what
can be in flight), and its last program leaves them zero. Engine thread only, per device.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from baton_kernels.gpu.one_row import row_kernel
from baton_kernels.gpu.overlap import overlap_options
from baton_kernels.gpu.skinny import skinny_kernel
from baton_kernels.gpu.tiles import Product, Tile, cut
from baton_kernels.half_norm import HalfNorm

_NUM_COUNTERS = 1 << 20


class _Counters:
    """One device's ring of zeroed counters."""

    def __init__(self, device: torch.device) -> None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("run one linear on this device before a graph is captured")
        self._ring = torch.zeros(_NUM_COUNTERS, dtype=torch.int32, device=device)
        self._next = 0

    def take(self, number: int) -> torch.Tensor:
        """`number` neighbours, all zero."""
        if number > _NUM_COUNTERS:
            raise ValueError(f"{number} tiles with split K, room for {_NUM_COUNTERS}")
        if self._next + number > _NUM_COUNTERS:
            self._next = 0
        first = self._next
        self._next += -(-number // 4) * 4  # pointers stay aligned to 16 bytes
        return self._ring[first : first + number]


@lru_cache(maxsize=16)
def _counters(device: torch.device) -> _Counters:
    return _Counters(device)


def launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    tile: Tile,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 0.0,
    x_scales: torch.Tensor | None = None,
    weight_scales: torch.Tensor | None = None,
    half_norm: HalfNorm | None = None,
    leaves: HalfNorm | None = None,
    is_gated: bool = False,
    rounds: bool = False,
) -> torch.Tensor:
    """One product. Shapes as the doors have them; scales float32, both or none; a norm for a tile
    of one row only, half ones for the others: `half_norm` is of x, and `leaves` is filled.
    rounds: SwiGLU has the bits of a product that is stored first."""
    num_rows, depth = x.shape
    product = Product(num_rows, weight.shape[0], depth, weight.element_size(), is_gated)
    plan = cut(tile, product)
    flags = {
        "HAS_BIAS": bias is not None,
        "HAS_RESIDUAL": residual is not None,
        "HAS_SCALES": x_scales is not None,
        **overlap_options(x),
    }
    if tile.is_row:
        if half_norm is not None or leaves is not None:
            raise ValueError("half_norm, leaves: for tiles of several rows")
        row_kernel[plan.grid](
            x, weight, out, bias, residual, norm_weight, x_scales, weight_scales,
            product.width, depth, weight.stride(0), norm_eps,
            HAS_NORM=norm_weight is not None, **flags, **plan.constants,
        )  # fmt: skip
        return out
    if half_norm is not None:
        x, norm_eps = half_norm.scaled, half_norm.eps
    partials = counters = None
    if plan.num_partials:
        partials = torch.empty(plan.num_partials, dtype=torch.float32, device=x.device)
        counters = _counters(x.device).take(plan.num_tiles)
    skinny_kernel[plan.grid](
        x, weight, out, bias, residual, x_scales, weight_scales, partials, counters,
        None if half_norm is None else half_norm.squares,
        None if leaves is None else leaves.weight,
        None if leaves is None else leaves.scaled,
        None if leaves is None else leaves.squares,
        num_rows, product.width, depth, x.stride(0), weight.stride(0), out.stride(0),
        residual.stride(0) if residual is not None else 0, norm_eps,
        NUM_RUNS=0 if half_norm is None else half_norm.squares.shape[0],
        LEAVES=leaves is not None,
        ROUNDS=rounds, UPCASTS=not x.is_cuda,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        **flags, **plan.constants,
    )  # fmt: skip
    return out
