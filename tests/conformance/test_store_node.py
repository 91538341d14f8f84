"""A store at moments that no message brings about, so they are held inside: it is stopped, left or
refused while it takes its memory or meets a worker's NIXL agent, it dies, its laws are recomputed
for long."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import invariants, store_node, store_process
from kvstore.block_source import WorkerInfo
from kvstore.block_store import BlockStore
from kvstore.config import KvStoreSettings
from kvstore.nixl_push import PeerBlocks
from kvstore.transport.nixl_agent import NixlAgent, Region
from process.rpc_errors import FailedPrecondition
from tests.harness.store import NewStore, NewWorker, chain_of
from tests.harness.waiting import WAIT_S, until, within


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
    new_worker: NewWorker, new_store: NewStore
) -> None:
    """A client must not keep what belongs to a dead process: memory of its GPU, for one."""
    process = await new_store()
    worker = await new_worker(process.address, "grpc", heartbeat_s=1000.0)
    assert (await worker.status()).num_attachments == 1
    await process.end()
    await until(lambda: worker.client.broken is not None)
    assert "connect" in worker.client.broken


async def test_a_status_does_not_wait_for_the_end_of_a_check(
    store: store_process.RunningStore, new_worker: NewWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a store of millions of blocks: a check begins and does not end until it may."""
    worker = await new_worker(store.address, "grpc")
    put = await worker.put(chain_of("a", 4), range(4))
    began, may_end, has_ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
    real = invariants.check_store

    def check_store(truth: BlockStore) -> Iterator[None]:
        began.set()
        while not may_end.is_set():
            yield
        yield from real(truth)
        has_ended.set()

    monkeypatch.setattr(invariants, "check_store", check_store)
    await asyncio.wait_for(began.wait(), WAIT_S)  # by itself, when something was put
    for asks_for_one in (False, True, False):
        status = await worker.client.status(check_integrity=asks_for_one, deadline=within())
        assert (status.num_committed, status.integrity_error) == (4, "")
    await worker.put(chain_of("b", 2), range(4, 6))
    assert not has_ended.is_set()
    may_end.set()
    await asyncio.wait_for(has_ended.wait(), WAIT_S)
    await worker.release(put.lease_id)
    assert (await worker.status()).num_committed == 6


async def test_leases_end_while_a_check_goes_on(
    store: store_process.RunningStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a store of a million blocks, whose only worker is silent: no check comes to its end."""
    began = asyncio.Event()

    def check_store(truth: BlockStore) -> Iterator[None]:
        began.set()
        while True:
            yield

    monkeypatch.setattr(invariants, "check_store", check_store)
    worker = await store.node.attach(WorkerInfo("w", bytes(16), bytes(32), 4096, "grpc"))
    truth: Any = store.node.store
    truth.reserve(worker.attachment_id, b"", [bytes(16)], ttl_s=1.0, now_s=store.node.now_s())
    async with asyncio.timeout(WAIT_S):
        await began.wait()
    await until(lambda: len(truth.leases) == 0)
