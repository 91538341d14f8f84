"""Layers: decoder layers of Llama's form, of which heads have one or a few: attention, residual,
norm, gated SiLU, residual. What is ahead of the attention is the network's own. Engine thread only.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import linear, rms_norm, silu

from engine.errors import LoadError
from engine.kv.layout import KvLayout
from engine.layers.torch_attention import Attend
from engine.models.fusion import rotate
from engine.speculation.heads.checkpoint import HeadCheckpoint
from engine.speculation.heads.rope import Rope

Turns = tuple[torch.Tensor, torch.Tensor]
"""Rope.turns."""


class Shape(NamedTuple):
    """Of all layers."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    inner_size: int
    norm_eps: float


class Layer(NamedTuple):
    """One decoder layer."""

    qkv: torch.Tensor
    """[(H + 2 K) D, what attention is made of]."""
    qkv_bias: torch.Tensor | None
    o: torch.Tensor
    o_bias: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor


class Layers:
    """See the module."""

    def __init__(self, shape: Shape, rope: Rope, layers: tuple[Layer, ...]) -> None:
        self.shape = shape
        self.rope = rope
        self.all = layers

    def layout(self, block_size: int, dtype: str) -> KvLayout:
        """Of their cache."""
        return KvLayout.plain(
            num_layers=len(self.all),
            num_kv_heads=self.shape.num_kv_heads,
            head_dim=self.shape.head_dim,
            block_size=block_size,
            dtype=dtype,
        )

    def forward(
        self, index: int, x: torch.Tensor, seen: torch.Tensor, turns: Turns, step: Attend
    ) -> torch.Tensor:
        """One layer.

        Args:
            x: [T, hidden]: the sum so far.
            seen: [T, inputs of its qkv]: what its attention is made of.
        Returns: [T, hidden].
        """
        layer, shape = self.all[index], self.shape
        num_rotated = shape.num_heads + shape.num_kv_heads
        heads = linear(seen, layer.qkv, layer.qkv_bias).view(len(x), -1, shape.head_dim)
        rotated = rotate(heads[:, :num_rotated], *turns).transpose(0, 1)
        attended = step.attend(
            index,
            rotated[: shape.num_heads],
            rotated[shape.num_heads :],
            heads[:, num_rotated:].transpose(0, 1),
            shape.head_dim**-0.5,
            None,
        )
        x = x + linear(attended.reshape(len(x), -1), layer.o, layer.o_bias)
        normed = self.normed(x, layer.mlp_norm)
        return x + linear(silu(linear(normed, layer.gate)) * linear(normed, layer.up), layer.down)

    def normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMSNorm of rows."""
        return rms_norm(x, weight.shape, weight, self.shape.norm_eps)


def read_shape(checkpoint: HeadCheckpoint, hidden_size: int) -> Shape:
    """Of its config.json. Raises: LoadError for numbers that cannot be, and for something else than
    is computed here."""
    config, where = checkpoint.config, says(checkpoint)
    if config.get("hidden_act", "silu") != "silu":
        raise LoadError(f"{where} hidden_act {config['hidden_act']!r}; only silu is computed")
    num_heads = checkpoint.number("num_attention_heads", 1)
    num_kv_heads = checkpoint.number("num_key_value_heads", num_heads)
    head_dim = checkpoint.number("head_dim", max(1, hidden_size // num_heads))
    is_cut = config.get("head_dim") is None and hidden_size % num_heads
    if is_cut or num_heads % num_kv_heads or head_dim % 2:
        raise LoadError(
            f"{where} {num_heads} heads and {num_kv_heads} of keys over hidden_size {hidden_size}, "
            "which cannot be; fix it, or fetch it again"
        )
    return Shape(
        hidden_size,
        num_heads,
        num_kv_heads,
        head_dim,
        checkpoint.number("intermediate_size", 4 * hidden_size),
        float(config.get("rms_norm_eps", 1e-6)),
    )


def says(checkpoint: HeadCheckpoint) -> str:
    """The beginning of a refusal of its config.json."""
    return f"speculation.draft_heads: {checkpoint.name}: config.json says"


def layer_names(prefix: str) -> set[str]:
    """The tensors of one layer that `read_layer` reads, if they are there."""
    names = {f"{prefix}.self_attn.{name}_proj.{kind}" for name in "qkvo" for kind in _KINDS}
    names |= {f"{prefix}.mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
    return names | {f"{prefix}.post_attention_layernorm.weight"}


_KINDS = ("weight", "bias")


def read_layer(checkpoint: HeadCheckpoint, shape: Shape, prefix: str, seen_size: int) -> Layer:
    """One layer of a checkpoint.

    Args:
        seen_size: what its attention is made of.
    Raises: LoadError.
    """
    hidden, inner = shape.hidden_size, shape.inner_size
    query_size, key_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    rows = {"q": query_size, "k": key_size, "v": key_size}
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    qkv = [checkpoint.tensor(f"{attention}.{n}_proj.weight", (rows[n], seen_size)) for n in rows]
    biases: list[torch.Tensor] = []
    if f"{attention}.q_proj.bias" in checkpoint.keys:
        biases = [checkpoint.tensor(f"{attention}.{n}_proj.bias", (rows[n],)) for n in rows]
    return Layer(
        torch.cat(qkv),
        torch.cat(biases) if biases else None,
        checkpoint.tensor(f"{attention}.o_proj.weight", (hidden, query_size)),
        checkpoint.optional(f"{attention}.o_proj.bias", (hidden,)),
        checkpoint.tensor(f"{prefix}.post_attention_layernorm.weight", (hidden,)),
        checkpoint.tensor(f"{mlp}.gate_proj.weight", (inner, hidden)),
        checkpoint.tensor(f"{mlp}.up_proj.weight", (inner, hidden)),
        checkpoint.tensor(f"{mlp}.down_proj.weight", (hidden, inner)),
    )
