"""The registry against a real Redis: heartbeats, incarnations, Redis going away and coming back."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator
from typing import Any

import pytest

from process import redis_client
from services.router.fakes.model import FakeModel
from services.router.fakes.prefill import FakePrefill
from services.router.registry import Registry
from services.router.views import Link, ServedModel, find_problem, worker_view
from tests.unit.router.bench import RedisServer

LIFE = "ab" * 16


@pytest.fixture
async def redis_server() -> AsyncIterator[RedisServer]:
    server = RedisServer()
    await server.start()
    yield server
    server.remove()


@pytest.fixture
async def client(redis_server: RedisServer) -> AsyncIterator[Any]:
    client = redis_server.client()
    yield client
    await client.aclose()


@pytest.fixture
async def registry(redis_server: RedisServer) -> AsyncIterator[Registry]:
    redis = redis_client.connect(redis_server.url, 1.0)
    yield Registry(redis, poll_interval_s=60, timeout_s=1.0)
    await redis.aclose()


async def _register(client: Any, worker: FakePrefill) -> None:
    await worker.register(client)


async def test_empty_is_reachable(registry: Registry) -> None:
    snapshot = await registry.poll()
    assert snapshot.is_redis_reachable and not snapshot.workers


async def test_a_worker_counts_while_it_beats(registry: Registry, client: Any) -> None:
    worker = FakePrefill("p0", FakeModel())
    await _register(client, worker)
    (view,) = (await registry.poll()).workers
    assert (view.worker_id, view.role, view.incarnation) == ("p0", "prefill", worker.incarnation)
    assert registry.statuses()[0].worker_id == "p0"
    await client.delete("baton:worker:p0:beat")
    assert not (await registry.poll()).workers
    assert not registry.statuses()


async def test_a_beat_of_another_life_does_not_count(registry: Registry, client: Any) -> None:
    await _register(client, FakePrefill("p0", FakeModel()))
    await client.set("baton:worker:p0:beat", "another life")
    assert not (await registry.poll()).workers


async def test_known_workers_stay_known_without_redis(
    registry: Registry, client: Any, redis_server: RedisServer
) -> None:
    await _register(client, FakePrefill("p0", FakeModel()))
    await registry.poll()
    redis_server.kill()
    snapshot = await registry.poll()
    assert not snapshot.is_redis_reachable and len(snapshot.workers) == 1
    assert len(registry.statuses()) == 1
    await redis_server.start()
    snapshot = await registry.poll()
    assert snapshot.is_redis_reachable and not snapshot.workers


async def test_stores(registry: Registry, client: Any) -> None:
    for node, spelling in (("n0", "node_id"), ("n1", "nodeId"), ("silent", "node_id")):
        entry = {spelling: node, "address": "h:1", "incarnation": LIFE}
        await client.hset("baton:stores", node, json.dumps(entry))
        await client.set(f"baton:store:{node}:beat", LIFE)
    await client.delete("baton:store:silent:beat")
    stores = (await registry.poll()).stores
    assert [store.node_id for store in stores] == ["n0", "n1"]


async def test_a_broken_entry_is_a_problem_not_a_failure(registry: Registry, client: Any) -> None:
    await _register(client, FakePrefill("p0", FakeModel()))
    await client.hset("baton:workers", "p1", "no json")
    await client.hset("baton:workers", b"\xff", b"\xff\xfe")
    await client.hset("baton:workers", "p2", '{"workerId": "somebody else"}')
    await client.hset("baton:stores", "n1", "[]")
    await client.hset("baton:stores", "n2", '{"node_id": 3}')
    for node, address, life in (("n3", "h:1", "no hex"), ("n4", "h:1", "ab"), ("n5", "", LIFE)):
        entry = {"node_id": node, "address": address, "incarnation": life}
        await client.hset("baton:stores", node, json.dumps(entry))
        await client.set(f"baton:store:{node}:beat", life)
    snapshot = await registry.poll()
    assert [worker.worker_id for worker in snapshot.workers] == ["p0"]
    assert not snapshot.stores
    assert len(snapshot.problems) == 8


async def test_polling_tells_who_asked(redis_server: RedisServer, client: Any) -> None:
    seen: list[int] = []
    redis = redis_client.connect(redis_server.url, 1.0)
    registry = Registry(
        redis,
        poll_interval_s=0.01,
        timeout_s=1.0,
        on_change=lambda snapshot: seen.append(len(snapshot.workers)),
    )
    await registry.start()
    assert seen == [0]
    await registry.stop()
    await redis.aclose()


def test_links_are_those_that_were_measured_the_last_of_each_store() -> None:
    worker = FakePrefill("p0", FakeModel())
    worker.links = [
        {"node_id": "n0", "read_bytes_per_s": 5.0, "degraded": True, "measured_unix_ms": 2},
        {"node_id": "n0", "read_bytes_per_s": 9.0, "measured_unix_ms": 1},
        {"node_id": "n1", "read_bytes_per_s": 7.0},
        {"node_id": "n2", "read_bytes_per_s": 7.0, "problem": "no answer"},
        {"node_id": "n3", "read_bytes_per_s": 0.0},
        {"node_id": "n4", "read_bytes_per_s": math.nan},
        {"node_id": "n5", "read_bytes_per_s": math.inf},
        {"node_id": "n6", "problem": "wrong bytes", "degraded": True},
    ]
    assert worker_view(worker.status()).links == {
        "n0": Link(5.0, is_degraded=True),
        "n1": Link(7.0),
        "n6": Link(0.0, is_degraded=True),
    }


def test_what_makes_a_worker_unusable() -> None:
    model = FakeModel()
    served = ServedModel(("fake", "./fake"), model.tokenizer_digest)
    worker = FakePrefill("p0", model)
    worker.address = "h:1"
    status = worker.status()
    assert find_problem(worker_view(status), served) is None
    for field, value, word in (
        ("model", "x", "another model"),
        ("tokenizer_digest", "x", "another tokenizer"),
        ("model_fingerprint", "no hex", "no hex"),
        ("address", "", "incomplete"),
        ("vocab_size", 0, "incomplete"),
    ):
        broken = worker.status()
        setattr(broken, field, value)
        assert word in (find_problem(worker_view(broken), served) or "")
