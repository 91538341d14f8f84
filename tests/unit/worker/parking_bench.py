"""A parking over a real store, for its tests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from engine.kv.layout import KvLayout
from engine.parking import Blocks
from kvstore import invariants, store_process
from kvstore.block_store import BlockStore
from kvstore.config import KvStoreSettings
from kvstore.errors import Quarantine, TransferCancelled, TransferTimeout
from process.deadline import Deadline
from services.worker.config import WorkerLimits
from services.worker.engine_thread import EngineThread
from services.worker.kv_swap import Stage, StagingRows, StoreParking
from services.worker.store_pool import StoreConnector, StoreTarget
from services.worker.store_writer import RENEWALS_PER_TTL
from tests.harness.waiting import until

FRAME_BYTES = 4096
"""Of the slab; every test's row fits into one."""
WAIT_S = 30.0

LAYOUT = KvLayout.plain(num_layers=2, num_kv_heads=2, head_dim=8, block_size=4, dtype="float32")
LIMITS = WorkerLimits(attach_budget_s=5.0)

MakeConnector = Callable[[Any], StoreConnector]


class Lot:
    """A store and a parking over it."""

    parking: StoreParking

    def __init__(self, folder: Path, num_frames: int) -> None:
        self.folder = folder
        self.num_frames = num_frames
        self._exit = contextlib.AsyncExitStack()
        self.address = ""
        self.node: Any = None

    async def start_store(self) -> None:
        """A second one answers where the first one did."""
        settings = KvStoreSettings(
            slab_dir=str(self.folder),
            capacity_bytes=self.num_frames * FRAME_BYTES,
            stop_timeout_s=0.0,
            **({"listen": self.address} if self.address else {}),
        )
        store = await self._exit.enter_async_context(store_process.running(settings))
        self.address, self.node = store.address, store.node

    async def kill_store(self) -> None:
        """Returns when the parking has noticed: over shm its bytes could be read until then."""
        await self._exit.aclose()
        self.parking.connector._suspect.set()
        await until(lambda: self.parking.connector.client is None)

    @contextlib.asynccontextmanager
    async def over_the_store(
        self,
        make_parking: Callable[[MakeConnector], StoreParking],
        limits: WorkerLimits,
        *,
        transport: str,
        thread: EngineThread | None = None,
    ) -> AsyncIterator[None]:
        """A started parking, which is stopped before its store."""
        await self.start_store()
        any_thread: Any = thread

        def connector(memory: Any) -> StoreConnector:
            target = StoreTarget(self.address, "w", b"i" * 16, "ab" * 32, memory, transport)
            return StoreConnector(target, any_thread, limits)

        self.parking = make_parking(connector)
        try:
            assert await self.parking.start(wait_s=WAIT_S)
            yield
        finally:
            await self.parking.stop(timeout_s=1)
            await self.kill_store()

    @property
    def store(self) -> BlockStore:
        store: BlockStore = self.node.store
        return store

    @property
    def rows(self) -> StagingRows:
        return self.parking.staging.rows

    @property
    def client(self) -> Any:
        client = self.parking.connector.client
        assert client is not None
        return client

    def stage(self, key: str) -> Stage:
        return self.parking._kept[key].stage

    async def stored(self, key: str) -> None:
        await until(lambda: self.stage(key) is Stage.STORED)

    async def fetched(self, key: str) -> Blocks | None:
        coming = self.parking.get(key)
        await until(lambda: coming.is_done)
        return coming.result()

    async def check_empty(self) -> None:
        """Nothing is taken here, nothing is kept alive there."""
        self.parking.check_integrity(())
        await until(lambda: self.rows.num_free == self.rows.num_rows)
        await until(lambda: len(self.store.leases) == 0)
        assert self.store.num_tails == self.store.num_pinned() == 0
        invariants.check(self.store)
        self.parking.check_integrity(())


@contextlib.asynccontextmanager
async def lot(
    tmp_path: Path,
    *,
    transport: str = "shm",
    num_rows: int = 8,
    num_frames: int = 64,
    limits: WorkerLimits = LIMITS,
    layout: KvLayout = LAYOUT,
    thread: EngineThread | None = None,
    renewals_per_ttl: float = RENEWALS_PER_TTL,
) -> AsyncIterator[Lot]:
    def parking(make_connector: MakeConnector) -> StoreParking:
        return StoreParking(
            layout,
            num_rows * layout.block_bytes + 1,
            limits,
            worker_incarnation=b"i" * 16,
            make_connector=make_connector,
            renewals_per_ttl=renewals_per_ttl,
        )

    made = Lot(tmp_path, num_frames)
    async with made.over_the_store(parking, limits, transport=transport, thread=thread):
        yield made


class StalledReads:
    """Reads of a client that do not end: each fails as `how` ("timeout", or "stop": when it is
    cancelled), and its rows may be written into until `settled`."""

    def __init__(self, client: Any, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.has_begun = asyncio.Event()
        self._how = how
        monkeypatch.setattr(client, "get_blocks", self._get_blocks)

    async def _get_blocks(
        self, lease_id: str, items: Any, deadline: Deadline, *, incarnation: bytes
    ) -> Any:
        self.has_begun.set()
        quarantine = Quarantine(tuple(row for _, row in items), self.settled)
        if self._how == "timeout":
            raise TransferTimeout("late", quarantine)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError as error:
            raise TransferCancelled("cancelled", quarantine) from error
