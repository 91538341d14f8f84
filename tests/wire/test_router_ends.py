"""A router that is told to end: what the streams under way see, over both protocols."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import grpc
import pytest

from tests.harness.router_bench import BOUND_S, http_bench, request, rest_of

pytestmark = pytest.mark.oracle


async def test_streams_that_outlast_the_drain_end_with_an_error() -> None:
    async with http_bench(times={"drain_s": 0.2}) as bench, aiohttp.ClientSession() as session:
        bench.decode.token_gate.close()
        bench.decode.token_gate.let_pass(2)
        call = bench.stub.Generate(request(), timeout=BOUND_S)
        body = {"prompt": "hello", "stream": True, "max_tokens": 8}
        async with session.post(f"{bench.url}/v1/completions", json=body) as response:
            first = await response.content.readline()
            await call.read()
            stopping = asyncio.create_task(bench.router.stop())
            rest = (await response.content.read()).decode()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await rest_of(call)
            await stopping
    assert first.startswith(b"data: ")
    events = [line for line in rest.splitlines() if line.startswith("data: ")]
    error = json.loads(events[-1].removeprefix("data: "))["error"]
    assert error["code"] == "unavailable" and "this router stops" in error["message"]
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "this router stops" in (caught.value.details() or "")


async def test_a_stream_that_ends_within_the_drain_is_whole() -> None:
    async with http_bench() as bench, aiohttp.ClientSession() as session:
        bench.decode.token_gate.close()
        bench.decode.token_gate.let_pass(1)
        body = {"prompt": "hello", "stream": True, "max_tokens": 4}
        async with session.post(f"{bench.url}/v1/completions", json=body) as response:
            await response.content.readline()
            stopping = asyncio.create_task(bench.router.stop())
            bench.decode.token_gate.open()
            rest = (await response.content.read()).decode()
            await stopping
    assert rest.rstrip().endswith("data: [DONE]") and "error" not in rest
