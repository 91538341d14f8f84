"""A parking over a real store, for its tests."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from engine.kv.layout import KvLayout
from engine.parking import Blocks
from services.worker.block_writer import RENEWALS_PER_TTL
from services.worker.config import WorkerLimits
from services.worker.engine_thread import EngineThread
from services.worker.parked_put import Stage
from services.worker.parking import StoreParking
from tests.harness.waiting import until
from tests.unit.worker.staging_bench import MakeConnector, StoreBench

LAYOUT = KvLayout.plain(num_layers=2, num_kv_heads=2, head_dim=8, block_size=4, dtype="float32")
LIMITS = WorkerLimits(attach_budget_s=5.0)


class Lot(StoreBench[StoreParking]):
    """A store and a parking over it."""

    @property
    def parking(self) -> StoreParking:
        return self.user

    def stage(self, key: str) -> Stage:
        return self.parking._kept[key].stage

    async def stored(self, key: str) -> None:
        await until(lambda: self.stage(key) is Stage.STORED)

    async def fetched(self, key: str) -> Blocks | None:
        coming = self.parking.get(key)
        await until(lambda: coming.is_done)
        return coming.result()


@contextlib.asynccontextmanager
async def lot(
    tmp_path: Path,
    *,
    transport: str = "shm",
    num_rows: int = 8,
    num_frames: int = 64,
    tenant_shares: tuple[str, ...] = (),
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

    made = Lot(tmp_path, num_frames, tenant_shares)
    async with made.over_the_store(parking, limits, transport=transport, thread=thread):
        yield made
