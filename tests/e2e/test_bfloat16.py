"""bfloat16 sums depend on the batch's shape, so here requests come one at a time: the same shapes
in
the cluster and in one engine, and then the same tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from baton import ClusterConfig, LocalCluster
from baton.client import SyncClient
from engine.request import Sampling
from tests.harness.cluster import (
    STORE_SIZE,
    assert_idle,
    oracle,
    prompts,
    run_engine,
    single_engine,
)

# The long run takes minutes a test.
pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(1200)]

MODEL = ClusterConfig().model
MAX_TOKENS = 24


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    config = ClusterConfig(port=0, overrides=(STORE_SIZE, 'worker.engine.dtype="bfloat16"'))
    with LocalCluster(config) as running:
        yield running
        assert_idle(running)


def test_bfloat16_equals_one_engine_for_the_same_shapes(
    cluster: LocalCluster, seed: int, scale: Callable[[int], int]
) -> None:
    rng = random.Random(seed)
    wanted = prompts(oracle(MODEL), rng, max(10, scale(200)))
    engine = single_engine(MODEL, "bfloat16")
    with SyncClient(cluster.address) as client:
        for index, prompt in enumerate(wanted):
            temperature = rng.choice([0.0, 1.0])
            sampling = Sampling(max_tokens=MAX_TOKENS, temperature=temperature, seed=index)
            (right,) = run_engine(engine, [(prompt, sampling)], prefix_cache=f"{seed}-{index}")
            answer = client.complete(
                prompt, max_tokens=MAX_TOKENS, temperature=temperature, seed=index
            )
            assert list(answer.token_ids) == right, (len(prompt), temperature, index)
            for leg in answer.provenance.legs:
                assert leg.dtype == "bfloat16"
                # Unrelated prompts: prefill computes all of each, decode nothing.
                assert leg.num_tokens_computed == (len(prompt) if leg.role == "prefill" else 0)
