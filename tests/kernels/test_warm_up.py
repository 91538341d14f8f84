"""After a warm-up nothing is compiled: a request that waits for a compiler waits for half a second.
On a GPU only: elsewhere there is nothing to compile."""

from __future__ import annotations

import random

import pytest
import torch

from benchmarks.compiles import Compiles
from engine.config import EngineConfig
from engine.loop import load_engine
from engine.request import Sampling
from tests.e2e.oracle import run_engine

_NUM_REQUESTS = 200


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="compiles for a GPU, and there is none")
def test_no_kernel_is_compiled_for_a_request(seed: int) -> None:
    config = EngineConfig(
        model="baton-5m",
        device="cuda:0",
        kv_bytes=2**33,
        max_num_running=96,
        max_num_tokens_per_step=1024,
        num_threads=1,
    )
    engine = load_engine(config)
    compiles = Compiles()
    rng = random.Random(seed)
    vocab_size = engine.model_info.vocab_size
    wanted = [
        (
            [rng.randrange(vocab_size) for _ in range(rng.randint(1, 900))],
            Sampling(
                max_tokens=rng.randint(1, 60),
                temperature=index % 2 * 0.8,
                seed=index,
                ignore_eos=True,
            ),
        )
        for index in range(_NUM_REQUESTS)
    ]
    answers = run_engine(engine, wanted, prefix_cache="warm-up")
    engine.check_integrity()
    engine.close()
    assert [len(answer) for answer in answers] == [one.max_tokens for _, one in wanted]
    assert not compiles.names
