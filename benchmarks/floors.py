"""Floors: what the bytes and operations of a model would take at the measured ceilings of a device.
Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Floors:
    """What a shape's bytes and operations would take at the ceilings of this run, one after the
    other: weights and cached keys and values read once a step, each product once. Nothing runs much
    faster; what runs products and reads at once may."""

    shape: Mapping[str, Any]
    ceilings: Mapping[str, float]
    weight_bytes: int
    """Of one number of a layer's matrices."""

    @property
    def _layer_parameters(self) -> int:
        hidden, inner, heads = (
            self.shape[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads")
        )
        columns = (heads + 2 * self.shape["num_key_value_heads"]) * self.shape["head_dim"]
        attended = heads * self.shape["head_dim"]
        per_layer = hidden * (columns + attended + 3 * inner)
        return int(self.shape["num_hidden_layers"] * per_layer)

    @property
    def _token_bytes(self) -> int:
        """Keys and values of one token, bfloat16."""
        heads = self.shape["num_key_value_heads"] * self.shape["head_dim"]
        return int(2 * 2 * self.shape["num_hidden_layers"] * heads)

    def _read_s(self, num_bytes: float) -> float:
        return num_bytes / (self.ceilings["read_gb_per_s"] * 1e9)

    def decode_s(self, batch: int, context: float) -> float:
        """One step."""
        head = 2 * self.shape["hidden_size"] * self.shape["vocab_size"]
        weights = self.weight_bytes * self._layer_parameters + head
        return self._read_s(weights + batch * context * self._token_bytes)

    def prefill_s(self, num_prompts: int, num_tokens: int) -> float:
        """Products and causal attention."""
        heads = self.shape["num_attention_heads"] * self.shape["head_dim"]
        pairs = num_tokens * num_tokens / 2
        flops = 2.0 * self._layer_parameters * num_tokens
        flops += 4.0 * self.shape["num_hidden_layers"] * heads * pairs
        return num_prompts * flops / (self.ceilings["matmul_tflop_per_s"] * 1e12)

    def throughput_s(self, num_requests: int, num_prompt: int, num_output: int) -> float:
        """All prompts, then all steps."""
        step_s = self.decode_s(num_requests, num_prompt + num_output / 2)
        return self.prefill_s(num_requests, num_prompt) + (num_output - 1) * step_s
