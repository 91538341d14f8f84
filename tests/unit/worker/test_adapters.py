"""WorkerAdapters: files that hang hold nobody up, and what is known follows the engine."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from engine.loop import Engine
from engine.lora.config import LoraLimits
from engine.lora.registry import AdapterInfo
from process.errors import FailedPrecondition, NoCapacity, Unavailable
from services.worker import adapters
from services.worker.adapters import MAX_NUM_READING, WorkerAdapters
from tests.unit.worker.builders import fake_engine, running

WAIT_S = 10.0


def _with_adapters(monkeypatch: pytest.MonkeyPatch) -> Engine:
    """A fake engine that takes any adapter, with a digest of its name."""
    engine = fake_engine()
    infos: dict[str, AdapterInfo] = {}

    def install(name: str, adapter: object) -> AdapterInfo:
        return infos.setdefault(name, AdapterInfo(name, name * 2, 1, 1, ()))

    monkeypatch.setattr(engine, "adapter_limits", LoraLimits)
    monkeypatch.setattr(engine, "install_adapter", install)
    monkeypatch.setattr(engine, "unload_adapter", lambda name: infos.pop(name))
    monkeypatch.setattr(engine, "adapters", lambda: tuple(infos.values()))
    return engine


async def test_files_that_hang_do_not_hold_up_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    let_go = threading.Event()
    monkeypatch.setattr(adapters, "read_adapter", lambda *_: let_go.wait(WAIT_S))
    async with running(_with_adapters(monkeypatch)) as thread:
        known = WorkerAdapters(thread, (), read_timeout_s=0.01)
        try:
            for _ in range(MAX_NUM_READING):
                with pytest.raises(Unavailable, match="was not read within"):
                    await known.load("a", Path("hung"))
                async with asyncio.timeout(WAIT_S):
                    assert await thread.call(lambda engine: 1) == 1
            with pytest.raises(NoCapacity, match="being read already"):
                await known.load("a", Path("hung"))
        finally:
            let_go.set()
            for reader in known._readers:
                await asyncio.to_thread(reader.join, WAIT_S)
        assert known.to_proto() == []


async def test_what_is_known_follows_the_engine_when_the_caller_is_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(adapters, "read_adapter", lambda *_: object())
    async with running(_with_adapters(monkeypatch)) as thread:
        known = WorkerAdapters(thread, ())
        changes: list[int] = []
        known.on_change = lambda: changes.append(1)
        await known.load("a", Path("there"))
        assert known.digest("a") == "aa" and len(changes) == 1
        entered, let_go = threading.Event(), threading.Event()
        thread.post(lambda _: (entered.set(), let_go.wait(WAIT_S)))
        assert await asyncio.to_thread(entered.wait, WAIT_S)
        unloading = asyncio.create_task(known.unload("a"))
        await asyncio.sleep(0)  # it is in the engine's queue
        unloading.cancel()
        await asyncio.gather(unloading, return_exceptions=True)
        let_go.set()
        await thread.call(lambda engine: None)
        with pytest.raises(FailedPrecondition, match="not loaded"):
            known.digest("a")
        assert len(changes) == 2
