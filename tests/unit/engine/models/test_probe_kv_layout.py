"""The probe refuses models that paged attention would compute wrongly, each by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from engine.errors import ModelNotSupported
from engine.kv.layout import LayerKv
from engine.models import transformers_backend
from engine.models.self_check import Recorder, probe_kv_layout
from tests.harness.models import FAMILIES


def _build(config: Any) -> Any:
    model = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).eval()
    model.set_attn_implementation(transformers_backend.ATTENTION_NAME)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_supported_families_show_their_kv(family: str) -> None:
    config = FAMILIES[family]()
    probed = probe_kv_layout(_build(config), num_layers=3, device="cpu")
    head_dim = getattr(config, "head_dim", None) or 8
    assert probed.layers == (LayerKv(2, head_dim, 2, head_dim),) * 3
    windows = {"mistral-window": (21,) * 3, "qwen2-window": (None, 13, 13)}
    assert probed.windows == windows.get(family, (None,) * 3)


def test_a_model_that_does_not_attend_in_each_layer_is_refused() -> None:
    with pytest.raises(ModelNotSupported, match=r"4 layers.*\[0, 1, 2\]"):
        probe_kv_layout(_build(FAMILIES["llama"]()), num_layers=4, device="cpu")


def test_a_keyword_that_is_not_known_is_refused() -> None:
    with pytest.raises(TypeError, match="attention with position_bias"):
        transformers_backend.paged_attention(
            torch.nn.Identity(), torch.zeros(1, 1, 1, 1), torch.zeros(1), torch.zeros(1), None,
            scaling=1.0, baton_step=Recorder(), position_bias=torch.zeros(1),
        )  # fmt: skip


def test_two_layers_under_one_index_are_refused() -> None:
    model = _build(FAMILIES["llama"]())
    model.model.layers[2].self_attn.layer_idx = 1
    with pytest.raises(ModelNotSupported, match="layer 1 attends twice"):
        probe_kv_layout(model, num_layers=3, device="cpu")


def test_attention_that_is_not_causal_is_refused() -> None:
    model = _build(FAMILIES["llama"]())
    model.model.layers[0].self_attn.is_causal = False
    with pytest.raises(ModelNotSupported, match="not causal"):
        probe_kv_layout(model, num_layers=3, device="cpu")


def test_keys_of_more_than_the_new_tokens_are_refused() -> None:
    query, key = torch.zeros(4, 3, 8), torch.zeros(2, 5, 8)
    with pytest.raises(TypeError, match="5 keys for 3 tokens"):
        Recorder().attend(0, query, key, key, 1.0, None)


def test_code_that_swallows_our_keyword_is_refused() -> None:
    with pytest.raises(TypeError, match="does not hand keywords on"):
        transformers_backend.paged_attention(
            torch.nn.Identity(), torch.zeros(1, 1, 1, 1), torch.zeros(1), torch.zeros(1), None,
            scaling=1.0,
        )  # fmt: skip
