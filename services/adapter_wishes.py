"""Wishes: which content of each LoRA adapter a cluster should serve. One entry of a HASH in Redis
for each name (`common.proto`: AdapterWish), changed by routers, followed by workers and routers.

How two accounts of one wish are merged, and what follows from one, is decided here. Pure, except
`swap`. A Redis that lost its entries changes nothing: processes go on following the wishes that
they know, and routers write them back. So an unloaded name keeps an entry without `current`, for
`FORGET_S`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, cast

import redis.asyncio
from google.protobuf import json_format

from protos.common_pb2 import AdapterVersion, AdapterWish

KEY = "baton:adapters"

FORGET_S = 7 * 24 * 3600.0
"""How long an unloaded name keeps its entry: by then every worker has read it."""

MAX_NAME_CHARS = 128

Wishes = Mapping[str, AdapterWish]
"""By name; they are not changed."""

_SWAP = """
if (redis.call('HGET', KEYS[1], ARGV[1]) or '') ~= ARGV[2] then
  return 0
end
if ARGV[3] == '' then
  redis.call('HDEL', KEYS[1], ARGV[1])
else
  redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
end
return 1
"""


def name_problem(name: str) -> str:
    """Why no adapter can have this name; empty: one can."""
    if name and len(name) <= MAX_NAME_CHARS and name.isprintable():
        return ""
    return f"a name has 1 to {MAX_NAME_CHARS} printable characters, not {name[:40]!r}"


def to_json(wish: AdapterWish) -> str:
    """As it stands in Redis."""
    return json_format.MessageToJson(wish, indent=None)


def from_json(name: bytes, data: bytes) -> AdapterWish:
    """Raises: ValueError for an entry that cannot be read."""
    try:
        wish = json_format.Parse(data.decode(), AdapterWish(), ignore_unknown_fields=True)
    except (json_format.ParseError, UnicodeDecodeError) as error:
        raise ValueError(f"wish {name!r} of an adapter cannot be read: {error}") from error
    if wish.name.encode() != name:
        raise ValueError(f"wish {name!r} of an adapter names {wish.name!r}")
    return wish


def parse(raw: Mapping[bytes, bytes], problems: list[str]) -> dict[str, AdapterWish]:
    """All entries; one that cannot be read is added to `problems`."""
    wishes = {}
    for name, data in raw.items():
        try:
            wish = from_json(name, data)
        except ValueError as error:
            problems.append(str(error))
            continue
        wishes[wish.name] = wish
    return wishes


def merged(known: Wishes, read: Wishes, now_unix_s: float) -> dict[str, AdapterWish]:
    """What is known after Redis was read: of each name the newer account, of equal ones that which
    was read; no name that was unloaded so long ago that it is forgotten."""
    newest = dict(known)
    for name, wish in read.items():
        if name not in known or known[name].version <= wish.version:
            newest[name] = wish
    return {
        name: wish
        for name, wish in newest.items()
        if name in read or not is_forgotten(wish, now_unix_s)
    }


def is_forgotten(wish: AdapterWish, now_unix_s: float) -> bool:
    """Whether the entry says nothing that anybody must know."""
    is_over = not wish.HasField("current") and not wish.old
    return is_over and now_unix_s - wish.changed_unix_ms / 1000 > FORGET_S


def digest_of(wish: AdapterWish | None) -> str:
    """What new requests get; empty: nothing is wished."""
    return wish.current.digest if wish is not None and wish.HasField("current") else ""


def versions(wish: AdapterWish) -> list[AdapterVersion]:
    """The contents that workers keep, the one for new requests first."""
    current = [wish.current] if wish.HasField("current") else []
    return [*current, *wish.old]


def changed(
    before: AdapterWish | None,
    *,
    name: str,
    model: str,
    current: AdapterVersion | None,
    loaded: Collection[str],
    now_unix_s: float,
) -> AdapterWish:
    """The wish after `before` (None: there was none) that gives new requests `current` (None:
    nothing).

    Args: loaded: digests that workers have of the name, which requests may use.
    """
    known = {version.digest: version for version in (versions(before) if before else [])}
    for digest in loaded:
        known.setdefault(digest, AdapterVersion(digest=digest))
    if current is not None:
        known.pop(current.digest, None)
    wish = AdapterWish(
        name=name,
        model=model,
        version=(before.version if before else 0) + 1,
        old=[known[digest] for digest in sorted(known)],
        changed_unix_ms=int(now_unix_s * 1000),
    )
    if current is not None:
        wish.current.CopyFrom(current)
    return wish


def without_old(wish: AdapterWish, used: Iterable[str]) -> AdapterWish:
    """The wish without old contents that are not `used`; `wish` itself where all are."""
    kept = set(used)
    old = [version for version in wish.old if version.digest in kept]
    if len(old) == len(wish.old):
        return wish
    less = AdapterWish()
    less.CopyFrom(wish)
    del less.old[:]
    less.old.extend(old)
    return less


async def swap(client: redis.asyncio.Redis, name: str, before: bytes, after: str) -> bool:
    """Write the entry `after` (empty: none) if the one there is `before` still (empty: none). The
    caller bounds it. Returns: whether it was. Raises: as Redis does."""
    return bool(await cast(Any, client).eval(_SWAP, 1, KEY, name, before, after))
