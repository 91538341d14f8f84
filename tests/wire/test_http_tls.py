"""The HTTP port over TLS: the role in a client's certificate decides, on every path; connections
count before their handshake, which is bounded, over gRPC, too."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from pathlib import Path

import aiohttp
import pytest
import uvloop
from aiohttp import web

from baton.cert_set import CertSet
from baton.certs import write
from process import serving
from process.access import Role
from process.serving import Strangers
from process.tls import Identity, TlsSettings
from services.router.http_server import HttpServer
from tests.harness.redis_server import RedisServer
from tests.harness.router_bench import HttpBench, fake_model, settings_for
from tests.harness.waiting import until


def context_of(settings: TlsSettings) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=settings.ca_file)
    if settings.cert_file:
        context.load_cert_chain(settings.cert_file, settings.key_file)
    return context


async def test_a_wrong_role_is_refused_on_every_path(tmp_path: Path) -> None:
    certs = write(tmp_path / "tls")
    redis = RedisServer()
    await redis.start()
    bench = HttpBench(redis, fake_model())
    try:
        client_tls = certs.tls_of(Role.ROUTER)
        assert client_tls.ca_file, "clients are asked for a certificate"
        settings = settings_for(redis, http_listen="127.0.0.1:0", client_tls=client_tls)
        await bench.start_router(settings)
        url = f"https://{bench.router.http_address}"
        async with aiohttp.ClientSession() as session:

            async def status(method: str, path: str, tls: ssl.SSLContext) -> int:
                async with session.request(method, url + path, ssl=tls) as answer:
                    return answer.status

            right = context_of(certs.tls_of(Role.CLIENT))
            assert await status("GET", "/health", right) == 200
            assert await status("GET", "/v1/models", right) == 200
            wrong = context_of(certs.tls_of(Role.DECODE))
            paths = {
                (route.method, route.resource.canonical)
                for route in bench.router._http.routes
                if route.resource is not None
            }
            assert len(paths) > 8
            certs_of_flips = write(tmp_path / "tls", flips=True)  # by the same CA
            flips = context_of(certs_of_flips.tls_of(Role.DECODE))
            for method, path in sorted(paths):
                for context in (wrong, flips):
                    found = await status(method, path.replace("{model}", "fake"), context)
                    assert found == 403, (method, path)
            nobody = ssl.create_default_context(cafile=client_tls.ca_file)
            with pytest.raises((aiohttp.ClientError, ssl.SSLError)):
                await status("GET", "/health", nobody)
        await asyncio.sleep(0)  # the closed connections' transports end
    finally:
        await bench.channel.close()
        await bench.router.stop()
        redis.remove()


def _server(certs: CertSet, **options: float) -> tuple[HttpServer, ssl.SSLContext]:
    """For three connections; it answers GET /."""

    async def answer(request: web.Request) -> web.Response:
        return web.Response()

    add = [lambda app: app.router.add_get("/", answer) and None]
    server = HttpServer(add, max_body_bytes=1024, drain_s=0.2, max_connections=3, **options)
    tls = TlsSettings(
        cert_file=str(certs.cert_file(Role.ROUTER)), key_file=str(certs.key_file(Role.ROUTER))
    )
    return server, Identity(tls).http_context()


def test_connections_count_before_their_handshake(tmp_path: Path) -> None:
    """Ten clients connect and never begin it. On the loop that routers run on."""
    certs = write(tmp_path / "tls")
    trusting = ssl.create_default_context(cafile=str(certs.ca_file))

    async def run() -> None:
        server, context = _server(certs, handshake_s=600.0)
        await server.start("127.0.0.1:0", context)
        try:
            host, _, port = server.address.rpartition(":")
            silent = [await asyncio.open_connection(host, int(port)) for _ in range(10)]
            for reader, _ in silent[3:]:
                with contextlib.suppress(ConnectionResetError):
                    assert await reader.read() == b""
            connections = server.connections
            assert connections is not None
            assert (connections.num_open, connections.num_refused) == (3, 7)
            for _, writer in silent:
                writer.close()
            await until(lambda: not connections.num_open)
            async with (
                aiohttp.ClientSession() as session,
                session.get(f"https://{server.address}/", ssl=trusting) as answer,
            ):
                assert answer.status == 200 and connections.num_open == 1
        finally:
            await server.stop()

    uvloop.run(run())


def test_a_handshake_that_does_not_end_is_ended(tmp_path: Path) -> None:
    async def run() -> None:
        server, context = _server(write(tmp_path / "tls"), handshake_s=0.1)
        await server.start("127.0.0.1:0", context)
        try:
            host, _, port = server.address.rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            assert await reader.read() == b""
            writer.close()
        finally:
            await server.stop()

    uvloop.run(run())


async def test_a_handshake_of_grpc_that_does_not_end_is_ended(tmp_path: Path) -> None:
    server, address = await serving.listen(
        "127.0.0.1:0",
        [],
        identity=Identity(write(tmp_path / "tls").tls_of(Role.ROUTER)),
        strangers=Strangers(handshake_s=0.1),
    )
    try:
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        assert await reader.read() == b""
        writer.close()
    finally:
        await server.stop(0)
