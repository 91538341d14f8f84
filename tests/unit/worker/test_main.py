"""What a worker process has its engine loaded with."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.errors import LoadError
from engine.speculation.config import SpeculationConfig
from engine.speculation.remote import DraftPeer, DraftTraces
from process.metrics import HealthProbes
from services.decode.role import DecodeRole
from services.worker import main
from services.worker.config import WorkerLimits, WorkerSettings
from services.worker.runtime import WorkerCore
from tests.harness.gated_engine import fake_engine


async def test_it_is_loaded_with_all_that_a_first_grammar_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[bool] = []

    def load(*_: Any, prepares_grammars: bool, **__: Any) -> None:
        told.append(prepares_grammars)
        raise LoadError("no model here")

    monkeypatch.setattr("engine.engine.load_engine", load)
    with pytest.raises(LoadError, match="no model here"):
        await main._load(WorkerSettings(), asyncio.Event(), HealthProbes("loading"), ())
    assert told == [True]


async def test_requests_watch_the_traces_that_draft_workers_calls_are_noted_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From the first one on: before its role begins, and so before the worker listens."""
    noted: list[DraftTraces] = []
    watched: list[DraftTraces] = []

    async def load(_: Any, __: Any, ___: Any, peers: Sequence[DraftPeer]) -> Any:
        noted.extend(peer.traces for peer in peers)
        return fake_engine()

    def make_role(core: WorkerCore) -> DecodeRole:
        watched.append(core.draft_traces)
        return DecodeRole(core)

    monkeypatch.setattr(main, "_load", load)
    engine = EngineConfig(speculation=SpeculationConfig(draft_workers=("127.0.0.1:1",)))
    settings = WorkerSettings(
        worker_id="w",
        redis_url="",
        engine=engine,
        limits=WorkerLimits(drain_s=0.2, stop_grace_s=0.05),
    )
    stop = asyncio.Event()
    stop.set()
    await main.run(settings, stop, "decode", make_role)
    assert len(noted) == len(watched) == 1 and watched[0] is noted[0]


def test_probes_are_told_how_far_the_loading_is() -> None:
    health = HealthProbes("loading the model")
    progress = main._Progress(health)
    for done in (0, 3, 10):
        progress("weights", done, 10)
        assert health.why_not_ready() == f"loading the model: weights, {done} of 10"
