"""Ends of requests and of roles that only an error of ours, or a moment that no message can be made
to meet, brings about: what is held is given back all the same. Reaches inside."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from engine.request import Request, Sampling
from kvstore.errors import Quarantine
from process import rpc
from process.deadline import Deadline
from process.rpc_errors import Cancelled, FailedPrecondition, Internal, NotFound, Unavailable
from protos import common_pb2
from services.decode.kv_loader import GenerateCommand
from services.prefill.handoff import PrefillAnswer
from services.prefill.request import Firsts, PrefixLeases
from services.worker import handle as handles
from services.worker import provenance, server
from services.worker.config import WorkerLimits
from services.worker.server import RoleSession
from tests.harness.decode_movers import Movers, going_on, movers
from tests.harness.gated_engine import BLOCK_SIZE, SALT, prompt_of
from tests.harness.prefill_decode_pair import WAIT_S, pair
from tests.harness.router_bench import Bench, running
from tests.harness.waiting import until

PROMPT = prompt_of(30, start=3)
DIRECT = common_pb2.HANDOVER_PATH_DIRECT


@pytest.fixture
async def m(tmp_path: Path) -> AsyncIterator[Movers]:
    async with movers(tmp_path) as made:
        yield made


class Deaf:
    async def show_firsts(self, firsts: Firsts) -> None: ...
    async def show_partial(self, handle: handles.Handle) -> None: ...


async def test_a_handle_whose_telling_failed_is_taken_back_and_its_prompt_is_stored(
    tmp_path: Path,
) -> None:
    def tell(answer: PrefillAnswer) -> None:
        assert answer.handle is not None
        raise Cancelled("the stream is gone")

    async with pair(tmp_path) as p:
        ask = p.prefill_role._servicer._ask(p.prefill_request(PROMPT, handover=DIRECT))
        with pytest.raises(Cancelled):
            await p.prefill_role.worker.prefill(ask, Deadline.after(WAIT_S), Deaf(), tell)
        assert p.at_prefill.num_loans == 0 and not p.at_prefill.states()
        await p.check()
        assert not p.at_prefill.not_stored_behind


async def test_a_stream_that_breaks_as_the_account_is_told_costs_the_store_no_block(
    tmp_path: Path,
) -> None:
    """Its end takes the leases back before anything that the request leaves on the loop has run."""
    async with pair(tmp_path) as p:
        ask = p.prefill_role._servicer._ask(p.prefill_request(PROMPT, handover=DIRECT))
        gate = p.at_prefill.home.hold("put")
        answers: list[PrefillAnswer] = []
        num_lent: list[int] = []

        def break_off() -> None:
            answers[0].take_back()
            answers[0].take_back()  # again: nothing
            num_lent.append(p.at_prefill.num_lent_blocks)

        def tell(answer: PrefillAnswer) -> None:
            answers.append(answer)
            asyncio.get_running_loop().call_soon(break_off)

        await p.prefill_role.worker.prefill(ask, Deadline.after(WAIT_S), Deaf(), tell)
        await until(lambda: bool(num_lent))
        assert p.at_prefill.num_loans == 0 and num_lent == [0]
        gate.open()
        await p.check()
        assert p.num_stored(PROMPT) == len(PROMPT) // BLOCK_SIZE
        assert not p.at_prefill.not_stored_behind


async def test_an_end_that_fails_in_part_still_gives_back_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(Exception):
        pass

    def broken(*_: object) -> None:
        raise Broken

    def deaf(answer: PrefillAnswer) -> None:
        raise Cancelled("the stream is gone")

    async with pair(tmp_path) as p:
        worker, lender = p.prefill_role.worker, p.prefill.core.lender
        assert lender is not None
        request = p.prefill_request(PROMPT, handover=DIRECT)
        ask = p.prefill_role._servicer._ask(request)
        with monkeypatch.context() as patched, pytest.raises(Broken):
            patched.setattr(PrefixLeases, "hand_over", broken)
            await worker.prefill(ask, Deadline.after(WAIT_S), Deaf(), deaf)
        assert lender.loans.num_leases == 0
        await p.check()
        told: list[PrefillAnswer] = []
        with monkeypatch.context() as patched, pytest.raises(Broken):
            patched.setattr(provenance, "set_leg_attributes", broken)
            await worker.prefill(ask, Deadline.after(WAIT_S), Deaf(), told.append)
        await until(lambda: not worker.states)
        told[0].take_back()
        await p.check()


async def test_a_handle_that_comes_when_the_request_has_just_ended_is_refused(m: Movers) -> None:
    """So that its leases are given back, as of any that is refused."""
    moved, sample = await m.moved(PROMPT, max_tokens=40)
    role: Any = m.workers[0].role
    worker, forget = role.worker, role.worker.forget
    refused: list[BaseException] = []

    def late(request: Any) -> None:
        forget(request)
        handle = role._servicer._handover(going_on(moved, [sample])).handle
        try:
            request.hand_over(GenerateCommand(handle, ((),)))
        except NotFound as error:
            refused.append(error)

    worker.forget = late
    key = await m.streams[0].begin(m.reserve(PROMPT, "r", max_tokens=40))
    m.leave(0)
    assert (await m.streams[0].next(key)).HasField("failed")
    assert len(refused) == 1
    worker.forget = forget
    m.stay(0)


# ---- the router's


def _num_errors(bench: Bench, code: str) -> float:
    counter = bench.router.metrics._errors.labels(bench.router.router_id, code)
    return float(counter._value.get())


def _is_counted_as_cancelled(bench: Bench) -> None:
    assert _num_errors(bench, "cancelled") == 1 and not _num_errors(bench, "internal")
    assert [record.outcome for record in bench.router._log._ended] == ["cancelled"]
    (traffic,) = bench.router._traffic.to_proto()
    assert (traffic.num_cancelled, traffic.num_failed) == (1, 0)
    assert not bench.router.desk.counters.failed


async def test_a_write_to_an_http_client_that_has_gone_is_no_internal_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """6 of 600 once were: written before their handler was cancelled."""
    write, num_written = web.StreamResponse.write, 0

    async def gone_at_the_third(response: web.StreamResponse, data: bytes) -> None:
        nonlocal num_written
        num_written += 1
        if num_written == 3:
            assert response._req is not None and response._req.transport is not None
            response._req.transport.abort()
        await write(response, data)

    monkeypatch.setattr(web.StreamResponse, "write", gone_at_the_third)
    async with running(http_listen="127.0.0.1:0") as bench:
        url = f"http://{bench.router.http_address}/v1/completions"
        body = {"model": "fake", "prompt": "hello", "max_tokens": 40, "stream": True}
        async with aiohttp.ClientSession() as session:
            with pytest.raises(aiohttp.ClientError):
                async with session.post(url, json=body) as response:
                    await response.read()
        await until(bench.is_idle)
        _is_counted_as_cancelled(bench)


async def test_a_write_on_a_call_that_is_over_is_no_internal_error(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def over(context: Any, message: bytes) -> None:
        raise rpc.CallOver("ExecuteBatchError")

    monkeypatch.setattr(rpc, "write_first", over)
    await bench.failure()
    await until(bench.is_idle)
    _is_counted_as_cancelled(bench)


# ---- a change of role


SHORT = PROMPT[:10]
"""One step."""


@pytest.mark.parametrize("when", ["drains", "ends", "begins"])
async def test_who_is_told_to_stop_while_it_changes_is_not_announced_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """It drains once, and its engine is closed once, by whoever has it then."""
    limits = WorkerLimits(store_wait_s=WAIT_S, attach_budget_s=5.0, drain_s=1.0)
    async with movers(tmp_path, limits=limits) as m:
        made, engine = m.workers[0], m.engine(0)
        told: list[str] = []
        stops: list[asyncio.Task[None]] = []
        close, begin, drain, end = (
            engine.close,
            server.begin_session,
            RoleSession.drain,
            RoleSession.end,
        )

        async def late_end(life: RoleSession, **options: Any) -> None:
            if not stops:
                stops.append(asyncio.create_task(made.stop()))
                await asyncio.sleep(0)
            await end(life, **options)

        async def late_begin(*arguments: Any, **options: Any) -> RoleSession:
            life = await begin(*arguments, **options)
            stops.append(asyncio.create_task(made.stop()))
            await asyncio.sleep(0)
            return life

        async def counted_drain(life: RoleSession) -> None:
            told.append("drained")
            await drain(life)

        def counted_close() -> None:
            told.append("closed")
            close()

        engine.close = counted_close
        monkeypatch.setattr(RoleSession, "drain", counted_drain)
        monkeypatch.setattr(
            RoleSession, "announce", lambda life, *addresses: told.append("announced")
        )
        if when == "begins":
            monkeypatch.setattr(server, "begin_session", late_begin)
        elif when == "ends":
            monkeypatch.setattr(RoleSession, "end", late_end)
        else:
            await m.begin_held(1, SHORT, max_tokens=40)
        changing = asyncio.create_task(m.at(0).set_role("prefill"))
        if when == "drains":
            await until(lambda: made.core.draining)
            stops.append(asyncio.create_task(made.stop()))
            await until(lambda: made._is_stopping)
            engine._model.release()
        with pytest.raises(Unavailable):
            await changing
        await stops[0]
        assert told == ["drained", "closed"] and not made.core.failed.is_set()


@pytest.mark.parametrize("settles", [True, False])
async def test_blocks_that_are_still_written_into_come_back_or_the_process_ends(
    m: Movers, monkeypatch: pytest.MonkeyPatch, settles: bool
) -> None:
    """A store stalled in the middle of a copy, and its request ended before the role did."""
    made = m.workers[0]
    core, engine = made.core, m.engine(0)
    monkeypatch.setattr(core, "stop", functools.partial(core.stop, 5.0 if settles else 0.2))
    chain = core.chain(SALT, "")
    asked = Request(
        request_id="x",
        prompt_token_ids=PROMPT,
        sampling=Sampling(max_tokens=4),
        block_hasher=chain.hasher,
        prompt_hashes=tuple(chain.hashes(PROMPT)),
        cache_root=chain.root,
    )
    reservation = await core.thread.call(lambda engine: engine.reserve(asked))
    settled = asyncio.get_running_loop().create_future()
    core.connector._quarantine("x", Quarantine(reservation.block_ids[:3], settled))
    core.drop("x")
    await until(lambda: core.thread.stats.num_quarantined_blocks == 3)
    changing = asyncio.create_task(made.set_role("prefill"))
    await asyncio.sleep(0.3)
    if not settles:
        with pytest.raises(Internal, match="0 requests and 3 of their blocks are left"):
            await changing
        assert made.failure is not None and core.failed.is_set()
        return
    assert not changing.done()
    settled.set_result(None)
    await changing
    assert engine.stats().num_quarantined_blocks == 0
    await made.core.thread.call(lambda engine: engine.check_integrity())


async def test_a_worker_that_cannot_become_the_other_ends(
    m: Movers, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = m.workers[0]

    async def fails(*arguments: Any, **options: Any) -> None:
        raise FailedPrecondition("the store has frames of another size")

    monkeypatch.setattr(server, "begin_session", fails)
    with pytest.raises(Internal, match="could not become prefill: the store has frames"):
        await made.set_role("prefill")
    assert made.core.failed.is_set() and made.failure is not None
    assert made.why_not_ready()
