"""Tiny random checkpoints, saved as transformers saves them, with a tokenizer file beside.

Float32, vocabulary 260, so that a test's oracle (transformers' own generate) runs in milliseconds.
And a small config of every model type that is served: its default config, with what that leaves
open, shrunk as the engine's rehearsal does it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from engine.models.self_check import tiny_config

VOCAB_SIZE = 260
WINDOW = 700

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": WINDOW,
    "eos_token_id": 1,
    "bos_token_id": None,
    "pad_token_id": 0,
    "dtype": "float32",
    "initializer_range": 0.3,  # so that logits are far apart, as a trained model's are
}

FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**_COMMON),
    "llama-tied-llama3-rope": lambda: transformers.LlamaConfig(
        **_COMMON,
        tie_word_embeddings=True,
        attention_bias=True,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "mistral": lambda: transformers.MistralConfig(**_COMMON, sliding_window=None),
    "mistral-window": lambda: transformers.MistralConfig(**_COMMON, sliding_window=21),
    "qwen2": lambda: transformers.Qwen2Config(**_COMMON, tie_word_embeddings=True),
    "qwen2-window": lambda: transformers.Qwen2Config(
        **_COMMON, use_sliding_window=True, sliding_window=13, max_window_layers=1
    ),
    "qwen3": lambda: transformers.Qwen3Config(**_COMMON, head_dim=16),
}


@dataclass(frozen=True)
class Tiny:
    """A checkpoint folder and the unmodified model of transformers that was saved to it."""

    family: str
    path: Path
    oracle: Any

    def generate(self, prompt: list[int], num_tokens: int) -> list[int]:
        """Greedy output tokens of transformers, EOS ignored."""
        with torch.inference_mode():
            output = self.oracle.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=num_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        tokens: list[int] = output[0, len(prompt) :].tolist()
        return tokens


def save(config: Any, folder: Path, seed: int) -> Any:
    """A random model of `config`, saved to `folder` with a tokenizer; returns the model."""
    torch.manual_seed(seed)
    model_class = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    model = model_class(config).to(torch.float32).eval()
    with torch.no_grad():  # norms and biases that do something
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.3)
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder)
    Tokenizer(WordLevel({str(i): i for i in range(config.vocab_size)}, unk_token="0")).save(
        str(folder / "tokenizer.json")
    )
    return model


_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_FULL_AND_SLIDING = {"full_attention": _ROPE, "sliding_attention": _ROPE}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
}

OPEN: dict[str, dict[str, Any]] = {
    # what a default config lacks
    "deepseek_v2": {
        "num_experts_per_tok": 2, "n_routed_experts": 8, "topk_method": "greedy", "n_group": 1,
        "topk_group": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 32,
    },
    "dots1": {
        "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1, "n_shared_experts": 1,
    },
    "cohere_compass_text": {
        "rope_parameters": _FULL_AND_SLIDING,
        "layer_types": ["sliding_attention", "full_attention"] * 20,
    },
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16, "num_experts": 4, "moe_topk": 2},
    "ministral": {"head_dim": 16},
    # switches that a default config leaves off and checkpoints have on
    "deepseek_v3": {"rope_parameters": _YARN},
    "gemma4_text": {"num_kv_shared_layers": 10},
    "granite": {
        "embedding_multiplier": 3.0, "residual_multiplier": 0.22, "logits_scaling": 2.0,
        "attention_multiplier": 0.2,
    },
    "granitemoe": {
        "embedding_multiplier": 3.0, "residual_multiplier": 0.22, "logits_scaling": 2.0,
        "attention_multiplier": 0.2,
    },
    "qwen2": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
}  # fmt: skip


def small_config(model_type: str) -> Any:
    """A transformers config of this type with which a model has about a million parameters."""
    return tiny_config(CONFIG_MAPPING[model_type](**OPEN.get(model_type, {})))
