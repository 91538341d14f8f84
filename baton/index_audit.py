"""Audit of the prefix index: does Redis list exactly the KV blocks that the stores hold? And the
history of blocks, as the stores remember it.

The audit (`audit`) compares the blocks of each store with the index of that store in Redis. Both
change while they are read. So each store is read twice, and between the two readings the store must
once have reported that Redis has all its changes. A difference that is in both readings was not in
flight: the index has drifted. A difference in one reading only was in flight. A store that does not
report so in time is unsettled: any of its differences may be in flight, and none counts as drift.

The history (`block_histories`) is what each store remembers of its blocks.

Reads Redis' registry and index and the `KvStore` service, and changes nothing. One asyncio loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc.aio
import redis.asyncio

from baton.errors import BatonError, Unavailable
from kvstore import index
from kvstore.block_hash import CHAIN_HASH_BYTES
from process import registry, rpc
from process.authorization import PeerRole
from process.deadline import Deadline
from process.registry import RedisAccess
from process.rpc import Dialer
from protos import inference_pb2, kvstore_pb2, kvstore_pb2_grpc

REDIS_TIMEOUT_S = 5.0
STATUS_TIMEOUT_S = 2.0
_SCAN_COUNT = 4096
"""Fields in one reply of Redis, which take it about 1 ms."""
_POLL_S = 0.05


@dataclass(frozen=True)
class Reading:
    """One reading of a store and its index, taken for a comparison."""

    present: frozenset[bytes]
    """Chain hashes that the store holds."""
    indexed: frozenset[bytes]
    """Chain hashes that the index has for the store."""
    store_sequence: int
    """Number of the last change that the store sent."""
    index_sequence: int
    """Number of the last change that Redis has; 0: no index."""


@dataclass(frozen=True)
class StoreAudit:
    """The comparison of one store with its index. Counts are of chain hashes."""

    node_id: str
    address: str
    incarnation: str
    """Incarnation of the store, in hex."""
    num_present: int = 0
    num_indexed: int = 0
    num_right: int = 0
    """Blocks that are present and indexed, in the second reading."""
    num_missing: int = 0
    """Blocks that are present and not indexed (drifted), so no router finds them."""
    num_false: int = 0
    """Blocks that are indexed and not present (drifted), so a worker that asks for them misses."""
    num_in_flight: int = 0
    """Differences in one reading only, or any of an unsettled store."""
    sequence_lag: int = 0
    """Batches of changes that Redis lacked in the first reading."""
    staleness_s: float | None = 0.0
    """Time from the first reading until Redis had all changes that the store had sent by then;
    None: longer than the limit."""
    num_earlier_indexes: int = 0
    """Indexes in Redis of earlier starts of this store. No router reads them, and they expire."""
    is_void: bool = False
    """Whether the store has no heartbeat, so that no router reads its index: there is nothing to
    compare."""
    problem: str = ""
    """Why the store was not compared; empty: it was."""

    @property
    def precision(self) -> float:
        """Share of the index that the store holds; 1.0 of an empty index."""
        return self.num_right / self.num_indexed if self.num_indexed else 1.0

    @property
    def recall(self) -> float:
        """Share of the store's blocks that are in the index; 1.0 of an empty store."""
        return self.num_right / self.num_present if self.num_present else 1.0

    @property
    def is_settled(self) -> bool:
        return not self.problem and self.staleness_s is not None

    @property
    def has_drifted(self) -> bool:
        return bool(self.num_missing or self.num_false)


@dataclass(frozen=True)
class StoreHistory:
    """The history that one store keeps of its blocks."""

    node_id: str
    blocks: Sequence[kvstore_pb2.BlockHistory] = ()
    problem: str = ""
    """Why the store gave no history; empty: it did."""


