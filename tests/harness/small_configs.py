"""A small config of every model type that is served: its default config, with what that leaves
open, shrunk as the engine's rehearsal does it."""

from __future__ import annotations

from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from engine.models.shrink import shrink

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
    return shrink(CONFIG_MAPPING[model_type](**OPEN.get(model_type, {})))
