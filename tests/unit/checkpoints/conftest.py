"""A tiny Qwen3-shaped checkpoint with random weights, made once per session."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.numpy import save_file

from tests.harness import tiny_checkpoint


@pytest.fixture(scope="session")
def _original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny-qwen3"
    tiny_checkpoint.save(folder)
    return folder


@pytest.fixture
def checkpoint(_original: Path, tmp_path: Path) -> Path:
    """A copy that the test may break."""
    return Path(shutil.copytree(_original, tmp_path / "tiny-qwen3"))


@pytest.fixture
def single_file(checkpoint: Path) -> Callable[[], Path]:
    """Turns the checkpoint into one with a single weight file."""

    def convert() -> Path:
        (checkpoint / "model.safetensors.index.json").unlink()
        for shard in checkpoint.glob("model-*.safetensors"):
            shard.unlink()
        save_file(tiny_checkpoint.weights(), checkpoint / "model.safetensors")
        return checkpoint

    return convert
