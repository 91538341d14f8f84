"""A tiny Qwen3-shaped checkpoint with random weights and a tokenizer of single bytes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": 260,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "dtype": "float32",
}


def weights() -> dict[str, np.ndarray]:
    """Always the same ones."""
    rng = np.random.default_rng(7)
    layer = "model.layers.0"
    shapes = {
        "model.embed_tokens.weight": (260, 16),
        f"{layer}.self_attn.q_proj.weight": (16, 16),
        f"{layer}.self_attn.k_proj.weight": (8, 16),
        f"{layer}.self_attn.v_proj.weight": (8, 16),
        f"{layer}.self_attn.o_proj.weight": (16, 16),
        f"{layer}.self_attn.q_norm.weight": (8,),
        f"{layer}.self_attn.k_norm.weight": (8,),
        f"{layer}.mlp.gate_proj.weight": (32, 16),
        f"{layer}.mlp.up_proj.weight": (32, 16),
        f"{layer}.mlp.down_proj.weight": (16, 32),
        f"{layer}.input_layernorm.weight": (16,),
        f"{layer}.post_attention_layernorm.weight": (16,),
        "model.norm.weight": (16,),
    }
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def save(folder: Path) -> None:
    """Write it as `save_pretrained` would, in two shards."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: index for index, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 128}))
    tensors = weights()
    names = sorted(tensors)
    shards = {
        "model-00001-of-00002.safetensors": names[:6],
        "model-00002-of-00002.safetensors": names[6:],
    }
    for file, held in shards.items():
        save_file({name: tensors[name] for name in held}, folder / file)
    weight_map = {name: file for file, held in shards.items() for name in held}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
