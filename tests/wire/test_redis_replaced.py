"""A Redis that is killed and replaced by an empty one, as a pod is: no request fails for it, and
whoever lives is registered in the new one."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import pytest

from services.router.fakes.worker import FakeWorker
from services.worker.heartbeat import Heartbeat
from tests.harness.router_bench import Bench, request, running
from tests.harness.waiting import until

SHORT = {"max_tokens": 4}


@contextlib.asynccontextmanager
async def _beating(bench: Bench, *workers: FakeWorker) -> AsyncIterator[list[Heartbeat]]:
    """The workers register as real ones do."""
    beats = [
        Heartbeat(
            bench.redis.url,
            worker_id=worker.worker_id,
            incarnation=worker.incarnation,
            status=worker.status,
        )
        for worker in workers
    ]
    for beat in beats:
        beat.start()
    try:
        await until(lambda: all(beat.is_registered for beat in beats))
        yield beats
    finally:
        for beat in beats:
            await beat.stop()


async def _serves(bench: Bench) -> None:
    messages = await bench.generate(request(text="a prompt of one block", sampling=SHORT))
    assert messages[-1].usage.num_output_tokens == 4


@pytest.mark.parametrize("is_seen_away", [True, False])
async def test_no_request_fails_while_redis_is_replaced(is_seen_away: bool) -> None:
    """Whether the router found it away, or meets the new one at its next look."""
    async with running() as bench, _beating(bench, bench.prefill, bench.decode) as beats:
        registry = bench.router._registry
        await registry.poll()
        bench.redis.kill()
        if is_seen_away:
            await until(lambda: not registry.snapshot.is_redis_reachable)
            await until(lambda: not any(beat.is_registered for beat in beats))
            await _serves(bench)
        await bench.redis.start()
        before = [beat.num_beats for beat in beats]
        assert len((await registry.poll()).workers) == 2
        await _serves(bench)
        while not all(beat.num_beats > num for beat, num in zip(beats, before, strict=True)):
            await _serves(bench)
        snapshot = await registry.poll()
        assert snapshot.is_redis_reachable and len(snapshot.workers) == 2
        await _serves(bench)


async def test_who_does_not_come_back_is_gone_when_its_time_is_over() -> None:
    async with running(num_decode=2) as bench, _beating(bench, bench.prefill, bench.decodes[0]):
        registry = bench.router._registry
        assert len((await registry.poll()).workers) == 3
        bench.redis.kill()
        await bench.redis.start()
        assert len((await registry.poll()).workers) == 3
        await until(lambda: {w.worker_id for w in registry.snapshot.workers} == {"p0", "d0"})
        await _serves(bench)
