"""How a worker of either role starts, serves and ends.

Start: load the engine on a thread (progress as log lines) -> engine thread -> store (bounded wait;
it may come later) -> gRPC server -> registry -> ready line. End, on a signal or when the engine
failed: out of the registry -> drain (bounded) -> server -> store -> engine thread. The process's
signals, exit codes and parent watch are `process.entry`'s.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import grpc.aio

from process import logs, serving
from process.metrics import MetricsServer
from services.worker.config import WorkerSettings, adapter_folders
from services.worker.core import Identity, WorkerCore
from services.worker.engine_port import WorkerEngine
from services.worker.handle_keys import HandleKeys
from services.worker.heartbeat import Heartbeat
from services.worker.metrics import WorkerCollector

logger = logging.getLogger(__name__)

AddService = Callable[[grpc.aio.Server], None]

STOP_GRACE_S = 1.0
"""For the last messages of cancelled RPCs."""

PROGRESS_EVERY = 0.02
"""Loading is logged when it moved by this share; each line costs a write."""


class Role(Protocol):
    """What a prefill or a decode worker adds to the core."""

    def start(self) -> None: ...
    def add_service(self, server: grpc.aio.Server) -> None: ...
    async def stop(self) -> None: ...


@dataclass
class Worker:
    """A started worker; `stop` ends it. Tests and `run` use the same one."""

    core: WorkerCore
    role: Role
    server: grpc.aio.Server
    heartbeat: Heartbeat | None
    metrics: MetricsServer

    @property
    def address(self) -> str:
        return self.core.address

    async def stop(self) -> None:
        """Leave the registry, let requests finish within the drain time, then end."""
        self.core.draining = True
        if self.heartbeat is not None:
            await self.heartbeat.stop()
        drain_s = self.core.limits.drain_s if self.core.thread.failure is None else 0.0
        if not await self.core.drain(drain_s):
            logs.event(logger, "drain_cut_short", level=logging.WARNING, num=self.core.num_live)
        await asyncio.to_thread(self.metrics.stop)
        await self.server.stop(STOP_GRACE_S)
        await self.role.stop()
        await self.core.stop()


async def start(
    engine: WorkerEngine,
    settings: WorkerSettings,
    role_name: str,
    make_role: Callable[[WorkerCore], Role],
) -> Worker:
    """Serve with a loaded engine. Returns when the worker answers.

    Raises: Unavailable when the port is taken; InvalidArgument for an adapter that does not fit.
    """
    core = WorkerCore(engine, settings, Identity.new(role_name, settings.worker_id))
    role = make_role(core)
    role.start()
    metrics = MetricsServer(WorkerCollector(core, asyncio.get_running_loop()))
    try:
        for name, folder in adapter_folders(settings):
            await core.adapters.load(name, folder)
        await core.attach(settings.limits.store_wait_s)
        if settings.metrics_listen:
            metrics.start(settings.metrics_listen)
            core.metrics_address = metrics.address
        server, address = await serving.listen(settings.listen, [role.add_service])
    except BaseException:
        await asyncio.to_thread(metrics.stop)
        await role.stop()
        await core.stop()
        raise
    core.address = settings.advertised or address
    heartbeat: Heartbeat | None = None
    if settings.redis_url:
        heartbeat = Heartbeat(
            settings.redis_url,
            worker_id=core.identity.worker_id,
            incarnation=core.identity.incarnation.hex(),
            status=core.status,
        )
        core.adapters.on_change = heartbeat.beat_now
        heartbeat.start()
    return Worker(core, role, server, heartbeat, metrics)


async def run(
    settings: WorkerSettings,
    stop: asyncio.Event,
    role_name: str,
    make_role: Callable[[WorkerCore], Role],
) -> None:
    """A worker process's whole life.

    Raises: what keeps it from starting (one line: what and how to fix it); Internal when the engine
    failed.
    """
    HandleKeys.of(settings.handle_keys_file)  # what is wrong there is told before a model is loaded
    engine = await _load(settings, stop)
    if engine is None:
        return
    worker = await start(engine, settings, role_name, make_role)
    core = worker.core
    logs.event(
        logger,
        "ready",
        address=worker.address,
        worker_id=core.identity.worker_id,
        role=role_name,
        incarnation=core.identity.incarnation.hex(),
        model=core.model.model,
        model_fingerprint=core.model.fingerprint,
        decoder=core.model.decoder,
        load_seconds=dict(core.model.seconds),
        store_attached=core.connector.client is not None,
        metrics=core.metrics_address,
    )
    try:
        await _first(stop, core.failed)
    finally:
        logs.event(logger, "stopping", num_live=core.num_live)
        await worker.stop()
        logs.event(logger, "stopped")
    if core.thread.failure is not None:
        raise core.thread.failure


async def _first(*events: asyncio.Event) -> None:
    """Wait for whichever comes first."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


async def _load(settings: WorkerSettings, stop: asyncio.Event) -> WorkerEngine | None:
    """Load the engine on a thread that does not hold the process back when it is told to stop.

    Returns: None when `stop` came first.
    """
    loop = asyncio.get_running_loop()
    loaded: asyncio.Future[WorkerEngine] = loop.create_future()

    def settle(engine: WorkerEngine | None, problem: Exception | None) -> None:
        if loaded.done():
            return
        if engine is not None:
            loaded.set_result(engine)
        elif problem is not None:
            loaded.set_exception(problem)

    def load() -> None:
        outcome: tuple[Any, Exception | None]
        try:
            # Here, because torch takes seconds: wrong settings are told before that.
            from engine.loop import load_engine

            outcome = (load_engine(settings.engine, progress=_Progress()), None)
        except Exception as error:  # handed to the loop, which raises it
            outcome = (None, error)
        try:
            loop.call_soon_threadsafe(settle, *outcome)
        except RuntimeError:
            logs.event(logger, "loaded_too_late", level=logging.DEBUG)

    threading.Thread(target=load, name="load", daemon=True).start()
    over = asyncio.Event()
    loaded.add_done_callback(lambda _: over.set())
    await _first(stop, over)
    return await loaded if loaded.done() else None


class _Progress:
    """Progress of loading as log lines, not more of them than anybody can look at."""

    def __init__(self) -> None:
        self._what = ""
        self._logged = 0

    def __call__(self, what: str, done: int, total: int) -> None:
        is_new = what != self._what
        is_step = done - self._logged >= max(1, int(total * PROGRESS_EVERY))
        if is_new or is_step or done >= total:
            self._what, self._logged = what, done
            logs.event(logger, "loading", what=what, done=done, total=total)
