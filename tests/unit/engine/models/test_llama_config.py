"""What our decoder reads of a config, and which configs it leaves to transformers' code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from engine.models.llama import read_llama_config, rope_table, unsupported_reason
from tests.harness.models import FAMILIES


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_counts_its_parameters_as_transformers_does(family: str) -> None:
    config = FAMILIES[family]()
    model = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
    assert unsupported_reason(config) is None
    assert read_llama_config(config).num_parameters == sum(
        one.numel() for one in model.parameters()
    )


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (transformers.GPT2Config(), "gpt2 is none of llama, mistral"),
        (transformers.LlamaConfig(hidden_act="gelu"), "its activation is gelu"),
        (
            transformers.LlamaConfig(num_attention_heads=8, num_key_value_heads=3, head_dim=16),
            "not a multiple",
        ),
        (
            transformers.LlamaConfig(
                rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
            ),
            "its RoPE is dynamic",
        ),
        (
            transformers.LlamaConfig(
                rope_parameters={
                    "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5,
                }
            ),
            "a part of each head",
        ),
    ],
)  # fmt: skip
def test_what_it_does_not_do_is_named(config: Any, reason: str) -> None:
    assert reason in str(unsupported_reason(config))
    with pytest.raises(ValueError, match=reason.split()[0]):
        read_llama_config(config)


def test_windows_are_those_that_the_code_reads() -> None:
    llama = FAMILIES["llama"]()
    llama.sliding_window = 20  # left over: transformers' llama does not read it
    assert read_llama_config(llama).windows == (None,) * 3
    assert read_llama_config(FAMILIES["mistral-window"]()).windows == (21,) * 3
    assert read_llama_config(FAMILIES["mistral"]()).windows == (None,) * 3
    assert read_llama_config(FAMILIES["qwen2-window"]()).windows == (None, 13, 13)


_ROPES: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 5e5},
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 256,
    },
    {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
        "original_max_position_embeddings": 128,
    },
]  # fmt: skip


@pytest.mark.parametrize("rope", _ROPES, ids=lambda rope: str(rope["rope_type"]))
def test_the_table_of_angles_is_transformers(rope: dict[str, Any]) -> None:
    config = transformers.LlamaConfig(
        head_dim=64, max_position_embeddings=512, rope_parameters=rope
    )
    table = rope_table(read_llama_config(config), 500, torch.device("cpu"))
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    cos, sin = rotary(torch.zeros(1, dtype=torch.float32), torch.arange(500)[None])
    assert torch.equal(table, torch.cat((cos[0, :, :32], sin[0, :, :32]), dim=1))


def test_a_share_is_cut_evenly_or_refused_by_name() -> None:
    shape = read_llama_config(FAMILIES["qwen3"]())  # 6 heads, 2 of keys
    half = shape.share(2)
    assert (half.num_heads, half.num_kv_heads, half.intermediate_size) == (3, 1, 40)
    assert half.num_layers == shape.num_layers
    with pytest.raises(ValueError, match="2 key-value heads cannot be shared by 4 ranks"):
        shape.share(4)
