"""How much memory a model takes: the formula of docs/sizing.md over a checkpoint's config. Pure.

    weights + blocks x (2 x layers x KV heads x head dim x bytes per number) x tokens per block

and for latent attention (MLA) the latent and its rotary part instead of keys and values; beside
them the room that adapters which are launched take from the start (lora.max_launched_rank). An
estimate: the worker measures what a step needs and refuses to start where it does not fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_BYTES = {
    "float32": 4.0,
    "bfloat16": 2.0,
    "float16": 2.0,
    "int8": 1.0,
    "fp8_e4m3": 1.0,
}
_MAX_GUESSED_WINDOW = 8192
"""Tokens, where neither settings nor config name a window."""
MAX_NUM_ADAPTERS = 8
"""Of an engine whose settings say nothing else: lora.max_num_adapters."""


@dataclass(frozen=True)
class ModelMemory:
    """What one worker of a model needs, in bytes."""

    weight_bytes: float
    """All weights, as they are computed with."""

    kv_bytes_per_token: float
    """Of every layer."""

    context_window: int
    """Tokens of the longest request."""

    streamed_bytes: float = 0.0
    """Of the weights, what at least lies in host memory beside a GPU (weights_device_bytes)."""

    stack_bytes: float = 0.0
    """For adapters that are launched, where our own decoder computes: all of it from the start."""

    @property
    def least_bytes(self) -> float:
        """Weights, room for adapters, and KV of one request that fills the window: below it no
        worker starts."""
        kv_bytes = self.kv_bytes_per_token * self.context_window
        return self.weight_bytes + self.stack_bytes + kv_bytes


def estimate(
    config: Mapping[str, Any], stored_bytes: float, engine: Mapping[str, Any]
) -> ModelMemory | None:
    """Of a checkpoint with this config.json and `stored_bytes` of weights in its files, run with
    these settings of the engine. None: the config does not say enough."""
    config = {**config, **(config.get("text_config") or {})}
    stored = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    computed = stored if engine.get("dtype", "auto") == "auto" else str(engine["dtype"])
    if stored not in _BYTES or computed not in _BYTES:
        return None
    factor = _BYTES[computed] / _BYTES[stored]
    if engine.get("weight_dtype", "auto") == "fp8_e4m3":
        factor = _BYTES["fp8_e4m3"] / _BYTES[stored]
    kv = computed if engine.get("kv_dtype", "auto") == "auto" else str(engine["kv_dtype"])
    numbers = _kv_numbers_per_token(config)
    if numbers is None or kv not in _BYTES:
        return None
    window = int(
        engine.get("context_window") or config.get("max_position_embeddings") or _MAX_GUESSED_WINDOW
    )
    weight_bytes = stored_bytes * factor
    given = float(engine.get("weights_device_bytes") or 0)
    streamed_bytes = max(0.0, weight_bytes - given) if given else 0.0
    is_stacked = kv == computed and engine.get("overlap", True) and not engine.get("exact", False)
    stack_bytes = _stack_numbers(config, engine) * _BYTES[computed] if is_stacked else 0.0
    return ModelMemory(weight_bytes, numbers * _BYTES[kv], window, streamed_bytes, stack_bytes)


def _stack_numbers(config: Mapping[str, Any], engine: Mapping[str, Any]) -> float:
    """Of the factors of as many adapters as may be loaded, on every linear layer; modules whose
    weights lie in one matrix have their ranks side by side (engine/lora/stacks.py)."""
    lora = engine.get("lora") or {}
    rank = float(lora.get("max_launched_rank") or 0)
    num_adapters = float(lora.get("max_num_adapters", MAX_NUM_ADAPTERS))
    hidden, inner = config.get("hidden_size"), config.get("intermediate_size")
    num_heads, num_layers = config.get("num_attention_heads"), config.get("num_hidden_layers")
    if not (rank and num_adapters and hidden and inner and num_heads and num_layers):
        return 0.0
    head_dim = config.get("head_dim") or hidden // num_heads
    query = num_heads * head_dim
    key = (config.get("num_key_value_heads") or num_heads) * head_dim
    linears = (
        (3, hidden + query + 2 * key),
        (1, query + hidden),
        (2, hidden + 2 * inner),
        (1, inner + hidden),
    )
    each = sum(num_modules * features for num_modules, features in linears)
    return float(num_layers * num_adapters * rank * each)


def _kv_numbers_per_token(config: Mapping[str, Any]) -> float | None:
    num_layers = config.get("num_hidden_layers") or config.get("n_layer")
    if not num_layers:
        return None
    if config.get("kv_lora_rank"):
        latent = config["kv_lora_rank"] + (config.get("qk_rope_head_dim") or 0)
        return float(num_layers * latent)
    num_heads = config.get("num_attention_heads") or config.get("n_head")
    hidden = config.get("hidden_size") or config.get("n_embd")
    if not num_heads or not hidden:
        return None
    num_kv_heads = config.get("num_key_value_heads") or num_heads
    head_dim = config.get("head_dim") or hidden // num_heads
    return float(2 * num_layers * num_kv_heads * head_dim)
