"""Small random EAGLE-3 heads, saved as they are published, and what they compute, written from the
paper: whole sequences at once, with no cache. Of a target of 3 layers with HIDDEN features and
VOCAB tokens (published_heads.py); the head's own sizes are others."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.harness.published_heads import HIDDEN, VOCAB, Tensors, save

LAYERS = (0, 1, 2)
"""Of the target; those that are published are of a deeper one."""

HEAD_DIM, NUM_HEADS, NUM_KV_HEADS, INNER = 6, 4, 2, 40
NUM_DRAFTED = 90
IDS = "eagle_aux_hidden_state_layer_ids"


def eagle3_tensors(
    *, own_size: int = HIDDEN, num_drafted: int = NUM_DRAFTED, seed: int = 0
) -> Tensors:
    """With maps of a vocabulary that is a part of the target's, and an embedding if the target's is
    of another size."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) / math.sqrt(columns)

    def vector() -> torch.Tensor:
        return torch.randn(own_size, generator=generator) / 4 + 1

    tensors = {"fc.weight": matrix(own_size, len(LAYERS) * HIDDEN), "norm.weight": vector()}
    for name, heads in (("q", NUM_HEADS), ("k", NUM_KV_HEADS), ("v", NUM_KV_HEADS)):
        weight = matrix(heads * HEAD_DIM, 2 * own_size)
        tensors[f"midlayer.self_attn.{name}_proj.weight"] = weight
    tensors["midlayer.self_attn.o_proj.weight"] = matrix(own_size, NUM_HEADS * HEAD_DIM)
    for name in ("gate", "up"):
        tensors[f"midlayer.mlp.{name}_proj.weight"] = matrix(INNER, own_size)
    tensors["midlayer.mlp.down_proj.weight"] = matrix(own_size, INNER)
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        tensors[f"midlayer.{name}.weight"] = vector()
    tensors["lm_head.weight"] = 3 * matrix(num_drafted, own_size)
    chosen = torch.randperm(VOCAB, generator=generator)[:num_drafted].sort().values
    tensors["d2t"] = chosen - torch.arange(num_drafted)
    tensors["t2d"] = torch.isin(torch.arange(VOCAB), chosen)
    if own_size != HIDDEN:
        tensors["embed_tokens.weight"] = matrix(VOCAB, own_size)
    return tensors


EAGLE3_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "draft_vocab_size": NUM_DRAFTED,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "max_position_embeddings": 64,
    "model_type": "llama",
    "num_attention_heads": NUM_HEADS,
    "num_hidden_layers": 1,
    "num_key_value_heads": NUM_KV_HEADS,
    "rms_norm_eps": 1e-5,
    "rope_theta": 3000.0,
    "tie_word_embeddings": False,
    "vocab_size": VOCAB,
}


def save_eagle3(folder: Path, tensors: Tensors | None = None, **fields: Any) -> Path:
    """The layers are named unless `fields` names them."""
    tensors = eagle3_tensors() if tensors is None else tensors
    if "eagle_config" not in fields:
        fields = {IDS: list(LAYERS)} | fields
    return save(folder, tensors, EAGLE3_CONFIG | fields)


def eagle3_feature(tensors: Tensors, inputs: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """[n, own size] of what went into the target's layers, [n, HIDDEN] each."""
    return torch.cat([inputs[layer] for layer in LAYERS], dim=-1) @ tensors["fc.weight"].T


def _normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def eagle3_out(
    tensors: Tensors,
    embedding: torch.Tensor,
    token_ids: Sequence[int],
    features: torch.Tensor,
    first: int,
    *,
    adds_normed: bool = False,
) -> torch.Tensor:
    """[n, own size] that come out of token i + 1 beside the feature of token i, the first of which
    is at position `first`."""
    count = len(token_ids)
    half = torch.arange(HEAD_DIM // 2)
    angles = torch.arange(first, first + count)[:, None] / 3000.0 ** (2 * half / HEAD_DIM)
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]

    def heads(name: str) -> torch.Tensor:
        projected = seen @ tensors[f"midlayer.self_attn.{name}_proj.weight"].T
        return projected.view(count, -1, HEAD_DIM)

    def turned(x: torch.Tensor) -> torch.Tensor:
        """Pairs (i, i + D / 2) as complex numbers."""
        left, right = x.chunk(2, dim=-1)
        both = torch.complex(left, right) * turn
        return torch.cat((both.real, both.imag), dim=-1)

    def layer(name: str) -> torch.Tensor:
        return tensors[f"midlayer.{name}.weight"]

    normed = _normed(features, layer("hidden_norm"))
    seen = torch.cat(
        (_normed(embedding[list(token_ids)], layer("input_layernorm")), normed), dim=-1
    )
    q, k, v = turned(heads("q")), turned(heads("k")), heads("v")
    groups = q.view(count, NUM_KV_HEADS, -1, HEAD_DIM)
    scores = torch.einsum("ikgd,jkd->kgij", groups, k) / math.sqrt(HEAD_DIM)
    scores = scores.masked_fill(torch.ones(count, count).triu(1).bool(), -torch.inf)
    mixed = torch.einsum("kgij,jkd->ikgd", scores.softmax(-1), v).reshape(count, -1)
    x = normed if adds_normed else features
    x = x + mixed @ layer("self_attn.o_proj").T
    y = _normed(x, layer("post_attention_layernorm"))
    gate = y @ layer("mlp.gate_proj").T
    return x + (gate * gate.sigmoid() * (y @ layer("mlp.up_proj").T)) @ layer("mlp.down_proj").T


def eagle3_logits(tensors: Tensors, out: torch.Tensor) -> torch.Tensor:
    """[VOCAB] after one row that came out; -inf of what the head has no token for."""
    own = tensors["lm_head.weight"] @ _normed(out, tensors["norm.weight"])
    logits = torch.full((VOCAB,), -torch.inf)
    logits[torch.arange(len(own)) + tensors["d2t"]] = own
    return logits
