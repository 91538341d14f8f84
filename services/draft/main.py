"""How a draft worker's process starts, serves and ends: the model is loaded on a thread (progress
as log lines) -> a worker (services/draft/server.py) -> ready line. It ends on a signal, or when
guessing has failed. Signals, exit codes and parent watch are `process.entrypoint`'s.
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
"""For the last messages of calls that fail."""
PROGRESS_EVERY = 0.1
"""Loading is logged when it moved by this share."""


async def run(settings: DraftSettings, stop: asyncio.Event) -> None:
    """A draft worker process's whole life.

    Raises: what keeps it from starting (one line: what and how to fix it); Internal when guessing
    failed.
    """
    tls.TlsIdentity.of(
        settings.tls, PeerRole.DRAFT
    )  # wrong files are told before a model is loaded
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
    """Wait for whichever comes first."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


async def _load(
    settings: DraftSettings, stop: asyncio.Event, health: HealthProbes
) -> DraftModelProposer | None:
    """On a thread that does not hold the process back when it is told to stop. Returns: None when
    `stop` came first."""
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
    """So that the first call does not wait for what the model does once."""
    key = ("warm-up", 0)
    for sampling in (Sampling(max_tokens=1), Sampling(max_tokens=1, temperature=1.0)):
        proposer.propose([DraftTask(key, [0, 0], 1, sampling, 0, 64)])
        proposer.forget(key)


class _Progress:
    """Progress of loading, for probes and as log lines: not more than anybody can look at."""

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
