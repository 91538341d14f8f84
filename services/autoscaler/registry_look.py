"""One look at the registry in Redis: what workers and routers say of themselves, and how old that
is.

The age of an entry is read off its beat, by Redis' own clock: nobody else's counts. An entry
without a beat, or with another life's, is left out; one that cannot be read is a problem that is
told. Knows no plan. One asyncio loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import redis.asyncio
from google.protobuf import json_format

from process import registry
from process.errors import Unavailable
from protos import common_pb2, router_status_pb2


class _Entry(Protocol):
    """What both kinds of entries have."""

    incarnation: str


_SLICE = 16
"""Entries parsed at a time: about 2 ms."""

Status = TypeVar("Status", bound=_Entry)


@dataclass(frozen=True)
class Beaten(Generic[Status]):
    """One live entry."""

    entry_id: str
    status: Status
    age_s: float


@dataclass(frozen=True)
class RegistryLook:
    """All of them."""

    workers: tuple[Beaten[common_pb2.WorkerStatus], ...] = ()
    routers: tuple[Beaten[router_status_pb2.RouterStatus], ...] = ()
    problems: tuple[str, ...] = ()


async def look(
    client: redis.asyncio.Redis,
    timeout_s: float,
    *,
    beat_ttl_ms: int = registry.BEAT_TTL_MS,
) -> RegistryLook:
    """beat_ttl_ms: how long a beat lasts. Raises: Unavailable when Redis does not answer."""
    problems: list[str] = []
    try:
        async with asyncio.timeout(timeout_s):
            workers = await _read(client, "worker", common_pb2.WorkerStatus, problems, beat_ttl_ms)
            routers = await _read(
                client, "router", router_status_pb2.RouterStatus, problems, beat_ttl_ms
            )
    except registry.REDIS_FAILURES as error:
        raise Unavailable(f"Redis does not answer: {error or type(error).__name__}") from error
    return RegistryLook(workers, routers, tuple(problems))


async def _read(
    client: redis.asyncio.Redis,
    kind: str,
    make: Callable[[], Any],
    problems: list[str],
    beat_ttl_ms: int,
) -> tuple[Beaten[Any], ...]:
    entries: Any = await client.hgetall(registry.entries_key(kind))
    ids = sorted(entries)
    async with client.pipeline(transaction=False) as pipe:
        for entry_id in ids:
            key = registry.beat_key(kind, entry_id.decode(errors="replace"))
            pipe.get(key)
            pipe.pttl(key)
        beats = await pipe.execute() if ids else []
    found = []
    for index, entry_id in enumerate(ids):
        if index % _SLICE == _SLICE - 1:
            await asyncio.sleep(0)  # others ask this process things, too
        beat, left_ms = beats[2 * index], beats[2 * index + 1]
        if beat is None or left_ms <= 0:
            continue
        try:
            status = json_format.Parse(
                entries[entry_id].decode(), make(), ignore_unknown_fields=True
            )
        except (json_format.ParseError, UnicodeDecodeError) as error:
            problems.append(f"the entry of {kind} {entry_id!r} cannot be read: {error}")
            continue
        if status.incarnation.encode() == beat:
            name = entry_id.decode(errors="replace")
            found.append(Beaten(name, status, registry.beat_age_s(left_ms, beat_ttl_ms)))
    return tuple(found)
