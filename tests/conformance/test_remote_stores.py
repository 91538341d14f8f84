"""A worker's ways to other nodes' stores, over every transport, with real stores: met, met again
after a restart, refused by name, tried again by one."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from engine.errors import IntegrityError
from kvstore import serve
from kvstore.client import StoreClient
from kvstore.config import KvStoreSettings
from kvstore.errors import (
    INCARNATION,
    STORE_UNAVAILABLE,
    LeaseLapsed,
    Quarantine,
    TransferTimeout,
)
from kvstore.transport.base import BlockMemory
from process.errors import DeadlineExceeded, Unavailable
from services.worker import stores as module
from services.worker.breaker import BACKOFF_MAX_S
from services.worker.provenance import FINGERPRINT
from services.worker.store_target import StoreTarget
from services.worker.stores import RemoteStores, StoreUnusable
from tests.harness.store import BLOCK_BYTES, BLOCK_SIZE, NUM_BLOCKS, TRANSPORTS, StoreProcess
from tests.harness.waiting import Clock, until, within

Chain = Callable[[str, int], list[bytes]]
MODEL = "ab" * 16


def target_of(transport: str, view: np.ndarray[Any, Any] | None = None) -> StoreTarget:
    if view is None:
        view = np.zeros((NUM_BLOCKS, BLOCK_BYTES), dtype=np.uint8)
    return StoreTarget(
        "", "worker", secrets.token_bytes(16), MODEL, BlockMemory.of(view), transport
    )


@asynccontextmanager
async def remote(
    target: StoreTarget | None,
    clock: Clock,
    max_stores: int = 4,
    lease_ttl_s: float = 30.0,
    ping_budget_s: float = 1.0,
) -> AsyncIterator[RemoteStores]:
    stores = RemoteStores(
        target,
        max_stores=max_stores,
        attach_budget_s=10.0,
        lease_ttl_s=lease_ttl_s,
        ping_budget_s=ping_budget_s,
        clock=clock,
    )
    try:
        yield stores
        stores.check_integrity()
    finally:
        await stores.stop(timeout_s=5.0)
        assert stores.clients == []


@pytest.fixture
def clock() -> Clock:
    return Clock(1000.0)


async def life_of(process: StoreProcess) -> bytes:
    """The incarnation that answers there now."""
    probe = await StoreClient.attach(
        process.address,
        worker_id="probe",
        worker_incarnation=secrets.token_bytes(16),
        fingerprint=MODEL,
        memory=BlockMemory.of(np.zeros((1, BLOCK_BYTES), dtype=np.uint8)),
        transport="grpc",
        timeout_s=10.0,
    )
    await probe.close()
    return probe.incarnation


async def node_of(running: serve.RunningStore) -> tuple[str, str, bytes]:
    return running.node.node_id, running.address, running.node.incarnation


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_all_who_ask_first_share_one_attachment(
    store: serve.RunningStore, transport: str, clock: Clock
) -> None:
    async with remote(target_of(transport), clock) as stores:
        node = await node_of(store)
        clients = await asyncio.gather(*(stores.client(*node, within()) for _ in range(20)))
        assert len({id(client) for client in clients}) == 1
        assert clients[0].transport_name == transport
        assert stores.num_attached == 1
        assert await stores.client(*node, within()) is clients[0]


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_who_leaves_early_does_not_take_the_attachment_along(
    store: serve.RunningStore, transport: str, clock: Clock
) -> None:
    async with remote(target_of(transport), clock) as stores:
        node = await node_of(store)
        with pytest.raises(DeadlineExceeded):
            await stores.client(*node, within(0.0))
        cancelled = asyncio.create_task(stores.client(*node, within()))
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.wait([cancelled])
        assert (await stores.client(*node, within())).broken is None
        assert stores.num_attached == 1
        assert stores.refused == {"deadline": 1}


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_store_that_restarts_under_the_same_name_is_met_again(
    new_store: Callable[..., Any],
    store_settings: KvStoreSettings,
    chain: Chain,
    transport: str,
    clock: Clock,
    seed: int,
) -> None:
    """Killed and started again at the same address and name, with blocks asked for in between: no
    crash, no stale client or agent, and who means the former life is told so."""
    process = await new_store(dataclasses.replace(store_settings, node_id="node"))
    view = np.random.default_rng(seed).integers(0, 256, (NUM_BLOCKS, BLOCK_BYTES), dtype=np.uint8)
    async with remote(target_of(transport, view), clock) as stores:
        lives = []
        for life in range(2):
            incarnation = await life_of(process)
            lives.append(incarnation)
            client = await stores.client("node", process.address, incarnation, within())
            assert client.incarnation == incarnation
            hashes = chain(f"life {life}", 4)
            put = await client.put_blocks(
                None,
                b"",
                list(zip(hashes, range(4), strict=True)),
                None,
                60.0,
                within(),
                num_tokens=BLOCK_SIZE,
            )
            items = list(zip(put.refs, range(10, 14), strict=True))
            got = await client.get_blocks(put.lease_id, items, within(), incarnation=incarnation)
            assert got.failed == {} and np.array_equal(view[10:14], view[:4])
            for former in lives[:-1]:
                with pytest.raises(StoreUnusable) as refused:
                    await stores.client("node", process.address, former, within())
                assert refused.value.reason == INCARNATION
            await process.end()
            got = await client.get_blocks(put.lease_id, items, within(1.0))
            assert set(got.failed) == set(range(4)) or transport == "shm"  # the mapping stays
            stores.suspect(client, Unavailable("the test killed it"))
            with pytest.raises(StoreUnusable) as away:
                await stores.client("node", process.address, incarnation, within())
            assert away.value.reason == STORE_UNAVAILABLE
            await process.start()
            clock.now_s += BACKOFF_MAX_S + 1
        assert len(set(lives)) == 2 == stores.num_attached


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_restart_that_nobody_noticed_is_found_by_who_means_the_new_life(
    new_store: Callable[..., Any], store_settings: KvStoreSettings, transport: str, clock: Clock
) -> None:
    """No failed call came between: the old client is asked, not believed."""
    process = await new_store(dataclasses.replace(store_settings, node_id="node"))
    async with remote(target_of(transport), clock) as stores:
        old = await stores.client("node", process.address, await life_of(process), within())
        await process.end()
        await process.start()
        incarnation = await life_of(process)
        try:
            new = await stores.client("node", process.address, incarnation, within())
        except StoreUnusable:  # the look found a connection that was gone: once more, later
            clock.now_s += BACKOFF_MAX_S + 1
            new = await stores.client("node", process.address, incarnation, within())
        assert new is not old and new.incarnation == incarnation


async def test_a_dead_store_is_refused_at_once_then_tried_by_one_and_met_when_it_returns(
    new_store: Callable[..., Any],
    store_settings: KvStoreSettings,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process = await new_store(dataclasses.replace(store_settings, node_id="node"))
    incarnation = await life_of(process)
    attempts = 0
    real = module.attach

    async def counted(target: StoreTarget, timeout_s: float) -> StoreClient:
        nonlocal attempts
        attempts += 1
        return await real(target, timeout_s)

    monkeypatch.setattr(module, "attach", counted)
    async with remote(target_of("grpc"), clock) as stores:

        async def ask() -> StoreClient | StoreUnusable:
            try:
                return await stores.client("node", process.address, incarnation, within())
            except StoreUnusable as error:
                return error

        await process.end()
        first = await asyncio.gather(*(ask() for _ in range(10)))
        assert attempts == 1 and all(isinstance(each, StoreUnusable) for each in first)
        assert isinstance(await ask(), StoreUnusable) and attempts == 1  # open: not even tried
        for round_ in range(3):
            clock.now_s += BACKOFF_MAX_S + 1
            refused = await asyncio.gather(*(ask() for _ in range(10)))
            assert attempts == 2 + round_, "half-open: one tries"
            assert all(isinstance(each, StoreUnusable) for each in refused)
        await process.start()
        incarnation = await life_of(process)
        assert isinstance(await ask(), StoreUnusable) and attempts == 4  # the back-off still runs
        clock.now_s += BACKOFF_MAX_S + 1
        back = await asyncio.gather(*(ask() for _ in range(10)))
        assert attempts == 5
        met = [each for each in back if isinstance(each, StoreClient)]
        assert len(met) == 1, "the others were refused while one tried"
        assert await ask() is met[0]
        assert set(stores.refused) == {STORE_UNAVAILABLE}


async def test_a_stalled_store_is_refused_until_it_answers(
    new_store: Callable[..., Any], store_settings: KvStoreSettings, clock: Clock
) -> None:
    process = await new_store(dataclasses.replace(store_settings, node_id="node"))
    incarnation = await life_of(process)
    async with remote(target_of("grpc"), clock) as stores:
        client = await stores.client("node", process.address, incarnation, within())
        stores.suspect(client, DeadlineExceeded("slow once"))
        with pytest.raises(StoreUnusable):
            await stores.client("node", process.address, incarnation, within())
        await stores.settle()
        assert await stores.client("node", process.address, incarnation, within()) is client
        await process.pause()
        stores.suspect(client, DeadlineExceeded("slow again"))
        await until(lambda: stores.clients == [])
        with pytest.raises(StoreUnusable):
            await stores.client("node", process.address, incarnation, within())
        process.wake()
        clock.now_s += BACKOFF_MAX_S + 1
        again = await stores.client("node", process.address, incarnation, within())
        assert again is not client and again.broken is None


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_transfer_that_hangs_ends_its_client(
    store: serve.RunningStore, transport: str, clock: Clock
) -> None:
    async with remote(target_of(transport), clock) as stores:
        node = await node_of(store)
        client = await stores.client(*node, within())
        settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        settled.set_result(None)
        stores.suspect(client, TransferTimeout("hangs", Quarantine((1,), settled)))
        assert stores.clients == []
        stores.suspect(client, TransferTimeout("hangs", Quarantine((1,), settled)))  # twice is once
        clock.now_s += 0.51
        assert await stores.client(*node, within()) is not client


async def test_another_layout_is_refused_by_its_name(
    store: serve.RunningStore, clock: Clock
) -> None:
    node = await node_of(store)
    async with remote(target_of("grpc"), clock) as first:
        await first.client(*node, within())
        other = np.zeros((4, BLOCK_BYTES + 8), dtype=np.uint8)
        async with remote(target_of("grpc", other), clock) as stores:
            with pytest.raises(StoreUnusable, match="block_bytes") as refused:
                await stores.client(*node, within())
            assert refused.value.reason == FINGERPRINT
            assert stores.refused == {FINGERPRINT: 1}


async def test_another_node_at_the_address_is_not_taken_for_it(
    store: serve.RunningStore, clock: Clock
) -> None:
    _, address, incarnation = await node_of(store)
    async with remote(target_of("grpc"), clock) as stores:
        with pytest.raises(StoreUnusable) as refused:
            await stores.client("another", address, incarnation, within())
        assert refused.value.reason == INCARNATION
        assert stores.clients == []


@pytest.mark.parametrize("has_store", [True, False])
async def test_a_worker_that_pulls_from_nobody_says_so(
    store: serve.RunningStore, clock: Clock, has_store: bool
) -> None:
    target = dataclasses.replace(target_of("grpc"), transport="") if has_store else None
    async with remote(target, clock) as stores:
        with pytest.raises(StoreUnusable, match="remote_transport"):
            await stores.client(*await node_of(store), within())
        assert stores.clients == []


async def test_idle_ones_make_room_and_busy_ones_do_not(
    store_settings: KvStoreSettings, clock: Clock
) -> None:
    async with (
        serve.running(store_settings) as a,
        serve.running(store_settings) as b,
        serve.running(store_settings) as c,
        remote(target_of("grpc"), clock, max_stores=2) as stores,
    ):
        client_a = await stores.client(*await node_of(a), within())
        client_b = await stores.client(*await node_of(b), within())
        with pytest.raises(StoreUnusable, match="max_remote_stores"):
            await stores.client(*await node_of(c), within())
        stores.sweep()  # as it does every few seconds: what was used by now is seen
        clock.now_s += module.MIN_IDLE_S
        with client_a._moving():  # the idlest, but bytes move
            client_c = await stores.client(*await node_of(c), within())
        assert set(stores.clients) == {client_a, client_c}
        stores.check_integrity()
        await until(lambda: client_b.broken is not None)
        clock.now_s += module.IDLE_S - 1
        with pytest.raises(LeaseLapsed):  # who has a lease renews it with the client in hand
            await client_a.renew("none", ttl_s=1.0, deadline=within())
        stores.sweep()
        clock.now_s += 1
        stores.sweep()
        assert stores.clients == [client_a]
        clock.now_s += module.IDLE_S
        stores.sweep()
        assert stores.clients == []
        clock.now_s += module.IDLE_S
        stores.sweep()
        assert not stores._peers


async def test_a_measurement_is_no_use(store: serve.RunningStore, clock: Clock) -> None:
    """A degraded link is measured again and again: that alone keeps no place for its store."""
    async with remote(target_of("grpc"), clock) as stores:
        client = await stores.client(*await node_of(store), within())
        stores.sweep()
        clock.now_s += module.IDLE_S
        await client.measure(range(2), within())
        stores.sweep()
        assert stores.clients == []


async def test_long_leases_are_renewed_seldom_and_keep_their_client_all_the_same(
    store_settings: KvStoreSettings, clock: Clock
) -> None:
    """Three renewals of 300 s: between two of them nobody else uses the client."""
    async with (
        serve.running(store_settings) as a,
        serve.running(store_settings) as b,
        remote(target_of("grpc"), clock, max_stores=1, lease_ttl_s=300.0) as stores,
    ):
        client_a = await stores.client(*await node_of(a), within())
        clock.now_s += 100.0
        stores.sweep()
        with pytest.raises(StoreUnusable, match="max_remote_stores"):
            await stores.client(*await node_of(b), within())
        assert stores.clients == [client_a] and client_a.broken is None
        clock.now_s += 50.0
        stores.sweep()
        assert stores.clients == []


async def test_what_is_gone_makes_room_at_once(
    store_settings: KvStoreSettings, clock: Clock
) -> None:
    async with (
        serve.running(store_settings) as a,
        serve.running(store_settings) as b,
        remote(target_of("grpc"), clock, max_stores=1) as stores,
    ):
        client_a = await stores.client(*await node_of(a), within())
        client_a._rpc.mark_broken("no heartbeat")
        client_b = await stores.client(*await node_of(b), within())
        assert stores.clients == [client_b]


async def test_leases_go_back_and_what_cannot_hurts_nobody(
    store: serve.RunningStore, chain: Chain, clock: Clock
) -> None:
    async with remote(target_of("grpc"), clock) as stores:
        client = await stores.client(*await node_of(store), within())
        truth = store.node.store
        assert truth is not None
        for name in ("a", "b"):
            put = await client.put_blocks(
                None, b"", [(chain(name, 1)[0], 0)], None, 60.0, within(), num_tokens=BLOCK_SIZE
            )
            stores.release_later(client, [put.lease_id, ""])
        await until(lambda: len(truth.leases) == 0)
        stores.release_later(None, ["x"])
        stores.release_later(client, ["unknown"])
        await stores.settle()
        assert client.broken is None


async def test_the_law_is_checked(store: serve.RunningStore, clock: Clock) -> None:
    async with remote(target_of("grpc"), clock) as stores:
        await stores.client(*await node_of(store), within())
        stores._max_stores = 0
        with pytest.raises(IntegrityError, match="1 remote stores are open"):
            stores.check_integrity()
        stores._max_stores = 4
