"""What a store owes itself whoever calls: nothing stays held when a caller leaves or the store
stops, what is told wrongly ends nothing, and the watch over its laws goes on."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
import pytest

from kvstore import attaching, errors, memory, serve, wire
from kvstore.config import KvStoreSettings
from kvstore.errors import IntegrityError
from kvstore.newcomer import Newcomer
from kvstore.nixl_agent import NixlAgent, Region
from kvstore.push_peers import PeerBlocks
from kvstore.store import Store
from process import serving
from process.errors import FailedPrecondition, InvalidArgument
from protos import kvstore_pb2, kvstore_pb2_grpc
from tests.harness.waiting import until, within

Chain = Callable[[str, int], list[bytes]]
NewWorker = Callable[..., Any]
LARGE = 1 << 20


@pytest.fixture
def no_gc() -> Iterator[None]:
    """What is let go is let go by us, not by a collection that happens to come."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_gc")
async def test_a_reader_that_leaves_midway_holds_nothing(
    store_settings: KvStoreSettings, new_worker: NewWorker, chain: Chain
) -> None:
    settings = dataclasses.replace(store_settings, capacity_bytes=16 * LARGE)
    async with serve.running(settings) as store, serving.channel(store.address) as channel:
        worker = await new_worker(store.address, "grpc", block_bytes=LARGE, num_blocks=8)
        put = await worker.put(chain("a", 8), range(8))
        truth = store.node.store
        assert truth is not None
        (attachment,) = truth.attachments
        stub = kvstore_pb2_grpc.KvStoreStub(channel)
        request = kvstore_pb2.ReadRequest(
            attachment_id=attachment.attachment_id,
            lease_id=put.lease_id,
            blocks=[wire.block_to_proto(block) for block in put.refs],
            chunk_bytes=64 * 1024,
        )
        for _ in range(10):
            call = stub.Read(request, timeout=10.0)
            await call.read()
            assert len(truth.leases) > 1
            call.cancel()
        await worker.client.release([put.lease_id], deadline=within())
        await until(lambda: len(truth.leases) == 0)
        assert truth.num_pinned() == 0


async def test_a_bad_block_is_counted_once_however_many_complain(
    store: serve.RunningStore, new_worker: NewWorker, chain: Chain
) -> None:
    worker = await new_worker(store.address, "grpc")
    put = await worker.put(chain("a", 4), range(4))
    assert store.node.slab is not None and store.node.store is not None
    store.node.slab.block(put.refs[2].frame)[7] ^= 1
    (attachment,) = store.node.store.attachments
    told = [put.refs[2], put.refs[2]]
    dropped = await asyncio.gather(
        *(store.node.report(attachment.attachment_id, told) for _ in range(3))
    )
    assert sorted(dropped) == [0, 0, 2]
    assert store.node.store.refused[errors.CHECKSUM] == 1
    await worker.client.release([put.lease_id], deadline=within())


