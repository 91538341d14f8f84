"""One small random target for all tests of heads."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.models.interface import LoadedModel
from engine.models.loader import load_model
from tests.harness.models import FAMILIES, Tiny, save


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    folder: Path = tmp_path_factory.mktemp("target") / "target"
    return Tiny("llama", folder, save(FAMILIES["llama"](), folder, 1))


@pytest.fixture(scope="session")
def config(target: Tiny) -> EngineConfig:
    return EngineConfig(
        model=str(target.path),
        device="cpu",
        dtype="float32",
        decoder="transformers",
        block_size=8,
        context_window=48,
        num_threads=1,
    )


@pytest.fixture(scope="session")
def model(config: EngineConfig) -> LoadedModel:
    return load_model(config)
