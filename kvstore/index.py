"""The prefix index in Redis: which stores hold a KV block, by its chain hash, and where the stores
are.

    baton:stores                          HASH node id -> StoreStatus as JSON
    baton:store:{node}:beat               the incarnation (hex), expiring: that start is alive
    baton:index:{node}:{incarnation hex}  HASH 16-byte chain hash -> sequence; `sequence` -> the
    last one
    baton:index-loading:{node}:{incarnation hex}  the same, of a full publication under way

Index entries are hints: a store checks under its own lease. One HASH per (node, incarnation), so
that the index of an earlier start goes by one UNLINK and is never asked; presence is prefix-closed,
so that the longest prefix is found by binary search inside Redis, in one round trip. Hashes travel
as one string: giving Redis a thousand arguments costs more than the search.

This module is the reading side and the keys; `index_publisher` writes. One asyncio loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import redis.asyncio
from google.protobuf import json_format

from process import logs, registry
from process.registry import REDIS_FAILURES
from process.rpc_errors import Unavailable
from protos import inference_pb2

logger = logging.getLogger(__name__)

KIND = "store"
"""The kind of stores' entries in the registry (process/registry.py)."""
STORES_KEY = registry.entries_key(KIND)
SEQUENCE_FIELD = b"sequence"  # 8 bytes: never a chain hash

_LONGEST_PREFIX = """
local found = {}
for _, hashes in ipairs(ARGV) do
  local count = #hashes / 16
  for _, key in ipairs(KEYS) do
    local low, high = 0, count
    while low < high do
      local middle = math.floor((low + high + 1) / 2)
      local hash = string.sub(hashes, (middle - 1) * 16 + 1, middle * 16)
      if redis.call('HEXISTS', key, hash) == 1 then low = middle else high = middle - 1 end
    end
    found[#found + 1] = low
  end
end
return found
"""


def index_key(node_id: str, incarnation: str) -> str:
    """The Redis key of the index of one start of a store. incarnation: hex."""
    return f"baton:index:{node_id}:{incarnation}"


def loading_key(node_id: str, incarnation: str) -> str:
    """The Redis key under which a full publication is loaded; not one of the keys that `index_key`
    can make."""
    return f"baton:index-loading:{node_id}:{incarnation}"


def beat_key(node_id: str) -> str:
    """The Redis key that exists while the store sends heartbeats; it holds the incarnation."""
    return registry.beat_key(KIND, node_id)


class PrefixIndex:
    """Reads the prefix index and the stores' registry entries from Redis; for routers."""

    def __init__(self, client: redis.asyncio.Redis, timeout_s: float) -> None:
        """Args: client: a connection whose owner closes it. timeout_s: bounds each call as a
        whole."""
        self._client = client
        self._timeout_s = timeout_s
        self._script = client.register_script(_LONGEST_PREFIX)

    async def prepare(self) -> None:
        """Connect to Redis and load the script of a lookup, which saves the first lookup four round
        trips. Optional: where Redis is away, each lookup says so.

        Raises: Unavailable when Redis does not answer in time.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._client.script_load(_LONGEST_PREFIX)
        except REDIS_FAILURES as error:
            raise Unavailable(f"prefix index: {_describe(error)}") from error

    async def lookup(
        self, chain_hashes: Sequence[bytes], nodes: Mapping[str, str]
    ) -> dict[str, int]:
        """Look up how many blocks of a prompt each store holds, from the first block on, by the
        index.

        Args: chain_hashes: of one prompt, in order. nodes: node id -> incarnation (hex).
        Returns: node id -> number of blocks, 0 for a store that has none or is not known.
        Raises: Unavailable when Redis does not answer in time.
        """
        (found,) = await self.lookup_all([chain_hashes], nodes)
        return found

    async def lookup_all(
        self, chains: Sequence[Sequence[bytes]], nodes: Mapping[str, str]
    ) -> list[dict[str, int]]:
        """Look up how many blocks of each of several chains (one prompt in several layouts) each
        store holds, in one round trip, whatever their lengths and however many stores there are.

        Returns: for each chain, node id -> number of blocks.
        Raises: Unavailable when Redis does not answer in time.
        """
        if not any(chains) or not nodes:
            return [dict.fromkeys(nodes, 0) for _ in chains]
        keys = [index_key(node_id, incarnation) for node_id, incarnation in nodes.items()]
        joined = [b"".join(chain) for chain in chains]
        try:
            async with asyncio.timeout(self._timeout_s):
                lengths: Any = await self._script(keys=keys, args=joined)
        except REDIS_FAILURES as error:
            raise Unavailable(f"prefix index: {_describe(error)}") from error
        found = iter(lengths)
        return [{node_id: int(next(found)) for node_id in nodes} for _ in chains]

    async def stores(self) -> list[inference_pb2.StoreStatus]:
        """The stores in the registry; `reachable` says whether that very start of the store has a
        fresh heartbeat. A row that cannot be read is passed over, and the log says so.

        Raises: Unavailable.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                rows: Any = await self._client.hgetall(STORES_KEY)
                if not rows:
                    return []
                beats = await self._client.mget([beat_key(_text(node)) for node in rows])
        except REDIS_FAILURES as error:
            raise Unavailable(f"registry: {_describe(error)}") from error
        stores: list[inference_pb2.StoreStatus] = []
        for (node, row), beat in zip(rows.items(), beats, strict=True):
            try:
                status = json_format.Parse(
                    row, inference_pb2.StoreStatus(), ignore_unknown_fields=True
                )
            except (json_format.ParseError, UnicodeDecodeError) as error:
                logs.event(
                    logger,
                    "registry_row_unreadable",
                    level=logging.WARNING,
                    node_id=_text(node),
                    error=str(error),
                )
                continue
            status.reachable = beat is not None and _text(beat) == status.incarnation
            stores.append(status)
        return stores


def _text(answer: bytes | str) -> str:
    return answer.decode(errors="replace") if isinstance(answer, bytes) else answer


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
