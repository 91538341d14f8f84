"""A real Redis for the index's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness.redis_server import RedisServer


@pytest.fixture(scope="module")
def redis_process() -> Iterator[RedisServer]:
    server = RedisServer()
    yield server
    server.remove()


@pytest.fixture
async def redis_server(redis_process: RedisServer) -> RedisServer:
    """Running and empty."""
    redis_process.kill()
    await redis_process.start()
    return redis_process
