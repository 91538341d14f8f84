"""StoreParking: swaps the KV blocks of preempted requests out to the KV store and back; it
implements the engine's Parking (engine/parking.py).

States of a put under a key. The engine's thread asks; one task on the event loop moves the bytes:

    STAGED   the bytes are in staging rows and on their way to the store
    STORED   the bytes are in the store, under a lease that is renewed; no rows
    COMING   asked for: rows are taken, and the bytes are fetched into them and verified
    HERE     the bytes are in rows until the put is dropped (when asked for while STAGED: at once)
    LOST     the bytes do not come back; the reason is counted and logged

Full blocks are stored by their chain hash, so a block that the store already has costs nothing and
other requests may find it; the unfilled last block is stored as a private tail. All of them are
charged to the request's tenant. The engine's thread never waits: without free rows a put is
refused. Blocks that the store cannot take, or does not return within `transfer_budget_s`, are lost:
the engine recomputes and counts them. A lease is renewed until its request continues or ends.

Staging holds the rows of host memory for blocks in transit, their lock, and the event loop whose
tasks move the bytes. The engine's thread takes rows and posts callbacks to the loop. The transports
see only this memory, so the parking has an attachment to the store of its own. StagingRows is the
allocator: a row is free, taken by a put, or quarantined while a transfer may still write into it.

Invariants (`check_integrity`): free + taken + quarantined == all rows; the taken rows are exactly
those of kept puts, and of dropped puts whose transfer is not over; keys as in engine/parking.py.
"""

from __future__ import annotations

import asyncio
import enum
import heapq
import itertools
import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol

import numpy as np

from engine.errors import IntegrityError, ParkingRefused
from engine.kv.layout import KvLayout
from engine.parking import Blocks, Parked
from kvstore.block_refs import Block
from kvstore.client import KvStoreClient, PutResult
from kvstore.errors import (
    DEADLINE,
    LEASE_LAPSED,
    STORE_UNAVAILABLE,
    LeaseLapsed,
    Quarantine,
    TransferCancelled,
    TransferTimeout,
)
from kvstore.transport.base import BlockMemory
from process import logs
from process.background_tasks import end_tasks, start_task
from process.deadline import Deadline
from process.rpc_errors import BatonError, DeadlineExceeded
from process.settings import SettingsError
from services.worker.config import WorkerLimits
from services.worker.store_pool import StoreConnector, reason_of
from services.worker.store_writer import NO_ROOM, RENEWALS_PER_TTL


class StagingRows:
    """Host memory for `num_rows` rows of one block each, committed when first written."""

    def __init__(self, num_rows: int, block_bytes: int) -> None:
        self.memory = BlockMemory.of(np.zeros((num_rows, block_bytes), dtype=np.uint8))
        self._free = list(range(num_rows))  # a heap: low rows first, so neighbours, as pieces
        self._quarantined: set[int] = set()

    @property
    def num_rows(self) -> int:
        return self.memory.num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_quarantined(self) -> int:
        return len(self._quarantined)

    def take(self, num_rows: int) -> tuple[int, ...] | None:
        """Allocate rows; None, and none is allocated, where fewer are free."""
        if num_rows > len(self._free):
            return None
        return tuple(heapq.heappop(self._free) for _ in range(num_rows))

    def give_back(self, rows: Iterable[int]) -> None:
        """Free allocated rows that are no longer read or written."""
        for row in rows:
            heapq.heappush(self._free, row)

    def quarantine(self, rows: Collection[int]) -> None:
        """Quarantine allocated rows that a transfer may still write into, until `settle`."""
        self._quarantined.update(rows)

    def settle(self, rows: Iterable[int]) -> None:
        """Free quarantined rows; their transfer is over."""
        for row in rows:
            self._quarantined.remove(row)
            heapq.heappush(self._free, row)

    def check_integrity(self, taken: Iterable[int]) -> None:
        """Check that `taken` are exactly the rows that are allocated and not quarantined. Raises:
        IntegrityError."""
        rows = sorted([*self._free, *self._quarantined, *taken])
        if rows != list(range(self.num_rows)):
            raise IntegrityError(
                f"parking rows: {len(self._free)} free, {len(self._quarantined)} quarantined and "
                f"the taken ones make {len(rows)}, with some missing or twice, of {self.num_rows}"
            )


