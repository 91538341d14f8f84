"""Life: one life of a worker in one role, from its core to its entry in the registry. A worker that
changes its role ends one and begins the next over the same engine, under a new incarnation.

Life of one: `begin` (core, role, adapters, store) -> `announce` (registered) -> `drain` (no new
requests; those that can move continue on other workers) -> `leave_registry` -> `end`. Knows no
server. The loop's thread.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from engine.speculation.remote import DraftTraces
from process import logs
from process.deadline import Deadline
from process.errors import Internal
from services.worker.config import WorkerSettings, adapter_folders
from services.worker.core import WorkerCore
from services.worker.engine_port import WorkerEngine
from services.worker.heartbeat import Heartbeat
from services.worker.identity import Identity
from services.worker.roles import MakeRole, Role

logger = logging.getLogger(__name__)

MOVE_SHARE = 0.8
"""Share of the drain time after which requests that have not moved with their KV move without
it."""

LAST_WORDS_S = 1.0
"""Seconds for messages that are still being sent to routers."""


@dataclass
class Life:
    """One life of a worker in one role: its core, role, adapters and registry entry."""

    core: WorkerCore
    role: Role
    heartbeat: Heartbeat | None = None

    def announce(self, address: str, metrics_address: str) -> None:
        """Register the worker in the registry as serving at `address`."""
        core, settings = self.core, self.core.settings
        core.address = settings.advertised or address
        core.metrics_address = metrics_address
        if not settings.redis_url:
            return
        self.heartbeat = Heartbeat(
            settings.redis_url,
            worker_id=core.identity.worker_id,
            incarnation=core.identity.incarnation.hex(),
            status=core.status,
            access=settings.redis,
            on_wishes=core.adapters.follow,
        )
        core.adapters.on_change = self.heartbeat.beat_now
        self.heartbeat.start()

    async def drain(self) -> None:
        """Refuse new requests, move those that can continue elsewhere, and wait for the rest and
        for readers of lent blocks: at most `drain_s` seconds, and not at all with a failed
        engine."""
        core = self.core
        drain_s = core.limits.drain_s if core.thread.failure is None else 0.0
        core.draining = True
        if self.heartbeat is not None:
            self.heartbeat.beat_now()  # routers choose others
        self.role.leave(Deadline.after(MOVE_SHARE * drain_s))
        if not await core.drain(drain_s):
            logs.event(logger, "drain_cut_short", level=logging.WARNING, num=core.num_live)
        await core.say_last_words(LAST_WORDS_S)

    async def leave_registry(self) -> None:
        """Remove the registry entry, within Redis' timeouts."""
        if self.heartbeat is not None:
            await self.heartbeat.stop()

    async def end(self, *, closes_engine: bool = True) -> None:
        """End the life after the last call and free its resources.

        Raises: Internal for an engine that is to be kept, and is not as it was before the first
        request.
        """
        await self.role.stop()
        await self.core.stop(closes_engine=closes_engine)
        stats = self.core.thread.stats
        num_left = stats.num_reserved + stats.num_waiting + stats.num_running + stats.num_holding
        num_blocks = stats.num_quarantined_blocks + stats.num_referenced_blocks
        if not closes_engine and (num_left or num_blocks):
            raise Internal(
                f"{num_left} requests and {num_blocks} of their blocks are left in the engine of a "
                "life that is over"
            )


async def begin(
    engine: WorkerEngine,
    settings: WorkerSettings,
    role_name: str,
    make_role: MakeRole,
    *,
    draft_traces: DraftTraces | None = None,
    before: WorkerCore | None = None,
) -> Life:
    """Create a life that is not registered yet.

    Args:
        draft_traces: see WorkerCore.
        before: core of the previous life, over the same engine.
    Raises: FailedPrecondition from the store; InvalidArgument for an adapter that does not fit.
    """
    worker_id = settings.worker_id if before is None else before.identity.worker_id
    identity = Identity.new(role_name, worker_id)
    core = WorkerCore(engine, settings, identity, draft_traces=draft_traces, before=before)
    core.tracing.start()
    role = make_role(core)
    role.start()
    life = Life(core, role)
    try:
        if before is None:
            for name, folder in adapter_folders(settings):
                await core.adapters.load(name, folder)
        await core.attach(settings.limits.store_wait_s)
    except BaseException:
        await life.end()
        raise
    return life
