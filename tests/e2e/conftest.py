"""Real clusters for the tests: five real processes on loopback, kept for all tests of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from baton.client import SyncClient
from baton.local_cluster import ClusterConfig, LocalCluster
from tests.harness.cluster import CLUSTERS, assert_idle


@pytest.fixture(scope="module", params=CLUSTERS)
def cluster(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    """One prefill, one decode worker, KV through the store; every transport in its turn."""
    transport, chunk = request.param
    config = ClusterConfig(
        port=0,
        transport=transport,
        handover="store",  # the other way is in test_handover.py
        overrides=(
            f"worker.engine.max_num_tokens_per_step={chunk}",
            f"worker.engine.max_num_running={min(32, chunk)}",
            'router.tenant_scopes=["a=team", "b=team"]',
        ),
    )
    with LocalCluster(config) as running:
        yield running
        assert_idle(running)


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[SyncClient]:
    with SyncClient(cluster.address) as connected:
        yield connected
