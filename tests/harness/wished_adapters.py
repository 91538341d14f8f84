"""Adapters that a running cluster wishes for: the wishes as Redis has them, and fake workers that
follow them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

from process.background_tasks import end_tasks, start_task
from protos import common_pb2
from services import adapter_wishes
from services.router.testing.fake_workers import FakeWorker
from tests.harness.router_bench import Bench, HttpBench, http_bench


def workers_of(bench: Bench) -> list[FakeWorker]:
    return [*bench.prefills, *bench.decodes]


async def wishes(bench: Bench) -> dict[str, common_pb2.AdapterWish]:
    return adapter_wishes.parse(await bench.redis_client.hgetall(adapter_wishes.KEY), [])


async def follow(bench: Bench, worker: FakeWorker) -> None:
    """As a worker does with each beat."""
    for name, wish in (await wishes(bench)).items():
        kept = {version.digest for version in adapter_wishes.versions(wish)}
        wanted = {v.digest for v in adapter_wishes.versions(wish) if v.folder}
        kept |= {d for (n, d), v in worker.held.items() if n == name and v >= wish.version}
        worker.loaded = {(n, d) for n, d in worker.loaded if n != name or d in kept}
        worker.loaded |= {(name, digest) for digest in wanted}
    await bench.publish(worker)


@asynccontextmanager
async def following(bench: Bench) -> AsyncIterator[None]:
    """The workers follow what is wished, beat by beat."""

    async def keep_up() -> None:
        while True:
            for worker in workers_of(bench):
                await follow(bench, worker)
            await asyncio.sleep(0.05)

    task = start_task(keep_up(), "following")
    try:
        yield
    finally:
        await end_tasks([task])


@asynccontextmanager
async def telling_bench(**options: Any) -> AsyncIterator[HttpBench]:
    """One whose workers say at once what they have loaded."""
    async with http_bench(**options) as bench:
        for worker in workers_of(bench):
            worker.on_loaded = partial(bench.publish, worker)
        yield bench


async def put_wish(bench: Bench, name: str, wish: common_pb2.AdapterWish) -> None:
    """In place of the one that is there."""
    await bench.redis_client.hset(adapter_wishes.KEY, name, adapter_wishes.to_json(wish))


def unloaded(
    wish: common_pb2.AdapterWish, *, loaded: Collection[str] = (), is_long_ago: bool
) -> common_pb2.AdapterWish:
    """The wish that follows this one when its adapter is unloaded, now or so long ago that it may
    be forgotten. `loaded`: digests of what workers have still."""
    ago_s = adapter_wishes.FORGET_S + 1 if is_long_ago else 0.0
    return adapter_wishes.changed(
        wish,
        name=wish.name,
        model="fake",
        current=None,
        loaded=loaded,
        now_unix_s=time.time() - ago_s,
    )


def redis_dies_with_a_change(
    monkeypatch: pytest.MonkeyPatch, bench: Bench, *, is_behind: bool
) -> list[str]:
    """Just before the next one, or just behind it: then the answer is lost, and what it held with
    it. Returns: names of the changes that are tried from here on."""
    swap = adapter_wishes.swap
    calls: list[str] = []

    async def dying(client: Any, name: str, before: bytes, after: str) -> bool:
        calls.append(name)
        if len(calls) > 1:
            return await swap(client, name, before, after)
        if is_behind:
            await swap(client, name, before, after)
        bench.redis.kill()
        await bench.redis.start()
        raise ConnectionError("gone")

    monkeypatch.setattr(adapter_wishes, "swap", dying)
    return calls
