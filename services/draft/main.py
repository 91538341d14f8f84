"""`run`: the lifecycle of a draft worker process. It loads the model on a thread and logs the
progress, starts the worker (`server.serving_drafts`), and logs a ready line. It ends on a signal,
or when drafting has failed. `process.entrypoint` handles signals, exit codes and the parent
process.
"""

from __future__ import annotations

import asyncio
import logging
import threading

from engine.request import Sampling
from engine.speculation.draft_model import DraftModelProposer
from engine.speculation.draft_protocol import DraftModelInfo
from engine.speculation.loader import load_draft_model
from engine.speculation.proposer import DraftTask
from process import entrypoint, logs, tls
from process.authorization import PeerRole
from process.metrics import HealthProbes, MetricsServer
from services.draft.config import DraftSettings
from services.draft.server import DraftWorker, serving_drafts

logger = logging.getLogger(__name__)

STOP_GRACE_S = 1.0
"""Seconds for failed calls to send their errors, when the thread is stuck."""
PROGRESS_EVERY = 0.1
"""Share of the loading work after which progress is logged again."""


async def run(settings: DraftSettings, stop: asyncio.Event) -> None:
    """Run a draft worker until `stop` is set or drafting fails.

    Raises: an error that prevents the start, in one line with the fix; Internal when drafting
        failed.
    """
    tls.TlsIdentity.of(settings.tls, PeerRole.DRAFT)  # report wrong files before a model is loaded
    health = HealthProbes("loading the model")
    metrics = MetricsServer(health=health)
    health.follow()
    if settings.metrics_listen:
        metrics.start(settings.metrics_listen)
    try:
        proposer = await _load(settings, stop, health)
        if proposer is None:
            return
        info = proposer.info
        model_info = DraftModelInfo(info.model, info.tokenizer_digest, info.vocab_size)
        async with serving_drafts(proposer, model_info, settings, metrics) as worker:
            health.set_check(worker.why_not_ready)
            _say_ready(worker, proposer, metrics)
            await _first(stop, worker.thread.failed)
            if worker.thread.is_stuck:
                await asyncio.sleep(STOP_GRACE_S)
                entrypoint.end_now("draft", worker.thread.failure)
            logs.event(logger, "stopping", num_sessions=len(worker.thread.sessions))
            worker.is_draining = True
        if worker.thread.failure is not None:
            raise worker.thread.failure
    finally:
        health.end()
        await asyncio.to_thread(metrics.stop)


def _say_ready(worker: DraftWorker, proposer: DraftModelProposer, metrics: MetricsServer) -> None:
    entrypoint.begin_serving()
    logs.event(
        logger,
        "ready",
        address=worker.address,
        worker_id=worker.worker_id,
        role=PeerRole.DRAFT.value,
        incarnation=worker.incarnation.hex(),
        model=proposer.info.model,
        decoder=proposer.info.decoder,
        load_seconds=dict(proposer.info.seconds),
        metrics=metrics.address,
    )


async def _first(*events: asyncio.Event) -> None:
    """Wait for the first of several events."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


async def _load(
    settings: DraftSettings, stop: asyncio.Event, health: HealthProbes
) -> DraftModelProposer | None:
    """Load the model on a daemon thread, which does not delay the end of the process. Returns: None
    when `stop` was set first.
    """
    loop = asyncio.get_running_loop()
    over = asyncio.Event()
    loaded: list[DraftModelProposer | Exception] = []

    def load() -> None:
        try:
            if settings.engine.num_threads:
                import torch

                torch.set_num_threads(settings.engine.num_threads)
            proposer = load_draft_model(settings.engine, _Progress(health))
            _warm_up(proposer)
            loaded.append(proposer)
        except Exception as error:  # handed to the loop, which raises it
            loaded.append(error)
        try:
            loop.call_soon_threadsafe(over.set)
        except RuntimeError:
            logs.event(logger, "loaded_too_late", level=logging.DEBUG)

    threading.Thread(target=load, name="load", daemon=True).start()
    await _first(stop, over)
    if not over.is_set():
        return None
    (outcome,) = loaded
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def _warm_up(proposer: DraftModelProposer) -> None:
    """Draft once with and without sampling, so that the first call does not wait for the model's
    one-time work.
    """
    key = ("warm-up", 0)
    for sampling in (Sampling(max_tokens=1), Sampling(max_tokens=1, temperature=1.0)):
        proposer.propose([DraftTask(key, [0, 0], 1, sampling, 0, 64)])
        proposer.forget(key)


class _Progress:
    """Progress of loading, for health probes and as a limited number of log lines."""

    def __init__(self, health: HealthProbes) -> None:
        self._health = health
        self._last = ("", 0)

    def __call__(self, what: str, done: int, total: int) -> None:
        before, logged = self._last
        is_step = done - logged >= max(1, int(total * PROGRESS_EVERY))
        if what != before or is_step or done >= total:
            self._last = (what, done)
            self._health.say(f"loading the model: {what}, {done} of {total}")
            logs.event(logger, "loading", what=what, done=done, total=total)
