"""What preflight reckons, against what the engine takes."""

from __future__ import annotations

import torch
from transformers import Qwen3Config

from baton.preflight import memory_check
from engine.lora.limits import LoraLimits
from engine.lora.stacked_weights import StackedLora
from engine.models.llama import find_sites, read_llama_config
from engine.models.weights import random_weights


def test_room_for_adapters_is_what_the_engine_makes_of_it() -> None:
    config = Qwen3Config(
        num_hidden_layers=3,
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=96,
        vocab_size=211,
        dtype="bfloat16",
    )
    weights = random_weights(
        read_llama_config(config), dtype=torch.bfloat16, device=torch.device("cpu"), seed=1
    )
    sites = find_sites(weights)
    stacks = StackedLora(
        sites, num_slots=5, max_rank=7, dtype=torch.bfloat16, device=torch.device("cpu")
    )
    lora = {"max_launched_rank": 7, "max_num_adapters": 5}
    found = memory_check.estimate(config.to_dict(), 1e6, {"lora": lora})
    assert found is not None and found.stack_bytes == stacks.num_bytes > 0
    assert found.least_bytes == 1e6 + stacks.num_bytes + (
        found.kv_bytes_per_token * found.context_window
    )
    usual = memory_check.estimate(config.to_dict(), 1e6, {"lora": {"max_launched_rank": 7}})
    assert usual is not None
    assert usual.stack_bytes * 5 == stacks.num_bytes * LoraLimits().max_num_adapters
    for none in ({}, {"kv_dtype": "int8"}, {"exact": True}, {"overlap": False}):
        settings = {"lora": lora, **none} if none else {}
        one = memory_check.estimate(config.to_dict(), 1e6, settings)
        assert one is not None and one.stack_bytes == 0.0
