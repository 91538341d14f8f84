"""Requests that are no requests: whoever sends them loses the call, and nobody else anything."""

from __future__ import annotations

import asyncio
import random
import struct
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from grpc._cython import cygrpc
from grpc.aio import _server
from packaging.requirements import Requirement

from baton import development_certificates
from process import grpc_server, rpc
from process.authorization import RULES, PeerRole
from process.tls import TlsIdentity
from protos import kvstore_pb2, kvstore_pb2_grpc

CALL_S = 10.0
ROOT = Path(__file__).resolve().parents[3]


class _Store(kvstore_pb2_grpc.KvStoreServicer):
    @rpc.unary
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
    async with rpc.channel(address) as channel:
        stub = kvstore_pb2_grpc.KvStoreStub(channel)
        reply = await stub.GetStatus(kvstore_pb2.GetStatusRequest(), timeout=CALL_S)
        return str(reply.node_id)


async def test_no_path_ends_the_server(seed: int) -> None:
    rng = random.Random(seed)
    paths = [b"/baton.v1.KvStore/\xff\xfe", b"/\xef", b"/", b"//", b"/a/b", bytes(range(128, 160))]
    paths += [b"/" + rng.randbytes(rng.randint(1, 60)) for _ in range(30)]

    def add(server: grpc.aio.Server) -> None:
        kvstore_pb2_grpc.add_KvStoreServicer_to_server(_Store(), server)

    server, address = await grpc_server.listen("127.0.0.1:0", [add])
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


@pytest.mark.parametrize("is_tls", [False, True])
async def test_an_unknown_method_is_unimplemented(is_tls: bool, tmp_path: Path) -> None:
    """Whatever the role; a method that exists is refused to a wrong role."""
    made = development_certificates.write(tmp_path) if is_tls else None
    identity = TlsIdentity(made.tls_of(PeerRole.KVSTORE)) if made is not None else None
    dial = rpc.Dialer(TlsIdentity(made.tls_of(PeerRole.DRAFT)) if made is not None else None)
    server, address = await grpc_server.listen(
        "127.0.0.1:0",
        [lambda server: kvstore_pb2_grpc.add_KvStoreServicer_to_server(_Store(), server)],
        identity=identity,
        rules=RULES[PeerRole.KVSTORE],
    )

    async def code(path: str, metadata: tuple[tuple[str, bytes], ...] = ()) -> str:
        try:
            method: Any = channel.unary_unary(path)
            await method(b"", timeout=CALL_S, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            return error.code().name
        return "OK"

    try:
        async with dial(address, PeerRole.KVSTORE) as channel:
            for path in ("/baton.v1.KvStore/Nothing", "/nothing/at/all", "/baton.v1.Decode/Stream"):
                assert await code(path) == "UNIMPLEMENTED"
            assert await code("/a/b", (("x-bin", b"\xff\xfe"),)) == "UNIMPLEMENTED"
            calls = [code("/a/b") for _ in range(2 * grpc_server._MAX_REFUSALS)]
            assert set(await asyncio.gather(*calls)) <= {"UNIMPLEMENTED", "CANCELLED"}
            assert await code("/a/b") == "UNIMPLEMENTED"
            served = await code("/baton.v1.KvStore/GetStatus")
            assert served == ("PERMISSION_DENIED" if is_tls else "OK")
    finally:
        await server.stop(0)


def test_the_private_parts_of_grpc_that_are_used_are_those_of_a_bounded_version() -> None:
    """A new minor version of grpcio: read `grpc/_cython/_cygrpc/aio/server.pyx.pxi` and
    `grpc/aio/_server.py` again, whether these mean what they did, and move the bound."""
    for owner, names in {
        cygrpc: ("AioServer", "ExecuteBatchError", "get_working_loop", "_MethodResolver"),
        cygrpc.AioServer: ("_request_call", "_request_registered_call"),
        _server.Server: ("add_registered_method_handlers",),
    }.items():
        assert [name for name in names if not hasattr(owner, name)] == []
    took = cygrpc._handle_rpc.__code__.co_varnames[: cygrpc._handle_rpc.__code__.co_argcount]
    assert took == (
        "method_name",
        "method_resolver",
        "interceptors",
        "rpc_state",
        "loop",
        "concurrency_exceeded",
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = [Requirement(each) for each in project["dependencies"]]
    (grpcio,) = [each for each in needed if each.name == "grpcio"]
    assert version("grpcio") in grpcio.specifier
    major, minor = version("grpcio").split(".")[:2]
    assert f"{major}.{int(minor) + 1}.0" not in grpcio.specifier
