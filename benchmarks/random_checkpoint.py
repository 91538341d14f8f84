"""Checkpoints of well-known shapes with random weights, as a user's would lie on disk: config.json,
a tokenizer, safetensors in shards. What is measured with one includes reading it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 14336,
        "vocab_size": 128_256,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "max_position_embeddings": 8704,
    },
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "vocab_size": 151_936,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "max_position_embeddings": 8704,
    },
}
_COMMON = {"dtype": "bfloat16", "hidden_act": "silu", "eos_token_id": None, "pad_token_id": 0}
_SHARD_BYTES = 4 << 30


def save(folder: Path, shape: str, *, device: str, seed: int = 0) -> None:
    """Write a checkpoint with random weights in bfloat16 into an empty folder.

    Args: shape: of SHAPES. device: where the numbers are drawn; they differ between kinds of
        device.
    """
    config = SHAPES[shape] | _COMMON
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    vocabulary = {str(token_id): token_id for token_id in range(config["vocab_size"])}
    Tokenizer(WordLevel(vocabulary, unk_token="0")).save(str(folder / "tokenizer.json"))
    generator = torch.Generator(device).manual_seed(seed)
    shards: list[dict[str, torch.Tensor]] = [{}]
    num_bytes = 0
    for name, size in _tensors(config):
        tensor = torch.empty(size, dtype=torch.bfloat16, device=device)
        if len(size) == 1:
            tensor.fill_(1.0)
        else:
            tensor.normal_(0.0, 1.0 / math.sqrt(size[1]), generator=generator)
        if num_bytes > _SHARD_BYTES:
            shards.append({})
            num_bytes = 0
        shards[-1][name] = tensor.cpu()
        num_bytes += tensor.numel() * tensor.element_size()
    places: dict[str, str] = {}
    for index, shard in enumerate(shards):
        file = f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(shard, file)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": places}), encoding="utf-8"
    )


def _tensors(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and size of each, as transformers names them."""
    hidden, inner, vocab = (
        config[key] for key in ("hidden_size", "intermediate_size", "vocab_size")
    )
    query = config["num_attention_heads"] * config["head_dim"]
    key = config["num_key_value_heads"] * config["head_dim"]
    yield "model.embed_tokens.weight", (vocab, hidden)
    for layer in range(config["num_hidden_layers"]):
        start = f"model.layers.{layer}"
        yield f"{start}.input_layernorm.weight", (hidden,)
        yield f"{start}.self_attn.q_proj.weight", (query, hidden)
        yield f"{start}.self_attn.k_proj.weight", (key, hidden)
        yield f"{start}.self_attn.v_proj.weight", (key, hidden)
        yield f"{start}.self_attn.o_proj.weight", (hidden, query)
        if config["model_type"] == "qwen3":
            yield f"{start}.self_attn.q_norm.weight", (config["head_dim"],)
            yield f"{start}.self_attn.k_norm.weight", (config["head_dim"],)
        yield f"{start}.post_attention_layernorm.weight", (hidden,)
        yield f"{start}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{start}.mlp.up_proj.weight", (inner, hidden)
        yield f"{start}.mlp.down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (vocab, hidden)
