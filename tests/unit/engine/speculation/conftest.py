"""A model whose forward passes write late; one small random target for all tests of heads."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.models.interface import LoadedModel
from engine.models.loader import load_model
from engine.sampling.host_device_copies import StreamMark
from engine.sampling.metadata import SamplerOutput
from engine.sampling.sampler import PendingSample, Sampler
from tests.harness.models import FAMILIES, Tiny, save
from tests.unit.engine.speculation.late_steps import LateFake


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[LateFake]:
    """A model that writes no sooner than its draws, or its end, are waited for."""
    fake = LateFake()

    class LateSample:
        def __init__(self, pending: PendingSample) -> None:
            self.pending = pending

        def result(self) -> list[SamplerOutput]:
            fake.num_waits += 1
            fake.settle()
            return self.pending.result()

    class LateSampler(Sampler):
        """Of plain steps; those of launched steps have one of their own."""

        def begin(self, *args: Any, **fields: Any) -> Any:
            return LateSample(super().begin(*args, **fields))

    class LateMark(StreamMark):
        def wait(self) -> None:
            fake.num_waits += 1
            fake.settle()
            super().wait()

    monkeypatch.setattr("engine.step_start.Sampler", LateSampler)
    monkeypatch.setattr("engine.begun.StreamMark", LateMark)
    yield fake


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


@pytest.fixture
def rng(seed: int) -> random.Random:
    return random.Random(f"heads {seed}")


@pytest.fixture
def numbers(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed % 2**40)
