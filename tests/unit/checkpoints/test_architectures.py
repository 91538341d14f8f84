"""What a config.json alone says about whether it is served."""

from __future__ import annotations

from typing import Any

import pytest

from checkpoints.architectures import FUSED, REFUSED, SERVED, UNIVERSAL, refusal

_FEATURES = {
    "kv-dims", "layer-dims", "logit-softcap", "mla", "moe", "shared-kv", "sinks", "sliding",
    "softcap",
}  # fmt: skip


def test_the_table_uses_its_own_words() -> None:
    assert list(SERVED) == sorted(SERVED) and list(REFUSED) == sorted(REFUSED)
    for route, features in SERVED.values():
        assert route in (FUSED, UNIVERSAL)
        assert set(features.split()) <= _FEATURES


def test_what_is_served_is_not_refused_by_its_type() -> None:
    assert [name for name in SERVED if refusal({"model_type": name}) is not None] == []


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({}, "None"),
        ({"model_type": ["llama"]}, "llama"),
        ({"model_type": "jamba"}, "recurrent"),
        ({"model_type": "gpt6"}, "not known"),
        ({"model_type": "llama", "quantization_config": {"quant_method": "fp8"}}, "quantized"),
        ({"model_type": "llama", "rope_scaling": {"type": "dynamic"}}, "dynamic"),
        (
            {"model_type": "llama", "rope_scaling": {"type": "dynamic", "factor": 2, "x": {}}},
            "dynamic",
        ),
        ({"model_type": "llama", "rope_scaling": "dynamic"}, "rope_scaling: 'dynamic'"),
        ({"model_type": "llama", "rope_parameters": [1]}, "rope_parameters"),
        ({"model_type": "llama", "rope_parameters": {"rope_type": ["yarn"]}}, "yarn"),
        ({"model_type": "llama", "layer_types": 3}, "layer_types: '3'"),
        ({"model_type": "llama", "layer_types": "full_attention"}, "layer_types"),
        (
            {
                "model_type": "gemma3_text",
                "rope_parameters": {
                    "full_attention": {"rope_type": "longrope"},
                    "sliding_attention": {"rope_type": "default"},
                },
            },
            "longrope",
        ),
        ({"model_type": "gemma2", "layer_types": ["chunked_attention"]}, "chunked_attention"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "bidirectional"),
        ({"model_type": "gemma4_text", "use_bidirectional_attention": "all"}, "bidirectional"),
    ],
)
def test_what_a_config_asks_beyond_its_type_is_refused_in_one_line(
    config: dict[str, Any], named: str
) -> None:
    reason = refusal(config)
    assert reason is not None and named in reason and "\n" not in reason


@pytest.mark.parametrize(
    "config",
    [
        {"rope_scaling": None, "layer_types": None},
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
        {"rope_parameters": {"full_attention": {"rope_type": "proportional"}}},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"use_bidirectional_attention": "vision"},
    ],
)
def test_what_is_computed_is_let_through(config: dict[str, Any]) -> None:
    assert refusal({"model_type": "gemma4_text"} | config) is None
