"""DecoderShape: what our own decoder must know of a model, read from a transformers config; and why
it does not do another. A pure value: no weights, no device. Any thread.

Invariant: what it accepts, it computes as transformers does; models/loader.py rehearses that for
every config it is given.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_ROPES = ("default", "linear", "llama3", "yarn")
"""Kinds of RoPE whose frequencies do not depend on a request's length."""


@dataclass(frozen=True)
class DecoderShape:
    """Sizes and switches of one rank's part of the model; of all of it where nothing is shared."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    norm_eps: float
    has_qkv_bias: bool
    has_o_bias: bool
    has_mlp_bias: bool
    has_head_norms: bool
    """RMSNorm of every query and key head before RoPE (Qwen3)."""
    is_tied: bool
    """The head's weight is the embedding's."""

    windows: tuple[int | None, ...]
    """How far each layer sees; None: all before it."""

    rope_frequencies: tuple[float, ...]
    """[D / 2]: radians a position, float32 numbers."""

    rope_scale: float
    """What cosine and sine are multiplied with (YaRN)."""

    @property
    def scaling(self) -> float:
        """Of the scores."""
        return 1.0 / math.sqrt(self.head_dim)

    @property
    def qkv_features(self) -> int:
        """Columns of query, key and value heads together."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def num_parameters(self) -> int:
        """Of all weights, a tied one counted once."""
        hidden, inner, query = self.hidden_size, self.intermediate_size, self.num_heads
        query *= self.head_dim
        layer = self.qkv_features * hidden + query * hidden + 3 * inner * hidden + 2 * hidden
        layer += self.qkv_features * self.has_qkv_bias + hidden * self.has_o_bias
        layer += (2 * inner + hidden) * self.has_mlp_bias + 2 * self.head_dim * self.has_head_norms
        ends = self.vocab_size * hidden * (1 if self.is_tied else 2) + hidden
        return layer * self.num_layers + ends

    def why_not_shared(self, num_ranks: int) -> str | None:
        """Why its layers cannot be cut for so many tensor-parallel ranks; None: they can."""
        for what, count in (
            ("key-value heads", self.num_kv_heads),
            ("heads", self.num_heads),
            ("inner features", self.intermediate_size),
            ("vocabulary entries", self.vocab_size),
        ):
            if count % num_ranks:
                return f"{count} {what} cannot be shared by {num_ranks} ranks"
        return None

    def share(self, num_ranks: int) -> DecoderShape:
        """The shape of one tensor-parallel rank's part. Raises: ValueError where it cannot be
        cut."""
        reason = self.why_not_shared(num_ranks)
        if reason is not None:
            raise ValueError(reason)
        return replace(
            self,
            num_heads=self.num_heads // num_ranks,
            num_kv_heads=self.num_kv_heads // num_ranks,
            intermediate_size=self.intermediate_size // num_ranks,
        )


def refusal(config: Any) -> str | None:
    """Why our decoder does not do a model of this transformers config; None: it does."""
    if config.model_type not in FAMILIES:
        return f"{config.model_type} is none of {', '.join(FAMILIES)}"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}, not silu"
    if config.num_attention_heads % config.num_key_value_heads:
        return "its heads are not a multiple of its key-value heads"
    rope = config.rope_parameters
    kind = rope.get("rope_type")
    if kind not in _ROPES:
        return f"its RoPE is {kind}: none of {', '.join(_ROPES)}"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        return "its RoPE turns a part of each head only"
    return None


def read_shape(config: Any) -> DecoderShape:
    """The shape of a transformers config. Raises: ValueError with `refusal`'s reason."""
    reason = refusal(config)
    if reason is not None:
        raise ValueError(reason)
    family = config.model_type
    has_bias = bool(getattr(config, "attention_bias", False)) and family in ("llama", "qwen3")
    frequencies, rope_scale = _rope(config)
    return DecoderShape(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim(config),
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        norm_eps=float(config.rms_norm_eps),
        has_qkv_bias=has_bias or family == "qwen2",
        has_o_bias=has_bias,
        has_mlp_bias=family == "llama" and bool(config.mlp_bias),
        has_head_norms=family == "qwen3",
        is_tied=bool(config.tie_word_embeddings),
        windows=_windows(config),
        rope_frequencies=frequencies,
        rope_scale=rope_scale,
    )


def rope_table(shape: DecoderShape, num_positions: int, device: torch.device) -> torch.Tensor:
    """[num_positions, D] float32: cosines, then sines, of every position's D / 2 angles. Angles are
    float32 products, as transformers' are. Source: RoFormer, arXiv:2104.09864, section 3.4.2."""
    positions = torch.arange(num_positions, dtype=torch.float32, device=device)
    frequencies = torch.tensor(shape.rope_frequencies, dtype=torch.float32, device=device)
    angles = positions[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=1).mul_(shape.rope_scale)


def head_dim(config: Any) -> int:
    """D of a transformers config."""
    named = getattr(config, "head_dim", None)
    return int(named or config.hidden_size // config.num_attention_heads)


def _windows(config: Any) -> tuple[int | None, ...]:
    """By layer. Llama's code reads no window, whatever its config says."""
    num_layers = int(config.num_hidden_layers)
    if config.model_type == "llama":
        return (None,) * num_layers
    window = None if config.sliding_window is None else int(config.sliding_window)
    if config.model_type == "mistral":
        return (window,) * num_layers
    return tuple(window if kind == "sliding_attention" else None for kind in config.layer_types)


def _rope(config: Any) -> tuple[tuple[float, ...], float]:
    """Frequencies and scale; the scaled kinds are transformers' to compute."""
    rope = config.rope_parameters
    dim = head_dim(config)
    if rope["rope_type"] == "default":
        exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
        return tuple((1.0 / (rope["rope_theta"] ** exponents)).tolist()), 1.0
    # Here: processes that are given a shape need no transformers.
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frequencies, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))
    if not math.isfinite(scale) or len(frequencies) != dim // 2:
        raise ValueError(f"transformers gives {len(frequencies)} frequencies, scale {scale}")
    return tuple(frequencies.float().tolist()), float(scale)
