"""An adapter's folder: whole, finite, safe tensors, or a refusal that names the tensor; a digest
that is equal exactly if the adapter computes the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from engine.errors import InvalidAdapter, TooManyAdapters
from engine.lora.adapter import WEIGHTS, read_adapter
from engine.lora.limits import LoraLimits
from process.settings import SettingsError
from tests.harness.adapters import save_adapter

LIMITS = LoraLimits(max_rank=8)
KEY = "base_model.model.layer.q_proj.lora_{}.weight"


@pytest.fixture
def model() -> nn.Module:
    layer = nn.ModuleDict({"q_proj": nn.Linear(6, 10), "v_proj": nn.Linear(6, 5)})
    return nn.ModuleDict({"layer": layer})


@pytest.fixture
def folder(tmp_path: Path, model: nn.Module) -> Path:
    return save_adapter(tmp_path / "a", model, 1, targets=["q_proj", "v_proj"])


def _edit_config(folder: Path, **fields: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def _edit_tensors(folder: Path, **tensors: torch.Tensor | None) -> None:
    """ "A" and "B" are q_proj's; others by their whole names. None: left out."""
    held = load_file(folder / WEIGHTS)
    for name, tensor in tensors.items():
        key = KEY.format(name) if name in ("A", "B") else name
        held.pop(key, None)
        if tensor is not None:
            held[key] = tensor
    save_file(held, folder / WEIGHTS)


def test_factors_by_module(folder: Path) -> None:
    progress: list[tuple[str, int, int]] = []
    adapter = read_adapter(folder, LIMITS, lambda *now: progress.append(now))
    assert sorted(adapter.factors) == ["layer.q_proj", "layer.v_proj"]
    q_proj = adapter.factors["layer.q_proj"]
    assert (q_proj.a.shape, q_proj.b.shape, q_proj.scale) == ((4, 6), (10, 4), 2.0)
    assert adapter.rank == 4
    assert progress[-1][0] == "adapter" and progress[-1][1] <= progress[-1][2]


def test_the_digest_is_of_what_is_computed(folder: Path, model: nn.Module, tmp_path: Path) -> None:
    digest = read_adapter(folder, LIMITS).digest
    assert len(bytes.fromhex(digest)) == 32
    _edit_config(
        folder, base_model_name_or_path="elsewhere", lora_dropout=0.0, inference_mode=False
    )
    assert read_adapter(folder, LIMITS).digest == digest, "these compute nothing"
    twice = save_adapter(tmp_path / "b", model, 1, targets=["v_proj", "q_proj"])
    assert read_adapter(twice, LIMITS).digest == digest, "the order of names computes nothing"

    others = {digest}
    _edit_config(folder, lora_alpha=8.5)
    others.add(read_adapter(folder, LIMITS).digest)
    _edit_config(folder, lora_alpha=8.0, use_rslora=True)
    others.add(read_adapter(folder, LIMITS).digest)
    _edit_config(folder, use_rslora=False)
    tensors = load_file(folder / WEIGHTS)
    changed = tensors[KEY.format("B")].clone()
    changed[3, 2] = torch.nextafter(changed[3, 2], torch.tensor(9.0))
    _edit_tensors(folder, B=changed)
    others.add(read_adapter(folder, LIMITS).digest)
    assert len(others) == 4, "a scale or the last bit of one weight is another adapter"


@pytest.mark.parametrize(
    ("tensors", "match"),
    [
        ({"A": None}, "layer.q_proj: has only one"),
        ({"A": torch.ones(3, 6)}, "^r: .*rank 4"),
        ({"B": torch.ones(10, 3)}, "^r: .*rank 4"),
        ({"A": torch.full((4, 6), torch.nan)}, "lora_A.weight: holds NaN"),
        ({"B": torch.full((10, 4), torch.inf)}, "lora_B.weight: holds NaN or inf"),
        ({"A": torch.ones(4, 6, dtype=torch.int8)}, "lora_A.weight: has dtype"),
        ({"A": torch.ones(24)}, "lora_A.weight: has shape"),
        ({"base_model.model.lm_head.weight": torch.ones(3, 3)}, "retrained or resized head"),
        ({"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(3, 3)}, "embeddings"),
        ({"base_model.model.layer.q_proj.lora_magnitude_vector": torch.ones(3)}, "DoRA"),
        ({"base_model.model.layer.q_proj.bias": torch.ones(3)}, "biases"),
        ({"base_model.model.mlp.experts.0.w1.lora_A.weight": torch.ones(4, 6)}, "MoE experts"),
        ({f"base_model.model.{'x.' * 200}lora_A.weight": torch.ones(4, 6)}, "above 256 characters"),
        ({"something.else": torch.ones(3)}, "something.else: is no tensor of a PEFT"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(
    folder: Path, tensors: dict[str, torch.Tensor | None], match: str
) -> None:
    _edit_tensors(folder, **tensors)
    with pytest.raises(InvalidAdapter, match=match):
        read_adapter(folder, LIMITS)


def test_pickles_and_broken_files_are_refused(folder: Path) -> None:
    path = folder / WEIGHTS
    whole = path.read_bytes()
    for cut in (0, 7, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(InvalidAdapter, match="fetch it again"):
            read_adapter(folder, LIMITS)
    path.unlink()
    with pytest.raises(InvalidAdapter, match="has none"):
        read_adapter(folder, LIMITS)
    (folder / "adapter_model.bin").write_bytes(whole)
    with pytest.raises(InvalidAdapter, match=r"adapter_model\.bin, which can run code"):
        read_adapter(folder, LIMITS)
    save_file({}, path)
    with pytest.raises(InvalidAdapter, match="holds no tensor"):
        read_adapter(folder, LIMITS)


def test_limits(folder: Path, model: nn.Module, tmp_path: Path) -> None:
    with pytest.raises(TooManyAdapters, match=r"lora\.max_bytes"):
        read_adapter(folder, LoraLimits(max_bytes=100))
    high = save_adapter(tmp_path / "high", model, 1, targets=["q_proj"], rank=9)
    with pytest.raises(InvalidAdapter, match=r"^r: layer.q_proj has rank 9.*lora\.max_rank"):
        read_adapter(high, LIMITS)
    for field, value in (("max_num_adapters", -1), ("max_rank", 0), ("max_bytes", 0)):
        with pytest.raises(SettingsError, match=field):
            LoraLimits(**{field: value})
