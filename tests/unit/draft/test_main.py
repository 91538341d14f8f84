"""A draft worker's life in one process: it loads the bundled model, guesses, and ends when told
to."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.errors import LoadError
from engine.speculation.config import SpeculationConfig
from engine.speculation.draft_protocol import DraftRequest
from process.rpc import PLAIN
from services.draft import main
from services.draft.config import DraftSettings
from services.worker.draft_channel import GrpcDraftChannel

CALL_S = 60.0
MODEL = EngineConfig(model="baton-5m-draft", device="cpu", num_threads=1, context_window=256)


async def test_it_loads_guesses_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def say_ready(worker: Any, *_: Any) -> None:
        ready.set_result(worker.address)

    monkeypatch.setattr(main, "_say_ready", say_ready)
    stop = asyncio.Event()
    life = asyncio.create_task(main.run(DraftSettings(engine=MODEL), stop))
    async with asyncio.timeout(CALL_S):
        await asyncio.wait([life, ready], return_when=asyncio.FIRST_COMPLETED)
        if life.done():
            await life
        channel = GrpcDraftChannel(ready.result(), PLAIN)
        about = await asyncio.wrap_future(channel.describe(CALL_S))
        assert about.model == "baton-5m-draft" and about.tokenizer_digest
        ask = DraftRequest(1, 0, list(range(20, 30)), 10, 8, 0.7, 1.0, 0, 0.0, 5, 0)
        (answer,) = await asyncio.wrap_future(channel.propose(bytes(16), [ask], CALL_S))
        assert answer.is_known and 0 < len(answer.token_ids) <= 8
        await channel.close()
        stop.set()
        await life


async def test_what_cannot_be_loaded_is_said() -> None:
    small = DraftSettings(engine=replace(MODEL, speculation=SpeculationConfig(draft_kv_bytes=1000)))
    with pytest.raises(LoadError, match="draft_kv_bytes: 1000 hold 0 blocks of baton-5m-draft"):
        await main.run(small, asyncio.Event())
