"""Checkpoints of one tiny llama and one tiny GPT-2, saved once."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from tests.harness.models import FAMILIES, save


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    save(FAMILIES["llama"](), path, 1)
    return path


@pytest.fixture(scope="session")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a kind that our own decoder does not do, with few positions."""
    path = tmp_path_factory.mktemp("gpt2")
    config = transformers.GPT2Config(
        vocab_size=260, n_embd=48, n_layer=2, n_head=6, n_positions=40, eos_token_id=1,
        bos_token_id=None, dtype="float32",
    )  # fmt: skip
    save(config, path, 1)
    return path
