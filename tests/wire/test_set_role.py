"""A worker changes its role: it drains as the one, and serves as the other over the same engine;
the one that it has not says so; what was cached still is."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from engine.request import Request, Sampling
from kvstore.errors import Quarantine
from process import serving
from process.errors import FailedPrecondition, Internal, Unavailable
from protos import (
    common_pb2,
    decode_pb2_grpc,
    prefill_pb2_grpc,
    worker_control_pb2,
    worker_control_pb2_grpc,
)
from services.decode.role import DecodeRole
from services.worker import main, worker
from services.worker.config import WorkerLimits, WorkerSettings
from services.worker.life import Life
from tests.harness.decode_movers import Movers, going_on, movers, release_when_taken_out
from tests.harness.gated_engine import SALT, GatedModel, fake_engine, prompt_of
from tests.harness.prefill_decode_pair import WAIT_S, Pair, RouterStream, Sample, pair
from tests.harness.waiting import until

PROMPT = prompt_of(30, start=3)
SHORT = PROMPT[:10]
"""One step."""


async def set_role(made: main.Worker, role: str) -> worker_control_pb2.SetRoleReply:
    async with serving.channel(made.address) as channel:
        stub = worker_control_pb2_grpc.WorkerControlStub(channel)
        return await stub.SetRole(worker_control_pb2.SetRoleRequest(role=role), timeout=WAIT_S)


async def code_of(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details() or ""


async def busy(m: Movers) -> int:
    """A request of worker 0 in a step that does not end."""
    model = m.engine(0)._model
    model.hold()
    key = await m.begin(0, SHORT, max_tokens=40)
    await until(model.is_held.is_set)
    return key


@contextlib.asynccontextmanager
async def flipped(p: Pair) -> AsyncIterator[Pair]:
    """The prefill worker decodes, the decode worker prefills."""
    for made, role in ((p.prefill, "decode"), (p.decode, "prefill")):
        await set_role(made, role)
    async with serving.channel(p.decode.address) as one, serving.channel(p.prefill.address) as two:
        stubs = prefill_pb2_grpc.PrefillStub(one), decode_pb2_grpc.DecodeStub(two)
        p.prefill, p.decode = p.decode, p.prefill
        p.prefill_stub, p.decode_stub = stubs
        yield p


async def test_both_workers_change_places_and_serve_as_before(tmp_path: Path) -> None:
    async with pair(tmp_path) as p:
        first = await p.generate(PROMPT)
        await p.check()
        before = {made.core.identity.incarnation for made in (p.prefill, p.decode)}
        names = {made.core.identity.worker_id for made in (p.prefill, p.decode)}
        memories = p.prefill.core.memory, p.decode.core.memory
        async with flipped(p):
            assert names == {made.core.identity.worker_id for made in (p.prefill, p.decode)}
            assert not before & {made.core.identity.incarnation for made in (p.prefill, p.decode)}
            # A device's checksums are captured once.
            assert p.decode.core.memory is memories[0] and p.prefill.core.memory is memories[1]
            assert [m.core.identity.role for m in (p.prefill, p.decode)] == ["prefill", "decode"]
            again = await p.generate(PROMPT, name="again")
            assert again.token_ids == first.token_ids == p.expected(PROMPT, 8)
            assert again.prefill is not None and again.prefill.leg.num_tokens_local == 28
            other = prompt_of(35, start=8)
            answer = await p.generate(other, name="other")
            assert answer.token_ids == p.expected(other, 8)
            assert answer.leg.num_tokens_computed == 0 and not answer.recomputed
            await p.check()
            async with flipped(p):
                last = await p.generate(PROMPT, name="last")
                assert last.token_ids == first.token_ids
                await p.check()


async def test_the_role_that_it_has_not_says_which_it_has(tmp_path: Path) -> None:
    async with movers(tmp_path) as m:
        made = m.workers[0]
        async with serving.channel(made.address) as channel:
            prefill = prefill_pb2_grpc.PrefillStub(channel)
            decode = decode_pb2_grpc.DecodeStub(channel)
            ask = common_pb2.GetWorkerStatusRequest()
            told = await code_of(prefill.GetWorkerStatus(ask, timeout=WAIT_S))
            assert told == (grpc.StatusCode.UNAVAILABLE, "decode-0 has the role decode now")
            assert (await decode.GetWorkerStatus(ask, timeout=WAIT_S)).role == "decode"
            reply = await set_role(made, "decode")  # it has it already
            assert reply.incarnation == made.core.identity.incarnation.hex()
            stream = m.streams[0]
            reply = await set_role(made, "prefill")
            assert (reply.worker_id, reply.role) == ("decode-0", "prefill")
            assert reply.incarnation == made.core.identity.incarnation.hex()
            assert await stream.ended() is grpc.StatusCode.UNAVAILABLE
            told = await code_of(decode.GetWorkerStatus(ask, timeout=WAIT_S))
            assert told == (grpc.StatusCode.UNAVAILABLE, "decode-0 has the role prefill now")
            status = await prefill.GetWorkerStatus(ask, timeout=WAIT_S)
            assert (status.role, status.draining, status.integrity_error) == ("prefill", False, "")


async def test_streams_move_away_before_the_role_changes(tmp_path: Path) -> None:
    limits = WorkerLimits(store_wait_s=WAIT_S, attach_budget_s=5.0, drain_s=60.0)
    async with movers(tmp_path, limits=limits) as m:
        sample = Sample()
        key = await busy(m)
        release_when_taken_out(m, 0)
        changing = asyncio.create_task(set_role(m.workers[0], "prefill"))
        while not (event := await m.streams[0].next(key)).HasField("moved"):
            sample.add(event.tokens)
        await changing
        stream = m.streams[1]
        key = await stream.reserve(m.reserve(SHORT, "r", max_tokens=40))
        await stream.next(key)
        await stream.generate_from(key, going_on(event.moved, [sample]))
        answer = await stream.collect(key)
        tokens = [*sample.token_ids, *answer.token_ids]
        assert tokens == GatedModel().generate(SHORT, 40)
        assert answer.leg.num_tokens_computed == 0 and not answer.recomputed


async def test_two_changes_wait_for_one_another_and_a_stop_for_both(tmp_path: Path) -> None:
    async with movers(tmp_path) as m:
        made = m.workers[0]
        await busy(m)
        one = asyncio.create_task(made.set_role("prefill"))
        two = asyncio.create_task(made.set_role("decode"))
        await until(lambda: made.core.draining)
        assert made.why_not_ready() == "draining"
        m.engine(0)._model.release()
        first, second = await one, await two
        assert (first.role, second.role) == ("prefill", "decode")
        assert first.incarnation != second.incarnation and made.why_not_ready() == ""
        three = asyncio.create_task(made.set_role("prefill"))
        await asyncio.sleep(0)
        stopping = asyncio.create_task(made.stop())
        with pytest.raises(Unavailable, match="is stopping"):
            await three
        await stopping
        with pytest.raises(Unavailable, match="is stopping"):
            await made.set_role("decode")


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
        close, begin, drain, end = engine.close, worker.begin, Life.drain, Life.end

        async def late_end(life: Life, **options: Any) -> None:
            if not stops:
                stops.append(asyncio.create_task(made.stop()))
                await asyncio.sleep(0)
            await end(life, **options)

        async def late_begin(*arguments: Any, **options: Any) -> Life:
            life = await begin(*arguments, **options)
            stops.append(asyncio.create_task(made.stop()))
            await asyncio.sleep(0)
            return life

        async def counted_drain(life: Life) -> None:
            told.append("drained")
            await drain(life)

        def counted_close() -> None:
            told.append("closed")
            close()

        engine.close = counted_close
        monkeypatch.setattr(Life, "drain", counted_drain)
        monkeypatch.setattr(Life, "announce", lambda life, *addresses: told.append("announced"))
        if when == "begins":
            monkeypatch.setattr(worker, "begin", late_begin)
        elif when == "ends":
            monkeypatch.setattr(Life, "end", late_end)
        else:
            await busy(m)
        changing = asyncio.create_task(set_role(made, "prefill"))
        if when == "drains":
            await until(lambda: made.core.draining)
            stops.append(asyncio.create_task(made.stop()))
            await until(lambda: made._is_stopping)
            engine._model.release()
        assert (await code_of(changing))[0] is grpc.StatusCode.UNAVAILABLE
        await stops[0]
        assert told == ["drained", "closed"] and not made.core.failed.is_set()


@pytest.mark.parametrize("settles", [True, False])
async def test_blocks_that_are_still_written_into_come_back_or_the_process_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settles: bool
) -> None:
    """A store stalled in the middle of a copy, and its request ended before the role did."""
    async with movers(tmp_path) as m:
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


async def test_a_caller_that_goes_leaves_no_half_of_a_role(tmp_path: Path) -> None:
    async with movers(tmp_path) as m:
        made = m.workers[0]
        await busy(m)
        async with serving.channel(made.address) as channel:
            stub = worker_control_pb2_grpc.WorkerControlStub(channel)
            request = worker_control_pb2.SetRoleRequest(role="prefill")
            call = stub.SetRole(request, timeout=WAIT_S)
            await until(lambda: made.core.draining)
            assert call.cancel()
            # It has been told of that when it has heard of what came after it.
            request = worker_control_pb2.SetRoleRequest(role="king")
            code, _ = await code_of(stub.SetRole(request, timeout=WAIT_S))
            assert code is grpc.StatusCode.INVALID_ARGUMENT
        m.engine(0)._model.release()
        await until(lambda: made.core.identity.role == "prefill" and not made.core.draining)


async def test_a_worker_that_cannot_become_the_other_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with movers(tmp_path) as m:
        made = m.workers[0]

        async def fails(*arguments: Any, **options: Any) -> None:
            raise FailedPrecondition("the store has frames of another size")

        monkeypatch.setattr(worker, "begin", fails)
        with pytest.raises(Internal, match="could not become prefill: the store has frames"):
            await made.set_role("prefill")
        assert made.core.failed.is_set() and made.failure is not None
        assert made.why_not_ready()


async def test_what_is_no_role_is_refused_by_name(tmp_path: Path) -> None:
    async with movers(tmp_path) as m:
        made = m.workers[0]
        async with serving.channel(made.address) as channel:
            stub = worker_control_pb2_grpc.WorkerControlStub(channel)
            request = worker_control_pb2.SetRoleRequest(role="king")
            told = await code_of(stub.SetRole(request, timeout=WAIT_S))
        code = grpc.StatusCode.INVALID_ARGUMENT
        assert told == (code, "role: 'king' is none of prefill, decode")
        assert not made.core.draining
        key = await m.begin(0, PROMPT, max_tokens=3)
        assert len((await m.streams[0].collect(key)).token_ids) == 3


async def test_without_a_store_it_changes_all_the_same(tmp_path: Path) -> None:
    settings = WorkerSettings(
        worker_id="w", redis_url="", limits=WorkerLimits(drain_s=0.2, stop_grace_s=0.05)
    )
    made = await main.start(fake_engine(), settings, "decode", DecodeRole)
    try:
        assert (await set_role(made, "prefill")).role == "prefill"
        assert (await set_role(made, "decode")).role == "decode"
        async with serving.channel(made.address) as channel:
            stream = RouterStream(decode_pb2_grpc.DecodeStub(channel).Stream())
            await stream.close()
    finally:
        await made.stop()
