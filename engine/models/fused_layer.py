"""FusedDecoderLayer: norm, attention, residual, norm, gated SiLU, residual, in as few calls as
torch offers.

RMSNorm is one call, q/k/v one matrix, RoPE runs over queries and keys together; with packed linears
SiLU, SiLU * up and both residual sums are done in the matrix products' epilogues. It knows no
family: models/fuse.py decides what it may replace, and models/built.py compares the numbers. Engine
thread only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear, rms_norm, silu

from engine.layers.linear import PackedLinear
from engine.layers.torch_attention import Attend
from engine.lora.stacked_weights import AdaptedLinear


class PlainLinear(AdaptedLinear):
    """The same surface as PackedLinear for x [T, in], by F.linear."""

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
    """Takes the place of a decoder layer; `layer` may be dropped afterwards.

    Args:
        layer: one that `fuse.is_plain_decoder_layer` recognised.
        window: how many tokens back it sees; None: all.
        is_packed: PackedLinear, else PlainLinear.
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
        """The projections by their names in the plain layer: (linear, first column of its output,
        number of columns)."""
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
        """[1, T, hidden] -> [1, T, hidden]. Masks and caches among the keywords are None on our way
        of calling."""
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
    """RoPE, half-split layout.

    Args:
        heads: [T, heads, D].
        cos, sin: [1, T, D].
    """
    half = heads.shape[-1] // 2
    turned = torch.cat((-heads[..., half:], heads[..., :half]), dim=-1)
    return torch.addcmul(heads * cos[0][:, None], turned, sin[0][:, None])
