"""Prefill and decode whose engines are split differently, heads over processes here and layers
there, hand KV blocks over as if both were one process; and no process stays behind."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import psutil
import pytest

from baton import ClusterConfig, LocalCluster
from baton.answers import Completion
from baton.client import Client
from tests.harness.cluster import STORE_SIZE, assert_idle, oracle, prompts

# Every time, in tests/unit/engine/parallel: blocks of one degree that are read by another
# (test_ranks.py), and ranks in processes of their own (test_parallel_engine.py).
pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(600)]

MODEL = ClusterConfig().model
MAX_TOKENS = 24
NUM_PROMPTS = 6
SETTINGS = (
    STORE_SIZE,
    "worker.engine.num_threads=1",
    "prefill.engine.tensor_parallel=2",
    "decode.engine.pipeline_parallel=2",
)


async def _complete(address: str, wanted: Sequence[Sequence[int]]) -> list[Completion]:
    async with Client(address) as client:
        asks = (
            client.complete(list(prompt), max_tokens=MAX_TOKENS, timeout_s=240, temperature=0.0)
            for prompt in wanted
        )
        return list(await asyncio.gather(*asks))


def test_prefill_and_decode_of_other_degrees_give_the_tokens_of_transformers(seed: int) -> None:
    reference = oracle(MODEL)
    wanted = prompts(reference, random.Random(seed), NUM_PROMPTS)
    with LocalCluster(ClusterConfig(port=0, overrides=SETTINGS)) as cluster:
        answers = asyncio.run(_complete(cluster.address, wanted))
        ranks = [
            process
            for process in psutil.Process().children(recursive=True)
            if "engine.parallel.rank_main" in process.cmdline()
        ]
        assert len(ranks) == 2
        assert_idle(cluster)
    for prompt, answer in zip(wanted, answers, strict=True):
        assert list(answer.token_ids) == reference.greedy(prompt, MAX_TOKENS)
        if len(answer.token_ids) > 1:
            (decode,) = (leg for leg in answer.provenance.legs if leg.role == "decode")
            assert decode.num_tokens_computed == 0 and decode.num_tokens_from_store > 0
    _, alive = psutil.wait_procs(ranks, timeout=60.0)
    assert not alive
