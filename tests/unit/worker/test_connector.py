"""The connector's promises with a store client that fails on command."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from engine.engine import LLMEngine
from engine.request import Reservation
from kvstore.block_refs import Block
from kvstore.block_source import MatchResult
from kvstore.errors import (
    LeaseLapsed,
    Quarantine,
    TransferCancelled,
    TransferFailed,
    TransferTimeout,
)
from kvstore.transport.base import BlockMemory, GetResult
from process.deadline import Deadline
from process.errors import BatonError, DeadlineExceeded, Unavailable
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
        self.entered = asyncio.Event()
        self.released: list[list[str]] = []
        self.num_releasing = 0
        self.num_turns = 1
        """Of the loop, that a release takes."""

    async def get_blocks(
        self, lease_id: str, items: Any, deadline: Deadline, **options: Any
    ) -> GetResult:
        self.entered.set()
        if self.outcome is None:
            await asyncio.Event().wait()
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        assert isinstance(self.outcome, GetResult)
        return self.outcome

    async def status(self, *, deadline: Deadline) -> Any:
        return kvstore_pb2.GetStatusReply(incarnation=b"one")

    async def close(self) -> None:
        self.broken = "closed"

    async def release(self, lease_ids: list[str], *, deadline: Deadline) -> int:
        self.num_releasing += 1
        assert self.num_releasing == 1, "one release at a time"
        for _ in range(self.num_turns):
            await asyncio.sleep(0)
        self.num_releasing -= 1
        if isinstance(self.outcome, BatonError):
            raise self.outcome
        self.released.append(lease_ids)
        return len(lease_ids)


@asynccontextmanager
async def reserved() -> AsyncIterator[tuple[LLMEngine, EngineThread, StoreConnector, Reservation]]:
    """A connector beside a request whose blocks may be written into."""
    engine = fake_engine(num_blocks=64)
    async with running(engine) as thread:
        connector = StoreConnector(None, thread, WorkerLimits())
        wanted = request(engine, prompt_of(26))
        reservation = await thread.call(lambda e: e.reserve(wanted))
        yield engine, thread, connector, reservation
        thread.post(lambda e: e.abort("r"))
        await connector.settle()
        await connector.stop(timeout_s=1)


def items_of(reservation: Reservation) -> list[tuple[Block, int]]:
    return [
        (Block(bytes([i]) * 16, i, 2, 0, 4), reservation.block_ids[i]) for i in range(NUM_ITEMS)
    ]


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
    async with reserved() as (_, _, connector, reservation):
        client: Any = FakeClient(GetResult(64, failed))
        loaded = await connector.load(
            client, "r", "lease", items_of(reservation), Deadline.after(30)
        )
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
    async with reserved() as (_, _, connector, reservation):
        client: Any = FakeClient(error)
        loaded = await connector.load(
            client, "r", "lease", items_of(reservation), Deadline.after(30)
        )
        assert (loaded.num_usable, loaded.not_usable) == (0, Counter({reason: NUM_ITEMS}))


@pytest.mark.parametrize("how", ["timeout", "cancel", "deadline"])
async def test_what_may_still_be_written_into_is_out_of_use_until_it_is_settled(how: str) -> None:
    async with reserved() as (engine, thread, connector, reservation):
        settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        block_ids = reservation.block_ids[:NUM_ITEMS]
        quarantine = Quarantine(block_ids, settled)
        client: Any = FakeClient(TransferTimeout("late", quarantine))
        if how != "timeout":
            client = _Stalled(quarantine)
        load = asyncio.create_task(
            _bounded_load(connector, client, reservation, 0.02 if how == "deadline" else 5)
        )
        await client.entered.wait()
        if how == "timeout":
            loaded = await load
            assert loaded.not_usable == {"deadline": NUM_ITEMS}
        else:
            if how == "cancel":
                load.cancel()
            with pytest.raises(asyncio.CancelledError if how == "cancel" else DeadlineExceeded):
                await load
        await thread.call(lambda e: e.abort("r"))
        assert (await thread.call(lambda e: e.stats())).num_quarantined_blocks == NUM_ITEMS
        assert connector.num_in_quarantine == NUM_ITEMS
        await thread.call(lambda e: e.check_integrity())
        settled.set_result(None)

        async def is_settled() -> bool:
            return not (await thread.call(lambda e: e.stats())).num_quarantined_blocks

        await until(is_settled)
        assert engine.stats().num_free_blocks == 64
        assert connector.num_in_quarantine == 0


async def _bounded_load(
    connector: StoreConnector, client: Any, reservation: Reservation, timeout_s: float
) -> Any:
    deadline = Deadline.after(timeout_s)
    async with deadline.timeout("the test"):
        return await connector.load(client, "r", "lease", items_of(reservation), deadline)


class _Stalled(FakeClient):
    def __init__(self, quarantine: Quarantine) -> None:
        super().__init__()
        self._quarantine = quarantine

    async def get_blocks(
        self, lease_id: str, items: Any, deadline: Deadline, **options: Any
    ) -> GetResult:
        try:
            return await super().get_blocks(lease_id, items, deadline, **options)
        except asyncio.CancelledError as error:
            raise TransferCancelled("cancelled", self._quarantine) from error


async def test_leases_are_given_back_one_call_at_a_time_and_none_is_lost() -> None:
    async with reserved() as (_, _, connector, _):
        client: Any = FakeClient()
        for index in range(20):
            connector.release_later(client, [f"lease{index}", ""])
        await connector.settle()
        released = sorted(lease for call in client.released for lease in call)
        assert released == sorted(f"lease{index}" for index in range(20))


async def test_a_store_that_is_away_takes_no_lease_back_and_hurts_nobody() -> None:
    async with reserved() as (_, _, connector, _):
        client: Any = FakeClient(Unavailable("gone"))
        connector.release_later(client, ["lease"])
        connector.release_later(None, ["lease"])
        await connector.settle()
        assert client.released == []


async def test_another_life_behind_the_same_address_is_noticed() -> None:
    async with reserved() as (_, _, connector, _):
        client: Any = FakeClient()
        client.incarnation = b"one"
        assert await connector._ping(client) is None
        client.incarnation = b"two"
        assert await connector._ping(client) == "another life answers"


async def test_a_worker_without_a_store_says_so() -> None:
    async with reserved() as (_, _, connector, _):
        assert await connector.start(wait_s=30) is False
        assert connector.client is None


@pytest.mark.parametrize("had_s", [0.0, 0.2, 5.0])
@pytest.mark.parametrize("how", ["answered late", "still moving"])
@pytest.mark.parametrize("is_ours", [True, False])
async def test_a_request_whose_own_time_ran_out_takes_the_store_from_nobody(
    had_s: float, how: str, is_ours: bool
) -> None:
    """A store that had no fair chance to answer is not refused to all the others."""
    async with reserved() as (_, thread, connector, reservation):
        client: Any = FakeClient(GetResult(0, dict.fromkeys(range(NUM_ITEMS), "deadline")))
        settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if how == "still moving":
            held = Quarantine(reservation.block_ids[:NUM_ITEMS], settled)
            client = FakeClient(TransferTimeout("late", held))
        told: list[BatonError] = []
        connector.on_other_suspect = lambda _, error: told.append(error)
        if is_ours:
            connector._client = client
        loaded = await connector.load(
            client, "r", "lease", items_of(reservation), Deadline.after(had_s)
        )
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
    async with reserved() as (_, _, connector, _):
        client: Any = FakeClient()
        client.num_turns = 10

        async def end_of_a_writer() -> None:
            await asyncio.sleep(0)
            connector.release_later(client, ["lease"])

        connector.spawn(end_of_a_writer())
        await connector.stop(timeout_s=5)
        assert client.released == [["lease"]]


async def test_the_stop_waits_for_nobody_for_ever() -> None:
    async with reserved() as (_, _, connector, _):
        connector.spawn(forever())
        async with asyncio.timeout(30):
            await connector.stop(timeout_s=0.01)


@pytest.mark.parametrize("how", ["breaks at once", "is not there"])
async def test_a_store_that_greets_well_and_fails_at_work_is_not_met_without_end(
    how: str,
) -> None:
    """Each attachment costs agents, mappings and a measurement."""
    num_attempts = 0

    async def attach(target: StoreTarget, timeout_s: float) -> Any:
        nonlocal num_attempts
        num_attempts += 1
        if how == "is not there":
            raise Unavailable("gone")
        client = FakeClient()
        client.broken = "every transfer fails"
        return client

    target = StoreTarget("a:1", "w", b"i" * 16, "ab", BlockMemory.of(np.zeros((1, 8), "u1")), "shm")
    async with running(fake_engine(num_blocks=64)) as thread:
        connector = StoreConnector(
            target, thread, WorkerLimits(), min_backoff_s=600.0, attach=attach
        )
        await connector.start(wait_s=0.05)
        for _ in range(200):
            assert connector.client is None
            await asyncio.sleep(0)
        await connector.stop(timeout_s=1)
    assert num_attempts == 1


async def test_a_store_that_was_good_for_long_is_met_again_at_once() -> None:
    clients: list[FakeClient] = []

    async def attach(target: StoreTarget, timeout_s: float) -> Any:
        clients.append(FakeClient())
        return clients[-1]

    target = StoreTarget("a:1", "w", b"i" * 16, "ab", BlockMemory.of(np.zeros((1, 8), "u1")), "shm")
    async with running(fake_engine(num_blocks=64)) as thread:
        clock = Clock()
        connector = StoreConnector(
            target, thread, WorkerLimits(), min_backoff_s=600.0, clock=clock, attach=attach
        )
        assert await connector.start(wait_s=30)
        clock.now_s += module.STEADY_S
        clients[0].broken = "it died"
        assert connector.client is None
        await connector.wait_attached(Deadline.after(30))
        assert connector.client is clients[1]
        await connector.stop(timeout_s=1)


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


async def test_a_store_that_hangs_keeps_the_lookups_under_way_no_longer_than_its_ping() -> None:
    """The lookup's own budget is long: it may bring blocks in from the file tier. And most of many
    lookups do not wait for the ping either."""
    clients: list[HungClient] = []

    async def attach(target: StoreTarget, timeout_s: float) -> Any:
        clients.append(HungClient())
        return clients[-1]

    target = StoreTarget("a:1", "w", b"i" * 16, "ab", BlockMemory.of(np.zeros((1, 8), "u1")), "shm")
    async with running(fake_engine(num_blocks=64)) as thread:
        connector = StoreConnector(target, thread, WorkerLimits(), attach=attach)
        assert await connector.start(wait_s=30)
        client: Any = clients[0]
        lookups = [
            asyncio.create_task(
                connector.match(client, [b"h" * 16], ttl_s=5.0, deadline=Deadline.after(3600))
            )
            for _ in range(module.MAX_DOUBTING + 2)
        ]
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
        again = await connector.match(client, [b"h" * 16], ttl_s=5.0, deadline=Deadline.after(30))
        assert again.lease_id == "lease"
        await connector.stop(timeout_s=1)


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
    """They bring blocks in from the file tier."""
    clients: list[SlowClient] = []

    async def attach(target: StoreTarget, timeout_s: float) -> Any:
        clients.append(SlowClient())
        return clients[-1]

    target = StoreTarget("a:1", "w", b"i" * 16, "ab", BlockMemory.of(np.zeros((1, 8), "u1")), "shm")
    async with running(fake_engine(num_blocks=64)) as thread:
        connector = StoreConnector(target, thread, WorkerLimits(), attach=attach)
        assert await connector.start(wait_s=30)
        client: Any = clients[0]
        lookups = [
            asyncio.create_task(
                connector.match(client, [b"h" * 16], ttl_s=5.0, deadline=Deadline.after(3600))
            )
            for _ in range(3 * module.MAX_DOUBTING)
        ]
        await until(lambda: connector.num_doubting == len(lookups))
        client.are_found.set()
        async with asyncio.timeout(30):
            found = await asyncio.gather(*lookups)
        assert [each.lease_id for each in found] == ["lease"] * len(lookups)
        await connector.stop(timeout_s=1)


async def forever() -> None:
    await asyncio.Event().wait()
