"""A store that is stopped, left or refused while it takes its memory or meets a worker's NIXL
agent, and one that dies: no message brings these moments about, so they are held inside."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import store_node, store_process
from kvstore.block_source import WorkerInfo
from kvstore.config import KvStoreSettings
from kvstore.nixl_push import PeerBlocks
from kvstore.transport.nixl_agent import NixlAgent, Region
from process.errors import FailedPrecondition
from tests.harness.store import NewWorker
from tests.harness.waiting import until, within


async def test_a_store_that_stops_while_it_takes_its_memory_leaves_none(
    store_settings: KvStoreSettings, new_worker: NewWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_go_on, made = threading.Event(), threading.Event(), threading.Event()
    take_memory = store_node.take_memory

    def slow(*arguments: Any) -> Any:
        begun.set()
        may_go_on.wait(20)
        try:
            return take_memory(*arguments)
        finally:
            made.set()

    monkeypatch.setattr(store_node, "take_memory", slow)
    async with store_process.running(
        dataclasses.replace(store_settings, stop_timeout_s=0.0)
    ) as store:
        attaching = asyncio.create_task(new_worker(store.address, "grpc"))
        await until(begun.is_set)
        asyncio.get_running_loop().call_later(0.3, may_go_on.set)
    await until(made.is_set)
    await asyncio.wait([attaching])
    assert attaching.exception() is not None
    assert not list(Path(store_settings.slab_dir).glob(f"*{store.node.incarnation.hex()}*"))


async def test_a_worker_that_leaves_while_it_is_met_leaves_no_peer_behind(
    store: store_process.RunningStore, new_worker: NewWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancelled while the store's NIXL agent takes its metadata in."""
    await new_worker(store.address, "nixl")
    theirs = await NixlAgent.start("worker-that-leaves", "lo", within(30.0))
    blocks = np.zeros((4, 5000), dtype=np.uint8)
    region = Region(int(blocks.ctypes.data), blocks.nbytes)
    newcomer = WorkerInfo(
        worker_id="w",
        worker_incarnation=b"1" * 16,
        model_fingerprint=b"",
        block_bytes=5000,
        transport="nixl",
        peer=PeerBlocks(await theirs.register(region), region, 4, 5000),
    )
    assert store.node.peers is not None
    agent = store.node.peers._agent
    assert agent is not None
    is_meeting, may_go_on = threading.Event(), threading.Event()
    call, gone = agent.call, asyncio.Event()

    async def slowly(job: Callable[[Any], Any]) -> Any:
        def inner(nixl: Any) -> Any:
            is_meeting.set()
            may_go_on.wait(20)
            return job(nixl)

        return await call(inner)

    async def removed(peer: str) -> None:
        assert peer == "worker-that-leaves"
        gone.set()

    monkeypatch.setattr(agent, "call", slowly)
    monkeypatch.setattr(agent, "remove_peer", removed)
    attaching = asyncio.create_task(store.node.attach(newcomer))
    await until(is_meeting.is_set)
    attaching.cancel()
    may_go_on.set()
    await asyncio.wait([attaching])
    assert attaching.cancelled()
    await until(gone.is_set)
    await theirs.close(within())


async def test_an_agent_that_cannot_take_the_slab_is_not_left_behind(
    store: store_process.RunningStore, new_worker: NewWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each further worker would leave another one, with its threads."""
    register, refused = NixlAgent.register, []

    async def refuse(self: NixlAgent, *arguments: Any, **options: Any) -> bytes:
        if not self.name.startswith("store-"):
            return await register(self, *arguments, **options)
        refused.append(self)
        raise FailedPrecondition("no room for it")

    monkeypatch.setattr(NixlAgent, "register", refuse)
    for _ in range(2):
        with pytest.raises(FailedPrecondition, match="no room for it"):
            await new_worker(store.address, "nixl")
    assert len(refused) == 2
    await until(lambda: not any(a._thread is not None and a._thread.is_alive() for a in refused))
    monkeypatch.undo()
    await new_worker(store.address, "nixl")


async def test_a_store_that_dies_is_known_to_be_gone_before_the_next_heartbeat(
    new_worker: NewWorker, new_store: Callable[..., Any]
) -> None:
    """A client must not keep what belongs to a dead process: memory of its GPU, for one."""
    process = await new_store()
    worker = await new_worker(process.address, "grpc", heartbeat_s=1000.0)
    assert (await worker.status()).num_attachments == 1
    await process.end()
    async with asyncio.timeout(20):
        while worker.client.broken is None:
            await asyncio.sleep(0.01)
    assert "connect" in worker.client.broken
