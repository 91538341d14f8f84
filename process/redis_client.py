"""How every part of Baton speaks to Redis."""

from __future__ import annotations

from typing import Any, cast

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

FAILURES = (RedisError, OSError, TimeoutError)
"""What a call raises when Redis is away, slow or says no."""


def connect(url: str, connect_timeout_s: float) -> redis.asyncio.Redis:
    """A client that retries nothing by itself and bounds connecting only: the caller bounds each
    call with `asyncio.timeout`.

    A `socket_timeout` would bound single writes too, but through `asyncio.wait_for`, which before
    Python 3.12 loses a cancel that meets a finished write: a cancelled request would go on.
    """
    client: Any = redis.asyncio.from_url(
        url,
        socket_timeout=None,
        socket_connect_timeout=connect_timeout_s,
        retry=Retry(NoBackoff(), 0),
        health_check_interval=0,
    )
    return cast(redis.asyncio.Redis, client)
