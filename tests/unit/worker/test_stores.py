"""RemoteStores in any order of what may happen to a store and to who asks for it: the laws hold at
every moment, nobody is given a client of another life, nothing is refused for ever.

With real stores: tests/conformance/test_store_pool.py.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest

from engine.errors import IntegrityError
from kvstore.client import KvStoreClient
from kvstore.errors import Quarantine, TransferTimeout
from kvstore.transport.base import BlockMemory
from process.deadline import Deadline
from process.rpc_errors import BatonError, DeadlineExceeded, Unavailable
from protos import kvstore_pb2
from services.worker import store_pool as module
from services.worker.store_pool import BACKOFF_MAX_S, RemoteStores, StoreTarget

MAX_STORES = 3
NUM_NODES = 5


class World:
    """Stores that live, die and restart; the clients that were made of them."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.now_s = 0.0
        self.lives: dict[str, bytes | None] = {}
        self.clients: list[FakeClient] = []
        self.tried: set[str] = set()
        for index in range(NUM_NODES):
            self.restart(f"n{index}:1")

    def restart(self, address: str) -> None:
        self.lives[address] = self.rng.randbytes(16)

    def kill(self, address: str) -> None:
        self.lives[address] = None

    async def attach(self, target: StoreTarget, timeout_s: float) -> KvStoreClient:
        assert target.address not in self.tried, "two try at once"
        self.tried.add(target.address)
        try:
            for _ in range(self.rng.randrange(4)):
                await asyncio.sleep(0)
        finally:
            self.tried.remove(target.address)
        life = self.lives[target.address]
        if life is None:
            raise Unavailable("nobody there")
        client = FakeClient(self, target.address, life)
        self.clients.append(client)
        return cast(KvStoreClient, client)


class FakeClient:
    """What RemoteStores needs of a client."""

    def __init__(self, world: World, address: str, life: bytes) -> None:
        self.world = world
        self.address = address
        self.node_id = address.partition(":")[0]
        self.incarnation = life
        self.broken: str | None = None
        self.is_busy = False
        self.num_uses = 0

    async def status(self, *, deadline: Deadline) -> Any:
        for _ in range(self.world.rng.randrange(3)):
            await asyncio.sleep(0)
        life = self.world.lives[self.address]
        if life is None:
            self.broken = "nobody there"
            raise Unavailable("nobody there")
        if self.world.rng.random() < 0.1:
            raise DeadlineExceeded("slow")
        return kvstore_pb2.GetStatusReply(incarnation=life)

    async def close(self) -> None:
        await asyncio.sleep(0)
        self.broken = "closed"


async def ask(stores: RemoteStores, world: World, address: str) -> None:
    """As a request does, with the life that the index told of, perhaps an old one."""
    life = world.lives[address] or world.rng.randbytes(16)
    if world.rng.random() < 0.1:
        life = world.rng.randbytes(16)
    node_id = address.partition(":")[0]
    try:
        client = await stores.client(node_id, address, life, Deadline.after(30))
    except BatonError:
        return
    assert (client.node_id, client.incarnation) == (node_id, life)


def happen(stores: RemoteStores, world: World) -> None:
    """Something that nobody asked for."""
    rng = world.rng
    address = rng.choice(list(world.lives))
    settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    settled.set_result(None)
    errors = [
        Unavailable("gone"),
        DeadlineExceeded("late"),
        TransferTimeout("hangs", Quarantine((1,), settled)),
    ]
    what = rng.randrange(6)
    if what == 0:
        world.kill(address)
    elif what == 1:
        world.restart(address)
    elif what == 2 and world.clients:
        stores.suspect(cast(KvStoreClient, rng.choice(world.clients[-8:])), rng.choice(errors))
    elif what == 3 and world.clients:
        client = rng.choice(world.clients[-8:])
        client.broken = client.broken or "no heartbeat"
    elif what == 4:
        world.now_s += rng.choice([0.1, 1.0, 10.0, 40.0])
    else:
        stores.sweep()


@pytest.mark.parametrize("variant", range(4))
async def test_in_any_order_the_laws_hold_and_nothing_is_refused_for_ever(
    seed: int, variant: int, scale: Callable[[int], int]
) -> None:
    rng = random.Random(seed * 4 + variant)
    world = World(rng)
    stores = _stores(world)
    asking: set[asyncio.Task[None]] = set()
    for _ in range(scale(50_000)):
        if rng.random() < 0.4:
            task = asyncio.create_task(ask(stores, world, rng.choice(list(world.lives))))
            asking.add(task)
        elif asking and rng.random() < 0.1:
            rng.choice(list(asking)).cancel()
        elif rng.random() < 0.5:
            happen(stores, world)
        else:
            await asyncio.sleep(0)
        stores.check_integrity()
        over = {task for task in asking if task.done()}
        for task in over:
            assert task.cancelled() or task.exception() is None
        asking -= over
    async with asyncio.timeout(20):
        if asking:
            await asyncio.wait(asking)
        await stores.settle()
    for address in world.lives:
        world.restart(address)
        world.now_s += 2 * module.IDLE_S + BACKOFF_MAX_S
        stores.sweep()
        async with asyncio.timeout(20):
            await stores.settle()
        for _ in range(2):  # the first may still find out that a connection is gone
            await ask(stores, world, address)
            await stores.settle()
            world.now_s += BACKOFF_MAX_S + 1
        node_id = address.partition(":")[0]
        life = world.lives[address]
        assert life is not None
        client = await stores.client(node_id, address, life, Deadline.after(30))
        assert client.incarnation == life
    await stores.stop(timeout_s=5.0)
    assert all(client.broken is not None for client in world.clients), "one was never closed"


async def test_a_client_that_broke_is_closed_though_nobody_asks(seed: int) -> None:
    """One that maps a dead worker's cache keeps that memory from the worker's next life."""
    world = World(random.Random(seed))
    stores = _stores(world)
    life = world.lives["n0:1"]
    assert life is not None
    client = cast(FakeClient, await stores.client("n0", "n0:1", life, Deadline.after(30)))
    client.broken = "no heartbeat"
    stores.sweep()
    assert stores.clients == []
    await stores.settle()
    assert client.broken == "closed"
    await stores.stop(timeout_s=5.0)


def _stores(world: World, **options: Any) -> RemoteStores:
    memory = BlockMemory.of(np.zeros((1, 8), dtype=np.uint8))
    return RemoteStores(
        StoreTarget("", "worker", bytes(16), "ab", memory, "grpc"),
        max_stores=MAX_STORES,
        attach_budget_s=5.0,
        lease_ttl_s=30.0,
        ping_budget_s=1.0,
        clock=lambda: world.now_s,
        **{"attach": world.attach} | options,
    )


async def test_the_law_is_checked(seed: int) -> None:
    world = World(random.Random(seed))
    stores = _stores(world)
    life = world.lives["n0:1"]
    assert life is not None
    await stores.client("n0", "n0:1", life, Deadline.after(30))
    stores._max_stores = 0
    with pytest.raises(IntegrityError, match="1 remote stores are open"):
        stores.check_integrity()
    await stores.stop(timeout_s=5.0)
