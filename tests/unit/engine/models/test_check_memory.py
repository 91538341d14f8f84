"""A model that is larger than the memory says so in one line: the kernel would kill in silence."""

from __future__ import annotations

import pytest

import checkpoints
from engine.config import EngineConfig
from engine.errors import LoadError
from engine.kv import sizing
from engine.models import weights
from engine.models.loader import load_model

FOLDER = checkpoints.resolve("baton-5m", files="all").path


def test_a_model_too_big_for_the_memory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = weights.num_weight_bytes(FOLDER, 4)
    monkeypatch.setattr(sizing, "free_memory_bytes", lambda device: needed - 1)
    config = EngineConfig(model="baton-5m", device="cpu", dtype="float32")
    with pytest.raises(LoadError) as told:
        load_model(config)
    (line,) = str(told.value).splitlines()
    assert line.startswith("baton-5m: its weights take 0.0") and "memory limit" in line
    weights.check_memory(config, FOLDER, "baton-5m", "cpu", "bfloat16")  # half of it suffices
    monkeypatch.setattr(sizing, "free_memory_bytes", lambda device: needed)
    weights.check_memory(config, FOLDER, "baton-5m", "cpu", "float32")


def test_ranks_on_devices_of_their_own_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = weights.num_weight_bytes(FOLDER, 4)
    monkeypatch.setattr(sizing, "free_memory_bytes", lambda device: needed // 2)
    two = EngineConfig(model="baton-5m", tensor_parallel=2)
    weights.check_memory(two, FOLDER, "m", "cuda:0", "float32")
    with pytest.raises(LoadError):  # the ranks of a CPU share its memory
        weights.check_memory(two, FOLDER, "m", "cpu", "float32")


def test_the_weights_are_counted_as_they_will_lie() -> None:
    stored = sum(file.stat().st_size for file in FOLDER.glob("*.safetensors"))
    sizes = {size: weights.num_weight_bytes(FOLDER, size) for size in (1, 2, 4)}
    assert sizes[4] == 2 * sizes[2] == 4 * sizes[1]
    assert any(0 <= stored - size < 64 * 1024 for size in sizes.values())  # but for the header
