"""How every part of Baton speaks to Redis: in the clear on this machine, over TLS elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.exceptions import RedisError

from process import secret_files
from process.secret_files import WatchedFile
from process.settings import SettingsError

FAILURES = (RedisError, OSError, TimeoutError)
"""What a call raises when Redis is away, slow or says no."""

_MAX_PASSWORD_BYTES = 4096


@dataclass(frozen=True)
class RedisAccess:
    """TLS and password of Redis. `rediss://` in the URL asks for TLS."""

    ca_file: str = ""
    """Certificates (PEM) that Redis's is signed by; empty: those that the machine trusts."""

    cert_file: str = ""
    """This process's certificate, for a Redis that asks for one."""

    key_file: str = ""
    """Its private key."""

    user: str = ""
    """Redis ACL user; empty: the default one."""

    password_file: str = ""
    """File with the password, read again when it changes; only its owner may be able to read it.
    Better than a password in the URL, which stands in command lines."""

    def __post_init__(self) -> None:
        if bool(self.cert_file) != bool(self.key_file):
            raise SettingsError("cert_file: goes with key_file; give both or none")
        if self.user and not self.password_file:
            raise SettingsError("user: goes with password_file")


NO_ACCESS = RedisAccess()
"""All that is needed stands in the URL."""


def check(url: str, access: RedisAccess) -> None:
    """Raises: SettingsError where URL and access contradict each other, or say half."""
    scheme, _, rest = url.partition("://")
    if scheme != "rediss" and (access.ca_file or access.cert_file):
        raise SettingsError("redis.ca_file: is for TLS; begin redis_url with rediss://")
    if access.password_file and "@" in rest:
        raise SettingsError("redis.password_file: redis_url names a user or password, too")


def connect(
    url: str, connect_timeout_s: float, access: RedisAccess = NO_ACCESS
) -> redis.asyncio.Redis:
    """A client that retries nothing by itself and bounds connecting only: the caller bounds each
    call with `asyncio.timeout`.

    A `socket_timeout` would bound single writes too, but through `asyncio.wait_for`, which before
    Python 3.12 loses a cancel that meets a finished write: a cancelled request would go on.
    Raises: SettingsError for files that cannot be read.
    """
    check(url, access)
    options: dict[str, Any] = {}
    if url.startswith("rediss://"):
        options |= {"ssl_cert_reqs": "required", "ssl_check_hostname": True}
        files = {
            "ssl_ca_certs": access.ca_file,
            "ssl_certfile": access.cert_file,
            "ssl_keyfile": access.key_file,
        }
        options |= {name: file for name, file in files.items() if file}
    if access.password_file:
        options["credential_provider"] = _FromFile(access.user, Path(access.password_file))
    client: Any = redis.asyncio.from_url(
        url,
        socket_timeout=None,
        socket_connect_timeout=connect_timeout_s,
        retry=Retry(NoBackoff(), 0),
        health_check_interval=0,
        **options,
    )
    if url.startswith("rediss://"):
        client.connection_pool.connection_class = _TlsConnection
    return cast(redis.asyncio.Redis, client)


class _TlsConnection(redis.asyncio.SSLConnection):
    """Closes the socket at once where redis-py gives a connection up without waiting.

    redis-py sends close_notify there and forgets the socket: it stays open for 30 s when the peer
    does not answer, and a command that ends before the answer never closes it.
    """

    async def disconnect(self, nowait: bool = False, *arguments: Any, **options: Any) -> None:
        if nowait and self._writer is not None:
            self._writer.transport.abort()
        await super().disconnect(nowait, *arguments, **options)


class _FromFile(CredentialProvider):
    """Asked at each new connection."""

    def __init__(self, user: str, path: Path) -> None:
        self._user = user

        def read() -> str:
            content = secret_files.read_secret(
                path,
                what="redis.password_file",
                max_bytes=_MAX_PASSWORD_BYTES,
                fix="write the password into it",
            )
            return content.decode(errors="strict").strip()

        self._password = WatchedFile("redis.password_file", [path], read)

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        password = self._password.get()
        return (self._user, password) if self._user else (password,)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        """One `stat` and seldom a read of a small file: not worth a thread."""
        return self.get_credentials()
