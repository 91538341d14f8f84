"""What is right, and the clusters of test_answers.py: five real processes on loopback, kept for all
its tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from baton import ClusterConfig, LocalCluster
from baton.client import SyncClient
from tests.harness.adapters import save_adapter
from tests.harness.cluster import CLUSTERS, STORE_SIZE, Oracle, assert_idle, oracle


@pytest.fixture(scope="session")
def reference() -> Oracle:
    """Of what a cluster serves by default."""
    return oracle(ClusterConfig().model)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = oracle(ClusterConfig().model).model
    return save_adapter(tmp_path_factory.mktemp("adapter") / "a", model, 1)


@pytest.fixture(scope="module", params=CLUSTERS)
def cluster(request: pytest.FixtureRequest, adapter: Path) -> Iterator[LocalCluster]:
    """One prefill, one decode worker, KV through the store; every transport in its turn. Those over
    shared memory have an adapter, metrics, and a decode worker that guesses: no token of an answer
    may depend on it, whatever is asked."""
    transport, chunk = request.param
    more = (
        f'worker.adapters=["tales={adapter}"]',
        "worker.metrics_listen=127.0.0.1:0",
        'decode.engine.speculation.drafters=["ngram"]',
        'decode.engine.speculation.draft_models=["baton-5m-draft"]',
        "decode.engine.speculation.always=true",
    )
    config = ClusterConfig(
        port=0,
        transport=transport,
        handover="store",  # the other way is in test_secured_handover.py
        overrides=(
            STORE_SIZE,
            f"worker.engine.max_num_tokens_per_step={chunk}",
            f"worker.engine.max_num_running={min(32, chunk)}",
            'router.tenant_scopes=["a=team", "b=team"]',
            *(more if transport == "shm" else ()),
        ),
    )
    with LocalCluster(config) as running:
        yield running
        assert_idle(running)


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[SyncClient]:
    with SyncClient(cluster.address) as connected:
        yield connected
