"""Real clusters for the tests: five real processes on loopback, kept for all tests of a module."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import pytest

from baton.client import SyncClient
from baton.local_cluster import ClusterConfig, LocalCluster
from protos import inference_pb2
from tests.conftest import LONG, SESSION_SEED

TRANSPORTS = ("shm", "nixl", "grpc")
# Most tokens of a step: chunks of a prompt that do (48) and do not (37) divide into blocks, and one
# that holds most prompts whole.
CHUNK_TOKENS = (512, 48, 37)


def _clusters() -> list[tuple[str, int]]:
    """(transport, chunk) of each cluster: the long run has every transport with both chunks that
    cut prompts; else each transport has one, which the seed rotates."""
    if LONG:
        return list(itertools.product(TRANSPORTS, CHUNK_TOKENS[1:]))
    turned = (CHUNK_TOKENS[(SESSION_SEED + place) % 3] for place in range(3))
    return list(zip(TRANSPORTS, turned, strict=True))


CLUSTERS = [
    pytest.param((transport, chunk), id=f"{transport}-chunk{chunk}")
    for transport, chunk in _clusters()
]


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


def assert_idle(
    cluster: LocalCluster, timeout_s: float = 40.0
) -> inference_pb2.GetClusterStatusReply:
    """Every conservation law holds and nothing is held for anybody: no request, no lease, no block.

    Leases of handles that nobody came for lapse by themselves, so this waits, within a bound.
    """
    deadline = time.monotonic() + timeout_s
    with SyncClient(cluster.address) as client:
        while True:
            status = client.status()
            found = complaints(status)
            if not found:
                return status
            assert time.monotonic() < deadline, found
            time.sleep(0.05)


def complaints(status: inference_pb2.GetClusterStatusReply) -> list[str]:
    """What is still held, or broken."""
    found = [f"{status.num_requests_in_flight} requests in the router"] * bool(
        status.num_requests_in_flight
    )
    for worker in status.workers:
        held = {
            "waiting": worker.num_waiting,
            "running": worker.num_running,
            "holding": worker.num_holding,
            "quarantined": worker.num_quarantined_blocks,
            "lent": worker.num_lent_blocks,
        }
        found += [f"{worker.worker_id}: {count} {name}" for name, count in held.items() if count]
        if worker.num_free_blocks + worker.num_cached_blocks != worker.num_blocks:
            found.append(f"{worker.worker_id}: blocks are referenced")
        if worker.integrity_error:
            found.append(f"{worker.worker_id}: {worker.integrity_error}")
    for store in status.stores:
        held = {
            "writing": store.num_writing,
            "pinned": store.num_pinned,
            "quarantined": store.num_quarantined,
            "leases": store.num_leases,
        }
        found += [f"{store.node_id}: {count} {name}" for name, count in held.items() if count]
        if store.num_free + store.num_committed != store.num_frames:
            found.append(f"{store.node_id}: frames do not sum up")
        if store.integrity_error:
            found.append(f"{store.node_id}: {store.integrity_error}")
    return found
