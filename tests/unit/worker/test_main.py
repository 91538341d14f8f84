"""What a worker process has its engine loaded with."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from engine.errors import LoadError
from process.health import Health
from services.worker import main
from services.worker.config import WorkerSettings


@pytest.mark.parametrize("settings", [WorkerSettings(), WorkerSettings(prepare_grammars=True)])
async def test_it_prepares_for_grammars_as_its_settings_say(
    settings: WorkerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[bool] = []

    def load(*_: Any, prepares_grammars: bool, **__: Any) -> None:
        told.append(prepares_grammars)
        raise LoadError("no model here")

    monkeypatch.setattr("engine.loop.load_engine", load)
    with pytest.raises(LoadError, match="no model here"):
        await main._load(settings, asyncio.Event(), Health("loading"), ())
    assert told == [settings.prepare_grammars]
