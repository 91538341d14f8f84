"""One look at a real Redis: who lives, how old their word is, and what cannot be read."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from process import registry
from process.errors import Unavailable
from protos import common_pb2
from services.autoscaler import observer
from services.worker.status import status_to_json
from tests.harness.redis_server import RedisServer


@pytest.fixture
async def server() -> AsyncIterator[RedisServer]:
    made = RedisServer()
    await made.start()
    yield made
    made.remove()


TTL_MS = 600_000
"""Long enough that nothing lapses while a test is slow."""


async def write(client: Any, worker_id: str, *, life: str = "1", left_ms: int = TTL_MS) -> None:
    status = common_pb2.WorkerStatus(worker_id=worker_id, incarnation="1", num_running=3)
    await client.hset(registry.entries_key("worker"), worker_id, status_to_json(status))
    await client.set(registry.beat_key("worker", worker_id), life, px=left_ms)


async def test_only_those_that_live_are_seen_each_as_old_as_its_beat(server: RedisServer) -> None:
    client: Any = server.client()
    try:
        await write(client, "fresh")
        await write(client, "late", left_ms=TTL_MS // 2)
        await write(client, "another life", life="2")
        await write(client, "dead")
        await client.delete(registry.beat_key("worker", "dead"))
        key = registry.entries_key("router")
        await client.hset(key, mapping={"r": "{no json", "s": '{"models": 3}'})
        for router in ("r", "s"):
            await client.set(registry.beat_key("router", router), "1", px=TTL_MS)
        found = await observer.look_at_registry(client, 5.0, beat_ttl_ms=TTL_MS)
    finally:
        await client.aclose()
    ages = {beaten.entry_id: beaten.age_s for beaten in found.workers}
    assert set(ages) == {"fresh", "late"}
    # No more than what passed since can be added to what was left of each beat.
    assert 0 <= ages["fresh"] < 200 < 300 <= ages["late"] < 500
    assert {beaten.status.num_running for beaten in found.workers} == {3}
    assert not found.routers and len(found.problems) == 2
    assert "entry of router b'r' cannot be read" in found.problems[0]


async def test_redis_away_is_one_line(server: RedisServer) -> None:
    client: Any = server.client()
    server.kill()
    try:
        with pytest.raises(Unavailable, match="Redis does not answer") as caught:
            await observer.look_at_registry(client, 1.0)
        assert "\n" not in str(caught.value)
    finally:
        await client.aclose()
