"""What a worker measures of its ways to stores: lent blocks come back whatever happens."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from engine.engine import LLMEngine
from kvstore.errors import Quarantine, TransferCancelled, TransferFailed, TransferTimeout
from kvstore.link_quality import LinkRates
from process.deadline import Deadline
from process.rpc_errors import DeadlineExceeded, NoCapacity, Unavailable
from services.worker.engine_thread import EngineThread
from services.worker.links import Links
from services.worker.provenance import links_to_proto
from tests.harness.gated_engine import fake_engine, prompt_of, request, running
from tests.harness.waiting import WAIT_S, settled, until

RATES = LinkRates(2**20, 4e9, 3e9, 0.001, 8e9)
SLOW = LinkRates(2**20, 1e6, 1e6, 0.001, 8e9)


class FakeClient:
    """Answers the n-th measurement with the n-th outcome."""

    def __init__(self, *outcomes: LinkRates | BaseException | None, node_id: str = "node") -> None:
        self.node_id = node_id
        self.address = f"{node_id}:1"
        self.transport_name = "grpc"
        self.outcomes = list(outcomes)
        self.entered, self.released = asyncio.Event(), asyncio.Event()
        self.broken: str | None = None
        self.block_ids: Sequence[int] = ()

    async def measure(self, block_ids: Sequence[int], deadline: Deadline) -> LinkRates:
        self.block_ids = list(block_ids)
        self.entered.set()
        outcome = self.outcomes.pop(0)
        if outcome is None:
            await self.released.wait()
            outcome = RATES
        if isinstance(outcome, BaseException):
            raise outcome
        assert outcome is not None
        return outcome


@asynccontextmanager
async def measuring(
    floor: float = 0.0, num_blocks: int = 256, **options: Any
) -> AsyncIterator[tuple[LLMEngine, EngineThread, Links, list[int]]]:
    """Links beside an engine; at the end nothing is lent and the laws hold."""
    engine = fake_engine(num_blocks=num_blocks)
    told: list[int] = []
    async with running(engine) as thread:
        block_bytes, note = engine.kv.layout.block_bytes, lambda: told.append(len(told))
        links = Links(thread, block_bytes, floor, on_room=note, **options)
        yield engine, thread, links, told
        await links.stop()
        assert await thread.call(lambda e: e.stats().num_referenced_blocks) == 0
        await thread.call(lambda e: e.check_integrity())


async def measured(
    links: Links, *outcomes: LinkRates | BaseException | None, **options: Any
) -> Any:
    """Returns: the client, whose first measurement is over."""
    client: Any = FakeClient(*outcomes, **options)
    links.measure_later(client)
    await links.settle()
    return client


async def test_a_link_is_measured_with_lent_blocks_that_come_back() -> None:
    async with measuring() as (_, thread, links, told):
        client = await measured(links, RATES)
        ((link, verdict),) = links.links
        assert (link.node_id, link.rates, link.problem) == ("node", RATES, "")
        assert not verdict.degraded
        assert len(client.block_ids) == 32
        await thread.call(lambda e: None)
        assert told == [0], "who waits for room is told"
        (message,) = links_to_proto(links.links)
        assert (message.write_bytes_per_s, message.read_bytes_per_s) == (4e9, 3e9)
        assert message.measured_unix_ms > 0 and not message.problem


async def test_below_its_floor_it_is_degraded() -> None:
    async with measuring(floor=3.5e9) as (_, _, links, _):
        await measured(links, RATES)
        (message,) = links_to_proto(links.links)
        assert message.degraded and message.floor_bytes_per_s == 3.5e9


@pytest.mark.parametrize(
    ("error", "degraded"),
    [
        (NoCapacity("no frames"), False),
        (Unavailable("gone"), False),
        (TransferFailed("what came is not what was sent"), True),
    ],
)
async def test_what_could_not_be_measured_says_why(error: Exception, degraded: bool) -> None:
    async with measuring() as (_, _, links, _):
        await measured(links, error)
        (message,) = links_to_proto(links.links)
        assert (message.degraded, message.problem) == (degraded, str(error))
        assert message.write_bytes_per_s == 0


async def test_a_late_one_is_tried_once_more_and_then_called_degraded() -> None:
    async with measuring() as (_, _, links, _):
        client = await measured(links, DeadlineExceeded("d"), RATES)
        assert links.links[0][0].rates == RATES
        client = await measured(links, DeadlineExceeded("d"), DeadlineExceeded("d"))
        ((link, verdict),) = links.links
        assert verdict.degraded and "2 s" in link.problem and client.outcomes == []


async def test_a_bad_moment_does_not_mark_a_link_for_good() -> None:
    async with measuring(floor=1e9, again_s=0.01) as (_, _, links, _):
        client = await measured(links, SLOW, SLOW, RATES, RATES)
        assert links.links[0][1].degraded
        await until(lambda: not links.links[0][1].degraded)
        assert links.num_repeated == 0, "a good one is not measured again"
        assert len(client.outcomes) == 1


@pytest.mark.parametrize("is_stopped", [True, False])
async def test_what_is_over_is_not_measured_again(is_stopped: bool) -> None:
    async with measuring(floor=1e12) as (_, _, links, _):
        client: Any = FakeClient(RATES, RATES)
        client.broken = None if is_stopped else "gone"
        links.measure_later(client)
        await links.settle()
        assert links.num_repeated == is_stopped
        if is_stopped:
            await links.stop()
            links.measure_later(client)
        assert links.num_repeated == 0
        await links.settle()
        assert len(client.outcomes) == 1


async def test_what_was_measured_is_not_forgotten_for_a_client_that_is_closed() -> None:
    """A degraded link stays one, whatever became of the client: its store is as far as before."""
    async with measuring(floor=1e12, again_s=0.01) as (_, _, links, _):
        client = await measured(links, RATES, Unavailable("this client is closed"))
        client.broken = "closed"
        await until(lambda: links.num_repeated == 0)  # nothing of a closed client is kept
        await links.settle()
        ((link, verdict),) = links.links
        assert (link.rates, link.problem, verdict.degraded) == (RATES, "", True)


async def test_a_busy_moment_makes_no_degraded_link_a_good_one() -> None:
    """No free blocks to measure with, here or there, say nothing of the link."""
    async with measuring(floor=1e9, again_s=0.01) as (_, _, links, _):
        client: Any = FakeClient(SLOW, NoCapacity("busy"), NoCapacity("busy"), RATES)
        links.measure_later(client)

        def is_measured() -> bool:
            for link, verdict in links.links if client.outcomes else ():
                assert (link.rates, verdict.degraded) == (SLOW, True)
            return not client.outcomes

        await until(is_measured)
        await until(lambda: not links.links[0][1].degraded)
        assert links.links[0][0].rates == RATES


@pytest.mark.parametrize("how", ["late", "cancelled"])
async def test_blocks_that_may_still_be_touched_stay_lent_until_they_are_settled(how: str) -> None:
    settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    held = Quarantine((1, 2), settled)
    async with measuring() as (_, thread, links, _):
        late: BaseException = TransferTimeout("late", held)
        if how == "cancelled":
            late = TransferCancelled("cancelled", held)
        await measured(links, late, NoCapacity("second"))
        assert await thread.call(lambda e: e.stats().num_referenced_blocks) == 32
        settled.set_result(None)

        async def are_back() -> bool:
            return await thread.call(lambda e: e.stats().num_referenced_blocks) == 0

        await until(are_back)


async def test_a_measurement_that_is_ended_gives_its_blocks_back() -> None:
    async with measuring() as (_, thread, links, _):
        client: Any = FakeClient(None)
        links.measure_later(client)
        await client.entered.wait()
        assert await thread.call(lambda e: e.stats().num_referenced_blocks) == 32
        await links.stop()


async def test_ended_while_the_engine_is_asked_the_blocks_come_back_too() -> None:
    is_busy, may_go_on = threading.Event(), threading.Event()
    async with measuring() as (_, thread, links, _):
        thread.post(lambda e: (is_busy.set(), may_go_on.wait(WAIT_S)))
        await until(is_busy.is_set)
        links.measure_later(FakeClient(None))  # type: ignore[arg-type]
        await settled()  # it waits for the engine
        await links.stop()
        may_go_on.set()


async def test_one_at_a_time() -> None:
    async with measuring() as (_, thread, links, _):
        first, second = FakeClient(None), FakeClient(RATES, node_id="other")
        links.measure_later(first)  # type: ignore[arg-type]
        links.measure_later(second)  # type: ignore[arg-type]
        await first.entered.wait()
        await thread.call(lambda e: None)  # behind what the second would have asked for
        assert not second.entered.is_set()
        first.released.set()
        await second.entered.wait()


async def test_a_busy_engine_lends_what_it_has() -> None:
    async with measuring(num_blocks=80) as (engine, thread, links, _):
        wanted = request(engine, prompt_of(220))
        reservation = await thread.call(lambda e: e.reserve(wanted))
        client = await measured(links, RATES)
        num_free = 80 - len(reservation.block_ids)
        assert len(client.block_ids) == num_free // 2
        thread.post(lambda e: e.abort("r"))


async def test_only_so_many_are_remembered() -> None:
    async with measuring(max_links=3) as (_, _, links, _):
        for index in (0, 1, 2, 0, 3):
            await measured(links, RATES, node_id=f"n{index}")
        assert [link.node_id for link, _ in links.links] == ["n2", "n0", "n3"]
