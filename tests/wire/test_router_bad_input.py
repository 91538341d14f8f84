"""Bad input is INVALID_ARGUMENT with the field's name, over the real wire, before any worker hears
of it.
"""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio
import pytest

from process.errors import InvalidArgument
from protos import inference_pb2
from tests.harness.router_bench import Bench, error_from_rpc, request, running

pytestmark = pytest.mark.oracle

GENERATE = "/baton.v1.Inference/Generate"


async def _refusal(bench: Bench, message: Any) -> InvalidArgument:
    """What the client learns about a message (or raw bytes) that must be refused."""
    data = message if isinstance(message, bytes) else message.SerializeToString()
    call = bench.channel.unary_stream(GENERATE)(data, timeout=30)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, caught.value.details()
    error = error_from_rpc(caught.value)
    assert isinstance(error, InvalidArgument)
    # Field violations and message name the same field.
    assert (caught.value.details() or "").startswith(error.field + ":")
    return error


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"text": ""}, "prompt"),
        ({"token_ids": {"ids": []}}, "token_ids.ids"),
        ({"token_ids": {"ids": [1, 2, 10_000_000]}}, "token_ids.ids[2]"),
        ({"token_ids": {"ids": [1] * 512}}, "token_ids.ids"),
        ({"text": "x" * 513}, "text"),
        ({"chat": {"messages": [{"role": "user", "content": "x" * 600}]}}, "chat"),
        ({"sampling": {"temperature": -1.0}}, "sampling.temperature"),
        ({"sampling": {"temperature": float("nan")}}, "sampling.temperature"),
        ({"sampling": {"top_p": 0.0}}, "sampling.top_p"),
        ({"sampling": {"max_tokens": 0, "n": 2}}, "sampling.n"),
        ({"sampling": {"max_tokens": 4_000_000_000}}, "sampling.max_tokens"),
        ({"sampling": {"stop_token_ids": [999_999]}}, "sampling.stop_token_ids[0]"),
        ({"model": "another"}, "model"),
        ({"request_id": "white space"}, "request_id"),
        ({"sampling": {"n": 17}}, "sampling.n"),
    ],
)
async def test_refused_by_name_before_any_work(fields: dict[str, Any], field: str) -> None:
    async with running() as bench:
        message = request(**fields) if fields != {"text": ""} else inference_pb2.GenerateRequest()
        error = await _refusal(bench, message)
        assert error.field == field
        assert error.retry_after_s is None
        assert not bench.prefill.requests and not bench.decode.num_reserved
        status = await bench.stub.GetClusterStatus(inference_pb2.GetClusterStatusRequest())
        assert status.num_requests_failed == 0


async def test_broken_bytes_name_their_field() -> None:
    async with running() as bench:
        good = request(text="MARK", request_id="ID").SerializeToString()
        broken_text = good.replace(b"MARK", b"M\xff\xfeK")
        assert (await _refusal(bench, broken_text)).field == "text"
        assert (await _refusal(bench, good[:-1])).field == "request"
        assert (await _refusal(bench, b"\xff\xff\xff")).field == "request"
        assert (await _refusal(bench, b"")).field == "prompt"
        assert not bench.prefill.requests


async def test_oversize_messages() -> None:
    limits = {"max_request_bytes": 10_000, "hard_request_bytes": 50_000}
    async with running(limits=limits) as bench:
        assert (await _refusal(bench, request(text="x" * 20_000))).field == "request"
        # Above the hard bound gRPC itself refuses, without reading the message.
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await bench.generate(request(text="x" * 60_000))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        # And the router is none the worse.
        assert await bench.generate(request(sampling={"max_tokens": 2}))
