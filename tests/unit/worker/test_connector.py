"""The connector's promises with a store client that fails on command."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from engine.request import Reservation
from kvstore.block_refs import Block
from kvstore.block_source import MatchResult
from kvstore.errors import (
    LeaseLapsed,
    Quarantine,
    TransferFailed,
    TransferTimeout,
)
from kvstore.transport.base import BlockMemory, GetResult
from process.deadline import Deadline
from process.rpc_errors import BatonError, DeadlineExceeded, Unavailable
from protos import kvstore_pb2
from services.worker import store_pool as module
from services.worker.config import WorkerLimits
from services.worker.engine_thread import EngineThread
from services.worker.store_pool import StoreConnector, StoreTarget
from tests.harness.gated_engine import fake_engine, prompt_of, request, running
from tests.harness.waiting import Clock, until

NUM_ITEMS = 6


class FakeClient:
    """What `load` and `release` need of a client."""

    def __init__(self, outcome: GetResult | BaseException | None = None) -> None:
        self.outcome = outcome
        self.broken: str | None = None
        self.incarnation = b"one"
        self.node_id = "node"
        self.released: list[list[str]] = []

    async def get_blocks(
        self, lease_id: str, items: Any, deadline: Deadline, **options: Any
    ) -> GetResult:
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        assert isinstance(self.outcome, GetResult)
        return self.outcome

    async def status(self, *, deadline: Deadline) -> Any:
        return kvstore_pb2.GetStatusReply(incarnation=b"one")

    async def close(self) -> None:
        self.broken = "closed"

    async def release(self, lease_ids: list[str], *, deadline: Deadline) -> int:
        for _ in range(10):  # turns of the loop
            await asyncio.sleep(0)
        self.released.append(lease_ids)
        return len(lease_ids)


@asynccontextmanager
async def reserved() -> AsyncIterator[tuple[EngineThread, StoreConnector, Reservation]]:
    """A connector beside a request whose blocks may be written into."""
    engine = fake_engine(num_blocks=64)
    async with running(engine) as thread:
        connector = StoreConnector(None, thread, WorkerLimits())
        wanted = request(engine, prompt_of(26))
        reservation = await thread.call(lambda e: e.reserve(wanted))
        yield thread, connector, reservation
        thread.post(lambda e: e.abort("r"))
        await connector.settle()
        await connector.stop(timeout_s=1)


async def load(
    connector: StoreConnector, client: Any, reservation: Reservation, timeout_s: float = 30
) -> Any:
    items = [
        (Block(bytes([i]) * 16, i, 2, 0, 4), reservation.block_ids[i]) for i in range(NUM_ITEMS)
    ]
    return await connector.load(client, "r", "lease", items, Deadline.after(timeout_s))


@asynccontextmanager
async def meeting(
    meet: Callable[[], FakeClient], wait_s: float = 30, **options: Any
) -> AsyncIterator[tuple[StoreConnector, list[Any]]]:
    """A connector that meets stores, and the clients that it was given."""
    clients: list[Any] = []

    async def attach(target: StoreTarget, timeout_s: float) -> Any:
        clients.append(meet())
        return clients[-1]

    target = StoreTarget("a:1", "w", b"i" * 16, "ab", BlockMemory.of(np.zeros((1, 8), "u1")), "shm")
    async with running(fake_engine(num_blocks=64)) as thread:
        connector = StoreConnector(target, thread, WorkerLimits(), attach=attach, **options)
        await connector.start(wait_s=wait_s)
        yield connector, clients
        await connector.stop(timeout_s=1)


@pytest.mark.parametrize(
    ("failed", "num_usable", "not_usable"),
    [
        ({}, 6, {}),
        ({5: "checksum"}, 5, {"checksum": 1}),
        ({0: "generation"}, 0, {"generation": 6}),
        ({2: "checksum", 4: "generation"}, 2, {"checksum": 3, "generation": 1}),
    ],
)
async def test_only_what_leads_without_a_gap_is_usable(
    failed: dict[int, str], num_usable: int, not_usable: dict[str, int]
) -> None:
    async with reserved() as (_, connector, reservation):
        loaded = await load(connector, FakeClient(GetResult(64, failed)), reservation)
        assert (loaded.num_usable, loaded.not_usable) == (num_usable, Counter(not_usable))


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (LeaseLapsed("l"), "lease_lapsed"),
        (DeadlineExceeded("d"), "deadline"),
        (TransferFailed("t"), "transport"),
        (Unavailable("u"), "store_unavailable"),
    ],
)
async def test_no_failure_of_the_store_is_the_requests(error: BatonError, reason: str) -> None:
    async with reserved() as (_, connector, reservation):
        loaded = await load(connector, FakeClient(error), reservation)
        assert (loaded.num_usable, loaded.not_usable) == (0, Counter({reason: NUM_ITEMS}))


async def test_another_life_behind_the_same_address_is_noticed() -> None:
    async with reserved() as (_, connector, _):
        client: Any = FakeClient()
        assert await connector._ping(client) is None
        client.incarnation = b"two"
        assert await connector._ping(client) == "another life answers"


@pytest.mark.parametrize("had_s", [0.0, 0.2, 5.0])
@pytest.mark.parametrize("how", ["answered late", "still moving"])
@pytest.mark.parametrize("is_ours", [True, False])
async def test_a_request_whose_own_time_ran_out_takes_the_store_from_nobody(
    had_s: float, how: str, is_ours: bool
) -> None:
    """A store that had no fair chance to answer is not refused to all the others."""
    async with reserved() as (thread, connector, reservation):
        client: Any = FakeClient(GetResult(0, dict.fromkeys(range(NUM_ITEMS), "deadline")))
        settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if how == "still moving":
            held = Quarantine(reservation.block_ids[:NUM_ITEMS], settled)
            client = FakeClient(TransferTimeout("late", held))
        told: list[BatonError] = []
        connector.on_other_suspect = lambda _, error: told.append(error)
        if is_ours:
            connector._client = client
        loaded = await load(connector, client, reservation, had_s)
        assert loaded.not_usable == {"deadline": NUM_ITEMS}
        is_to_blame = had_s == 5.0
        assert (connector.client is None) == (is_to_blame or not is_ours)
        assert bool(told) == (is_to_blame and not is_ours)
        connector._client = None
        settled.set_result(None)
        await asyncio.sleep(0)
        await thread.call(lambda engine: None)


async def test_the_stop_waits_for_leases_that_are_given_back_meanwhile() -> None:
    """A writer that was cancelled has its last put to wait for before it gives its lease back."""
    async with reserved() as (_, connector, _):
        client: Any = FakeClient()

        async def end_of_a_writer() -> None:
            await asyncio.sleep(0)
            connector.release_later(client, ["lease"])

        connector.spawn(end_of_a_writer())
        await connector.stop(timeout_s=5)
        assert client.released == [["lease"]]


@pytest.mark.parametrize("how", ["breaks at once", "is not there"])
async def test_a_store_that_greets_well_and_fails_at_work_is_not_met_without_end(
    how: str,
) -> None:
    """Each attachment costs agents, mappings and a measurement."""
    num_attempts = 0

    def meet() -> FakeClient:
        nonlocal num_attempts
        num_attempts += 1
        if how == "is not there":
            raise Unavailable("gone")
        client = FakeClient()
        client.broken = "every transfer fails"
        return client

    async with meeting(meet, wait_s=0.05, min_backoff_s=600.0) as (connector, _):
        for _ in range(200):
            assert connector.client is None
            await asyncio.sleep(0)
    assert num_attempts == 1


async def test_a_store_that_was_good_for_long_is_met_again_at_once() -> None:
    clock = Clock()
    async with meeting(FakeClient, min_backoff_s=600.0, clock=clock) as (connector, clients):
        clock.now_s += module.STEADY_S
        clients[0].broken = "it died"
        assert connector.client is None
        await connector.wait_attached(Deadline.after(30))
        assert connector.client is clients[1]


class HungClient(FakeClient):
    """A store that stops to answer."""

    address = "a:1"

    def __init__(self) -> None:
        super().__init__()
        self.num_lookups = 0
        self.hangs = True
        self.ping_is_late = asyncio.Event()

    async def match(self, chain_hashes: Any, *, ttl_s: float, deadline: Deadline) -> MatchResult:
        self.num_lookups += 1
        if self.hangs:
            await asyncio.Event().wait()
        return MatchResult((), "lease")

    async def status(self, *, deadline: Deadline) -> Any:
        if self.hangs:
            await self.ping_is_late.wait()
            raise DeadlineExceeded("no answer")
        return await super().status(deadline=deadline)


def look_up(connector: StoreConnector, client: Any, num: int) -> list[asyncio.Task[MatchResult]]:
    """Of a long budget: a lookup may bring blocks in from the file tier."""
    deadline = Deadline.after(3600)
    return [
        asyncio.create_task(connector.match(client, [b"h" * 16], ttl_s=5.0, deadline=deadline))
        for _ in range(num)
    ]


async def test_a_store_that_hangs_keeps_the_lookups_under_way_no_longer_than_its_ping() -> None:
    """And most of many lookups do not wait for the ping either."""
    async with meeting(HungClient) as (connector, clients):
        (client,) = clients
        lookups = look_up(connector, client, module.MAX_DOUBTING + 2)
        await until(lambda: sum(lookup.done() for lookup in lookups) == 2)
        client.ping_is_late.set()
        async with asyncio.timeout(30):
            found = await asyncio.gather(*lookups, return_exceptions=True)
        kinds = Counter(type(each) for each in found)
        assert kinds == {DeadlineExceeded: module.MAX_DOUBTING, Unavailable: 2}
        assert client.num_lookups == len(lookups) and connector.client is None
        client.hangs = False
        await connector.wait_attached(Deadline.after(30))
        assert connector.client is client and len(clients) == 1
        (again,) = look_up(connector, client, 1)
        assert (await again).lease_id == "lease"


class SlowClient(HungClient):
    """A store that answers pings; its lookups take as long as `are_found` does."""

    def __init__(self) -> None:
        super().__init__()
        self.hangs = False
        self.are_found = asyncio.Event()

    async def match(self, chain_hashes: Any, *, ttl_s: float, deadline: Deadline) -> MatchResult:
        await self.are_found.wait()
        return MatchResult((), "lease")


async def test_lookups_that_take_long_are_waited_for_while_the_store_answers_pings() -> None:
    async with meeting(SlowClient) as (connector, (client,)):
        lookups = look_up(connector, client, 3 * module.MAX_DOUBTING)
        await until(lambda: connector.num_doubting == len(lookups))
        client.are_found.set()
        async with asyncio.timeout(30):
            found = await asyncio.gather(*lookups)
        assert [each.lease_id for each in found] == ["lease"] * len(lookups)
