"""The first steps: which there are, and that a model of either kind computes them without a cache's
block."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from engine import batch
from engine.config import EngineConfig
from engine.kv.memory import KvMemory
from engine.models.loader import load_model
from engine.warm_up import _steps
from tests.harness.models import FAMILIES, save


def test_a_cpu_compiles_nothing() -> None:
    assert _steps("cpu", 512, 32) == [(1,), (512,)]


@pytest.mark.parametrize("most", [(8192, 256), (512, 32), (64, 256), (3, 3), (2, 2), (1, 1)])
def test_every_class_of_steps_is_among_them(most: tuple[int, int]) -> None:
    max_num_tokens, max_num_running = most
    steps = _steps("cuda:0", *most)
    assert len(set(steps)) == len(steps)
    assert all(0 < sum(step) <= max_num_tokens for step in steps)
    assert (1,) in steps
    assert all(len(step) <= max_num_running + 1 for step in steps)
    prompts = [step[0] for step in steps if len(step) == 1 and step != (1,)]
    assert [*prompts, max_num_tokens][-1] == max_num_tokens
    beside = [len(step) - 1 for step in steps if len(step) > 1 and step[-1] > 1]
    assert max(beside, default=0) == max(0, min(max_num_running, max_num_tokens - 2))
    alone = [len(step) for step in steps if set(step) == {1}]
    assert set(beside) <= set(alone)
    assert all(more <= max(less + 1, 1.25 * less) for less, more in itertools.pairwise(beside))


@pytest.mark.parametrize("decoder", ["own", "transformers"])
def test_a_step_of_several_writes_nothing_and_gives_numbers(
    decoder: str, tmp_path: Path, seed: int
) -> None:
    save(FAMILIES["llama"](), tmp_path, seed % 1000)
    config = EngineConfig(model=str(tmp_path), device="cpu", decoder=decoder, dtype="float32")
    model = load_model(config)
    memory = KvMemory(model.layout, 12)
    model.attach(memory)
    for lengths in ((1, 1, 1), (1, 1, 2), (1, 40, 1), (100,)):
        logits = model.forward(batch.warm_up(*lengths)).clone()
        assert logits.shape[0] == len(lengths)
        assert bool(torch.isfinite(logits).all())
    assert not memory.cache.any()
