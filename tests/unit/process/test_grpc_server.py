"""Requests that are no requests: whoever sends them loses the call, and nobody else anything."""

from __future__ import annotations

import asyncio
import random
import struct
from typing import Any

import grpc.aio
import pytest

from process import serving
from protos import kvstore_pb2, kvstore_pb2_grpc

CALL_S = 10.0


class _Store(kvstore_pb2_grpc.KvStoreServicer):
    @serving.unary
    async def GetStatus(self, request: Any, context: Any) -> kvstore_pb2.GetStatusReply:
        return kvstore_pb2.GetStatusReply(node_id="here")


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    head = struct.pack("!I", len(payload))[1:] + bytes([kind, flags])
    return head + struct.pack("!I", stream) + payload


def _request(path: bytes) -> bytes:
    """An HTTP/2 connection's beginning with one request, its headers uncompressed."""
    fields = {
        b":method": b"POST",
        b":scheme": b"http",
        b":path": path,
        b":authority": b"x",
        b"te": b"trailers",
        b"content-type": b"application/grpc",
    }
    headers = b"".join(
        b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value
        for name, value in fields.items()
    )
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    return preface + _frame(4, 0, 0, b"") + _frame(1, 5, 1, headers)


async def _answers(address: str) -> str:
    async with serving.channel(address) as channel:
        stub = kvstore_pb2_grpc.KvStoreStub(channel)
        reply = await stub.GetStatus(kvstore_pb2.GetStatusRequest(), timeout=CALL_S)
        return str(reply.node_id)


async def test_no_path_ends_the_server(seed: int) -> None:
    rng = random.Random(seed)
    paths = [b"/baton.v1.KvStore/\xff\xfe", b"/\xef", b"/", b"//", b"/a/b", bytes(range(128, 160))]
    paths += [b"/" + rng.randbytes(rng.randint(1, 60)) for _ in range(30)]

    def add(server: grpc.aio.Server) -> None:
        kvstore_pb2_grpc.add_KvStoreServicer_to_server(_Store(), server)

    server, address = await serving.listen("127.0.0.1:0", [add])
    host, _, port = address.rpartition(":")
    try:
        for path in paths:
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(_request(path))
            await writer.drain()
            async with asyncio.timeout(CALL_S):
                assert await reader.read(1)  # the server has seen us
            assert await _answers(address) == "here", path
            writer.close()
    finally:
        await server.stop(0)


async def test_an_unknown_method_is_an_error_at_once() -> None:
    server, address = await serving.listen(
        "127.0.0.1:0",
        [lambda server: kvstore_pb2_grpc.add_KvStoreServicer_to_server(_Store(), server)],
    )
    try:
        async with serving.channel(address) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await channel.unary_unary("/baton.v1.KvStore/Nothing")(b"", timeout=CALL_S)
        assert await _answers(address) == "here"
    finally:
        await server.stop(0)
