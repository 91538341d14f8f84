"""HalfNorm: rows on their way from one product to the next whose RMSNorm is half done. The product
that makes the rows leaves them a second time, multiplied by the norm's weight, and sums of squares;
the product that takes them multiplies its result by the rows' factor. No launch stands between.

Only between products of few rows that Triton computes, both of one device. Knows no model.
Invariant: a row's factor is summed in one order, run after run. Engine thread only, per device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from baton_kernels.dispatch import Backend, runs_triton


@dataclass(frozen=True)
class HalfNorm:
    """Made empty by `between`, filled by `linear(leaves=)`, taken by `linear(half_norm=)`."""

    weight: torch.Tensor
    """[K] of the norm."""

    eps: float

    scaled: torch.Tensor
    """[M, K]: rows times `weight`."""

    squares: torch.Tensor
    """[runs, M] float32: each row's sum of squares over one run of columns."""

    def of(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What `scaled` [n, K], and `squares` from the other side [n, runs], are of rows [n, K]
        that no product left. All squares count to the first run."""
        wide = rows.float()
        squares = self.squares.new_zeros(rows.shape[0], self.squares.shape[0])
        squares[:, 0] = wide.square().sum(dim=1)
        return (wide * self.weight.float()).to(self.scaled.dtype), squares

    def check(self, name: str, rows: torch.Tensor) -> None:
        """Raises: ValueError where it is not of rows [M, K] like these."""
        if self.scaled.shape != rows.shape or self.scaled.dtype != rows.dtype:
            raise ValueError(
                f"{name} is of {tuple(self.scaled.shape)} {self.scaled.dtype}: "
                f"{tuple(rows.shape)} {rows.dtype} expected"
            )


def between(
    x: torch.Tensor,
    maker: torch.Tensor,
    taker: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_eps: float,
    *,
    is_gated: bool,
    backend: Backend = "auto",
) -> HalfNorm | None:
    """Room for what passes between two products, or None where a norm is better done by itself.

    Args:
        x: [M, any] that the first product is of.
        maker: its weight [K, any], whose result is [M, K].
        taker: the second one's [N, K].
        is_gated: the second one is (`linear`'s `activation`).
    """
    num_rows, depth = x.shape[0], maker.shape[0]
    if num_rows < 2 or not runs_triton(backend, x):
        return None
    from baton_kernels.gpu.tiles import Product, ceil_div, choose_tile

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