def compare(
    store: inference_pb2.StoreStatus,
    first: Reading,
    second: Reading,
    *,
    staleness_s: float | None,
    num_earlier_indexes: int = 0,
) -> StoreAudit:
    """Compare two readings of one store. Pure.

    Args: staleness_s: from the first reading until Redis had all changes of the store; None: Redis
        had not before the second reading, so that no difference counts as drift.
    """
    missing = second.present - second.indexed
    false = second.indexed - second.present
    stayed_missing = missing & (first.present - first.indexed)
    stayed_false = false & (first.indexed - first.present)
    is_settled = staleness_s is not None
    num_missing = len(stayed_missing) if is_settled else 0
    num_false = len(stayed_false) if is_settled else 0
    return StoreAudit(
        node_id=store.node_id,
        address=store.address,
        incarnation=store.incarnation,
        num_present=len(second.present),
        num_indexed=len(second.indexed),
        num_right=len(second.present & second.indexed),
        num_missing=num_missing,
        num_false=num_false,
        num_in_flight=len(missing) + len(false) - num_missing - num_false,
        sequence_lag=max(0, first.store_sequence - first.index_sequence),
        staleness_s=staleness_s,
        num_earlier_indexes=num_earlier_indexes,
    )


async def audit(
    redis_url: str,
    *,
    settle_s: float,
    timeout_s: float,
    dial: Dialer = rpc.PLAIN,
    access: RedisAccess = registry.NO_ACCESS,
) -> list[StoreAudit]:
    """Audit every store that is registered in this Redis, one after the other, by node id.

    Args: settle_s: limit of the wait for the index of one store to catch up. timeout_s: limit of
        one reading of a store and its index.
    Raises: Unavailable when Redis does not answer.
    """
    async with _stores(redis_url, access) as (client, stores):
        return [await _audit_store(client, dial, store, settle_s, timeout_s) for store in stores]


async def block_histories(
    redis_url: str,
    prefix: bytes,
    *,
    max_blocks: int,
    timeout_s: float,
    dial: Dialer = rpc.PLAIN,
    access: RedisAccess = registry.NO_ACCESS,
) -> list[StoreHistory]:
    """Ask each registered store for the history of blocks whose chain hash begins with `prefix`.
    Returns: one answer for each store, by node id.

    Args: max_blocks: limit for each store. timeout_s: limit for one store.
    Raises: Unavailable when Redis does not answer.
    """
    request = kvstore_pb2.GetBlockHistoryRequest(chain_hash=prefix, max_blocks=max_blocks)
    async with _stores(redis_url, access) as (_, stores):
        asked = (_store_history(store, request, timeout_s, dial) for store in stores)
        return await asyncio.gather(*asked)


@contextlib.asynccontextmanager
async def _stores(
    redis_url: str, access: RedisAccess
) -> AsyncIterator[tuple[redis.asyncio.Redis, list[inference_pb2.StoreStatus]]]:
    """A connection to this Redis, and the stores that are registered there, by node id."""
    client = registry.connect_redis(redis_url, REDIS_TIMEOUT_S, access)
    try:
        stores = await index.PrefixIndex(client, REDIS_TIMEOUT_S).stores()
        yield client, sorted(stores, key=lambda store: store.node_id)
    finally:
        await client.aclose()