class RowHolder(Protocol):
    """Owner of rows; its fields change under the lock."""

    rows: tuple[int, ...]


class Staging:
    """Staging rows shared by the engine's thread and the event loop. Closed until `open`.

    Attributes:
        rows: allocator of the rows; used under `lock`.
    """

    def __init__(self, num_rows: int, row_bytes: int) -> None:
        self.rows = StagingRows(num_rows, row_bytes)
        self.lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def open(self) -> None:
        """Open the staging rows; callbacks run on the calling event loop from here on."""
        self._loop = asyncio.get_running_loop()

    def close(self) -> None:
        """Close the staging rows; callbacks are refused from here on."""
        self._loop = None

    @property
    def is_open(self) -> bool:
        """Return whether staging is open; any thread."""
        return self._loop is not None

    def tell(self, callback: Callable[..., object], *arguments: object) -> bool:
        """Run a callback on the event loop; any thread. Returns: False when staging is closed."""
        loop = self._loop
        if loop is None:
            return False
        try:
            loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError:  # closed
            return False
        return True

    @property
    def num_rows(self) -> dict[str, int]:
        """Return the number of rows by state; any thread."""
        with self.lock:
            free, quarantined = self.rows.num_free, self.rows.num_quarantined
            taken = self.rows.num_rows - free - quarantined
        return {"free": free, "taken": taken, "quarantined": quarantined}

    def give_back(self, holder: RowHolder) -> None:
        """Free the holder's rows, which are neither read nor written any more; called under the
        lock."""
        rows, holder.rows = holder.rows, ()
        self.rows.give_back(rows)

    def quarantine(
        self, holder: RowHolder, quarantine: Quarantine, then: Callable[[], object]
    ) -> None:
        """Quarantine those of the holder's rows that a transfer may still write into, until it is
        over, then run `then` on the loop."""
        held = quarantine.block_ids
        with self.lock:
            self.rows.quarantine(held)
            holder.rows = tuple(row for row in holder.rows if row not in held)

        def settled(_: object) -> None:
            with self.lock:
                self.rows.settle(held)
            then()

        quarantine.settled.add_done_callback(settled)


class Stage(enum.Enum):
    """Stages of parked bytes; services/worker/kv_swap.py describes the transitions."""

    STAGED = "staged"
    STORED = "stored"
    COMING = "coming"
    HERE = "here"
    LOST = "lost"


OVER = frozenset({Stage.HERE, Stage.LOST})


class ParkedPut:
    """Blocks that were put under one key, once. `stage`, `rows` and the two flags change under the
    lock."""

    def __init__(
        self, key: str, chain_hashes: tuple[bytes, ...], rows: tuple[int, ...], tenant: str
    ) -> None:
        self.key = key
        self.tenant = tenant
        self.chain_hashes = chain_hashes
        self.rows = rows
        self.num_blocks = len(rows)
        self.stage = Stage.STAGED
        self.is_dropped = False
        self.is_ended = False
        """Its task is over: nothing moves for it any more."""
        self.wake = asyncio.Event()
        self.lease_id = ""
        self.incarnation = b""
        self.refs: tuple[Block, ...] = ()


class Coming:
    """A put whose bytes are being fetched back: a Parked of engine/parking.py."""

    def __init__(self, put: ParkedPut, memory: BlockMemory) -> None:
        self._put = put
        self._memory = memory

    @property
    def is_done(self) -> bool:
        return self._put.stage in OVER

    def result(self) -> Blocks | None:
        """Return the fetched blocks; None where they are not here, in transit or lost. Their rows
        stay the put's own until it is dropped on the engine's thread."""
        if self._put.stage is not Stage.HERE:
            return None
        return self._memory.view[list(self._put.rows)]


