"""Errors must cross a real gRPC border unchanged: kind, text, wrong field, retry time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from process import errors, serving
from protos import kvstore_pb2, kvstore_pb2_grpc


class _Raises(kvstore_pb2_grpc.KvStoreServicer):
    def __init__(self, error: BaseException) -> None:
        self.error = error

    @serving.unary
    async def GetStatus(self, request: Any, context: Any) -> kvstore_pb2.GetStatusReply:
        raise self.error

    @serving.streaming
    async def Read(self, request: Any, context: Any) -> AsyncIterator[kvstore_pb2.ReadChunk]:
        yield kvstore_pb2.ReadChunk(index=7)
        raise self.error


async def _over_the_wire(error: BaseException, *, stream: bool) -> errors.BatonError:
    server, address = await serving.listen(
        "127.0.0.1:0",
        [lambda s: kvstore_pb2_grpc.add_KvStoreServicer_to_server(_Raises(error), s)],
    )
    try:
        async with serving.channel(address) as channel:
            stub = kvstore_pb2_grpc.KvStoreStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                if stream:
                    call = stub.Read(kvstore_pb2.ReadRequest(), timeout=5)
                    assert (await call.read()).index == 7
                    await call.read()
                else:
                    await stub.GetStatus(kvstore_pb2.GetStatusRequest(), timeout=5)
            return serving.error_from_rpc(caught.value)
    finally:
        await server.stop(0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "error",
    [
        errors.InvalidArgument("sampling.top_p", "must be in (0, 1], got 2.0"),
        errors.NotFound("no lease l"),
        errors.AlreadyExists("request r"),
        errors.FailedPrecondition("other layout"),
        errors.NoCapacity("no blocks", retry_after_s=2.5),
        errors.Unavailable("gone"),
        errors.DeadlineExceeded("late"),
        errors.Cancelled("client"),
    ],
)
async def test_errors_survive_the_wire(error: errors.BatonError, stream: bool) -> None:
    received = await _over_the_wire(error, stream=stream)
    assert type(received) is type(error)
    assert str(received) == str(error)
    assert received.retry_after_s == error.retry_after_s
    assert getattr(received, "field", None) == getattr(error, "field", None)
    code, _ = serving.status_of(error)
    again = serving.error_of_code(serving.code_number(code), str(error), error.retry_after_s)
    assert (type(again), str(again)) == (type(error), str(error))


async def test_the_unexpected_is_internal_and_does_not_leak() -> None:
    received = await _over_the_wire(KeyError("a secret of ours"), stream=False)
    assert type(received) is errors.Internal
    assert "secret" not in str(received)


async def test_a_taken_port_is_one_clear_error() -> None:
    server, address = await serving.listen("127.0.0.1:0", [])
    try:
        with pytest.raises(errors.Unavailable, match=f"cannot listen on {address}"):
            await serving.listen(address, [])
    finally:
        await server.stop(0)
    await asyncio.sleep(0)
