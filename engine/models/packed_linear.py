"""PackedLinear: a linear layer of transformers' code over a packed weight
(baton_kernels/packed_linear.py), and what adapters add to it. Knows no model. Engine thread only.
"""

from __future__ import annotations

from typing import Literal

import torch
from baton_kernels.packed_linear import pack_weight, packed_linear, packed_linear_with
from torch.nn import functional

from engine.lora.stacked_weights import AdaptedLinear, Deltas

Activation = Literal["none", "swish"]


class PackedLinear(AdaptedLinear):
    """x [..., in] -> [..., out], same dtype. `activation` is applied to the output: "none" or
    "swish" (SiLU).

    `deltas` is what adapters add to the product, before the activation. Rows without an adapter
    come out of the same calls as without any, equal to the last bit.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, activation: Activation = "none"
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.activation = activation
        # Not a parameter: an opaque tensor has no storage that state_dict could save.
        self.packed = pack_weight(weight)
        self.bias = None if bias is None else bias.detach()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """An input without rows gives an output without rows."""
        if x.numel() == 0:
            return x.new_empty(*x.shape[:-1], self.out_features)
        if self.deltas is not None and self.deltas.is_wanted:
            rows = x.reshape(-1, self.in_features)
            return self._forward_adapted(rows, self.deltas).view(*x.shape[:-1], -1)
        return self._product(x, self.activation)

    def _product(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        return packed_linear(x, self.packed, self.bias, activation)

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
        out = packed_linear_with(x, other, self.packed, self.bias, "mul")
        if self.deltas is not None and self.deltas.is_wanted:
            self.deltas.add(x, out, times=other)
        return out

    def forward_plus(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """forward(x) + other, in one pass; x [T, in], other and result [T, out]. No activation."""
        if x.numel() == 0:
            return other
        out = packed_linear_with(x, other, self.packed, self.bias, "add")
        if self.deltas is not None and self.deltas.is_wanted:
            self.deltas.add(x, out)
        return out

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features}, {self.dtype}, {self.activation}"
