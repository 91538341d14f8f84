"""A worker's ways to stores, over every transport, with real stores: its home store and those of
other nodes are met, met again after a restart, refused by name, tried again by one."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import numpy as np
import pytest

from process.rpc_errors import DeadlineExceeded, NotFound, Unavailable
from tests.harness.store import (
    BLOCK_BYTES,
    NUM_BLOCKS,
    SETTINGS,
    TRANSPORTS,
    LocalStore,
    NewStore,
    chain_of,
    local_store,
)
from tests.harness.store_pool import (
    BACKOFF_MAX_S,
    IDLE_S,
    MIN_IDLE_S,
    NUM_ITEMS,
    home_store,
    place_now,
    place_of,
    store_pool,
)
from tests.harness.waiting import WAIT_S, until, within

NODE = dataclasses.replace(SETTINGS, node_id="node")
AWAY = "store_unavailable"


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_all_who_ask_first_share_one_attachment(store: LocalStore, transport: str) -> None:
    async with store_pool(transport) as pool:
        place = place_of(store)
        clients = await asyncio.gather(*(pool.meet(place) for _ in range(20)))
        assert len({id(client) for client in clients}) == 1
        assert clients[0].transport_name == transport
        assert pool.num_attached == pool.num_tries == 1
        assert await pool.meet(place) is clients[0]


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_who_leaves_early_does_not_take_the_attachment_along(
    store: LocalStore, transport: str
) -> None:
    async with store_pool(transport) as pool:
        place = place_of(store)
        with pytest.raises(DeadlineExceeded):
            await pool.meet(place, timeout_s=0.0)
        cancelled = asyncio.create_task(pool.meet(place))
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.wait([cancelled])
        assert (await pool.meet(place)).broken is None
        assert pool.num_attached == 1
        assert pool.refused == {"deadline": 1}


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_store_that_restarts_under_the_same_name_is_met_again(
    new_store: NewStore, transport: str, seed: int
) -> None:
    """Killed and started again at the same address and name, with blocks asked for in between: no
    crash, no stale client or agent, and who means the former life is told so."""
    process = await new_store(NODE)
    view = np.random.default_rng(seed).integers(0, 256, (NUM_BLOCKS, BLOCK_BYTES), dtype=np.uint8)
    async with store_pool(transport, view) as pool:
        lives = []
        for number in range(2):
            place = await place_now(process)
            lives.append(place.life)
            client = await pool.meet(place)
            assert client.incarnation == place.life
            lease_id, refs = await pool.put(client, chain_of(f"life {number}", 4))
            items = list(zip(refs, range(10, 14), strict=True))
            got = await client.get_blocks(lease_id, items, within(), incarnation=place.life)
            assert got.failed == {} and np.array_equal(view[10:14], view[:4])
            for former in lives[:-1]:
                assert await pool.refusal(place.of_life(former)) == "incarnation"
            await process.end()
            got = await client.get_blocks(lease_id, items, within(1.0))
            assert set(got.failed) == set(range(4)) or transport == "shm"  # the mapping stays
            pool.suspect(client, Unavailable("the test killed it"))
            assert await pool.refusal(place) == AWAY
            await process.start()
            pool.pass_time(BACKOFF_MAX_S + 1)
        assert len(set(lives)) == 2 == pool.num_attached


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_restart_that_nobody_noticed_is_found_by_who_means_the_new_life(
    new_store: NewStore, transport: str
) -> None:
    """No failed call came between: the old client is asked, not believed."""
    process = await new_store(NODE)
    async with store_pool(transport) as pool:
        old = await pool.meet(await place_now(process))
        await process.end()
        await process.start()
        place = await place_now(process)
        new = await pool.meet_or_none(place)
        if new is None:  # the look found a connection that was gone: once more, later
            pool.pass_time(BACKOFF_MAX_S + 1)
            new = await pool.meet(place)
        assert new is not old and new.incarnation == place.life


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_the_home_store_dies_and_returns(new_store: NewStore, transport: str) -> None:
    """It is met again by itself, and measured again."""
    process = await new_store(dataclasses.replace(SETTINGS, node_id="home"))
    async with home_store(process, transport) as home:
        first = await home.met_anew()
        items = await home.store_and_load(chain_of("life 0", NUM_ITEMS))
        link, is_degraded = await home.measured()
        assert (link.node_id, link.transport, link.problem) == ("home", transport, "")
        assert not is_degraded and link.rates is not None
        await process.end()
        lost = await home.load(first, items, first.incarnation, 5.0)
        assert lost or transport == "shm"  # its mapping stays
        await process.start()
        second = await home.met_anew(first)
        assert first.incarnation != second.incarnation and home.num_attached == 2
        items = await home.store_and_load(chain_of("life 1", NUM_ITEMS))
        again, _ = await home.measured()
        assert again.measured_unix_ms > link.measured_unix_ms and again.problem == ""
        stale = await home.load(second, items, first.incarnation, WAIT_S)
        assert stale == {"incarnation": NUM_ITEMS}
        await until(lambda: first.broken is not None)


async def test_a_dead_store_is_refused_at_once_then_tried_by_one_and_met_when_it_returns(
    new_store: NewStore,
) -> None:
    process = await new_store(NODE)
    place = await place_now(process)
    async with store_pool("grpc") as pool:

        async def ask_all() -> list[Any]:
            return [
                client
                for client in await asyncio.gather(*(pool.meet_or_none(place) for _ in range(10)))
                if client is not None
            ]

        await process.end()
        assert not await ask_all() and pool.num_tries == 1
        assert await pool.refusal(place) == AWAY and pool.num_tries == 1  # open: not even tried
        for round_ in range(3):
            pool.pass_time(BACKOFF_MAX_S + 1)
            assert not await ask_all()
            assert pool.num_tries == 2 + round_, "half-open: one tries"
        await process.start()
        place = await place_now(process)
        await pool.refusal(place)
        assert pool.num_tries == 4  # the back-off still runs
        pool.pass_time(BACKOFF_MAX_S + 1)
        (met,) = await ask_all()  # the others were refused while one tried
        assert pool.num_tries == 5
        assert await pool.meet(place) is met
        assert set(pool.refused) == {AWAY}


async def test_a_stalled_store_is_refused_until_it_answers(new_store: NewStore) -> None:
    process = await new_store(NODE)
    place = await place_now(process)
    async with store_pool("grpc") as pool:
        client = await pool.meet(place)
        pool.suspect(client, DeadlineExceeded("slow once"))
        assert await pool.refusal(place) == AWAY
        await pool.settle()
        assert await pool.meet(place) is client
        await process.pause()
        pool.suspect(client, DeadlineExceeded("slow again"))
        await until(lambda: pool.clients == [])
        assert await pool.refusal(place) == AWAY
        process.wake()
        pool.pass_time(BACKOFF_MAX_S + 1)
        again = await pool.meet(place)
        assert again is not client and again.broken is None


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_transfer_that_hangs_ends_its_client(store: LocalStore, transport: str) -> None:
    async with store_pool(transport) as pool:
        client = await pool.meet(place_of(store))
        pool.suspect_hanging(client)
        assert pool.clients == []
        pool.suspect_hanging(client)  # twice is once
        pool.pass_time(0.51)
        assert await pool.meet(place_of(store)) is not client


async def test_another_layout_is_refused_by_its_name(store: LocalStore) -> None:
    place = place_of(store)
    async with store_pool("grpc") as first:
        await first.meet(place)
        other = np.zeros((4, BLOCK_BYTES + 8), dtype=np.uint8)
        async with store_pool("grpc", other) as pool:
            assert await pool.refusal(place, says="block_bytes") == "fingerprint"
            assert pool.refused == {"fingerprint": 1}


async def test_another_node_at_the_address_is_not_taken_for_it(store: LocalStore) -> None:
    async with store_pool("grpc") as pool:
        place = dataclasses.replace(place_of(store), node_id="another")
        assert await pool.refusal(place) == "incarnation"
        assert pool.clients == []


@pytest.mark.parametrize("has_store", [True, False])
async def test_a_worker_that_pulls_from_nobody_says_so(store: LocalStore, has_store: bool) -> None:
    transport = "" if has_store else "grpc"
    async with store_pool(transport, has_store=has_store) as pool:
        assert await pool.refusal(place_of(store), says="remote_transport") == AWAY
        assert pool.clients == []


async def test_idle_ones_make_room_and_busy_ones_do_not() -> None:
    async with (
        local_store() as a,
        local_store() as b,
        local_store() as c,
        store_pool("grpc", max_stores=2) as pool,
    ):
        client_a, client_b = await pool.meet(place_of(a)), await pool.meet(place_of(b))
        assert await pool.refusal(place_of(c), says="max_remote_stores") == AWAY
        pool.look()  # what was used by now is seen
        pool.pass_time(MIN_IDLE_S)
        with pool.moving(client_a):  # the idlest, but bytes move
            client_c = await pool.meet(place_of(c))
        assert set(pool.clients) == {client_a, client_c}
        pool.check()
        await until(lambda: client_b.broken is not None)
        pool.pass_time(IDLE_S - 1)
        with pytest.raises(NotFound):  # a lease is renewed with the client in hand
            await client_a.renew("none", ttl_s=1.0, deadline=within())
        pool.look()
        pool.pass_time(1)
        pool.look()
        assert pool.clients == [client_a]
        for clients, num_known in (([], 1), ([], 0)):
            pool.pass_time(IDLE_S)
            pool.look()
            assert pool.clients == clients and pool.num_known == num_known


async def test_a_measurement_is_no_use(store: LocalStore) -> None:
    """A degraded link is measured again and again: that alone keeps no place for its store."""
    async with store_pool("grpc") as pool:
        client = await pool.meet(place_of(store))
        pool.look()
        pool.pass_time(IDLE_S)
        await client.measure(range(2), within())
        pool.look()
        assert pool.clients == []


async def test_long_leases_are_renewed_seldom_and_keep_their_client_all_the_same() -> None:
    """Three renewals of 300 s: between two of them nobody else uses the client."""
    async with (
        local_store() as a,
        local_store() as b,
        store_pool("grpc", max_stores=1, lease_ttl_s=300.0) as pool,
    ):
        client = await pool.meet(place_of(a))
        pool.pass_time(100.0)
        pool.look()
        assert await pool.refusal(place_of(b), says="max_remote_stores") == AWAY
        assert pool.clients == [client] and client.broken is None
        pool.pass_time(50.0)
        pool.look()
        assert pool.clients == []


async def test_what_is_gone_makes_room_at_once() -> None:
    async with local_store() as a, local_store() as b, store_pool("grpc", max_stores=1) as pool:
        pool.lose(await pool.meet(place_of(a)))
        client = await pool.meet(place_of(b))
        assert pool.clients == [client]


async def test_leases_go_back_and_what_cannot_hurts_nobody(store: LocalStore) -> None:
    async with store_pool("grpc") as pool:
        client = await pool.meet(place_of(store))

        async def num_leases() -> int:
            return int((await client.status(deadline=within())).num_leases)

        for name in ("a", "b"):
            lease_id, _ = await pool.put(client, chain_of(name, 1))
            assert await num_leases() >= 1
            pool.release_later(client, lease_id, "")

        async def are_back() -> bool:
            return await num_leases() == 0

        await until(are_back)
        pool.release_later(None, "x")
        pool.release_later(client, "unknown")
        await pool.settle()
        assert client.broken is None
