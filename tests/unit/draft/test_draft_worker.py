"""A draft worker around its sessions: settings, calls that are computed together, failures, its
end, and what its metrics say."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Awaitable, Sequence
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2

from engine.config import EngineConfig
from engine.sequence import Key
from engine.speculation.config import SpeculationConfig
from engine.speculation.draft_protocol import DraftRequest
from engine.speculation.proposer import Draft, DraftTask
from process.authorization import PeerRole
from process.deadline import Deadline
from process.rpc import PLAIN
from process.rpc_errors import DeadlineExceeded, Internal, InvalidArgument, NoCapacity, Unavailable
from process.settings import SettingsError
from process.tls import TlsSettings
from protos import draft_pb2, draft_pb2_grpc
from services.draft.config import DraftLimits, DraftSettings
from services.draft.server import SERVICE, DraftCollector, serving_drafts
from services.draft.thread import LAWS_EVERY, PIECE_EVERY, DraftThread
from tests.harness import draft_workers as bench
from tests.harness.waiting import settled

CALL_S = 60.0
ONE, OTHER = bytes(16), bytes(range(16))


def _ask(session: int, token_ids: Sequence[int] = (1, 2)) -> DraftRequest:
    return DraftRequest(session, 0, token_ids, 1, 6, 0.0, 1.0, 0, 0.0, 0, 0)


class Held(bench.Wrapped):
    """A proposer that waits until it may, counts, and fails when it is told to."""

    def __init__(self) -> None:
        super().__init__(bench.CountsOn())
        self.begun = threading.Event()
        self.may = threading.Event()
        self.batches: list[int] = []
        self.keys: list[Key] = []
        """Of all batches."""
        self.fails = False

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        self.begun.set()
        assert self.may.wait(CALL_S)
        if self.fails:
            raise RuntimeError("the device is gone")
        self.batches.append(len(tasks))
        self.keys += [task.key for task in tasks]
        return super().propose(tasks)


class Bench:
    def __init__(self, max_waiting_calls: int = 8, step_timeout_s: float = 0.0) -> None:
        self.proposer = Held()
        self.thread = DraftThread(
            bench.sessions(by=self.proposer), max_waiting_calls, step_timeout_s=step_timeout_s
        )

    def call(
        self, verifier: bytes, *asks: DraftRequest, budget_s: float = CALL_S
    ) -> asyncio.Task[Any]:
        made: Awaitable[Any] = self.thread.propose(verifier, asks, Deadline.after(budget_s))
        return asyncio.ensure_future(made)

    async def begin(self) -> asyncio.Task[Any]:
        """A call that is being computed."""
        first = self.call(ONE, _ask(0))
        assert await asyncio.to_thread(self.proposer.begun.wait, CALL_S)
        return first

    async def end(self) -> None:
        self.proposer.may.set()
        assert await self.thread.stop(CALL_S)


async def test_what_waits_is_computed_together_but_for_calls_of_one_verifier() -> None:
    b = Bench()
    first = await b.begin()
    calls = [b.call(ONE, _ask(1), _ask(2)), b.call(OTHER, _ask(1)), b.call(ONE, _ask(1))]
    await settled()  # they are queued
    b.proposer.may.set()
    answers = await asyncio.gather(first, *calls)
    assert [len(one) for one in answers] == [1, 2, 1, 1]
    assert all(answer.is_known for one in answers for answer in one)
    assert b.proposer.batches == [1, 3, 1]
    b.thread.forget(ONE, [0, 1])
    await b.call(OTHER, _ask(1))
    assert len(b.thread.sessions) == 2
    await b.end()


async def test_who_has_given_up_is_not_computed_for() -> None:
    b = Bench()
    first = await b.begin()
    late = b.call(OTHER, _ask(1), budget_s=0.0)
    with pytest.raises(DeadlineExceeded):
        await late
    assert b.thread.num_waiting == 2, "it is still in the queue"
    b.proposer.may.set()
    await first
    await b.end()
    assert b.proposer.batches == [1] and b.thread.num_waiting == 0


async def test_what_waits_is_bounded_whoever_gives_up_and_whatever_is_over() -> None:
    b = Bench(max_waiting_calls=4)
    first = await b.begin()
    for _ in range(2):
        with pytest.raises(DeadlineExceeded):
            await b.call(OTHER, _ask(1), budget_s=0.0)
    b.thread.forget(ONE, [1])
    with pytest.raises(NoCapacity):
        b.thread.forget(ONE, [2])
    with pytest.raises(NoCapacity):
        await b.call(OTHER, _ask(1))
    for verifier, sessions in ((b"x", [1]), (ONE, list(range(4097)))):
        with pytest.raises(InvalidArgument):
            b.thread.forget(verifier, sessions)
    assert b.thread._jobs.qsize() == 3 and b.thread.num_waiting == 4
    b.proposer.may.set()
    await first
    await b.end()
    assert b.thread.num_waiting == 0


async def test_where_calls_always_wait_new_texts_are_caught_up_with_all_the_same() -> None:
    b = Bench(max_waiting_calls=64)
    first = await b.begin()
    long = b.call(OTHER, _ask(9, [1] * 20))
    # Each is a batch: they are of one verifier.
    calls = [b.call(ONE, _ask(1)) for _ in range(4 * PIECE_EVERY)]
    await settled()  # they are queued
    b.proposer.may.set()
    await asyncio.gather(first, long, *calls)
    pieces = [place for place, key in enumerate(b.proposer.keys) if key == (OTHER.hex(), 9)]
    assert len(pieces) == 3 and pieces[-1] < len(b.proposer.keys) - 1, "20 tokens, 8 at once"
    assert all(late - early > PIECE_EVERY for early, late in itertools.pairwise(pieces))
    await b.end()


async def test_where_calls_always_wait_laws_are_recomputed_all_the_same() -> None:
    b = Bench(max_waiting_calls=2 * LAWS_EVERY)
    first = await b.begin()
    b.thread.sessions.num_bytes += 1
    calls = [b.call(ONE, _ask(1)) for _ in range(LAWS_EVERY + 3)]
    await settled()  # they are queued
    b.proposer.may.set()
    await first
    found = await asyncio.gather(*calls, return_exceptions=True)
    num_answered = LAWS_EVERY - 1  # and the first: that many batches
    assert not any(isinstance(one, Unavailable) for one in found[:num_answered])
    assert all(isinstance(one, Unavailable) for one in found[num_answered:])
    assert "bytes counted" in str(b.thread.failure)
    await b.end()


async def test_a_thread_that_does_not_end_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    proposer = Held()
    settings = DraftSettings(engine=EngineConfig(model="fake"))
    async with serving_drafts(proposer, bench.about(), settings, join_s=0.0) as worker:
        made = worker.thread.propose(ONE, [_ask(0)], Deadline.after(CALL_S))
        call = asyncio.ensure_future(made)
        assert await asyncio.to_thread(proposer.begun.wait, CALL_S)
    assert "guessing_goes_on" in caplog.text
    proposer.may.set()
    assert len(await call) == 1
    assert await worker.thread.stop(CALL_S)


async def test_a_proposer_that_fails_ends_the_worker_and_every_call() -> None:
    b = Bench()
    first = await b.begin()
    second = b.call(OTHER, _ask(1))
    await settled()
    b.proposer.fails = True
    b.proposer.may.set()
    with pytest.raises(Internal, match="guessing has failed"):
        await first
    with pytest.raises(Unavailable, match="the device is gone"):
        await second
    async with asyncio.timeout(CALL_S):
        await b.thread.failed.wait()
    with pytest.raises(Unavailable, match="the device is gone"):
        await b.call(ONE, _ask(1))
    up = {sample.name: sample.value for family in _families(b) for sample in family.samples}
    assert up["baton_up"] == 0
    await b.end()


async def test_guessing_that_does_not_end_is_the_workers_failure() -> None:
    b = Bench(step_timeout_s=0.05)
    first = await b.begin()
    async with asyncio.timeout(CALL_S):
        await b.thread.failed.wait()
    assert b.thread.is_stuck and "limits.step_timeout_s" in str(b.thread.failure)
    with pytest.raises(Unavailable, match="its device does not answer"):
        await b.call(OTHER, _ask(1))
    # A device that answers after all.
    b.proposer.may.set()
    assert len(await first) == 1
    await b.end()
    assert not b.thread.is_stuck


async def test_a_worker_that_waits_for_calls_is_not_stuck() -> None:
    b = Bench(step_timeout_s=CALL_S)
    b.proposer.may.set()
    await b.call(ONE, _ask(1))
    assert await asyncio.to_thread(_is_idle, b)
    await b.end()


def _is_idle(b: Bench) -> bool:
    """No step of its thread has begun that has not ended."""
    until_s = time.monotonic() + CALL_S
    while b.thread._watch._since_s is not None and time.monotonic() < until_s:
        time.sleep(0.001)
    return b.thread._watch._since_s is None


async def test_a_law_that_does_not_hold_ends_the_worker() -> None:
    b = Bench()
    b.proposer.may.set()
    await b.call(ONE, _ask(1))
    b.thread.sessions.num_bytes += 1
    b.thread.forget(ONE, [7])
    async with asyncio.timeout(CALL_S):
        await b.thread.failed.wait()
    assert "bytes counted" in str(b.thread.failure)
    await b.end()


async def test_calls_that_wait_fail_when_it_ends() -> None:
    b = Bench()
    first = await b.begin()
    ending = asyncio.ensure_future(b.thread.stop(CALL_S))
    await settled()
    with pytest.raises(Unavailable, match="stopping"):
        await b.call(OTHER, _ask(1))
    b.proposer.may.set()
    assert len(await first) == 1
    assert await ending


def _families(b: Bench) -> list[Any]:
    return list(DraftCollector(b.thread, "draft-0").collect())


async def test_metrics_say_what_was_asked() -> None:
    b = Bench()
    b.proposer.may.set()
    await b.call(ONE, _ask(1), _ask(2))
    await b.call(ONE, _ask(3)._replace(start=9))
    found = {sample.name: sample.value for family in _families(b) for sample in family.samples}
    assert found == {
        "baton_up": 1,
        "baton_draft_sessions": 2,
        "baton_draft_session_bytes": b.thread.sessions.num_bytes,
        "baton_draft_waiting_calls": 0,
        "baton_draft_asked_total": 3,
        "baton_draft_nodes_total": 6,
        "baton_draft_unknown_total": 1,
        "baton_draft_evicted_sessions_total": 0,
    }
    await b.end()


async def test_a_worker_that_drains_says_so_and_takes_nothing_more() -> None:
    settings = DraftSettings(engine=EngineConfig(model="fake"))
    async with (
        serving_drafts(bench.CountsOn(), bench.about(), settings) as worker,
        PLAIN(worker.address, PeerRole.DRAFT) as channel,
    ):
        asks = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        stub = draft_pb2_grpc.DraftStub(channel)  # type: ignore[no-untyped-call]
        status = health_pb2.HealthCheckResponse
        for is_draining, expected in ((False, status.SERVING), (True, status.NOT_SERVING)):
            worker.is_draining = is_draining
            told = await asks(health_pb2.HealthCheckRequest(service=SERVICE), timeout=CALL_S)
            assert told.status == expected
        for call, request in (
            (stub.Describe, draft_pb2.DescribeDraftRequest()),
            (stub.Propose, draft_pb2.ProposeRequest(verifier=ONE)),
            (stub.Forget, draft_pb2.ForgetRequest(verifier=ONE)),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match="is draining") as refused:
                await call(request, timeout=CALL_S)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert not await asyncio.to_thread(worker.thread._thread.is_alive)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"engine": EngineConfig()}, "engine.model: is empty; name the small model"),
        (
            {"engine": EngineConfig(model="m", speculation=SpeculationConfig(drafters=("ngram",)))},
            "engine.speculation: a draft worker guesses with engine.model alone",
        ),
        ({"listen": "0.0.0.0:1"}, "listen: 0.0.0.0:1 is reached from other machines"),
        ({"tls": TlsSettings("", "c", "k")}, "tls.ca_file"),
        ({"metrics_listen": "x"}, "metrics_listen"),
    ],
)
def test_settings_out_of_range_are_refused(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(SettingsError, match=problem):
        DraftSettings(**{"engine": EngineConfig(model="m"), **fields})


@pytest.mark.parametrize(
    "fields",
    [
        {"max_num_sessions": 0},
        {"max_session_bytes": 1},
        {"max_waiting_calls": 0},
        {"catch_up_tokens": 0},
        {"max_call_s": 0.0},
        {"drain_s": -1.0},
        {"step_timeout_s": -1.0},
    ],
)
def test_limits_out_of_range_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=next(iter(fields))):
        DraftLimits(**fields)
