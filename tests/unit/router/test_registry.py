"""The registry against a real Redis: heartbeats, incarnations, Redis going away and coming back."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from process import redis_client
from services.router.fake_workers import FakeModel, FakePrefill
from services.router.registry import Registry
from services.router.views import ServedModel, find_problem, worker_view
from tests.unit.router.bench import RedisServer


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
    for node, spelling in (("n0", "node_id"), ("n1", "nodeId")):
        entry = {spelling: node, "address": "h:1", "incarnation": "ab"}
        await client.hset("baton:stores", node, json.dumps(entry))
        await client.set(f"baton:store:{node}:beat", "ab")
    await client.hset("baton:stores", "n2", '{"node_id": "n2", "address": "", "incarnation": "x"}')
    stores = (await registry.poll()).stores
    assert [store.node_id for store in stores] == ["n0", "n1"]


async def test_a_broken_entry_is_a_problem_not_a_failure(registry: Registry, client: Any) -> None:
    await _register(client, FakePrefill("p0", FakeModel()))
    await client.hset("baton:workers", "p1", "no json")
    await client.hset("baton:workers", b"\xff", b"\xff\xfe")
    await client.hset("baton:workers", "p2", '{"workerId": "somebody else"}')
    await client.hset("baton:stores", "n1", "[]")
    await client.hset("baton:stores", "n2", '{"node_id": 3}')
    snapshot = await registry.poll()
    assert [worker.worker_id for worker in snapshot.workers] == ["p0"]
    assert len(snapshot.problems) == 5


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
