"""Tenants in a real cluster: whose cached prefixes a prompt meets, at workers and in the store."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from baton.client import SyncClient
from baton.local_cluster import ClusterConfig, LocalCluster
from baton.messages import Completion
from tests.e2e.conftest import assert_idle
from tests.e2e.oracle import BLOCK_SIZE, oracle, prompts

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

MAX_TOKENS = 4


@pytest.fixture(scope="module")
def shared() -> Iterator[LocalCluster]:
    """Tenants a and b share; nobody else does."""
    config = ClusterConfig(port=0, overrides=('router.tenant_scopes=["a=team", "b=team"]',))
    with LocalCluster(config) as running:
        yield running
        assert_idle(running)


def _num_cached(completion: Completion) -> int:
    """Prompt tokens that no worker computed before the first token."""
    (leg,) = (leg for leg in completion.provenance.legs if leg.role == "prefill")
    return completion.usage.num_prompt_tokens - leg.num_tokens_computed


def test_a_prompt_meets_what_its_own_tenants_left_and_nothing_else(
    shared: LocalCluster, seed: int
) -> None:
    """The same prompt from everybody, twice: a scope's tenants hit each other's blocks from the
    first time on, also one called like the scope only its own."""
    reference = oracle(ClusterConfig().model)
    prompt = next(p for p in prompts(reference, random.Random(seed), 60) if len(p) >= 200)[:200]
    expected = reference.greedy(prompt, MAX_TOKENS)
    full = (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
    seen: dict[str, list[int]] = {}
    with SyncClient(shared.address) as client:
        for tenant in ("a", "b", "c", "team", "") * 2:
            completion = client.complete(
                prompt, max_tokens=MAX_TOKENS, temperature=0.0, tenant=tenant, timeout_s=60
            )
            assert list(completion.token_ids) == expected
            seen.setdefault(tenant, []).append(_num_cached(completion))
    assert seen == {
        "a": [0, full],
        "b": [full, full],
        "c": [0, full],
        "team": [0, full],
        "": [0, full],
    }
