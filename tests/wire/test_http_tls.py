"""The HTTP port over TLS with certificates of clients: the role in it decides, on every path."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import aiohttp
import pytest

from baton.certs import write
from process.access import Role
from process.tls import TlsSettings
from tests.unit.router.bench import RedisServer, fake_model, settings_for
from tests.wire.http_bench import HttpBench


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
