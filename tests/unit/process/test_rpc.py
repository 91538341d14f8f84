"""Errors must cross a real gRPC border unchanged: kind, text, wrong field, retry time."""

from __future__ import annotations

import asyncio
import socket
import stat
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2

from process import grpc_server, rpc, rpc_errors
from protos import kvstore_pb2, kvstore_pb2_grpc


class _Raises(kvstore_pb2_grpc.KvStoreServicer):
    def __init__(self, error: BaseException) -> None:
        self.error = error

    @rpc.unary
    async def GetStatus(self, request: Any, context: Any) -> kvstore_pb2.GetStatusReply:
        raise self.error

    @rpc.unary
    async def Write(self, request: Any, context: Any) -> kvstore_pb2.WriteReply:
        num_bytes = 0
        async for chunk in request:
            num_bytes += len(chunk.data)
        return kvstore_pb2.WriteReply(num_bytes=num_bytes)

    @rpc.streaming
    async def Read(self, request: Any, context: Any) -> AsyncGenerator[kvstore_pb2.ReadChunk, None]:
        yield kvstore_pb2.ReadChunk(index=7)
        raise self.error


class _Superseded(kvstore_pb2_grpc.KvStoreServicer):
    """Its answer is cancelled while the first message is on its way."""

    @rpc.unary
    async def Read(self, request: Any, context: Any) -> None:
        first = asyncio.create_task(
            rpc.write_first(context, kvstore_pb2.ReadChunk(data=bytes(100_000)))
        )
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait([first])
        assert first.cancelled()
        raise rpc_errors.Cancelled("another attempt took over")


class _Echo(kvstore_pb2_grpc.KvStoreServicer):
    @rpc.unary
    async def GetStatus(self, request: Any, context: Any) -> kvstore_pb2.GetStatusReply:
        return kvstore_pb2.GetStatusReply(node_id="here")


async def _over_the_wire(error: BaseException, *, stream: bool) -> rpc_errors.BatonError:
    server, address = await grpc_server.listen(
        "127.0.0.1:0",
        [lambda s: kvstore_pb2_grpc.add_KvStoreServicer_to_server(_Raises(error), s)],
    )
    try:
        async with rpc.channel(address) as channel:
            stub = kvstore_pb2_grpc.KvStoreStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                if stream:
                    call = stub.Read(kvstore_pb2.ReadRequest(), timeout=30)
                    assert (await call.read()).index == 7
                    await call.read()
                else:
                    await stub.GetStatus(kvstore_pb2.GetStatusRequest(), timeout=30)
            return rpc.error_from_rpc(caught.value)
    finally:
        await server.stop(0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "error",
    [
        rpc_errors.InvalidArgument("sampling.top_p", "must be in (0, 1], got 2.0"),
        rpc_errors.NotFound("no lease l"),
        rpc_errors.AlreadyExists("request r"),
        rpc_errors.FailedPrecondition("other layout"),
        rpc_errors.NoCapacity("no blocks", retry_after_s=2.5),
        rpc_errors.Unavailable("gone"),
        rpc_errors.DeadlineExceeded("late"),
        rpc_errors.Cancelled("client"),
    ],
)
async def test_errors_survive_the_wire(error: rpc_errors.BatonError, stream: bool) -> None:
    received = await _over_the_wire(error, stream=stream)
    assert type(received) is type(error)
    assert str(received) == str(error)
    assert received.retry_after_s == error.retry_after_s
    assert getattr(received, "field", None) == getattr(error, "field", None)
    code, _ = rpc.status_of(error)
    again = rpc.error_of_code(rpc.code_number(code), str(error), error.retry_after_s)
    assert (type(again), str(again)) == (type(error), str(error))


async def test_the_unexpected_is_internal_and_does_not_leak() -> None:
    received = await _over_the_wire(KeyError("a secret of ours"), stream=False)
    assert type(received) is rpc_errors.Internal
    assert "secret" not in str(received)


async def test_a_taken_port_is_one_clear_error() -> None:
    server, address = await grpc_server.listen("127.0.0.1:0", [])
    try:
        with pytest.raises(rpc_errors.Unavailable, match=f"cannot listen on {address}"):
            await grpc_server.listen(address, [])
    finally:
        await server.stop(0)
    await asyncio.sleep(0)


