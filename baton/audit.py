"""Whether the prefix index tells the truth: each store is asked what it holds, Redis what the index
says, and the two are compared.

Both change while one looks. So a store is looked at twice, and between the looks it must once have
said that Redis had been told everything: what differs in both looks the same way was not on its
way, it has drifted. What differs in one look only was in flight. A store that does not get that far
in time is unsettled: all its differences may still be on their way, and none is held against it.

Knows Redis' keys and the `KvStore` service; asks, and changes nothing. One asyncio loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc.aio
import redis.asyncio

from baton.errors import BatonError, Unavailable
from kvstore import index
from kvstore.block_hash import CHAIN_HASH_BYTES
from process import registry, rpc
from process.access import PeerRole
from process.deadline import Deadline
from process.registry import RedisAccess
from process.rpc import Dialer
from protos import inference_pb2, kvstore_pb2, kvstore_pb2_grpc

REDIS_TIMEOUT_S = 5.0
STATUS_TIMEOUT_S = 2.0
_SCAN_COUNT = 4096
"""Fields per answer of Redis: about 1 ms of its time."""
_POLL_S = 0.05


@dataclass(frozen=True)
class Look:
    """One store at one moment. present: what it holds; indexed: what the index says that it holds.
    Sequences: of the last change that the store sent, and that Redis has (0: no index there)."""

    present: frozenset[bytes]
    indexed: frozenset[bytes]
    store_sequence: int
    index_sequence: int


@dataclass(frozen=True)
class StoreAudit:
    """What came of one store. Counts are chain hashes."""

    node_id: str
    address: str
    incarnation: str
    """Hex."""
    num_present: int = 0
    num_indexed: int = 0
    num_right: int = 0
    """Present and indexed, by the second look."""
    num_missing: int = 0
    """Drifted: present, not indexed. A hit that nobody finds."""
    num_false: int = 0
    """Drifted: indexed, not present. A hit that fails when it is asked for."""
    num_in_flight: int = 0
    """Differed in one look only, or in both of an unsettled store."""
    sequence_lag: int = 0
    """Changes (batches of them) that Redis was behind at the first look."""
    staleness_s: float | None = 0.0
    """How long it then took until Redis had everything; None: longer than was waited."""
    num_dead_lives: int = 0
    """Indexes of earlier lives that Redis still holds; nobody asks them, and they expire."""
    is_void: bool = False
    """The store has no heartbeat: nobody asks its index, so there is nothing to compare."""
    problem: str = ""
    """Why there are no counts; empty: there are."""

    @property
    def precision(self) -> float:
        """Share of the index that is true; 1 of an empty one."""
        return self.num_right / self.num_indexed if self.num_indexed else 1.0

    @property
    def recall(self) -> float:
        """Share of the truth that is in the index; 1 of an empty store."""
        return self.num_right / self.num_present if self.num_present else 1.0

    @property
    def is_settled(self) -> bool:
        return not self.problem and self.staleness_s is not None

    @property
    def has_drifted(self) -> bool:
        return bool(self.num_missing or self.num_false)


def compare(
    store: inference_pb2.StoreStatus,
    first: Look,
    second: Look,
    *,
    staleness_s: float | None,
    num_dead_lives: int = 0,
) -> StoreAudit:
    """Judge two looks at one store. Pure.

    Args: staleness_s: from the first look until the store had told Redis everything; None: that did
        not come before the second look, so no difference can be held against it.
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
        num_dead_lives=num_dead_lives,
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

    Args: settle_s: longest wait for one store's index to catch up. timeout_s: bounds reading one
        store and its index once.
    Raises: Unavailable when Redis does not answer.
    """
    client = registry.connect_redis(redis_url, REDIS_TIMEOUT_S, access)
    try:
        stores = await index.PrefixIndex(client, REDIS_TIMEOUT_S).stores()
        ordered = sorted(stores, key=lambda store: store.node_id)
        return [await _audit_store(client, dial, store, settle_s, timeout_s) for store in ordered]
    finally:
        await client.aclose()


async def _audit_store(
    client: redis.asyncio.Redis,
    dial: Dialer,
    store: inference_pb2.StoreStatus,
    settle_s: float,
    timeout_s: float,
) -> StoreAudit:
    if not store.reachable:
        return _not_looked_at(store, "no heartbeat: its index is void", is_void=True)
    async with dial(store.address, PeerRole.KVSTORE) as channel:
        looking = _Looking(client, kvstore_pb2_grpc.KvStoreStub(channel), store, timeout_s)
        try:
            first = await looking.look()
            staleness_s = await looking.wait_told(settle_s)
            second = await looking.look()
            num_dead_lives = await looking.count_dead_lives()
        except BatonError as error:
            return _not_looked_at(store, str(error))
    return compare(store, first, second, staleness_s=staleness_s, num_dead_lives=num_dead_lives)


def _not_looked_at(
    store: inference_pb2.StoreStatus, why: str, *, is_void: bool = False
) -> StoreAudit:
    return StoreAudit(store.node_id, store.address, store.incarnation, is_void=is_void, problem=why)


class _Looking:
    """Asks one life of one store, and its index."""

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

    async def look(self) -> Look:
        """Raises: Unavailable when the store or Redis does not answer, or another life does."""
        deadline = Deadline.after(self._timeout_s)
        sequence, present = await self._list(deadline)
        async with deadline.timeout(f"reading the index of {self._store.node_id}"):
            indexed, index_sequence = await self._read_index()
        return Look(present, indexed, sequence, index_sequence)

    async def wait_told(self, settle_s: float) -> float | None:
        """Wait until the store has once told Redis everything, and Redis has it.

        Returns: how long that took; None: `settle_s` did not suffice.
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

    async def count_dead_lives(self) -> int:
        """Indexes of this node under other incarnations."""
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
        self._check_life(status.incarnation)
        return status

    async def _list(self, deadline: Deadline) -> tuple[int, frozenset[bytes]]:
        present: set[bytes] = set()
        sequence = 0
        try:
            replies = self._stub.List(kvstore_pb2.ListRequest(), timeout=deadline.left_s())
            async for reply in replies:
                self._check_life(reply.incarnation)
                sequence = reply.index_sequence
                present.update(reply.chain_hashes)
        except grpc.aio.AioRpcError as error:
            raise rpc.error_from_rpc(error) from error
        return sequence, frozenset(present)

    async def _read_index(self) -> tuple[frozenset[bytes], int]:
        """What was there during the whole reading is surely in it; see SCAN's guarantees."""
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

    def _check_life(self, incarnation: bytes) -> None:
        if incarnation.hex() != self._store.incarnation:
            raise Unavailable("another life of the store answers; audit again")


def found_fault(audits: Sequence[StoreAudit]) -> bool:
    """Whether some index is wrong, or could not be compared although its store has a heartbeat."""
    return any(one.has_drifted or (one.problem and not one.is_void) for one in audits)
