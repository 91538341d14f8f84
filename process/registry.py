"""Redis: how each process connects to it, and the registry there, in which each process keeps an
entry with a heartbeat.

An entry is a field of the HASH `baton:<kind>s`, id -> status as JSON. It counts while the key
`baton:<kind>:{id}:beat` holds the incarnation that the entry names; that key expires BEAT_TTL_MS
(of a store: its `heartbeat_ttl_s`) after the last beat, by Redis' own clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import redis.asyncio
from redis.asyncio.client import Pipeline
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.exceptions import RedisError

from process import logs
from process.background_tasks import end_tasks, start_task
from process.secret_files import WatchedFile, read_secret
from process.settings import SettingsError

logger = logging.getLogger(__name__)

REDIS_FAILURES = (RedisError, OSError, TimeoutError)
"""The errors that a call raises when Redis is away, slow or refuses."""

_MAX_PASSWORD_BYTES = 4096

BEAT_TTL_MS = 3000
"""Time for which one heartbeat of a worker or router counts, in milliseconds."""

BEAT_EVERY_S = 0.7
"""Time between two heartbeats of a worker or router."""

REDIS_TIMEOUT_S = 1.0
"""Longest wait for one answer of Redis."""

STARTING_WORKER = "starting-worker"
"""Kind of the registry's entries of workers that still load their model."""


@dataclass(frozen=True)
class RedisAccess:
    """TLS files and password for Redis. `rediss://` in the URL asks for TLS."""

    ca_file: str = ""
    """Certificates (PEM) that Redis's certificate is signed by; empty: those that the machine
    trusts."""

    cert_file: str = ""
    """This process's certificate, for a Redis that asks for one."""

    key_file: str = ""
    """Private key of `cert_file`."""

    user: str = ""
    """User of Redis (ACL); empty: the default one."""

    password_file: str = ""
    """File with the password, read again when it changes; only its owner may be able to read it.
    Better than a password in the URL, which shows in command lines."""

    def __post_init__(self) -> None:
        if bool(self.cert_file) != bool(self.key_file):
            raise SettingsError("cert_file: goes with key_file; give both or none")
        if self.user and not self.password_file:
            raise SettingsError("user: goes with password_file")


NO_ACCESS = RedisAccess()
"""Access to a Redis whose URL says everything that is needed."""


def check_redis(url: str, access: RedisAccess) -> None:
    """Check that a URL and an access do not contradict each other. Raises: SettingsError naming the
    setting."""
    scheme, _, rest = url.partition("://")
    if scheme != "rediss" and (access.ca_file or access.cert_file):
        raise SettingsError("redis.ca_file: is for TLS; begin redis_url with rediss://")
    if access.password_file and "@" in rest:
        raise SettingsError("redis.password_file: redis_url names a user or password, too")


def connect_redis(
    url: str, connect_timeout_s: float, access: RedisAccess = NO_ACCESS
) -> redis.asyncio.Redis:
    """Make a Redis client that retries nothing by itself and bounds connecting only: the caller
    bounds each call with `asyncio.timeout`. A `socket_timeout` would bound single writes too, but
    through `asyncio.wait_for`, which before Python 3.12 loses a cancel that meets a finished write:
    a cancelled request would go on.

    Raises: SettingsError for files that cannot be read.
    """
    check_redis(url, access)
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
        options["credential_provider"] = _PasswordFile(access.user, Path(access.password_file))
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


