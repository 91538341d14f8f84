"""PackedLinear: a linear layer whose weight oneDNN reordered once, at load. 1.5-4x F.linear for 1
to 32 rows on CPU.

`torch.ops.mkldnn._reorder_linear_weight` and `_linear_pointwise` are private operations of torch
(what its own inductor emits): `unavailable_reason` tries them once, numbers compared, and the model
keeps F.linear where that failed. Which way was taken is in ModelInfo.linear. Knows no model. Engine
thread only.
"""
# ruff: noqa: SLF001  (torch.ops.mkldnn has no public name for these; the one place that uses them)

from __future__ import annotations

import torch
from torch.nn import functional

from engine.lora.deltas import Deltas
from engine.lora.site import AdaptedLinear

_HINT_ROWS = None  # of the batch: None lets oneDNN choose a weight format good for any


class PackedLinear(AdaptedLinear):
    """x [..., in] -> [..., out], same dtype. `activation` is applied to the output: "none" or
    "swish" (SiLU).

    `deltas` is what adapters add to the product, before the activation. Rows without an adapter
    come out of the same calls as without any, equal to the last bit.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, activation: str = "none"
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.activation = activation
        # Not parameters: an opaque tensor has no storage that state_dict could save.
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _HINT_ROWS)
        self.bias = None if bias is None else bias.detach()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """An input without rows gives an output without rows."""
        if x.numel() == 0:
            return x.new_empty(*x.shape[:-1], self.out_features)
        if self.deltas is not None and self.deltas.is_wanted:
            rows = x.reshape(-1, self.in_features)
            return self._forward_adapted(rows, self.deltas).view(*x.shape[:-1], -1)
        return self._product(x, self.activation)

    def _product(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self.packed, self.bias, activation, [], ""
        )
        return out

    def _forward_adapted(self, x: torch.Tensor, deltas: Deltas) -> torch.Tensor:
        """[T, in] -> [T, out]. Where only some rows have an adapter and the activation is in the
        product, those rows are multiplied a second time, without it."""
        if self.activation == "none":
            out = self._product(x, "none")
            deltas.add(x, out)
        elif deltas.is_whole:
            out = self._product(x, "none")
            deltas.add(x, out)
            functional.silu(out, inplace=True)
        else:
            out = self._product(x, self.activation)
            picked = deltas.pick(x)
            inner = self._product(picked, "none") + deltas.delta(picked)
            deltas.put(out, functional.silu(inner))
        return out

    def forward_times(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """forward(x) * other, in one pass; x [T, in], other and result [T, out]. No activation."""
        if x.numel() == 0:
            return other
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(
            x, other, self.packed, self.bias, "mul"
        )
        if self.deltas is not None and self.deltas.is_wanted:
            self.deltas.add(x, out, times=other)
        return out

    def forward_plus(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """forward(x) + other, in one pass; x [T, in], other and result [T, out]. No activation."""
        if x.numel() == 0:
            return other
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(
            x, other, self.packed, self.bias, "add"
        )
        if self.deltas is not None and self.deltas.is_wanted:
            self.deltas.add(x, out)
        return out

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features}, {self.dtype}, {self.activation}"


def unavailable_reason(dtype: torch.dtype, device: str) -> str | None:
    """Why packed linears cannot be used here; None: they can."""
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
            packed, plain = PackedLinear(weight, None)(x), functional.linear(x, weight)
    except (RuntimeError, AttributeError, TypeError) as error:
        return f"oneDNN's packed linear failed: {str(error).splitlines()[0]}"
    if not torch.allclose(packed.float(), plain.float(), rtol=2e-2, atol=1e-2):
        return "oneDNN's packed linear gave other numbers than F.linear"
    return None
