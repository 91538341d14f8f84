"""SideWays: a worker life's lender of its blocks and parking of preempted requests' blocks, which
are separate from its store connection. Each exists only where role, settings and engine call for
it. Belongs to the loop's thread.

Belongs to the loop's thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from kvstore.transport.base import BlockMemory
from services.worker.config import WorkerSettings
from services.worker.connector import StoreConnector
from services.worker.engine_port import WorkerEngine
from services.worker.engine_thread import EngineThread
from services.worker.lender import WorkerLender
from services.worker.parking import StoreParking
from services.worker.store_target import StoreTarget


@dataclass(frozen=True)
class SideWays:
    """Lender and parking of one worker life, each where role, settings and engine call for it."""

    lender: WorkerLender | None = None
    """Lender of this worker's blocks; None: it lends none."""
    parking: StoreParking | None = None
    """Parking of preempted requests' blocks in the store; None: the engine's own."""

    @classmethod
    def make(
        cls,
        target: StoreTarget | None,
        engine: WorkerEngine,
        thread: EngineThread,
        settings: WorkerSettings,
        role: str,
        *,
        address: Callable[[], str],
        on_room: Callable[[], None],
    ) -> SideWays:
        """Create the lender and the parking of a role that begins; the engine gets the parking.

        Args:
            target: the store of this worker life; None: it has none.
            address: returns the address of this worker's lender, once it listens.
            on_room: called when the engine has got blocks back.
        Raises: SettingsError for a bound without room for a block.
        """
        if target is None:
            return cls()
        limits = settings.limits
        lender = parking = None

        def make_connector(memory: BlockMemory) -> StoreConnector:
            return StoreConnector(replace(target, memory=memory), thread, limits)

        if _lends(engine, settings, role):
            lender = WorkerLender(
                target,
                thread,
                limits.lease_ttl_s,
                lets_map=settings.lend_mapped,
                address=address,
                on_room=on_room,
            )
        if engine.park_bytes:
            parking = StoreParking(
                engine.kv.layout,
                engine.park_bytes,
                limits,
                worker_incarnation=target.worker_incarnation,
                make_connector=make_connector,
            )
            engine.use_parking(parking)
        return cls(lender, parking)

    async def attach(self, wait_s: float) -> None:
        """Attach the parking to the store, waiting at most `wait_s` seconds. Raises: as
        StoreConnector.start."""
        if self.parking is not None:
            await self.parking.start(wait_s=wait_s)

    async def detach(self, timeout_s: float) -> None:
        """Stop the parking's transfers; lent blocks stay lent."""
        if self.parking is not None:
            await self.parking.stop(timeout_s=timeout_s)


def _lends(engine: WorkerEngine, settings: WorkerSettings, role: str) -> bool:
    """Return whether the worker lends blocks. Only prefill workers do, and only where the engine
    never preempts: it might wait for the blocks of a preempted request that readers keep in place.
    Blocks spread over several devices cannot be lent."""
    is_wanted = settings.limits.lend_blocks and role == "prefill"
    return is_wanted and engine.kv.is_whole and settings.engine.preemption == "never"
