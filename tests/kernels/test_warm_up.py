"""After a warm-up nothing is compiled: a request that waits for a compiler waits for half a second.
On a GPU only: elsewhere there is nothing to compile."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from benchmarks.engine_gpu import Compiles
from engine.config import EngineConfig
from engine.engine import load_engine
from engine.request import Sampling
from tests.harness.cluster import run_engine
from tests.harness.models import FAMILIES, save

_NUM_REQUESTS = 200
_LARGE = 40_000
"""Tokens: a draw's row is split over few programs or many, by the number of rows."""


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="compiles for a GPU, and there is none")
@pytest.mark.parametrize(
    ("vocab_size", "lengths", "max_num_running"), [(0, (1, 900), 96), (_LARGE, (64, 128), 200)]
)
def test_no_kernel_is_compiled_for_a_request(
    vocab_size: int, lengths: tuple[int, int], max_num_running: int, tmp_path: Path, seed: int
) -> None:
    """Of the bundled model; and, with so many that decode together, of one with many tokens."""
    model, dtype = "baton-5m", "auto"
    if vocab_size:
        shape = FAMILIES["llama"]()
        shape.vocab_size, shape.head_dim, shape.max_position_embeddings = vocab_size, 32, 1024
        save(shape, tmp_path, seed % 1000)
        model, dtype = str(tmp_path), "bfloat16"
    config = EngineConfig(
        model=model,
        dtype=dtype,
        device="cuda:0",
        kv_bytes=2**31,
        max_num_running=max_num_running,
        max_num_tokens_per_step=1024,
        num_threads=1,
    )
    engine = load_engine(config)
    assert engine.model_info.decoder == "own", "other kernels are torch's"
    compiles = Compiles()
    rng = random.Random(seed)
    vocab_size = engine.model_info.vocab_size
    wanted = [
        (
            [rng.randrange(vocab_size) for _ in range(rng.randint(*lengths))],
            Sampling(
                max_tokens=rng.randint(1, 60),
                temperature=index % 2 * 0.8,
                seed=index,
                ignore_eos=True,
            ),
        )
        for index in range(_NUM_REQUESTS)
    ]
    answers = run_engine(engine, wanted, prefix_cache=f"warm-up {vocab_size}")
    engine.check_integrity()
    engine.close()
    assert [len(answer) for answer in answers] == [one.max_tokens for _, one in wanted]
    assert not compiles.names
