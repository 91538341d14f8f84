"""EagleNetwork: EAGLE's autoregression head (arXiv 2401.15077; of EAGLE-2, 2406.16858, the same):
`fc` over a token's embedding beside the target's hidden state of the token before it, then decoder
layers of Llama's form, of which the first has no norm ahead of its attention. What comes out is a
guess of the target's hidden state of that token: the target's head makes logits of it, and it
stands for the hidden state where that is not known yet.

Embedding and head are the target's own. A checkpoint may carry copies, which training never
changes: they are not read. EAGLE-3 is another network, and refused.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.nn.functional import linear, rms_norm, silu

from engine.errors import LoadError
from engine.kv.layout import KvLayout
from engine.models.attention_hook import Attend
from engine.models.fused_layer import rotate
from engine.models.interface import Ends
from engine.speculation.heads.checkpoint import HeadCheckpoint

_NOT_READ = ("embed_tokens.weight", "lm_head.weight")
_MATRICES = ("q", "k", "v", "o", "gate", "up", "down")


class Layer(NamedTuple):
    """One decoder layer."""

    norm: torch.Tensor | None
    """Ahead of attention; None: the first layer's."""
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    o: torch.Tensor
    mlp_norm: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor


class Shape(NamedTuple):
    """Of all layers."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    inner_size: int
    norm_eps: float
    rope_theta: float
    rope_divisor: float
    """Positions are divided by it ("linear" scaling)."""

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


class EagleNetwork:
    """See the module."""

    def __init__(
        self,
        shape: Shape,
        fc: tuple[torch.Tensor, torch.Tensor | None],
        layers: tuple[Layer, ...],
        ends: Ends,
    ) -> None:
        self.shape = shape
        self.ends = ends
        self.layers = layers
        self._fc = fc
        steps = torch.arange(0, shape.head_dim, 2, dtype=torch.float32, device=fc[0].device)
        self._frequencies = shape.rope_theta ** (-steps / shape.head_dim) / shape.rope_divisor

    def layout(self, block_size: int, dtype: str) -> KvLayout:
        """Of its own cache."""
        return KvLayout.plain(
            num_layers=len(self.layers),
            num_kv_heads=self.shape.num_kv_heads,
            head_dim=self.shape.head_dim,
            block_size=block_size,
            dtype=dtype,
        )

    def forward(
        self,
        token_ids: torch.Tensor,
        features: torch.Tensor,
        positions: torch.Tensor,
        step: Attend,
    ) -> torch.Tensor:
        """One pass.

        Args:
            token_ids: [T].
            features: [T, hidden]: of the token before each, the target's hidden state or what came
                out here.
            positions: [T]: of the tokens before.
        Returns: [T, hidden].
        """
        shape = self.shape
        embedded = self.ends.embed(token_ids).to(features.dtype)
        x = linear(torch.cat((embedded, features), dim=-1), *self._fc)
        angles = positions.float()[:, None] * self._frequencies
        angles = torch.cat((angles, angles), dim=-1)[None]
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        num_rotated = shape.num_heads + shape.num_kv_heads
        for index, layer in enumerate(self.layers):
            qkv = linear(self._normed(x, layer.norm), layer.qkv, layer.qkv_bias)
            heads = qkv.view(len(x), -1, shape.head_dim)
            rotated = rotate(heads[:, :num_rotated], cos, sin).transpose(0, 1)
            attended = step.attend(
                index,
                rotated[: shape.num_heads],
                rotated[shape.num_heads :],
                heads[:, num_rotated:].transpose(0, 1),
                shape.head_dim**-0.5,
                None,
            )
            x = x + linear(attended.reshape(len(x), -1), layer.o)
            normed = self._normed(x, layer.mlp_norm)
            x = x + linear(silu(linear(normed, layer.gate)) * linear(normed, layer.up), layer.down)
        return x

    def _normed(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        if weight is None:
            return x
        return rms_norm(x, weight.shape, weight, self.shape.norm_eps)


def is_eagle(checkpoint: HeadCheckpoint) -> bool:
    """By its tensors: its config.json is that of a small Llama."""
    return "fc.weight" in checkpoint.keys


def read_eagle(checkpoint: HeadCheckpoint, ends: Ends, *, vocab_size: int) -> EagleNetwork:
    """The network of a checkpoint. Raises: LoadError."""
    if "d2t" in checkpoint.keys or any(key.startswith("midlayer.") for key in checkpoint.keys):
        raise LoadError(
            f"speculation.draft_heads: {checkpoint.name} is an EAGLE-3 head, which goes by the "
            "hidden states of three layers; name one of EAGLE or EAGLE-2"
        )
    shape = _shape(checkpoint, ends.hidden_size, vocab_size)
    hidden, num_layers = shape.hidden_size, checkpoint.number("num_hidden_layers", 1)
    fc = (
        checkpoint.tensor("fc.weight", (hidden, 2 * hidden)),
        checkpoint.optional("fc.bias", (hidden,)),
    )
    layers = tuple(_layer(checkpoint, shape, index) for index in range(num_layers))
    known = {"fc.weight", "fc.bias", *_NOT_READ}
    for index in range(num_layers):
        known |= set(_names(index).values())
        known |= {f"layers.{index}.self_attn.{name}_proj.bias" for name in "qkv"}
        known.add(f"layers.{index}.self_attn.rotary_emb.inv_freq")
    known.discard("layers.0.input_layernorm.weight")
    checkpoint.check_known(known)
    return EagleNetwork(shape, fc, layers, ends)


def _names(index: int) -> dict[str, str]:
    """Of one layer's tensors."""
    prefix = f"layers.{index}"
    names = {name: f"{prefix}.self_attn.{name}_proj.weight" for name in "qkvo"}
    names |= {name: f"{prefix}.mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
    return names | {
        "norm": f"{prefix}.input_layernorm.weight",
        "mlp_norm": f"{prefix}.post_attention_layernorm.weight",
    }


def _layer(checkpoint: HeadCheckpoint, shape: Shape, index: int) -> Layer:
    hidden, inner = shape.hidden_size, shape.inner_size
    key_size = shape.num_kv_heads * shape.head_dim
    sizes = {"q": (hidden, hidden), "k": (key_size, hidden), "v": (key_size, hidden)}
    sizes |= {"o": (hidden, hidden), "gate": (inner, hidden), "up": (inner, hidden)}
    sizes["down"] = (hidden, inner)
    names = _names(index)
    found = {name: checkpoint.tensor(names[name], sizes[name]) for name in _MATRICES}
    biases: list[torch.Tensor] = []
    if f"layers.{index}.self_attn.q_proj.bias" in checkpoint.keys:
        for name in "qkv":
            bias_name = f"layers.{index}.self_attn.{name}_proj.bias"
            biases.append(checkpoint.tensor(bias_name, (sizes[name][0],)))
    return Layer(
        None if index == 0 else checkpoint.tensor(names["norm"], (hidden,)),
        torch.cat([found[name] for name in "qkv"]),
        torch.cat(biases) if biases else None,
        found["o"],
        checkpoint.tensor(names["mlp_norm"], (hidden,)),
        found["gate"],
        found["up"],
        found["down"],
    )


def _shape(checkpoint: HeadCheckpoint, hidden_size: int, vocab_size: int) -> Shape:
    """Raises: LoadError for a field that does not go with the target, or that asks for something
    else than is computed here."""
    config = checkpoint.config
    where = f"speculation.draft_heads: {checkpoint.name}: config.json says"
    for field, own in (("hidden_size", hidden_size), ("vocab_size", vocab_size)):
        if config.get(field) != own:
            raise LoadError(
                f"{where} {field} {config.get(field)!r}, this model has {own}; name heads that "
                "were made for it"
            )
    if config.get("hidden_act", "silu") != "silu":
        raise LoadError(f"{where} hidden_act {config['hidden_act']!r}; only silu is computed")
    num_heads = checkpoint.number("num_attention_heads", 1)
    num_kv_heads = checkpoint.number("num_key_value_heads", num_heads)
    if hidden_size % num_heads or num_heads % num_kv_heads or (hidden_size // num_heads) % 2:
        raise LoadError(
            f"{where} {num_heads} heads and {num_kv_heads} of keys over hidden_size {hidden_size}, "
            "which cannot be; fix it, or fetch it again"
        )
    theta, divisor = _rope(config, where)
    return Shape(
        hidden_size,
        num_heads,
        num_kv_heads,
        checkpoint.number("intermediate_size", 4 * hidden_size),
        float(config.get("rms_norm_eps", 1e-6)),
        theta,
        divisor,
    )


def _rope(config: dict[str, Any], where: str) -> tuple[float, float]:
    """(theta, what positions are divided by)."""
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ("default", "linear"):
        raise LoadError(
            f"{where} rope_scaling {kind!r}; heads are computed with none, or with 'linear'"
        )
    theta = float(config.get("rope_theta") or scaling.get("rope_theta") or 10000.0)
    return theta, float(scaling.get("factor", 1.0)) if kind == "linear" else 1.0
