"""Small random draft heads, saved as Medusa and EAGLE publish theirs, and what they compute,
written from the papers: whole sequences at once, with no cache."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]

HIDDEN = 48
VOCAB = 260
NUM_HEADS, NUM_KV_HEADS, INNER = 4, 2, 56
HEAD_DIM = HIDDEN // NUM_HEADS


def medusa_tensors(
    num_heads: int = 3, num_blocks: int = 2, *, seed: int = 0, has_projections: bool = True
) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    tensors: Tensors = {}
    for head in range(num_heads):
        for block in range(num_blocks):
            name = f"{head}.{block}.linear"
            tensors[f"{name}.weight"] = torch.randn(HIDDEN, HIDDEN, generator=generator) / 7
            tensors[f"{name}.bias"] = torch.randn(HIDDEN, generator=generator)
        if has_projections:
            tensors[f"{head}.{num_blocks}.weight"] = torch.randn(VOCAB, HIDDEN, generator=generator)
    return tensors


def eagle_tensors(num_layers: int = 1, *, seed: int = 0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) / math.sqrt(columns)

    def vector(size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator) / 4 + 1

    tensors = {"fc.weight": matrix(HIDDEN, 2 * HIDDEN), "fc.bias": vector(HIDDEN) - 1}
    tensors["embed_tokens.weight"] = matrix(VOCAB, HIDDEN)
    for index in range(num_layers):
        prefix = f"layers.{index}"
        for name, heads in (("q", NUM_HEADS), ("k", NUM_KV_HEADS), ("v", NUM_KV_HEADS)):
            tensors[f"{prefix}.self_attn.{name}_proj.weight"] = matrix(heads * HEAD_DIM, HIDDEN)
        tensors[f"{prefix}.self_attn.o_proj.weight"] = matrix(HIDDEN, HIDDEN)
        tensors[f"{prefix}.mlp.gate_proj.weight"] = matrix(INNER, HIDDEN)
        tensors[f"{prefix}.mlp.up_proj.weight"] = matrix(INNER, HIDDEN)
        tensors[f"{prefix}.mlp.down_proj.weight"] = matrix(HIDDEN, INNER)
        tensors[f"{prefix}.post_attention_layernorm.weight"] = vector(HIDDEN)
        if index > 0:
            tensors[f"{prefix}.input_layernorm.weight"] = vector(HIDDEN)
    return tensors


MEDUSA_CONFIG: dict[str, Any] = {
    "base_model_name_or_path": "somebody/target",
    "medusa_num_heads": 2,
    "medusa_num_layers": 2,
    "model_type": "medusa",
}
"""Two heads of three: published ones say too few, too."""

EAGLE_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "max_position_embeddings": 700,
    "model_type": "llama",
    "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": NUM_KV_HEADS,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "vocab_size": VOCAB,
}


def save(
    folder: Path, tensors: Tensors, config: dict[str, Any], file: str = "model.safetensors"
) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / file)
    return folder


def save_medusa(folder: Path, tensors: Tensors | None = None, **fields: Any) -> Path:
    tensors = medusa_tensors() if tensors is None else tensors
    return save(folder, tensors, MEDUSA_CONFIG | fields, "medusa_lm_head.safetensors")


def save_eagle(folder: Path, tensors: Tensors | None = None, **fields: Any) -> Path:
    return save(folder, eagle_tensors() if tensors is None else tensors, EAGLE_CONFIG | fields)


def medusa_logits(
    tensors: Tensors, head: int, hidden: torch.Tensor, own_head: torch.Tensor
) -> torch.Tensor:
    """Of one head, after 2 blocks: [B, hidden] -> [B, V]. `own_head`: [V, hidden], the target's."""
    for block in range(2):
        inner = hidden @ tensors[f"{head}.{block}.linear.weight"].T
        inner = inner + tensors[f"{head}.{block}.linear.bias"]
        hidden = hidden + inner * torch.sigmoid(inner)
    return hidden @ tensors.get(f"{head}.2.weight", own_head).T


def eagle_features(
    tensors: Tensors,
    embedding: torch.Tensor,
    token_ids: Sequence[int],
    features: torch.Tensor,
    first: int,
    num_layers: int = 1,
) -> torch.Tensor:
    """[n, hidden] that come out of token i + 1 beside the feature of token i, the first of which
    is at position `first`."""
    count = len(token_ids)
    x = torch.cat((embedding[list(token_ids)], features), dim=-1) @ tensors["fc.weight"].T
    x = x + tensors["fc.bias"]
    half = torch.arange(HEAD_DIM // 2)
    angles = torch.arange(first, first + count)[:, None] / 5000.0 ** (2 * half / HEAD_DIM)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]

    def turned(heads: torch.Tensor) -> torch.Tensor:
        left, right = heads.chunk(2, dim=-1)
        return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)

    def normed(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * tensors[name]

    for index in range(num_layers):
        prefix = f"layers.{index}"
        y = x if index == 0 else normed(x, f"{prefix}.input_layernorm.weight")
        q, k, v = (
            (y @ tensors[f"{prefix}.self_attn.{name}_proj.weight"].T).view(count, -1, HEAD_DIM)
            for name in "qkv"
        )
        shared = NUM_HEADS // NUM_KV_HEADS
        q, k, v = turned(q), turned(k).repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
        scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(HEAD_DIM)
        scores = scores.masked_fill(torch.ones(count, count).triu(1).bool(), -torch.inf)
        mixed = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).reshape(count, HIDDEN)
        x = x + mixed @ tensors[f"{prefix}.self_attn.o_proj.weight"].T
        y = normed(x, f"{prefix}.post_attention_layernorm.weight")
        gate = y @ tensors[f"{prefix}.mlp.gate_proj.weight"].T
        inner = gate * torch.sigmoid(gate) * (y @ tensors[f"{prefix}.mlp.up_proj.weight"].T)
        x = x + inner @ tensors[f"{prefix}.mlp.down_proj.weight"].T
    return x
