"""`run`: start, serving and shutdown of a worker process of either role.

Start: a registry entry that announces the worker, for routers whose requests wait -> load the
engine on a thread, with progress as log lines -> start a Worker (services/worker/server.py) ->
ready line. A signal or a failure of the engine ends the worker. `process.entrypoint` handles
signals, exit codes and the watch of the parent process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.speculation.remote import DraftPeer
from process import entrypoint, logs, tls
from process.authorization import PeerRole
from process.background_tasks import end_tasks, start_task
from process.metrics import HealthProbes, MetricsServer
from process.registry import STARTING_WORKER, RegistryHeartbeat
from process.rpc import Dialer
from process.tracing import Tracing
from services.worker.config import WorkerSettings
from services.worker.draft_channel import DraftPeers
from services.worker.engine_port import WorkerEngine
from services.worker.handle import HandleKeys
from services.worker.runtime import Identity, WorkerCore
from services.worker.server import MakeRole, Worker, start

logger = logging.getLogger(__name__)

PROGRESS_EVERY = 0.02
"""Share of progress after which loading is logged again; each line costs a write."""


async def run(
    settings: WorkerSettings,
    stop: asyncio.Event,
    role_name: str,
    make_role: MakeRole,
) -> None:
    """Run a worker process from start to end.

    Raises: the error that keeps it from starting (one line with the fix); Internal when the engine
    failed.
    """
    # What is wrong with these files is told before a model is loaded.
    HandleKeys.of(settings.handle_keys_file)
    identity = tls.TlsIdentity.of(settings.tls, PeerRole(role_name))
    Tracing.check(settings.tracing)
    health = HealthProbes("loading the model")
    metrics = MetricsServer(health=health)
    health.follow()
    if settings.metrics_listen:
        # Before the model: whoever probes shall see that this process lives, and what it does.
        metrics.start(settings.metrics_listen)
    drafts = DraftPeers(settings.engine.speculation.draft_workers, Dialer(identity))
    worker_id = Identity.new(role_name, settings.worker_id).worker_id
    settings = replace(settings, worker_id=worker_id)
    try:
        async with _said_to_start(settings, role_name):
            engine = await _load(settings, stop, health, drafts.peers)
            if engine is None:
                return
            worker = await start(
                engine, settings, role_name, make_role, metrics, draft_traces=drafts.traces
            )
        drafts.show(metrics, lambda: worker.core.identity)
        health.set_check(worker.why_not_ready)
        await _serve(worker, role_name, stop)
    finally:
        health.end()
        await drafts.close()
        await asyncio.to_thread(metrics.stop)


@contextlib.asynccontextmanager
async def _said_to_start(settings: WorkerSettings, role_name: str) -> AsyncIterator[None]:
    """Register the worker as starting while the body runs."""
    if not settings.redis_url:
        yield
        return
    about = {"worker_id": settings.worker_id, "role": role_name, "model": settings.engine.model}
    beat = RegistryHeartbeat(
        settings.redis_url,
        STARTING_WORKER,
        entry_id=settings.worker_id,
        incarnation=entrypoint.new_incarnation().hex(),
        entry=lambda: json.dumps(about),
        access=settings.redis,
    )
    beat.start()
    try:
        yield
    finally:
        await beat.stop()


async def _serve(worker: Worker, role_name: str, stop: asyncio.Event) -> None:
    """Serve until `stop` is set or the engine fails; the failure is raised."""
    core = worker.core
    entrypoint.begin_serving()
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
        async with _logging_steps(core):
            await _first(stop, core.failed)
            if worker.core.thread.is_stuck:
                await asyncio.sleep(core.settings.limits.stop_grace_s)
                entrypoint.end_now(role_name, worker.failure)
    finally:
        logs.event(logger, "stopping", num_live=worker.core.num_live)
        await worker.stop()
        logs.event(logger, "stopped")
    if worker.failure is not None:
        raise worker.failure


@contextlib.asynccontextmanager
async def _logging_steps(core: WorkerCore) -> AsyncIterator[None]:
    """Record a log of the engine's steps and jobs, if configured, and write it at the end. A log
    that cannot be written is reported and does not end the worker."""
    log = core.step_log
    if log is None:
        yield
        return
    watching = start_task(log.run(), "step log")
    try:
        yield
    finally:
        await end_tasks([watching])
        folder, worker_id = Path(core.settings.step_log), core.identity.worker_id
        try:
            path = await asyncio.to_thread(log.write, folder, worker_id)
            logs.event(logger, "step_log_written", path=str(path), num=len(log))
        except OSError as error:
            logs.event(logger, "step_log_lost", level=logging.ERROR, why=str(error))


async def _first(*events: asyncio.Event) -> None:
    """Wait for whichever finishes first."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


async def _load(
    settings: WorkerSettings, stop: asyncio.Event, health: HealthProbes, peers: Sequence[DraftPeer]
) -> WorkerEngine | None:
    """Load the engine on a thread that does not delay the process when it is stopped.

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
            # Here, because it takes seconds: wrong keys and certificates are told before that.
            with entrypoint.importing():
                from engine.engine import load_engine

            engine = load_engine(
                settings.engine,
                progress=_Progress(health),
                prepares_grammars=True,
                draft_peers=peers,
            )
            outcome = (engine, None)
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
    """Loading progress, for probes and as log lines at a limited rate."""

    def __init__(self, health: HealthProbes) -> None:
        self._health = health
        self._what = ""
        self._logged = 0

    def __call__(self, what: str, done: int, total: int) -> None:
        is_new = what != self._what
        is_step = done - self._logged >= max(1, int(total * PROGRESS_EVERY))
        if is_new or is_step or done >= total:
            self._what, self._logged = what, done
            self._health.say(f"loading the model: {what}, {done} of {total}")
            logs.event(logger, "loading", what=what, done=done, total=total)