class Unknown:
    """Result of `get` for a key under which nothing was put."""

    is_done = True

    def result(self) -> Blocks | None:
        return None


def refs_of(result: PutResult, put: ParkedPut) -> tuple[Block, ...] | None:
    """Return the store references of all blocks; None where one is missing, or the store holds
    another block in its place."""
    refs = result.refs if result.tail is None else (*result.refs, result.tail)
    hashes = [ref.chain_hash for ref in refs]
    asked = [*put.chain_hashes, b""][: put.num_blocks]
    return tuple(refs) if hashes == asked else None


logger = logging.getLogger(__name__)

STOPPED = "stopped"


class StoreParking:
    """Parking of preempted requests' blocks in the KV store. `put`, `get`, `drop` and
    `check_integrity` are called on the engine's thread, the rest on the event loop's.

    Attributes:
        num_bytes_stored, num_bytes_fetched: moved since start (blocks that were there cost none).
        lost: puts that did not come back although they were wanted, by reason.
    """

    def __init__(
        self,
        layout: KvLayout,
        max_bytes: int,
        limits: WorkerLimits,
        *,
        worker_incarnation: bytes,
        make_connector: Callable[[BlockMemory], StoreConnector],
        renewals_per_ttl: float = RENEWALS_PER_TTL,
    ) -> None:
        """Create a parking with its own store connection.

        Args:
            max_bytes: host memory for blocks in transit, in bytes.
            make_connector: creates the store connector for the given memory.
            renewals_per_ttl: number of renewals of a lease per lease time.
        Raises: SettingsError where `max_bytes` holds no block.
        """
        if max_bytes < layout.block_bytes:
            raise SettingsError(
                f"park_bytes: {max_bytes} hold no block of {layout.block_bytes} bytes; raise it"
            )
        self._block_size = layout.block_size
        self._limits = limits
        self._renewal_s = limits.lease_ttl_s / renewals_per_ttl
        self._name = worker_incarnation.hex()
        self.staging = Staging(max_bytes // layout.block_bytes, layout.block_bytes)
        self._rows = self.staging.rows
        self.connector = make_connector(self._rows.memory)
        self._kept: dict[str, ParkedPut] = {}
        self._leaving: set[ParkedPut] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._has_room = asyncio.Event()
        self._numbers = itertools.count(1)
        self.num_bytes_stored = 0
        self.num_bytes_fetched = 0
        self.lost: Counter[str] = Counter()

    # ---- life, on the loop

    async def start(self, *, wait_s: float) -> bool:
        """Attach to the store, waiting at most `wait_s` seconds. Returns and raises as
        StoreConnector.start."""
        self.staging.open()
        return await self.connector.start(wait_s=wait_s)

    async def stop(self, *, timeout_s: float) -> None:
        """Refuse new puts, cancel transfers and detach from the store. Puts that are still needed
        are lost."""
        self.staging.close()
        await end_tasks(self._tasks)
        await self.connector.stop(timeout_s=timeout_s)

    # ---- the engine's thread

    def put(
        self, key: str, chain_hashes: Sequence[bytes], blocks: Blocks, *, owner: str = ""
    ) -> None:
        """Park a copy of these blocks under a key, charged to the tenant `owner`. Raises:
        ParkingRefused without free rows, before `start` and after `stop`; IntegrityError for a key
        in use."""
        num_unfilled = len(blocks) - len(chain_hashes)
        if num_unfilled not in (0, 1):
            raise IntegrityError(f"{key}: {len(blocks)} blocks, {len(chain_hashes)} of them full")
        with self.staging.lock:
            if key in self._kept:
                raise IntegrityError(f"{key} is parked already")
            if not self.staging.is_open:
                raise ParkingRefused("the worker's way to its store is not open")
            rows = self._rows.take(len(blocks))
            num_free = self._rows.num_free
        if rows is None:
            raise ParkingRefused(
                f"{len(blocks)} blocks, but {num_free} rows of park_bytes are free just now"
            )
        self._rows.memory.view[list(rows)] = blocks
        put = ParkedPut(key, tuple(chain_hashes), rows, owner)
        if not rows:  # of a quantized cache unfilled blocks are not parked, and here is no other
            put.stage, put.is_ended = Stage.HERE, True
        with self.staging.lock:
            self._kept[key] = put
        if rows and not self.staging.tell(self._begin, put):
            self._end(put)

    def get(self, key: str) -> Parked:
        """Begin to fetch the blocks of a key back. Returns: an object whose `is_done` and `result`
        the engine polls."""
        with self.staging.lock:
            put = self._kept.get(key)
            if put is None:
                return Unknown()
            if put.stage is Stage.STAGED:
                put.stage = Stage.HERE
            elif put.stage is Stage.STORED:
                put.stage = Stage.COMING
        if not put.is_ended and not self.staging.tell(put.wake.set):
            self._lose(put, STOPPED)
        return Coming(put, self._rows.memory)

    def drop(self, key: str) -> None:
        """Drop the blocks of a key. Rows that a transfer still uses are freed when it is over."""
        with self.staging.lock:
            put = self._kept.pop(key, None)
            if put is None:
                return
            put.is_dropped = True
            if put.is_ended:
                self.staging.give_back(put)
            else:
                self._leaving.add(put)
        self.staging.tell(self._has_room.set)
        self.staging.tell(put.wake.set)

    def check_integrity(self, keys: Collection[str]) -> None:
        """Check that the keys are those of kept puts, and that every row is accounted for. Raises:
        IntegrityError."""
        with self.staging.lock:
            if set(self._kept) != set(keys):
                raise IntegrityError(f"parked are {sorted(self._kept)}, not {sorted(keys)}")
            for put in self._kept.values():
                num_rows = {Stage.STAGED: put.num_blocks, Stage.HERE: put.num_blocks}
                num_rows[Stage.STORED] = 0
                if len(put.rows) != num_rows.get(put.stage, len(put.rows)):
                    raise IntegrityError(
                        f"{put.key} is {put.stage.value} with {len(put.rows)} rows"
                    )
            puts = (*self._kept.values(), *self._leaving)
            self._rows.check_integrity(row for put in puts for row in put.rows)

    # ---- both, under the lock or taking it

    def _lose(self, put: ParkedPut, reason: str) -> None:
        """Mark a put as lost, unless its bytes are no longer needed or already here."""
        with self.staging.lock:
            if put.is_dropped or put.stage in OVER:
                return
            put.stage = Stage.LOST
            self.lost[reason] += 1
        logs.event(logger, "parked_lost", level=logging.WARNING, key=put.key, reason=reason)

    def _end(self, put: ParkedPut) -> None:
        """Mark the end of a put's transfers; only the first call has an effect."""
        self._lose(put, STOPPED)
        with self.staging.lock:
            put.is_ended = True
            self._leaving.discard(put)
            if put.is_dropped or put.stage is Stage.LOST:
                self.staging.give_back(put)

    # ---- one put's task, on the loop

    def _begin(self, put: ParkedPut) -> None:
        if not self.staging.is_open:
            self._end(put)
            return
        task = start_task(self._live(put), "parking")
        self._tasks.add(task)

        def over(_: object) -> None:
            self._tasks.discard(task)
            self.connector.release_later(self.connector.client, [put.lease_id])
            self._end(put)
            self._has_room.set()

        task.add_done_callback(over)

    async def _live(self, put: ParkedPut) -> None:
        await self._store(put)
        while put.stage is Stage.STORED and not put.is_dropped:
            await self._wait(put)
        if put.stage is Stage.COMING and not put.is_dropped:
            await self._fetch(put)
        self._end(put)  # in the same turn: a caller that sees the end may want its rows

    async def _store(self, put: ParkedPut) -> None:
        """Store a put's bytes: STAGED -> STORED, or LOST."""
        client = self.connector.client
        if client is None:
            self._lose(put, STORE_UNAVAILABLE)
        if client is None or put.stage is not Stage.STAGED or put.is_dropped:
            return
        num_full = len(put.chain_hashes)
        tail = None
        if num_full < put.num_blocks:  # a whole block to the store: the engine knows what is filled
            name = f"{self._name}/{put.key}/{next(self._numbers)}"
            tail = (name, put.rows[num_full], self._block_size)
        try:
            result = await client.put_blocks(
                None,
                b"",
                list(zip(put.chain_hashes, put.rows[:num_full], strict=True)),
                tail,
                self._limits.lease_ttl_s,
                Deadline.after(self._limits.put_budget_s),
                num_tokens=self._block_size,
                tenant=put.tenant,
            )
        except BatonError as error:
            self.connector.suspect(client, error)
            self._lose(put, reason_of(error))
            return
        put.lease_id, put.incarnation = result.lease_id, client.incarnation
        self.num_bytes_stored += result.num_bytes
        refs = refs_of(result, put)
        if refs is None:
            self._lose(put, NO_ROOM)
            return
        with self.staging.lock:
            put.refs = refs
            if put.stage is Stage.STAGED:
                put.stage = Stage.STORED
                self.staging.give_back(put)
        self._has_room.set()

    async def _wait(self, put: ParkedPut) -> None:
        """Renew a put's lease until its bytes are requested or dropped."""
        try:
            async with asyncio.timeout(self._renewal_s):
                await put.wake.wait()
            return
        except TimeoutError:
            client = self.connector.client
        if client is None:
            return  # back before the lease lapses, or the fetch finds out
        try:
            await client.renew(
                put.lease_id,
                ttl_s=self._limits.lease_ttl_s,
                deadline=Deadline.after(self._limits.put_budget_s),
            )
        except LeaseLapsed:
            self._lose(put, LEASE_LAPSED)
        except BatonError as error:
            self.connector.suspect(client, error)

    async def _fetch(self, put: ParkedPut) -> None:
        """Fetch a put's bytes: COMING -> HERE, or LOST."""
        deadline = Deadline.after(self._limits.transfer_budget_s)
        client = self.connector.client
        if client is None:
            self._lose(put, STORE_UNAVAILABLE)
            return
        try:
            await self._take_rows(put, deadline)
            reason = await self._get(put, client, deadline)
        except TransferCancelled as error:
            self.staging.quarantine(put, error.quarantine, self._has_room.set)
            raise
        except TransferTimeout as error:
            self.staging.quarantine(put, error.quarantine, self._has_room.set)
            self.connector.suspect(client, error)
            reason = DEADLINE
        except BatonError as error:
            reason = reason_of(error)
        if reason:
            self._lose(put, reason)
            return
        with self.staging.lock:
            if put.stage is Stage.COMING:
                put.stage = Stage.HERE

    async def _take_rows(self, put: ParkedPut, deadline: Deadline) -> None:
        """Wait for free rows for a put. Raises: DeadlineExceeded when other puts keep them too
        long."""
        async with deadline.timeout("rows to bring parked blocks back"):
            while True:
                with self.staging.lock:
                    rows = self._rows.take(put.num_blocks)
                    if rows is not None:
                        put.rows = rows
                        return
                self._has_room.clear()
                await self._has_room.wait()

    async def _get(self, put: ParkedPut, client: KvStoreClient, deadline: Deadline) -> str:
        """Fetch a put's bytes from the store. Returns: why they are unusable; empty: they are
        usable."""
        result = await client.get_blocks(
            put.lease_id,
            list(zip(put.refs, put.rows, strict=True)),
            deadline,
            incarnation=put.incarnation,
        )
        self.num_bytes_fetched += result.num_bytes
        if not result.failed:
            return ""
        reason = result.failed[min(result.failed)]
        if reason == DEADLINE:
            self.connector.suspect(client, DeadlineExceeded("a transfer"))
        return reason
