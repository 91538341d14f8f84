"""Faster layers for a loaded transformers model, recognised by the structure of a layer's
attributes, not by model family: `fuse` replaces the layers that it recognises exactly and leaves
others.

FusedDecoderLayer computes norm, attention, residual, norm, gated SiLU and residual in as few torch
calls as possible: RMSNorm is one call, q/k/v one matrix, RoPE runs over queries and keys together;
with packed linears SiLU, SiLU * up and both residual sums run in the matrix products' epilogues.

Numerical equality is not guaranteed: transformers_backend.py compares logits before and after, and
returns to the plain model if they differ. Weights are replaced layer by layer, so the peak is one
layer above the model's size. `fuse` is for load time; the layer for the engine's thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.functional import linear, rms_norm, silu

from engine.layers.linear import PackedLinear
from engine.layers.torch_attention import Attend
from engine.lora.stacked_weights import AdaptedLinear


class PlainLinear(AdaptedLinear):
    """A linear layer with the interface of PackedLinear, computed by torch's `linear`; x is [T,
    in]."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, activation: str = "none"
    ) -> None:
        super().__init__()
        self.weight = weight.detach()
        self.bias = None if bias is None else bias.detach()
        self.activation = activation
        self.out_features, self.in_features = weight.shape

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = linear(x, self.weight, self.bias)
        if self.deltas is not None and self.deltas.is_wanted:
            self.deltas.add(x, out)
        return silu(out) if self.activation == "swish" else out

    def forward_times(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return self.forward(x) * other

    def forward_plus(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return self.forward(x) + other


class FusedDecoderLayer(nn.Module):
    """A replacement of a transformers decoder layer, made from `layer`, which may be dropped
    afterwards.

    Args:
        layer: a layer that `is_plain_decoder_layer` recognised.
        window: number of tokens of its sliding window; None: it has none.
        is_packed: uses PackedLinear; otherwise PlainLinear.
    """

    def __init__(self, layer: Any, *, window: int | None, is_packed: bool) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        make = PackedLinear if is_packed else PlainLinear
        self.layer_idx: int = attention.layer_idx
        self.head_dim: int = attention.head_dim
        self.scaling: float = attention.scaling
        self.window = window
        self.num_heads = attention.q_proj.out_features // self.head_dim
        self.num_kv_heads = attention.k_proj.out_features // self.head_dim
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        weight = torch.cat([projection.weight.detach() for projection in projections])
        bias = None
        if attention.q_proj.bias is not None:
            bias = torch.cat([projection.bias.detach() for projection in projections])
        self.qkv = make(weight, bias)
        self.o = make(attention.o_proj.weight, attention.o_proj.bias)
        self.gate = make(mlp.gate_proj.weight, mlp.gate_proj.bias, "swish")
        self.up = make(mlp.up_proj.weight, mlp.up_proj.bias)
        self.down = make(mlp.down_proj.weight, mlp.down_proj.bias)
        self.norm_weight = layer.input_layernorm.weight.detach()
        self.norm_eps: float = layer.input_layernorm.variance_epsilon
        self.mlp_norm_weight = layer.post_attention_layernorm.weight.detach()
        self.mlp_norm_eps: float = layer.post_attention_layernorm.variance_epsilon
        self.head_norm_weight: torch.Tensor | None = None  # [H + K, 1, D]
        self.head_norm_eps = 0.0
        if hasattr(attention, "q_norm"):
            q_weight = attention.q_norm.weight.detach().expand(self.num_heads, -1)
            k_weight = attention.k_norm.weight.detach().expand(self.num_kv_heads, -1)
            self.head_norm_weight = torch.cat((q_weight, k_weight))
            self.head_norm_eps = attention.q_norm.variance_epsilon

    def parts(self) -> dict[str, tuple[AdaptedLinear, int, int]]:
        """Return the projections by their names in the plain layer: (linear, first column of its
        output, number of columns)."""
        query, key = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        whole: dict[str, AdaptedLinear] = {
            "self_attn.o_proj": self.o,
            "mlp.gate_proj": self.gate,
            "mlp.up_proj": self.up,
            "mlp.down_proj": self.down,
        }
        return {
            "self_attn.q_proj": (self.qkv, 0, query),
            "self_attn.k_proj": (self.qkv, query, key),
            "self_attn.v_proj": (self.qkv, query + key, key),
        } | {name: (one, 0, one.out_features) for name, one in whole.items()}

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        baton_step: Attend,
        **_: Any,
    ) -> torch.Tensor:
        """Compute the layer: [1, T, hidden] -> [1, T, hidden]. Other keywords (masks, caches) are
        ignored; they are None in the calls of `run`."""
        x = hidden_states[0]
        num_tokens = x.shape[0]
        num_rotated = self.num_heads + self.num_kv_heads
        qkv = self.qkv(rms_norm(x, self.norm_weight.shape, self.norm_weight, self.norm_eps))
        qkv = qkv.view(num_tokens, -1, self.head_dim)  # [T, H + 2K, D]
        heads = qkv[:, :num_rotated]
        if self.head_norm_weight is not None:
            heads = rms_norm(heads, (self.head_dim,), None, self.head_norm_eps)
            heads = heads * self.head_norm_weight
        heads = rotate(heads, *position_embeddings).transpose(0, 1)  # [H + K, T, D]
        attended = baton_step.attend(
            self.layer_idx,
            heads[: self.num_heads],
            heads[self.num_heads :],
            qkv[:, num_rotated:].transpose(0, 1),
            self.scaling,
            self.window,
        )
        x = self.o.forward_plus(attended.reshape(num_tokens, -1), x)
        normed = rms_norm(x, self.mlp_norm_weight.shape, self.mlp_norm_weight, self.mlp_norm_eps)
        inner = self.up.forward_times(normed, self.gate(normed))
        return self.down.forward_plus(inner, x)[None]


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply RoPE in the half-split layout. Returns: [T, heads, D].

    Args:
        heads: [T, heads, D].
        cos, sin: [1, T, D].
    """
    half = heads.shape[-1] // 2
    turned = torch.cat((-heads[..., half:], heads[..., :half]), dim=-1)
    return torch.addcmul(heads * cos[0][:, None], turned, sin[0][:, None])


_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_MLP_LINEARS = {"gate_proj", "up_proj", "down_proj"}


def fuse(
    model: Any, *, is_packed: bool, windows: Sequence[int | None], with_layers: bool = True
) -> tuple[str, ...]:
    """Replace the layers of `model` that are recognised, in place. Returns: descriptions of what
    was replaced.

    Args:
        windows: the sliding window of each layer as observed (Probed.windows), since code and
            config may disagree on it, and a short comparison of logits would not show it.
        with_layers: replace decoder layers, too; False for model types that are known to have
            look-alikes.
    """
    done: list[str] = []
    for module in list(model.modules()) if with_layers else ():
        if not isinstance(module, nn.ModuleList) or not len(module):
            continue
        num_fused = 0
        layers: list[Any] = list(module)
        for index, layer in enumerate(layers):
            if is_plain_decoder_layer(layer) and _rotary_dim(model) == layer.self_attn.head_dim:
                module[index] = FusedDecoderLayer(
                    layer, window=windows[layer.self_attn.layer_idx], is_packed=is_packed
                )
                num_fused += 1
        if num_fused:
            done.append(f"{num_fused} of {len(module)} decoder layers")
    if is_packed:
        num_packed = _pack_linears(model)
        if num_packed:
            done.append(f"{num_packed} other linears")
    return tuple(done)


def is_plain_decoder_layer(layer: Any) -> bool:
    """Whether the layer's child modules are exactly those of a Llama-like layer, with plain
    nn.Linear projections: two RMS norms, attention with q, k, v and o (and norms of q and k, or
    none), gated SiLU."""
    if _children(layer) != _LAYER:
        return False
    attention, mlp = layer.self_attn, layer.mlp
    names = _children(attention)
    if names not in (_PROJECTIONS, _PROJECTIONS | _HEAD_NORMS) or _children(mlp) != _MLP_LINEARS | {
        "act_fn"
    }:
        return False
    linears = [getattr(attention, name) for name in sorted(_PROJECTIONS)]
    linears += [getattr(mlp, name) for name in sorted(_MLP_LINEARS)]
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    norms += [getattr(attention, name) for name in sorted(names & _HEAD_NORMS)]
    biases = {getattr(attention, f"{name}_proj").bias is None for name in "qkv"}
    return (
        all(type(linear) is nn.Linear for linear in linears)
        and len(biases) == 1
        and all(_is_rms_norm(norm) for norm in norms)
        and len({getattr(norm, "variance_epsilon", None) for norm in norms[2:]}) <= 1
        and _is_silu(mlp.act_fn)
        and isinstance(getattr(attention, "layer_idx", None), int)
        and isinstance(getattr(attention, "head_dim", None), int)
        and isinstance(getattr(attention, "scaling", None), float)
    )


def _children(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}


@torch.inference_mode()
def _is_rms_norm(module: Any) -> bool:
    """Whether the module computes weight * x / rms(x), tested on numbers, so that a look-alike (1 +
    weight) is rejected."""
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
    if not isinstance(weight, torch.Tensor) or not isinstance(eps, float):
        return False
    x = torch.linspace(-2.0, 3.0, weight.numel(), device=weight.device, dtype=weight.dtype)[None]
    expected = functional.rms_norm(x, weight.shape, weight, eps).float()
    return torch.allclose(module(x).float(), expected, rtol=2e-2, atol=1e-3)


@torch.inference_mode()
def _is_silu(function: Any) -> bool:
    x = torch.linspace(-4.0, 4.0, 33)
    return torch.allclose(function(x), functional.silu(x), rtol=1e-6, atol=1e-6)


def _rotary_dim(model: Any) -> int | None:
    """Return the number of dimensions that RoPE rotates; None unless all rotary embeddings agree on
    it."""
    dims = {
        2 * module.inv_freq.numel()
        for module in model.modules()
        if isinstance(getattr(module, "inv_freq", None), torch.Tensor)
    }
    return dims.pop() if len(dims) == 1 else None


def _pack_linears(module: nn.Module) -> int:
    """Replace every plain nn.Linear below `module`, the LM head included, by a PackedLinear.
    Returns: their number."""
    num_packed = 0
    for name, child in list(module.named_children()):
        if type(child) is nn.Linear:
            setattr(module, name, PackedLinear(child.weight, child.bias))
            num_packed += 1
        else:
            num_packed += _pack_linears(child)
    return num_packed