async def _store_history(
    store: inference_pb2.StoreStatus,
    request: kvstore_pb2.GetBlockHistoryRequest,
    timeout_s: float,
    dial: Dialer,
) -> StoreHistory:
    async with dial(store.address, PeerRole.KVSTORE) as channel:
        stub = kvstore_pb2_grpc.KvStoreStub(channel)
        try:
            reply = await stub.GetBlockHistory(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            return StoreHistory(store.node_id, problem=str(rpc.error_from_rpc(error)))
    if not reply.keeps_history:
        return StoreHistory(store.node_id, problem="remembers nothing (max_history_blocks = 0)")
    return StoreHistory(store.node_id, reply.blocks)


async def _audit_store(
    client: redis.asyncio.Redis,
    dial: Dialer,
    store: inference_pb2.StoreStatus,
    settle_s: float,
    timeout_s: float,
) -> StoreAudit:
    if not store.reachable:
        return _not_compared(store, "no heartbeat: its index is void", is_void=True)
    async with dial(store.address, PeerRole.KVSTORE) as channel:
        reader = _StoreReader(client, kvstore_pb2_grpc.KvStoreStub(channel), store, timeout_s)
        try:
            first = await reader.read()
            staleness_s = await reader.wait_synced(settle_s)
            second = await reader.read()
            num_earlier_indexes = await reader.count_earlier_indexes()
        except BatonError as error:
            return _not_compared(store, str(error))
    return compare(
        store, first, second, staleness_s=staleness_s, num_earlier_indexes=num_earlier_indexes
    )


def _not_compared(
    store: inference_pb2.StoreStatus, why: str, *, is_void: bool = False
) -> StoreAudit:
    return StoreAudit(store.node_id, store.address, store.incarnation, is_void=is_void, problem=why)


class _StoreReader:
    """Reads one incarnation of a store, and its index."""

    def __init__(
        self,
        client: redis.asyncio.Redis,
        stub: Any,
        store: inference_pb2.StoreStatus,
        timeout_s: float,
    ) -> None:
        self._client = client
        self._stub = stub
        self._store = store
        self._timeout_s = timeout_s
        self._key = index.index_key(store.node_id, store.incarnation)

    async def read(self) -> Reading:
        """Read a store and its index. Raises: Unavailable when the store or Redis does not answer,
        or the store was restarted."""
        deadline = Deadline.after(self._timeout_s)
        sequence, present = await self._list(deadline)
        async with deadline.timeout(f"reading the index of {self._store.node_id}"):
            indexed, index_sequence = await self._read_index()
        return Reading(present, indexed, sequence, index_sequence)

    async def wait_synced(self, settle_s: float) -> float | None:
        """Wait until the store reports that it has sent all changes, and Redis has them.

        Returns: how long that took; None: longer than `settle_s`.
        """
        deadline = Deadline.after(settle_s)
        began_s = deadline.clock()
        while True:
            status = await self._status()
            stored = await self._bounded(self._client.hget(self._key, index.SEQUENCE_FIELD))
            has_it = stored is not None and int(stored) >= status.index_sequence
            if status.index_synced and has_it:
                return deadline.clock() - began_s
            if deadline.expired:
                return None
            await asyncio.sleep(_POLL_S)

    async def count_earlier_indexes(self) -> int:
        """The number of indexes of this node under other incarnations."""
        keys = [key async for key in self._scan_keys()]
        return sum(1 for key in keys if key != self._key.encode())

    async def _scan_keys(self) -> Any:
        pattern = index.index_key(self._store.node_id, "*")
        cursor = 0
        while True:
            cursor, keys = await self._bounded(
                self._client.scan(cursor, match=pattern, count=_SCAN_COUNT)
            )
            for key in keys:
                yield key
            if cursor == 0:
                return

    async def _status(self) -> kvstore_pb2.GetStatusReply:
        try:
            status: kvstore_pb2.GetStatusReply = await self._stub.GetStatus(
                kvstore_pb2.GetStatusRequest(), timeout=STATUS_TIMEOUT_S
            )
        except grpc.aio.AioRpcError as error:
            raise rpc.error_from_rpc(error) from error
        self._check_incarnation(status.incarnation)
        return status

    async def _list(self, deadline: Deadline) -> tuple[int, frozenset[bytes]]:
        present: set[bytes] = set()
        sequence = 0
        try:
            replies = self._stub.List(kvstore_pb2.ListRequest(), timeout=deadline.left_s())
            async for reply in replies:
                self._check_incarnation(reply.incarnation)
                sequence = reply.index_sequence
                present.update(reply.chain_hashes)
        except grpc.aio.AioRpcError as error:
            raise rpc.error_from_rpc(error) from error
        return sequence, frozenset(present)

    async def _read_index(self) -> tuple[frozenset[bytes], int]:
        """The index; a hash that is in it during the whole reading is in the result, as SCAN
        guarantees."""
        found: set[bytes] = set()
        sequence = 0
        cursor = 0
        while True:
            cursor, fields = await self._bounded(
                self._client.hscan(self._key, cursor, count=_SCAN_COUNT)
            )
            for name, value in fields.items():
                if len(name) == CHAIN_HASH_BYTES:
                    found.add(name)
                elif name == index.SEQUENCE_FIELD:
                    sequence = int(value)
            if cursor == 0:
                return frozenset(found), sequence

    async def _bounded(self, call: Any) -> Any:
        try:
            async with asyncio.timeout(REDIS_TIMEOUT_S):
                return await call
        except registry.REDIS_FAILURES as error:
            raise Unavailable(f"Redis does not answer: {error!r}") from error

    def _check_incarnation(self, incarnation: bytes) -> None:
        if incarnation.hex() != self._store.incarnation:
            raise Unavailable("the store was restarted during the audit; audit again")


def found_fault(audits: Sequence[StoreAudit]) -> bool:
    """Whether an audit found a fault: an index has drifted, or a store that has a heartbeat could
    not be compared."""
    return any(one.has_drifted or (one.problem and not one.is_void) for one in audits)
