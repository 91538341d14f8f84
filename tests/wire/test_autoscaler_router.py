"""What a router does for an autoscaler: it says what its traffic is, and holds requests while there
are no workers."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import grpc.aio
import pytest
from google.protobuf import json_format

from baton.client import Client
from process import registry, rpc
from process.errors import Unavailable
from protos import inference_pb2, router_status_pb2
from services.router.testing.fake_workers import FakeDecode, FakePrefill
from tests.harness.redis_server import RedisServer
from tests.harness.router_bench import (
    BOUND_S,
    SHORT_WAITS,
    Bench,
    HttpBench,
    fake_model,
    http_bench,
    request,
    running,
    settings_for,
)
from tests.harness.waiting import until


async def entry(bench: Bench) -> router_status_pb2.RouterStatus:
    client: Any = bench.redis.client()
    try:
        raw = await client.hget(registry.entries_key("router"), bench.router.router_id)
        beat = await client.get(registry.beat_key("router", bench.router.router_id))
    finally:
        await client.aclose()
    status = router_status_pb2.RouterStatus()
    if raw is not None and beat is not None:
        json_format.Parse(raw, status)
        assert status.incarnation.encode() == beat
    return status


async def model(bench: Bench) -> router_status_pb2.ModelTraffic:
    bench.router._beat.beat_now()
    status = await entry(bench)
    return status.models[0] if status.models else router_status_pb2.ModelTraffic()


async def test_traffic_is_told_in_the_registry() -> None:
    async with running() as bench:
        for index in range(3):
            await bench.generate(
                request(text=f"hello {index}", sampling={"max_tokens": 5, "ignore_eos": True})
            )

        async def is_told() -> bool:
            return (await model(bench)).num_finished == 3

        await until(is_told)
        told = await model(bench)
        assert (told.model, told.num_arrived) == (bench.model.name, 3)
        assert told.num_output_tokens == 15
        assert told.num_prompt_tokens > 0
        assert sum(told.first_token.counts) == 3
        assert sum(told.per_token.counts) == 3
        assert (told.num_held, told.num_queued, told.num_running) == (0, 0, 0)
        status = await entry(bench)
        assert (status.router_id, status.address) == (bench.router.router_id, bench.router.address)


async def test_a_router_that_stops_is_no_longer_there() -> None:
    async with running() as bench:
        await until(lambda: bench.router._beat.is_registered)
        await bench.router._beat.stop()
        assert not (await entry(bench)).router_id


async def test_the_first_requests_wait_for_the_first_workers() -> None:
    async with running(num_prefill=0, num_decode=0, hold_without_workers_s=BOUND_S) as bench:
        bench.router.desk.ready()  # a balancer must send it something
        asked = [
            asyncio.create_task(bench.generate(request(text="hi", sampling={"max_tokens": 3})))
            for _ in range(3)
        ]

        async def are_told() -> bool:
            return (await model(bench)).num_held == 3

        await until(are_told)
        await bench.add(FakePrefill("p0", bench.model))
        assert not any(task.done() for task in asked)
        await bench.add(FakeDecode("d0", bench.model))
        for messages in await asyncio.gather(*asked):
            last = messages[-1]
            assert last.finish_reason
            assert sum(stage.seconds for stage in last.times if stage.stage == "hold") > 0

        async def is_told_too() -> bool:
            told = await model(bench)
            return (told.num_finished, told.num_held) == (3, 0)

        await until(is_told_too)


@pytest.mark.parametrize("waits", [{"hold_without_workers_s": BOUND_S, "times": SHORT_WAITS}, {}])
async def test_a_model_that_requests_wait_for_is_listed_as_its_last_workers_had_it(
    waits: dict[str, Any],
) -> None:
    ask = inference_pb2.ListModelsRequest()
    async with running(**waits) as bench:
        before = await bench.stub.ListModels(ask, timeout=BOUND_S)
        assert before.models
        client: Any = bench.redis.client()
        await client.delete(registry.entries_key("worker"))
        await client.aclose()
        assert not await bench.probe.look()
        assert await bench.stub.ListModels(ask, timeout=BOUND_S) == before
    async with running(
        times=SHORT_WAITS
    ) as bench:  # its workers are expected back for `failover_wait_s`
        client = bench.redis.client()
        await client.delete(registry.entries_key("worker"))
        await client.aclose()
        await bench.probe.look()

        async def is_gone() -> bool:
            return not (await bench.stub.ListModels(ask, timeout=BOUND_S)).models

        await until(is_gone)


async def test_too_many_are_refused() -> None:
    async with running(
        num_prefill=0,
        num_decode=0,
        hold_without_workers_s=BOUND_S,
        limits={"max_held_requests": 1},
    ) as bench:
        first = bench.stub.Generate(request(), timeout=BOUND_S)
        await until(lambda: bench.probe.num_held == 1)
        with pytest.raises(grpc.aio.AioRpcError) as second:
            await bench.generate(request())
        assert second.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        first.cancel()


async def test_too_long_is_refused() -> None:
    async with running(num_prefill=0, num_decode=0, hold_without_workers_s=0.3) as bench:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await bench.generate(request())
        error = rpc.error_from_rpc(caught.value)
        assert isinstance(error, Unavailable) and "none started within 0.3 s" in str(error)
        assert error.retry_after_s is not None


async def test_a_client_that_leaves_is_held_no_more() -> None:
    async with running(num_prefill=0, num_decode=0, hold_without_workers_s=BOUND_S) as bench:
        call = bench.stub.Generate(request(), timeout=BOUND_S)
        await until(lambda: bench.probe.num_held == 1)
        call.cancel()
        await until(lambda: bench.probe.num_held == 0)


async def test_without_holding_it_is_refused_at_once() -> None:
    async with running(num_prefill=0, num_decode=0) as bench:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await bench.generate(inference_pb2.GenerateRequest(text="hello"))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_router_is_ready_when_each_role_has_a_worker() -> None:
    """Though requests are held for the first workers, and one of them has said that it starts."""
    async with running(num_prefill=0, num_decode=0, hold_without_workers_s=BOUND_S) as bench:
        async with bench.starting_decode("d0"):
            with pytest.raises(Unavailable, match="no prefill worker serves"):
                bench.router.desk.ready()
            await bench.add(FakePrefill("p0", bench.model))
            await until(lambda: bench.probe.is_up("p0"))
            with pytest.raises(Unavailable, match="no decode worker serves"):
                bench.router.desk.ready()
            await bench.add(FakeDecode("d0", bench.model))
        async with Client(bench.router.address) as client:
            await until(client.is_ready)


async def test_a_router_that_never_met_redis_is_not_at_zero() -> None:
    """Whether workers are there is what it cannot know yet."""
    server = RedisServer()
    try:
        await server.start()
        server.kill()
        bench = HttpBench(server, fake_model())
        settings = settings_for(server, hold_without_workers_s=BOUND_S, http_listen="127.0.0.1:0")
        await bench.start_router(settings)
        try:
            async with aiohttp.ClientSession() as session, Client(bench.router.address) as client:
                async with session.get(f"{bench.url}/ready") as response:
                    assert response.status == 503
                assert not await client.is_ready()
                await server.start()
                await until(client.is_ready)
                async with session.get(f"{bench.url}/ready") as response:
                    assert response.status == 200
                server.kill()
                await until(lambda: not bench.probe.is_redis_reachable)
                assert await client.is_ready(), "a Redis that went away is no reason"
                await server.start()
        finally:
            await bench.stop(expect_idle=True)
    finally:
        server.remove()


async def test_a_router_that_only_expects_a_worker_is_not_ready() -> None:
    async with http_bench(num_decode=0) as bench, aiohttp.ClientSession() as session:
        async with bench.starting_decode("d0"):
            async with session.get(f"{bench.url}/ready") as response:
                assert response.status == 503 and "decode" in await response.text()
