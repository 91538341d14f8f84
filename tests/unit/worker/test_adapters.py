"""WorkerAdapters: files that hang hold nobody up, and what is known follows the engine."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.engine import LLMEngine
from engine.lora.limits import LoraLimits
from engine.lora.manager import AdapterInfo
from process.rpc_errors import FailedPrecondition, NoCapacity, Unavailable
from protos.common_pb2 import AdapterVersion, AdapterWish
from services import adapter_wishes
from services.worker import adapters
from services.worker.adapters import MAX_NUM_READING, WorkerAdapters
from tests.harness.gated_engine import fake_engine, running
from tests.harness.waiting import settled

WAIT_S = 10.0


def _with_adapters(monkeypatch: pytest.MonkeyPatch) -> LLMEngine:
    """A fake engine that takes any adapter, and names each by its digest."""
    engine = fake_engine()
    infos: dict[str, AdapterInfo] = {}

    def install(name: str, adapter: object) -> AdapterInfo:
        return infos.setdefault(name, AdapterInfo(name, name, 1, 1, ()))

    monkeypatch.setattr(engine, "adapter_limits", LoraLimits)
    monkeypatch.setattr(engine, "install_adapter", install)
    monkeypatch.setattr(engine, "unload_adapter", lambda name: infos.pop(name))
    monkeypatch.setattr(engine, "adapters", lambda: tuple(infos.values()))
    return engine


def _read_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder holds an adapter whose digest is its name."""
    monkeypatch.setattr(
        adapters, "read_adapter", lambda folder, *_: SimpleNamespace(digest=folder.name)
    )


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
    _read_digests(monkeypatch)
    async with running(_with_adapters(monkeypatch)) as thread:
        known = WorkerAdapters(thread, ())
        changes: list[int] = []
        known.on_change = lambda: changes.append(1)
        await known.load("a", Path("aa"))
        known.check("a", "aa")
        assert len(changes) == 1
        entered, let_go = threading.Event(), threading.Event()
        thread.post(lambda _: (entered.set(), let_go.wait(WAIT_S)))
        assert await asyncio.to_thread(entered.wait, WAIT_S)
        unloading = asyncio.create_task(known.unload("a"))
        await settled()  # it is in the engine's queue
        unloading.cancel()
        await asyncio.gather(unloading, return_exceptions=True)
        let_go.set()
        await thread.call(lambda engine: None)
        with pytest.raises(FailedPrecondition, match="not loaded"):
            known.check("a", "aa")
        assert len(changes) == 2


def _wish(version: int, current: str, *old: str, model: str = "fake") -> dict[bytes, bytes]:
    """Of "a", as it stands in Redis. A content's folder has its name."""
    wish = AdapterWish(name="a", model=model, version=version)
    if current:
        wish.current.CopyFrom(AdapterVersion(digest=current, folder=f"/{current}"))
    wish.old.extend(AdapterVersion(digest=digest) for digest in old)
    return {b"a": adapter_wishes.to_json(wish).encode()}


async def _followed(known: WorkerAdapters, raw: dict[bytes, bytes]) -> list[str]:
    """Digests that are loaded of "a" when the wish is followed."""
    known.follow(raw)
    if known._following is not None:
        async with asyncio.timeout(WAIT_S):
            await known._following
    return [status.digest for status in known.to_proto() if status.name == "a"]


async def test_a_worker_follows_what_is_wished(monkeypatch: pytest.MonkeyPatch) -> None:
    _read_digests(monkeypatch)
    async with running(_with_adapters(monkeypatch)) as thread:
        known = WorkerAdapters(thread, (), model_names=("fake",))
        await known.load("a", Path("/start"))  # by the worker's settings
        assert await _followed(known, {}) == ["start"]
        assert await _followed(known, _wish(1, "one", "start")) == ["one", "start"]
        await known.load("a", Path("/two"), hold_s=WAIT_S, version=1)
        assert await _followed(known, _wish(1, "one")) == ["one", "two"]
        assert await _followed(known, _wish(2, "two", "one")) == ["one", "two"]
        assert await _followed(known, {}) == ["one", "two"]  # Redis lost it
        assert await _followed(known, _wish(1, "one")) == ["one", "two"]  # or is behind
        assert await _followed(known, _wish(3, "")) == []
        assert await _followed(known, _wish(4, "other", model="other")) == []


async def test_what_is_held_in_vain_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    _read_digests(monkeypatch)
    now_s = 0.0
    async with running(_with_adapters(monkeypatch)) as thread:
        known = WorkerAdapters(thread, (), model_names=("fake",), clock=lambda: now_s)
        await known.load("a", Path("/lapses"), hold_s=5.0)
        await known.load("a", Path("/given"), hold_s=5.0)
        await known.unload("a", "given")
        assert await _followed(known, {}) == ["lapses"]
        now_s = 5.0
        assert await _followed(known, {}) == []
        await known.load("a", Path("/loses"), hold_s=5.0, version=1)
        assert await _followed(known, _wish(2, "won")) == ["won"]


async def test_a_folder_with_other_content_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    found = "other"
    monkeypatch.setattr(adapters, "read_adapter", lambda *_: SimpleNamespace(digest=found))
    async with running(_with_adapters(monkeypatch)) as thread:
        known = WorkerAdapters(thread, (), model_names=("fake",), clock=lambda: now_s)
        assert await _followed(known, _wish(1, "one")) == []
        found = "one"
        assert await _followed(known, _wish(1, "one")) == []  # not read again at each beat
        now_s = adapters.RETRY_S
        assert await _followed(known, _wish(1, "one")) == ["one"]
