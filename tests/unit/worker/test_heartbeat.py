"""The registry entry over a real Redis: there while the worker lives, back after Redis was away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis.asyncio
from google.protobuf import json_format

from process.registry import BEAT_TTL_MS
from protos import common_pb2
from services.worker.runtime import WORKERS_KEY, Heartbeat, beat_key
from tests.harness.redis_server import RedisServer
from tests.harness.waiting import until

ID = "decode-7"


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[RedisServer]:
    process = RedisServer(tmp_path)
    await process.start()
    yield process
    process.kill()


def heartbeat(server: RedisServer, incarnation: str = "aa") -> Heartbeat:
    def status() -> common_pb2.WorkerStatus:
        return common_pb2.WorkerStatus(
            worker_id=ID, role="decode", incarnation=incarnation, num_prompt_tokens_local=5
        )

    return Heartbeat(server.url, worker_id=ID, incarnation=incarnation, status=status, every_s=0.02)


async def test_a_worker_is_registered_while_it_lives_and_no_longer(server: RedisServer) -> None:
    client = redis.asyncio.from_url(server.url)
    beat = heartbeat(server)
    beat.start()
    await until(lambda: beat.num_beats >= 2)
    status = json_format.Parse(await client.hget(WORKERS_KEY, ID), common_pb2.WorkerStatus())
    assert (status.worker_id, status.role, status.num_prompt_tokens_local) == (ID, "decode", 5)
    assert await client.get(beat_key(ID)) == b"aa"
    assert 0 < await client.pttl(beat_key(ID)) <= BEAT_TTL_MS
    await beat.stop()
    assert await client.hlen(WORKERS_KEY) == 0
    assert await client.exists(beat_key(ID)) == 0
    await client.connection_pool.disconnect()


async def test_redis_away_is_survived_and_its_next_life_is_told(server: RedisServer) -> None:
    beat = heartbeat(server)
    beat.start()
    await until(lambda: beat.is_registered)
    server.kill()
    await until(lambda: not beat.is_registered)
    await server.start()
    client = redis.asyncio.from_url(server.url)
    await until(lambda: client.hexists(WORKERS_KEY, ID))
    await until(lambda: beat.is_registered)
    await beat.stop()
    await client.connection_pool.disconnect()


async def test_who_waits_for_redis_tries_as_often_as_it_beats(server: RedisServer) -> None:
    """However long it is away: a wait that grew would go on when Redis is back."""
    num_asked = 0

    def status() -> common_pb2.WorkerStatus:
        nonlocal num_asked
        num_asked += 1
        return common_pb2.WorkerStatus(worker_id=ID, incarnation="aa")

    beat = Heartbeat(server.url, worker_id=ID, incarnation="aa", status=status, every_s=0.02)
    beat.start()
    await until(lambda: beat.is_registered)
    server.kill()
    await until(lambda: not beat.is_registered)
    before = num_asked
    await until(lambda: num_asked >= before + 50)
    await beat.stop()


async def test_a_worker_may_start_and_stop_without_redis(tmp_path: Path) -> None:
    beat = heartbeat(RedisServer(tmp_path))
    beat.start()
    await asyncio.sleep(0)
    assert not beat.is_registered
    await asyncio.wait_for(beat.stop(), 30)


async def test_an_old_life_does_not_remove_its_successor(server: RedisServer) -> None:
    old, new = heartbeat(server, "aa"), heartbeat(server, "bb")
    old.start()
    await until(lambda: old.is_registered)
    assert old._task is not None
    old._task.cancel()  # it hangs; the same id is started again
    new.start()
    await until(lambda: new.is_registered)
    await old.stop()
    client = redis.asyncio.from_url(server.url)
    assert await client.get(beat_key(ID)) == b"bb"
    assert await client.hexists(WORKERS_KEY, ID)
    await new.stop()
    assert not await client.hexists(WORKERS_KEY, ID)
    await client.connection_pool.disconnect()


async def test_what_killed_workers_left_goes_with_the_next_one_that_comes(
    server: RedisServer,
) -> None:
    client = redis.asyncio.from_url(server.url)
    await client.hset(WORKERS_KEY, mapping={"dead": "{}", "alive": "{}"})
    await client.set(beat_key("alive"), "bb", px=60_000)
    beat = heartbeat(server)
    beat.start()
    await until(lambda: beat.num_beats >= 2)
    assert {key.decode() for key in await client.hkeys(WORKERS_KEY)} == {"alive", ID}
    await beat.stop()
    await client.connection_pool.disconnect()
