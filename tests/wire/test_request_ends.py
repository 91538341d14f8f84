"""Ends of requests that only an error of ours, or a moment that no message can be made to meet,
brings about: what is held is given back all the same. Reaches inside.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import grpc.aio
import pytest
from aiohttp import web

from process import rpc
from process.deadline import Deadline
from process.errors import Cancelled, NotFound
from protos import common_pb2
from services.decode.kv_loader import GenerateCommand
from services.prefill.handoff import PrefillAnswer
from services.prefill.request import Firsts, PrefixLeases
from services.worker import handle as handles
from services.worker import provenance
from tests.harness.decode_movers import going_on, movers
from tests.harness.gated_engine import BLOCK_SIZE, prompt_of
from tests.harness.prefill_decode_pair import WAIT_S, pair
from tests.harness.router_bench import Bench, request, running
from tests.harness.waiting import until

PROMPT = prompt_of(30, start=3)
DIRECT = common_pb2.HANDOVER_PATH_DIRECT


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
            patched.setattr(provenance, "tell", broken)
            await worker.prefill(ask, Deadline.after(WAIT_S), Deaf(), told.append)
        await until(lambda: not worker.states)
        told[0].take_back()
        await p.check()


async def test_a_handle_that_comes_when_the_request_has_just_ended_is_refused(
    tmp_path: Path,
) -> None:
    """After its last word, before its stream has forgotten it: so that its leases are given back,
    as of any that is refused."""
    async with movers(tmp_path) as m:
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
    """6 of 600 streams whose client left were counted as internal errors: those that were written
    before their handler was cancelled."""
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
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def over(context: Any, message: bytes) -> None:
        raise rpc.CallOver("ExecuteBatchError")

    monkeypatch.setattr(rpc, "write_first", over)
    async with running() as bench:
        with pytest.raises(grpc.aio.AioRpcError):
            await bench.generate(request())
        await until(bench.is_idle)
        _is_counted_as_cancelled(bench)
