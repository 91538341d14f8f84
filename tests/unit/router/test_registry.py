"""The registry against a real Redis: heartbeats, incarnations, Redis going away and coming back."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from redis.exceptions import RedisError

from process.registry import connect_redis
from services.router.registry import KEEP_S, LAPSE_S, MARK_KEY, Registry
from services.router.testing.fake_workers import FakePrefill, FakeServedModel
from services.router.worker_views import LinkView, ServedModel, Snapshot, find_problem, worker_view
from tests.harness.redis_server import RedisServer
from tests.harness.router_bench import BOUND_S
from tests.harness.waiting import Clock

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
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def registry(redis_server: RedisServer, clock: Clock) -> AsyncIterator[Registry]:
    redis = connect_redis(redis_server.url, BOUND_S)
    yield Registry(redis, poll_interval_s=60, timeout_s=BOUND_S, clock=clock)
    await redis.aclose()


async def _register(client: Any, *names: str) -> list[FakePrefill]:
    workers = [FakePrefill(name, FakeServedModel()) for name in names]
    for worker in workers:
        await worker.register(client)
    return workers


async def _lapses(registry: Registry, clock: Clock, *names: str) -> None:
    """Those are known for KEEP_S from now on, and no longer."""
    clock.now_s += KEEP_S - 0.001
    assert _names(await registry.poll()) == [*names]
    clock.now_s += 0.001
    assert not (await registry.poll()).workers


@pytest.mark.parametrize("fails", [False, True])
async def test_an_older_look_does_not_undo_a_newer_one(
    registry: Registry, client: Any, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """A status may look while the next regular look is under way."""
    is_held, may_go_on = asyncio.Event(), asyncio.Event()
    parse = registry._parse_workers

    async def late(raw: Any) -> Any:
        is_held.set()
        await may_go_on.wait()
        if fails:
            raise RedisError("away")
        return await parse(raw)

    monkeypatch.setattr(registry, "_parse_workers", late)
    older = asyncio.create_task(registry.poll())
    await is_held.wait()
    monkeypatch.setattr(registry, "_parse_workers", parse)
    await _register(client, "p0")
    assert len((await registry.poll()).workers) == 1
    may_go_on.set()
    for snapshot in (await older, registry.snapshot):
        assert snapshot.is_redis_reachable and len(snapshot.workers) == 1
    assert len(registry.statuses()) == 1


async def _replace(redis_server: RedisServer) -> None:
    """By an empty one."""
    redis_server.kill()
    await redis_server.start()


@pytest.mark.parametrize("is_seen_away", [True, False])
async def test_an_empty_redis_is_no_news_until_everybody_could_register_there(
    registry: Registry, client: Any, redis_server: RedisServer, clock: Clock, is_seen_away: bool
) -> None:
    """Whether or not a look failed meanwhile."""
    first, *_ = await _register(client, "p0", "p1", "p2")
    await client.hset(
        "baton:stores",
        "n0",
        json.dumps({"node_id": "n0", "address": "h:1", "incarnation": LIFE}),
    )
    await client.set("baton:store:n0:beat", LIFE)
    await registry.poll()
    redis_server.kill()
    if is_seen_away:
        assert not (await registry.poll()).is_redis_reachable
    clock.now_s += 1000.0  # however long it was away
    await redis_server.start()
    snapshot = await registry.poll()
    assert snapshot.is_redis_reachable
    assert _names(snapshot) == ["p0", "p1", "p2"] and len(snapshot.stores) == 1
    assert [status.worker_id for status in registry.statuses()] == ["p0", "p1", "p2"]
    assert len(registry.store_statuses()) == 1 and registry.find("p2") is not None
    # One registers, and is gone when it is gone; another one is a new life.
    await first.register(client)
    (successor,) = await _register(client, "p1")
    assert _names(await registry.poll()) == ["p0", "p1", "p2"]
    found = registry.find("p1")
    assert found is not None and found.incarnation == successor.incarnation
    await client.delete("baton:worker:p0:beat", "baton:worker:p1:beat")
    assert _names(await registry.poll()) == ["p2"]
    # Who was not heard of in all that time is gone.
    clock.now_s += KEEP_S - 0.001
    assert _names(await registry.poll()) == ["p2"]
    clock.now_s += 0.001
    snapshot = await registry.poll()
    assert not snapshot.workers and not snapshot.stores
    assert not registry.statuses() and registry.find("p2") is None


async def test_heartbeats_that_lapsed_while_redis_was_away_are_no_news_either(
    registry: Registry, client: Any, redis_server: RedisServer, clock: Clock
) -> None:
    """One that keeps what it has: the entries are there, the beats are over."""
    await _register(client, "p0")
    await registry.poll()
    redis_server.kill()
    await registry.poll()
    await redis_server.start()
    await _register(client, "p0")
    await client.delete("baton:worker:p0:beat")
    assert _names(await registry.poll()) == ["p0"]
    clock.now_s += KEEP_S
    assert not (await registry.poll()).workers


async def test_a_redis_that_stays_the_same_is_believed_at_once(
    registry: Registry, client: Any, redis_server: RedisServer
) -> None:
    """Two routers look: neither is another Redis to the other."""
    await _register(client, "p0")
    redis = connect_redis(redis_server.url, BOUND_S)
    other = Registry(redis, poll_interval_s=60, timeout_s=BOUND_S)
    assert _names(await registry.poll()) == _names(await other.poll()) == ["p0"]
    await client.delete("baton:worker:p0:beat")
    assert not (await registry.poll()).workers and not (await other.poll()).workers
    await redis.aclose()


async def test_a_redis_replaced_twice_keeps_who_is_known(
    registry: Registry, client: Any, redis_server: RedisServer, clock: Clock
) -> None:
    await _register(client, "p0")
    await registry.poll()
    await _replace(redis_server)
    await registry.poll()
    clock.now_s += KEEP_S / 2
    await _replace(redis_server)
    await registry.poll()
    await _lapses(registry, clock, "p0")


class Connections:
    """Of a registry to Redis: each look takes two of its pool, one for each round trip."""

    def __init__(self, registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
        pool = registry._client.connection_pool
        self._take = pool.get_connection
        self.num_taken = 0
        self.before: Callable[[], Awaitable[Any]] | None = None
        """What happens before the next one is taken."""
        monkeypatch.setattr(pool, "get_connection", self._get)

    async def _get(self, *args: Any, **kwargs: Any) -> Any:
        self.num_taken += 1
        if self.before is not None:
            await self.before()
        return await self._take(*args, **kwargs)


async def _away() -> None:
    raise RedisError("away")


@pytest.fixture
def connections(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> Connections:
    return Connections(registry, monkeypatch)


async def test_looks_that_fail_now_and_then_keep_nobody_who_is_dead(
    registry: Registry, client: Any, clock: Clock, connections: Connections
) -> None:
    await _register(client, "p0", "p1")
    await registry.poll()
    beat = await client.get("baton:worker:p0:beat")
    await client.persist("baton:worker:p1:beat")
    await client.delete("baton:worker:p0:beat")
    for num in range(10):
        clock.now_s += 0.5
        connections.before = _away if num % 2 == 0 else None
        snapshot = await registry.poll()
        assert snapshot.is_redis_reachable is bool(num % 2)
        # A beat outlasts one missed look: its absence means what it says.
        assert _names(snapshot) == (["p0", "p1"] if num == 0 else ["p1"])
    # It is heard of again, and stays so through the next failed look.
    await client.set("baton:worker:p0:beat", beat)
    assert _names(await registry.poll()) == ["p0", "p1"]
    connections.before = _away
    assert _names(await registry.poll()) == ["p0", "p1"]


@pytest.mark.parametrize("missed_s", [LAPSE_S + 0.001, 1000.0])
async def test_a_beat_that_could_lapse_while_no_look_got_through_is_waited_for(
    registry: Registry, client: Any, clock: Clock, connections: Connections, missed_s: float
) -> None:
    """Of one and the same Redis."""
    await _register(client, "p0")
    await registry.poll()
    mark = await client.get(MARK_KEY)
    connections.before = _away
    await registry.poll()
    await client.delete("baton:worker:p0:beat")
    connections.before = None
    clock.now_s += missed_s
    assert _names(await registry.poll()) == ["p0"]
    await _lapses(registry, clock, "p0")
    assert await client.get(MARK_KEY) == mark


@pytest.mark.parametrize("at", [1, 2])
async def test_a_redis_that_loses_everything_within_a_look_is_another_one(
    registry: Registry, client: Any, clock: Clock, connections: Connections, at: int
) -> None:
    await _register(client, "p0")
    await registry.poll()
    num_before = connections.num_taken

    async def flush() -> None:
        if connections.num_taken == num_before + at:
            await client.flushall()

    connections.before = flush
    assert _names(await registry.poll()) == ["p0"]
    assert connections.num_taken == num_before + 2
    assert _names(await registry.poll()) == ["p0"] and registry.find("p0") is not None
    clock.now_s += KEEP_S
    assert not (await registry.poll()).workers


def _names(snapshot: Snapshot) -> list[str]:
    return [worker.worker_id for worker in snapshot.workers]


async def test_stores(registry: Registry, client: Any) -> None:
    for node, spelling in (("n0", "node_id"), ("n1", "nodeId"), ("silent", "node_id")):
        entry = {spelling: node, "address": "h:1", "incarnation": LIFE}
        await client.hset("baton:stores", node, json.dumps(entry))
        await client.set(f"baton:store:{node}:beat", LIFE)
    await client.delete("baton:store:silent:beat")
    stores = (await registry.poll()).stores
    assert [store.node_id for store in stores] == ["n0", "n1"]


async def test_a_broken_entry_is_a_problem_not_a_failure(registry: Registry, client: Any) -> None:
    await _register(client, "p0")
    await client.hset("baton:workers", "p1", "no json")
    await client.hset("baton:workers", b"\xff", b"\xff\xfe")
    await client.hset("baton:workers", "p2", '{"workerId": "somebody else"}')
    await client.hset("baton:stores", "n1", "[]")
    await client.hset("baton:stores", "n2", '{"node_id": 3}')
    for node, address, life in (("n3", "h:1", "no hex"), ("n4", "h:1", "ab"), ("n5", "", LIFE)):
        entry = {"node_id": node, "address": address, "incarnation": life}
        await client.hset("baton:stores", node, json.dumps(entry))
        await client.set(f"baton:store:{node}:beat", life)
    entry = {"node_id": "another", "address": "h:1", "incarnation": LIFE}
    await client.hset("baton:stores", "n6", json.dumps(entry))
    await client.set("baton:store:n6:beat", LIFE)
    snapshot = await registry.poll()
    assert [worker.worker_id for worker in snapshot.workers] == ["p0"]
    assert not snapshot.stores
    assert len(snapshot.problems) == 9
    assert "registry entry b'n6' names store 'another'" in snapshot.problems


async def test_polling_tells_who_asked(redis_server: RedisServer, client: Any) -> None:
    seen: list[int] = []
    redis = connect_redis(redis_server.url, BOUND_S)
    registry = Registry(
        redis,
        poll_interval_s=0.01,
        timeout_s=BOUND_S,
        on_change=lambda snapshot: seen.append(len(snapshot.workers)),
    )
    await registry.start()
    assert seen == [0]
    await registry.stop()
    await redis.aclose()


def test_links_are_those_that_were_measured_the_last_of_each_store() -> None:
    worker = FakePrefill("p0", FakeServedModel())
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
        "n0": LinkView(5.0, is_degraded=True),
        "n1": LinkView(7.0),
        "n6": LinkView(0.0, is_degraded=True),
    }


def test_what_makes_a_worker_unusable() -> None:
    model = FakeServedModel()
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