async def test_a_broken_law_is_told_and_does_not_end_the_watch(
    store_settings: KvStoreSettings,
    new_worker: NewWorker,
    chain: Chain,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lapsed leases go on being ended without a call; what broke stays in the status."""
    async with serve.running(store_settings) as store:
        worker = await new_worker(store.address, "grpc")
        await worker.put(chain("a", 1), [0], ttl_s=0.3)
        truth, real = store.node.store, Store.lapse
        assert truth is not None

        def broken(self: Store, now_s: float) -> None:
            monkeypatch.setattr(Store, "lapse", real)
            raise IntegrityError("a law that was broken once")

        monkeypatch.setattr(Store, "lapse", broken)
        await until(lambda: "broken once" in store.node.integrity_error)
        await until(lambda: len(truth.leases) == 0)
        assert "broken once" in await store.node.check_integrity()


async def test_heartbeats_do_not_keep_the_laws_from_being_checked(
    store_settings: KvStoreSettings, new_worker: NewWorker, chain: Chain
) -> None:
    """A store of many workers hears one between any two looks."""
    async with serve.running(dataclasses.replace(store_settings, sweep_interval_s=0.25)) as store:
        worker = await new_worker(store.address, "grpc")
        put = await worker.put(chain("a", 1), [0])
        truth = store.node.store
        assert truth is not None
        entry = truth.catalog.find(put.refs[0].chain_hash)
        assert entry is not None

        async def beat() -> None:
            while True:
                await worker.client.match([], ttl_s=1, deadline=within())

        beating = [asyncio.create_task(beat()) for _ in range(4)]
        entry.num_pins += 1
        try:
            await until(lambda: "pins" in store.node.integrity_error)
        finally:
            entry.num_pins -= 1
            for task in beating:
                task.cancel()
            await asyncio.wait(beating)


async def test_numbers_that_cannot_be_are_refused_and_the_status_goes_on(
    store: serve.RunningStore, new_worker: NewWorker, chain: Chain
) -> None:
    """A spoiled count would not fit into the status, nor into the row in the registry."""
    worker = await new_worker(store.address, "grpc")
    put = await worker.put(chain("a", 1), [0])
    most = 2**64 - 1
    async with serving.channel(store.address) as channel:
        stub = kvstore_pb2_grpc.KvStoreStub(channel)
        for _ in range(2):
            for call, request in (
                (stub.Renew, kvstore_pb2.RenewRequest(lease_id=put.lease_id, num_bytes_read=most)),
                (stub.Release, kvstore_pb2.ReleaseRequest(num_bytes_read=most)),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call(request, timeout=10.0)
                error = serving.error_from_rpc(caught.value)
                assert isinstance(error, InvalidArgument) and error.field == "num_bytes_read"
    assert (await worker.status()).num_bytes_read == 0
    assert serve.store_status(store.node, store.address).num_leases == 1


async def test_a_pin_that_would_be_over_at_once_is_refused(
    store: serve.RunningStore, new_worker: NewWorker, chain: Chain
) -> None:
    worker = await new_worker(store.address, "grpc")
    put = await worker.put(chain("a", 2), range(2))
    assert store.node.store is not None
    (attachment,) = store.node.store.attachments
    request = kvstore_pb2.MatchRequest(
        attachment_id=attachment.attachment_id, chain_hashes=chain("a", 2), pin=True
    )
    async with serving.channel(store.address) as channel:
        stub = kvstore_pb2_grpc.KvStoreStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Match(request, timeout=10.0)
        assert "ttl_ms" in (caught.value.details() or "")
        request.lease_id = put.lease_id  # whose own end counts
        assert len((await stub.Match(request, timeout=10.0)).blocks) == 2


async def test_a_store_that_stops_while_it_takes_its_memory_leaves_none(
    store_settings: KvStoreSettings, new_worker: NewWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_go_on, made = threading.Event(), threading.Event(), threading.Event()
    make = memory.make

    def slow(*arguments: Any) -> Any:
        begun.set()
        may_go_on.wait(20)
        try:
            return make(*arguments)
        finally:
            made.set()

    monkeypatch.setattr(memory, "make", slow)
    async with serve.running(dataclasses.replace(store_settings, stop_timeout_s=0.0)) as store:
        attaching = asyncio.create_task(new_worker(store.address, "grpc"))
        await until(begun.is_set)
        asyncio.get_running_loop().call_later(0.3, may_go_on.set)
    await until(made.is_set)
    await asyncio.wait([attaching])
    assert attaching.exception() is not None
    assert not list(Path(store_settings.slab_dir).glob(f"*{store.node.incarnation.hex()}*"))


async def test_a_worker_that_leaves_while_it_is_met_leaves_no_peer_behind(
    store: serve.RunningStore, new_worker: NewWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancelled while the store's NIXL agent takes its metadata in."""
    await new_worker(store.address, "nixl")
    theirs = await NixlAgent.start("worker-that-leaves", "lo", within(30.0))
    blocks = np.zeros((4, 5000), dtype=np.uint8)
    region = Region(int(blocks.ctypes.data), blocks.nbytes)
    newcomer = Newcomer(
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
    store: serve.RunningStore, new_worker: NewWorker, monkeypatch: pytest.MonkeyPatch
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
    new_worker: NewWorker, new_store: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client must not keep what belongs to a dead process: memory of its GPU, for one."""
    monkeypatch.setattr(attaching, "HEARTBEAT_S", 1000.0)
    process = await new_store()
    worker = await new_worker(process.address, "grpc")
    assert (await worker.status()).num_attachments == 1
    await process.end()
    async with asyncio.timeout(20):
        while worker.client.broken is None:
            await asyncio.sleep(0.01)
    assert "connect" in worker.client.broken