async def test_a_unix_socket_is_its_users_alone_and_replaces_what_a_killed_server_left(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.sock"
    with socket.socket(socket.AF_UNIX) as killed:  # its file stays
        killed.bind(str(path))
    server, address = await grpc_server.listen(
        f"unix:{path}", [lambda s: kvstore_pb2_grpc.add_KvStoreServicer_to_server(_Echo(), s)]
    )
    try:
        assert address == f"unix:{path}" and stat.S_IMODE(path.stat().st_mode) == 0o600
        async with rpc.channel(address) as channel:
            stub = kvstore_pb2_grpc.KvStoreStub(channel)
            reply = await stub.GetStatus(kvstore_pb2.GetStatusRequest(), timeout=30)
        assert reply.node_id == "here"
    finally:
        await server.stop(0)
    nowhere = f"unix:{tmp_path}/none/a.sock"
    with pytest.raises(rpc_errors.Unavailable, match=f"cannot listen on {nowhere}"):
        await grpc_server.listen(nowhere, [])


# -- messages that were spoiled on their way

_NO_MESSAGE = b"\x0a\x05ab"  # says five bytes, has two


@pytest.mark.parametrize("method", ["GetStatus", "Write", "Read"])
async def test_a_request_that_cannot_be_read_is_refused_and_ends_nothing(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    raises = _Raises(rpc_errors.NotFound("read all the same"))
    server, address = await grpc_server.listen(
        "127.0.0.1:0",
        [lambda s: kvstore_pb2_grpc.add_KvStoreServicer_to_server(raises, s)],
    )
    try:
        async with rpc.channel(address) as channel:
            stub = kvstore_pb2_grpc.KvStoreStub(channel)
            writing = stub.Write(timeout=30)
            await writing.write(kvstore_pb2.WriteChunk(data=b"1234"))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await _send_raw(channel, method, _NO_MESSAGE)
            ours = rpc.error_from_rpc(caught.value)
            assert isinstance(ours, rpc_errors.InvalidArgument) and ours.field == "request"
            await writing.write(kvstore_pb2.WriteChunk(data=b"56"))
            await writing.done_writing()
            assert (await writing).num_bytes == 6
    finally:
        await server.stop(0)
    assert not caplog.records


async def _send_raw(channel: grpc.aio.Channel, method: str, data: bytes) -> None:
    path = f"/baton.v1.KvStore/{method}"
    if method == "Write":
        call = channel.stream_unary(path)(timeout=30)
        await call.write(data)
        await call.done_writing()
        await call
    elif method == "Read":
        async for _ in channel.unary_stream(path)(data, timeout=30):
            raise AssertionError("it was answered")
    else:
        await channel.unary_unary(path)(data, timeout=30)


def _failed(details: bytes) -> grpc.aio.AioRpcError:
    trailing = grpc.aio.Metadata(("grpc-status-details-bin", details))
    return grpc.aio.AioRpcError(
        grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), trailing, details="gone"
    )


def _packed(type_name: str, value: bytes) -> bytes:
    detail = any_pb2.Any(type_url=f"type.googleapis.com/google.rpc.{type_name}", value=value)
    return status_pb2.Status(code=14, message="gone", details=[detail]).SerializeToString()


@pytest.mark.parametrize(
    "details",
    [
        _NO_MESSAGE,
        b"\x12\x01\xff",
        _packed("RetryInfo", _NO_MESSAGE),
        _packed("BadRequest", _NO_MESSAGE),
        *(
            _packed(
                "RetryInfo",
                error_details_pb2.RetryInfo(
                    retry_delay=duration_pb2.Duration(seconds=seconds, nanos=nanos)
                ).SerializeToString(),
            )
            for seconds, nanos in [(-1, 0), (0, -5), (10**9, 0), (2**62, 0)]
        ),
    ],
    ids=str,
)
def test_details_that_cannot_be_are_none(details: bytes) -> None:
    """The status itself still says what is wrong."""
    ours = rpc.error_from_rpc(_failed(details))
    assert type(ours) is rpc_errors.Unavailable and str(ours) == "gone"
    assert ours.retry_after_s == rpc_errors.Unavailable.retry_after_s


async def test_headers_are_bounded_and_the_next_call_is_served() -> None:
    server, address = await grpc_server.listen(
        "127.0.0.1:0",
        [lambda server: kvstore_pb2_grpc.add_KvStoreServicer_to_server(_Echo(), server)],
    )
    try:
        async with grpc.aio.insecure_channel(address) as channel:  # a client without our bounds
            stub = kvstore_pb2_grpc.KvStoreStub(channel)
            long = (("x-long", "a" * (rpc.MAX_METADATA_BYTES + 1)),)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.GetStatus(kvstore_pb2.GetStatusRequest(), timeout=10, metadata=long)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            fits = (("x-long", "a" * (rpc.MAX_METADATA_BYTES // 2)),)
            assert await stub.GetStatus(kvstore_pb2.GetStatusRequest(), timeout=10, metadata=fits)
    finally:
        await server.stop(0)


async def test_a_cancel_during_the_first_message_still_tells_its_client() -> None:
    """Or it would wait until its deadline for a status that gRPC could not send."""
    server, address = await grpc_server.listen(
        "127.0.0.1:0",
        [lambda s: kvstore_pb2_grpc.add_KvStoreServicer_to_server(_Superseded(), s)],
    )
    try:
        async with rpc.channel(address) as channel:
            call = kvstore_pb2_grpc.KvStoreStub(channel).Read(kvstore_pb2.ReadRequest(), timeout=20)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                while await call.read() is not grpc.aio.EOF:
                    pass
            assert caught.value.code() is grpc.StatusCode.CANCELLED
            assert "another attempt" in str(caught.value.details())
    finally:
        await server.stop(0)
