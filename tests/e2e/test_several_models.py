"""Two models in one cluster: a request is served by the workers of the model that it names, over
both doors, and nobody's KV meets another model's. Over NIXL or gRPC, as the seed draws.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from baton import ClusterConfig, LocalCluster
from baton.client import SyncClient
from baton.messages import Completion
from process.errors import InvalidArgument
from tests.harness.cluster import DRAWN_TRANSPORT, STORE_SIZE, assert_idle, oracle, prompts

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

MODELS = ("baton-5m", "baton-5m-draft")
MAX_TOKENS = 8


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    config = ClusterConfig(
        port=0,
        model=MODELS[0],
        more_models=MODELS[1:],
        transport=DRAWN_TRANSPORT,
        handover="store",
        overrides=(STORE_SIZE,),
    )
    with LocalCluster(config) as running:
        yield running
        assert_idle(running)


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[SyncClient]:
    with SyncClient(cluster.address) as connected:
        yield connected


def prompts_for_both(seed: int, num: int) -> list[tuple[int, ...]]:
    """The same ids for both models: both have the same vocabulary."""
    return [tuple(prompt) for prompt in prompts(oracle(MODELS[0]), random.Random(seed), num)]


def test_each_name_is_answered_by_its_own_model(
    cluster: LocalCluster, client: SyncClient, seed: int
) -> None:
    """Both at once, and the same prompts: an answer of the wrong model, or KV of it, would show."""
    asked = [(model, prompt) for prompt in prompts_for_both(seed, 6) for model in MODELS]
    status = {worker.worker_id: worker.model for worker in client.status().workers}
    assert sorted(status.values()) == sorted(MODELS * 2)

    def complete(one: tuple[str, tuple[int, ...]]) -> Completion:
        model, prompt = one
        return client.complete(prompt, model=model, max_tokens=MAX_TOKENS, temperature=0.0)

    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(complete, asked * 2))
    fingerprints: dict[str, set[str]] = {model: set() for model in MODELS}
    num_moved = 0
    for (model, prompt), answer in zip(asked * 2, answers, strict=True):
        assert list(answer.token_ids) == oracle(model).greedy(prompt, MAX_TOKENS), model
        assert answer.provenance.model == model
        fingerprints[model].add(answer.provenance.model_fingerprint)
        legs = answer.provenance.legs
        assert {status[leg.worker_id] for leg in legs} == {model}
        assert not any(leg.recomputed for leg in legs)
        assert {leg.transport for leg in legs} <= {DRAWN_TRANSPORT, ""}
        num_moved += sum(leg.num_tokens_from_store for leg in legs if leg.role == "decode")
    assert num_moved > 0
    assert [len(found) for found in fingerprints.values()] == [1, 1]
    assert fingerprints[MODELS[0]] != fingerprints[MODELS[1]]


def test_what_one_model_cached_is_no_hit_of_the_other(client: SyncClient, seed: int) -> None:
    prompt = next(p for p in prompts_for_both(seed + 1, 60) if len(p) >= 100)[:100]
    seen = []
    for model in (*MODELS, *MODELS):
        answer = client.complete(prompt, model=model, max_tokens=2, temperature=0.0)
        (leg,) = (leg for leg in answer.provenance.legs if leg.role == "prefill")
        seen.append(leg.num_tokens_computed)
    assert seen[:2] == [100, 100] and max(seen[2:]) < 100


def test_a_name_is_needed_and_must_be_there(client: SyncClient) -> None:
    for name in ("", "baton-6m"):
        with pytest.raises(InvalidArgument) as caught:
            client.complete("Once", model=name, max_tokens=1)
        assert caught.value.field == "model"
        assert all(model in str(caught.value) for model in MODELS)


def test_over_http(cluster: LocalCluster, client: SyncClient) -> None:
    with openai.OpenAI(
        base_url=f"http://{cluster.http_address}/v1", api_key="none", max_retries=0, timeout=60
    ) as http:
        assert {model.id for model in http.models.list()} == set(MODELS)
        for model in MODELS:
            options: Any = {"max_tokens": 12, "temperature": 0.0}
            answer = http.completions.create(model=model, prompt="Once upon a time", **options)
            expected = client.complete("Once upon a time", model=model, **options)
            assert answer.choices[0].text == expected.text and answer.model == model
        with pytest.raises(openai.NotFoundError):
            http.completions.create(model="baton-6m", prompt="Once")
