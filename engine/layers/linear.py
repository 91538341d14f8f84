"""Linear layers with fused operations and LoRA adapters: FusedLinear for LlamaDecoder, PackedLinear
for transformers' models on a CPU.

Rows without an adapter are computed by the same call as in a step without adapters, with the same
bits; rows with one are multiplied a second time, unfused. A step that is launched with adapters
(`FusedLinear.stack`) multiplies all its rows once, and a gate's activation is then a launch of its
own. It knows no model and no attention. Engine thread only.
"""

from __future__ import annotations

from typing import Literal

import torch
from baton_kernels.dispatch import Backend
from baton_kernels.fp8_linear import Fp8Weight, fp8_linear
from baton_kernels.layer_ops import rms_norm, silu_mul
from baton_kernels.linear import HalfNorm, between_products, linear
from baton_kernels.packed_linear import (
    PackedWeight,
    pack_weight,
    packed_linear,
    packed_linear_with,
)
from torch.nn import functional

from engine.lora.stacked_weights import AdaptedLinear, Deltas, StackedFactors


class FusedLinear(AdaptedLinear):
    """A linear layer: x [M, K] -> [M, N], or [M, N / 2] if it is gated.

    Args:
        weight: [N, K], or an Fp8Weight, whose product is computed in fp8; of a gated layer the
            gate's rows come before the inner ones.
        bias: [N].
        is_gated: the result is SiLU of the first half of the columns times the second half.
    """

    def __init__(
        self,
        weight: torch.Tensor | Fp8Weight,
        bias: torch.Tensor | None = None,
        *,
        is_gated: bool = False,
    ) -> None:
        super().__init__()
        matrix = weight.values if isinstance(weight, Fp8Weight) else weight
        self.out_features, self.in_features = matrix.shape
        self.weight: torch.Tensor | Fp8Weight | tuple[PackedWeight, ...] = weight
        """The weight; if it is packed, one PackedWeight, or two for a gated layer: of the gate's
        rows and of the inner ones."""
        self.bias = bias
        self.is_gated = is_gated
        self.backend: Backend = "auto"
        self.is_exact = False
        self.stack: StackedFactors | None = None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors of the layer, without a packed weight."""
        weight = self.weight
        found = [] if self.bias is None else [self.bias]
        if isinstance(weight, Fp8Weight):
            return [weight.values, weight.scales, *found]
        return found if isinstance(weight, tuple) else [weight, *found]

    def pack(self) -> None:
        """Reorder the weight for this CPU; a tied weight is copied. Does nothing for an fp8
        weight."""
        if isinstance(self.weight, torch.Tensor):
            halves = self.weight.chunk(2) if self.is_gated else (self.weight,)
            self.weight = tuple(pack_weight(half) for half in halves)

    def forward(
        self,
        x: torch.Tensor,
        *,
        norm_weight: torch.Tensor | None = None,
        norm_eps: float = 0.0,
        residual: torch.Tensor | None = None,
        half_norm: HalfNorm | None = None,
        leaves: HalfNorm | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute the product of x, or of its RMSNorm if `norm_weight` [K] is given, and add it to
        `residual` [M, N] in place if that is given. An input without rows has an output without
        rows.

        Args:
            half_norm: the half-computed norm of x, in place of `norm_weight`, as `room` of the
                layer before returned it.
            leaves: filled with the half-computed norm of the result, as `room` returned it.
            out: [M, N], a buffer that a product without adapters may use for its result.
        """
        if x.shape[0] == 0:
            return x.new_empty(0, self.out_features // (2 if self.is_gated else 1))
        if self.stack is not None and self.stack.is_wanted:
            return self._stacked(self.stack, x, norm_weight, norm_eps, residual)
        if self.deltas is None or not self.deltas.is_wanted:
            return self._product(
                x, self.is_gated, norm_weight, norm_eps, residual, half_norm, leaves, out
            )
        return self._adapted(x, norm_weight, norm_eps, residual, half_norm, leaves)

    def room(
        self, x: torch.Tensor, taker: FusedLinear, norm_weight: torch.Tensor, norm_eps: float
    ) -> HalfNorm | None:
        """Return the buffer for half-computing the norm between this layer's product of x and the
        layer `taker`; None: the norm is computed separately."""
        maker_weight, taker_weight = self.weight, taker.weight
        if not isinstance(maker_weight, torch.Tensor) or not isinstance(taker_weight, torch.Tensor):
            return None
        if self.stack is not None and self.stack.is_wanted:  # which adds to what the product left
            return None
        return between_products(
            x,
            maker_weight,
            taker_weight,
            norm_weight,
            norm_eps,
            is_gated=taker.is_gated,
            backend=self.backend,
        )

    def _product(
        self,
        x: torch.Tensor,
        is_gated: bool,
        norm_weight: torch.Tensor | None = None,
        norm_eps: float = 0.0,
        residual: torch.Tensor | None = None,
        half_norm: HalfNorm | None = None,
        leaves: HalfNorm | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        weight = self.weight
        if isinstance(weight, tuple):
            if norm_weight is not None:
                x = functional.rms_norm(x, norm_weight.shape, norm_weight, norm_eps)
            return self._packed_product(weight, x, is_gated, residual)
        if residual is not None:
            out = residual
        if isinstance(weight, Fp8Weight):
            return fp8_linear(
                x,
                weight,
                self.bias,
                residual=residual,
                out=out,
                norm_weight=norm_weight,
                norm_eps=norm_eps,
                activation="silu_mul" if is_gated else None,
                backend=self.backend,
                exact=self.is_exact,
            )
        return linear(
            x,
            weight,
            self.bias,
            residual=residual,
            out=out,
            norm_weight=norm_weight if half_norm is None else None,
            norm_eps=norm_eps,
            activation="silu_mul" if is_gated else None,
            half_norm=half_norm,
            leaves=leaves,
            backend=self.backend,
            exact=self.is_exact,
        )

    def _packed_product(
        self,
        weight: tuple[PackedWeight, ...],
        x: torch.Tensor,
        is_gated: bool,
        residual: torch.Tensor | None,
    ) -> torch.Tensor:
        biases = (None,) * len(weight) if self.bias is None else self.bias.chunk(len(weight))
        if is_gated:
            gate = packed_linear(x, weight[0], biases[0], "swish")
            return packed_linear_with(x, gate, weight[1], biases[1], "mul")
        if residual is not None:
            return packed_linear_with(x, residual, weight[0], biases[0], "add")
        parts = [packed_linear(x, *half) for half in zip(weight, biases, strict=True)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _stacked(
        self,
        stack: StackedFactors,
        x: torch.Tensor,
        norm_weight: torch.Tensor | None,
        norm_eps: float,
        residual: torch.Tensor | None,
    ) -> torch.Tensor:
        """Compute `forward` in a step that is launched with adapters, with fixed shapes."""
        if norm_weight is not None:
            x = rms_norm(x, norm_weight, norm_eps, backend=self.backend)
        out = self._product(x, is_gated=False, residual=residual)
        stack.add(out, x, self.backend)
        return silu_mul(out, backend=self.backend) if self.is_gated else out

    def _adapted(
        self,
        x: torch.Tensor,
        norm_weight: torch.Tensor | None,
        norm_eps: float,
        residual: torch.Tensor | None,
        half_norm: HalfNorm | None,
        leaves: HalfNorm | None,
    ) -> torch.Tensor:
        deltas = self.deltas
        if deltas is None:
            raise ValueError("no adapter is on this layer")
        picked = deltas.pick(x)
        if norm_weight is not None:
            picked = rms_norm(picked, norm_weight, norm_eps, backend=self.backend)
        inner = self._product(picked, is_gated=False) + deltas.delta(picked)
        if self.is_gated:
            inner = silu_mul(inner, backend=self.backend)
        if residual is not None:
            inner = inner + deltas.pick(residual)
        out = inner
        if not deltas.is_whole:
            out = self._product(
                x, self.is_gated, norm_weight, norm_eps, residual, half_norm, leaves
            )
            deltas.put(out, inner)
        if leaves is not None:
            scaled, squares = leaves.of(inner)
            deltas.put(leaves.scaled, scaled)
            deltas.put(leaves.squares.t(), squares)
        return out


Activation = Literal["none", "swish"]


class PackedLinear(AdaptedLinear):
    """A linear layer with a packed weight: x [..., in] -> [..., out], same dtype. `activation`,
    "none" or "swish" (SiLU), is applied to the output.

    `deltas` are the adapters' products, which are added before the activation. Rows without an
    adapter are computed by the same calls as without adapters, with the same bits.
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
        """Compute the layer. An input without rows has an output without rows."""
        if x.numel() == 0:
            return x.new_empty(*x.shape[:-1], self.out_features)
        if self.deltas is not None and self.deltas.is_wanted:
            rows = x.reshape(-1, self.in_features)
            return self._forward_adapted(rows, self.deltas).view(*x.shape[:-1], -1)
        return self._product(x, self.activation)

    def _product(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        return packed_linear(x, self.packed, self.bias, activation)

    def _forward_adapted(self, x: torch.Tensor, deltas: Deltas) -> torch.Tensor:
        """Compute the layer with adapters: [T, in] -> [T, out]. If only some rows have one and the
        product has a fused activation, those rows are multiplied a second time, without it."""
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
        """Compute forward(x) * other in one pass; x [T, in], other and result [T, out]. Not with an
        activation."""
        if x.numel() == 0:
            return other
        out = packed_linear_with(x, other, self.packed, self.bias, "mul")
        if self.deltas is not None and self.deltas.is_wanted:
            self.deltas.add(x, out, times=other)
        return out

    def forward_plus(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Compute forward(x) + other in one pass; x [T, in], other and result [T, out]. Not with an
        activation."""
        if x.numel() == 0:
            return other
        out = packed_linear_with(x, other, self.packed, self.bias, "add")
        if self.deltas is not None and self.deltas.is_wanted:
            self.deltas.add(x, out)
        return out

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features}, {self.dtype}, {self.activation}"
