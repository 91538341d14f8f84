"""Linear layers on a CPU whose weight oneDNN reordered once, at load: 1.5 to 4 times as fast as
F.linear for 1 to 32 rows.

`torch.ops.mkldnn._reorder_linear_weight` and `_linear_pointwise` are private operations of torch
(its own inductor emits them): `unavailable_reason` tries them and compares their numbers, and the
caller keeps F.linear where that failed. Knows no model. Engine thread only.
"""
# ruff: noqa: SLF001  (torch.ops.mkldnn has no public name for these; the one place that uses them)

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn import functional

_HINT_ROWS = None  # of the batch: None lets oneDNN choose a weight format good for any


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A weight [N, K] in oneDNN's own memory order."""

    values: torch.Tensor
    """Opaque oneDNN tensor: it has no storage that could be read or saved."""

    shape: tuple[int, int]
    """Shape of the weight: (N, K)."""

    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return self.shape[0] * self.shape[1] * self.dtype.itemsize


def pack_weight(weight: torch.Tensor) -> PackedWeight:
    """Copy `weight` [N, K] (bfloat16 or float32, on a CPU) into oneDNN's order."""
    values = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _HINT_ROWS)
    return PackedWeight(values, (weight.shape[0], weight.shape[1]), weight.dtype)


def packed_linear(
    x: torch.Tensor,
    weight: PackedWeight,
    bias: torch.Tensor | None = None,
    activation: Literal["none", "swish"] = "none",
) -> torch.Tensor:
    """Compute x [..., K] @ weight.T + bias -> [..., N] in x's dtype, for at least one row.
    activation "swish": SiLU of the product."""
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
        x, weight.values, bias, activation, [], ""
    )
    return out


def packed_linear_with(
    x: torch.Tensor,
    other: torch.Tensor,
    weight: PackedWeight,
    bias: torch.Tensor | None,
    operation: Literal["add", "mul"],
) -> torch.Tensor:
    """Compute the product of x [M, K], plus or times `other` [M, N], in one pass, for at least one
    row."""
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(
        x, other, weight.values, bias, operation
    )
    return out


def unavailable_reason(dtype: torch.dtype, device: str) -> str | None:
    """Return why packed linears cannot be used with this dtype and device; None: they can."""
    if torch.device(device).type != "cpu":
        return f"on {device}"
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return "torch was built without oneDNN"
    if dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "this CPU has no bfloat16 instructions for oneDNN"
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(24, 40, generator=generator).to(dtype)
    x = torch.randn(3, 40, generator=generator).to(dtype)
    try:
        with torch.inference_mode():
            packed, plain = packed_linear(x, pack_weight(weight)), functional.linear(x, weight)
    except (RuntimeError, AttributeError, TypeError) as error:
        return f"oneDNN's packed linear failed: {str(error).splitlines()[0]}"
    if not torch.allclose(packed.float(), plain.float(), rtol=2e-2, atol=1e-2):
        return "oneDNN's packed linear gave other numbers than F.linear"
    return None