class _PasswordFile(CredentialProvider):
    """Read at each new connection."""

    def __init__(self, user: str, path: Path) -> None:
        self._user = user

        def read() -> str:
            content = read_secret(
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
        """The credentials, read as `get_credentials` does: one `stat` and seldom a read of a small
        file are not worth a thread."""
        return self.get_credentials()


# Only the process that wrote the beat removes the entry: its successor may have the same id.
_REMOVE = """
if redis.call('GET', KEYS[2]) == ARGV[2] then
  redis.call('HDEL', KEYS[1], ARGV[1])
  redis.call('DEL', KEYS[2])
  return 1
end
return 0
"""


# Removes what killed processes have left. A living one writes its entry again with its next beat.
_REAP = """
local num = 0
for _, id in ipairs(redis.call('HKEYS', KEYS[1])) do
  if redis.call('EXISTS', ARGV[1] .. id .. ARGV[2]) == 0 then
    num = num + redis.call('HDEL', KEYS[1], id)
  end
end
return num
"""


def entries_key(kind: str) -> str:
    """Redis key of the HASH with all entries of a kind, such as worker or router."""
    return f"baton:{kind}s"


def beat_key(kind: str, entry_id: str) -> str:
    """Redis key that exists while the process with this entry sends heartbeats."""
    return f"baton:{kind}:{entry_id}:beat"


def beat_age_s(ttl_left_ms: int, beat_ttl_ms: int = BEAT_TTL_MS) -> float:
    """Seconds since a heartbeat whose key has so many milliseconds left (PTTL)."""
    return max(0.0, (beat_ttl_ms - ttl_left_ms) / 1000)


class RegistryHeartbeat:
    """Writes one process's entry into the registry and sends its heartbeats, until `stop`, which
    removes the entry if it is still this start's. Without Redis the process serves on and tries
    again every beat, so that it is registered well before others, BEAT_TTL_MS after Redis is back,
    take it for gone. One asyncio loop."""

    def __init__(
        self,
        redis_url: str,
        kind: str,
        *,
        entry_id: str,
        incarnation: str,
        entry: Callable[[], str],
        every_s: float = BEAT_EVERY_S,
        ttl_ms: int = BEAT_TTL_MS,
        timeout_s: float = REDIS_TIMEOUT_S,
        access: RedisAccess = NO_ACCESS,
        beside: Callable[[Pipeline], Callable[[list[Any]], None]] | None = None,
    ) -> None:
        """Args: entry: makes the JSON to write at each beat. ttl_ms: how long a beat counts.
        timeout_s: longest wait for Redis. beside: called at each beat: it adds commands of its
        own to the pipeline and returns what takes their answers. None of these functions may
        raise."""
        self._redis = connect_redis(redis_url, timeout_s, access)
        self._kind = kind
        self._entry_id = entry_id
        self._incarnation = incarnation
        self._entry = entry
        self._every_s = every_s
        self._ttl_ms = ttl_ms
        self._timeout_s = timeout_s
        self._beside = beside
        self._task: asyncio.Task[None] | None = None
        self._now = asyncio.Event()
        self.is_registered = False
        self.num_beats = 0
        self.num_failures = 0
        """The number of heartbeats that Redis did not take."""

    def start(self) -> None:
        """Start to send heartbeats, the first one at once."""
        self._task = start_task(self._beat_forever(), "heartbeat")

    def beat_now(self) -> None:
        """Send a heartbeat, with the entry as it is now, without waiting for the next one."""
        self._now.set()

    async def stop(self) -> None:
        """Stop sending heartbeats and remove the entry; bounded by Redis' timeouts."""
        await end_tasks([self._task])
        try:
            remove = self._redis.register_script(_REMOVE)
            async with asyncio.timeout(self._timeout_s):
                await remove(
                    keys=[entries_key(self._kind), beat_key(self._kind, self._entry_id)],
                    args=[self._entry_id, self._incarnation],
                )
        except REDIS_FAILURES as error:
            logs.event(logger, "not_deregistered", level=logging.WARNING, why=str(error))
        await self._redis.connection_pool.disconnect()

    async def _beat_forever(self) -> None:
        while True:
            self._now.clear()
            try:
                async with asyncio.timeout(self._timeout_s):
                    await self._beat()
            except REDIS_FAILURES as error:
                self.num_failures += 1
                if self.is_registered:
                    logs.event(logger, "redis_away", level=logging.WARNING, why=str(error))
                    # Only the connection may be lost: try again at once.
                    self.is_registered = False
                    continue
                # No more often than beats, so that a Redis that is back has no more to do than
                # before; jittered, since all processes lost it at once.
                await asyncio.sleep(self._every_s * random.uniform(0.5, 1.0))
                continue
            if not self.num_beats:
                await self._reap()
            if not self.is_registered:
                logs.event(logger, "registered", kind=self._kind, entry_id=self._entry_id)
            self.is_registered = True
            self.num_beats += 1
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._every_s):
                    await self._now.wait()

    async def _reap(self) -> None:
        """Once in a life: where pods have generated names, no successor takes over the entries of
        killed ones."""
        before, after = beat_key(self._kind, "|").split("|")
        try:
            reap = self._redis.register_script(_REAP)
            async with asyncio.timeout(self._timeout_s):
                num = await reap(keys=[entries_key(self._kind)], args=[before, after])
        except REDIS_FAILURES as error:
            logs.event(logger, "not_reaped", level=logging.WARNING, why=str(error))
            return
        if num:
            logs.event(logger, "reaped", kind=self._kind, num=num)

    async def _beat(self) -> None:
        take: Callable[[list[Any]], None] | None = None
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hset(entries_key(self._kind), self._entry_id, self._entry())
            pipe.set(beat_key(self._kind, self._entry_id), self._incarnation, px=self._ttl_ms)
            if self._beside is not None:
                take = self._beside(pipe)
            _, _, *answers = await pipe.execute()
        if take is not None:
            take(answers)
