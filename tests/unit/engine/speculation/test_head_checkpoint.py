"""Heads that do not go with the model, or with what is computed here, are refused in one line."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import LoadError
from engine.models.interface import LoadedModel
from engine.speculation.config import SpeculationConfig
from engine.speculation.eagle import EagleNetwork, EagleProposer
from engine.speculation.loader import load_heads
from engine.testing.fake_model import FakeModel
from tests.harness import published_heads as heads


def _load(config: EngineConfig, model: LoadedModel, folder: Path, **fields: Any) -> list[Any]:
    speculation = SpeculationConfig(draft_heads=(str(folder),), **fields)
    return load_heads(dataclasses.replace(config, speculation=speculation), model)


def _changed(tensors: heads.Tensors, change: dict[str, torch.Tensor | None]) -> heads.Tensors:
    """None: without it."""
    whole = tensors | {name: value for name, value in change.items() if value is not None}
    return {name: value for name, value in whole.items() if change.get(name, value) is not None}


@pytest.mark.parametrize(
    ("change", "fields", "problem"),
    [
        (
            {"0.1.linear.weight": torch.zeros(48, 47)},
            {},
            r"0.1.linear.weight is \[48, 47\], and must be \[48, 48\]",
        ),
        ({"1.2.weight": torch.zeros(97, 48)}, {}, r"1.2.weight is \[97, 48\], and must be \[260"),
        ({"1.0.linear.bias": None}, {}, "has no tensor 1.0.linear.bias"),
        ({"2.2.weight": None}, {}, "has no tensor 2.2.weight"),
        ({}, {"medusa_num_heads": 4}, "has no tensor 3.0.linear.weight"),
        ({}, {"medusa_num_layers": 1}, "does not have, first 0.1.linear.bias"),
        ({"lm_head.weight": torch.zeros(2)}, {}, "1 tensors that this .* first lm_head.weight"),
        ({}, {"medusa_num_layers": "two"}, "medusa_num_layers is 'two', not a count"),
    ],
)
def test_medusa_heads_of_another_form_are_refused(
    *,
    config: EngineConfig,
    model: LoadedModel,
    tmp_path: Path,
    change: dict[str, torch.Tensor | None],
    fields: dict[str, Any],
    problem: str,
) -> None:
    tensors = _changed(heads.medusa_tensors(), change)
    with pytest.raises(LoadError, match=problem):
        _load(config, model, heads.save_medusa(tmp_path / "m", tensors, **fields))


@pytest.mark.parametrize(
    ("change", "fields", "problem"),
    [
        ({"fc.weight": torch.zeros(48, 48)}, {}, r"fc.weight is \[48, 48\], and must be \[48, 96"),
        ({"layers.0.self_attn.k_proj.weight": None}, {}, "no tensor layers.0.self_attn.k_proj"),
        ({}, {"num_hidden_layers": 2}, "no tensor layers.1."),
        ({}, {"hidden_size": 64}, "config.json says hidden_size 64, this model has 48"),
        ({}, {"vocab_size": 32000}, "config.json says vocab_size 32000, this model has 260"),
        ({}, {"num_attention_heads": 5}, "5 heads and 2 of keys over hidden_size 48"),
        ({}, {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({}, {"rope_scaling": {"rope_type": "dynamic", "factor": 8.0}}, "rope_scaling 'dynamic'"),
        ({}, {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "which cannot be .*Missing"),
        (
            {"layers.0.input_layernorm.weight": torch.ones(48)},
            {},
            "does not have, first layers.0.input_layernorm.weight",
        ),
        ({"fc.weight": None}, {}, "neither in Medusa's format .* nor in EAGLE's"),
    ],
)
def test_eagle_heads_of_another_form_are_refused(
    *,
    config: EngineConfig,
    model: LoadedModel,
    tmp_path: Path,
    change: dict[str, torch.Tensor | None],
    fields: dict[str, Any],
    problem: str,
) -> None:
    tensors = _changed(heads.eagle_tensors(), change)
    with pytest.raises(LoadError, match=problem):
        _load(config, model, heads.save_eagle(tmp_path / "e", tensors, **fields))


def test_pickles_and_models_that_cannot_have_heads_are_refused(
    config: EngineConfig, model: LoadedModel, tmp_path: Path
) -> None:
    folder = tmp_path / "pickled"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(heads.MEDUSA_CONFIG))
    (folder / "medusa_lm_head.pt").write_bytes(b"anything")
    with pytest.raises(LoadError, match=r"only pickled weights \(medusa_lm_head.pt\).*safetensors"):
        _load(config, model, folder)
    with pytest.raises(LoadError, match=r"draft_heads: .*nowhere: no such folder"):
        _load(config, model, tmp_path / "nowhere")
    eagle = heads.save_eagle(tmp_path / "e")
    with pytest.raises(LoadError, match="draft_kv_bytes: 1000 hold 0 blocks of e"):
        _load(config, model, eagle, draft_kv_bytes=1000)
    with pytest.raises(LoadError, match="draft_heads: fake keeps no hidden states"):
        _load(config, FakeModel(), eagle)


def test_what_published_checkpoints_have_beside_is_passed_over(
    config: EngineConfig, model: LoadedModel, tmp_path: Path
) -> None:
    """Names as of a whole model, a copy of its ends, old buffers, biases of queries and keys."""
    tensors = {f"model.{name}": tensor for name, tensor in heads.eagle_tensors().items()}
    del tensors["model.fc.bias"]
    tensors["lm_head.weight"] = torch.zeros(260, 48)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(6)
    for name, size in (("q", 48), ("k", 24), ("v", 24)):
        tensors[f"model.layers.0.self_attn.{name}_proj.bias"] = torch.ones(size)
    folder = heads.save_eagle(
        tmp_path / "e", tensors, rope_scaling={"type": "linear", "factor": 2.0}
    )
    (head,) = _load(config, model, folder)
    assert isinstance(head, EagleProposer)
    assert head.name == "e"
    assert isinstance(head._network, EagleNetwork)
    (layer,) = head._network.own_layers.all
    assert layer.qkv_bias is not None
    assert layer.qkv_bias.shape == (96,)
    assert head._network.own_layers.rope.frequencies[0] == 0.5
