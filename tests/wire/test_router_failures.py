"""Workers, stores and Redis that go away: a clear status in time, and nothing left over."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import grpc
import grpc.aio
import pytest

from baton.client import Client
from process.errors import DeadlineExceeded, InvalidArgument, NoCapacity, Unavailable
from tests.harness.router_bench import (
    BOUND_S,
    SHORT_WAITS,
    FakeDecode,
    FakePrefill,
    Looks,
    expected_ids,
    failure,
    fake_model,
    request,
    rest_of,
    running,
)
from tests.harness.waiting import Deadlines, until

pytestmark = pytest.mark.oracle

SHORT = {"max_tokens": 4}


async def test_a_prefill_worker_that_dies_is_replaced() -> None:
    async with running(num_prefill=2) as bench:
        for worker in bench.prefills:
            worker.gate.close()
        call = bench.stub.Generate(request(sampling=SHORT), timeout=BOUND_S)
        victim, other = await bench.busy_prefill()
        other.gate.open()
        await victim.stop()
        assert sum(len(m.token_ids) for m in await rest_of(call)) == 4
        # As long as it is suspect, the other one is asked first.
        assert await bench.generate(request(sampling=SHORT))
        assert len(other.requests) == 2


async def test_a_lone_prefill_worker_that_dies_is_unavailable_with_a_retry_time() -> None:
    async with running(times=SHORT_WAITS) as bench:
        bench.prefill.gate.close()
        call = bench.stub.Generate(request(), timeout=BOUND_S)
        await bench.prefill.gate.reached.wait()
        await bench.prefill.stop()
        code, error = await failure(call)
        assert code is grpc.StatusCode.UNAVAILABLE and error.retry_after_s is not None
        await until(lambda: bench.decode.num_open == 0)


async def test_the_first_token_does_not_wait_for_the_store() -> None:
    async with running() as bench:
        bench.prefill.account_gate.close()
        call = bench.stub.Generate(request(sampling=SHORT), timeout=BOUND_S)
        first = await asyncio.wait_for(call.read(), BOUND_S)
        assert len(first.token_ids) == 1
        assert not bench.decode.generated
        bench.prefill.account_gate.open()
        assert sum(len(m.token_ids) for m in await rest_of(call)) == 3


async def test_a_prefill_worker_that_dies_after_its_token_costs_no_token() -> None:
    """What it drew is shown already; the decode worker goes on from it and computes the prompt."""
    async with running() as bench:
        bench.prefill.account_gate.close()
        options = {"max_tokens": 4, "seed": 5}
        call = bench.stub.Generate(request(token_ids={"ids": [5, 6, 7]}, sampling=options))
        first = await asyncio.wait_for(call.read(), BOUND_S)
        await bench.prefill.stop()
        rest = await asyncio.wait_for(rest_of(call), BOUND_S)
        ids = [*first.token_ids, *(i for message in rest for i in message.token_ids)]
        assert ids == expected_ids(bench, [5, 6, 7], 5, 4)
        (told,) = bench.decode.generated
        assert not told.HasField("handle")
        assert list(told.output_token_ids) == ids[:1]
        assert [leg.role for leg in rest[-1].provenance.legs] == ["decode"]


async def test_an_answer_that_ends_with_its_first_token_frees_decode_before_the_account() -> None:
    async with running() as bench:
        bench.prefill.account_gate.close()
        (stop,) = expected_ids(bench, [5, 6, 7], 5, 1)
        options = {"max_tokens": 4, "seed": 5, "stop_token_ids": [stop]}
        call = bench.stub.Generate(request(token_ids={"ids": [5, 6, 7]}, sampling=options))
        await until(lambda: bench.decode.num_cancelled == 1)
        shown = await asyncio.wait_for(call.read(), BOUND_S)
        assert list(shown.token_ids) == [stop]
        bench.prefill.account_gate.open()
        (last,) = await asyncio.wait_for(rest_of(call), BOUND_S)
        assert last.stop_token_id == stop
        assert not bench.decode.generated


async def test_an_answer_that_is_over_does_not_wait_long_for_its_account() -> None:
    """The store may be slow; the client has its answer, and it ends in good time without that
    leg."""
    async with running(times={"finish_wait_s": 0.2}) as bench:
        bench.prefill.account_gate.close()
        call = bench.stub.Generate(request(sampling={"max_tokens": 1}), timeout=BOUND_S)
        shown, last = await asyncio.wait_for(rest_of(call), BOUND_S)
        assert len(shown.token_ids) == 1
        assert last.usage.num_output_tokens == 1 and not last.provenance.legs
        bench.prefill.account_gate.open()


async def test_two_prefill_workers_that_die_one_before_and_one_after_the_token() -> None:
    async with running(num_prefill=2) as bench:
        for worker in bench.prefills:
            worker.gate.close()
            worker.account_gate.close()
        options = {"max_tokens": 4, "seed": 5}
        call = bench.stub.Generate(request(token_ids={"ids": [5, 6, 7]}, sampling=options))
        victim, other = await bench.busy_prefill()
        other.gate.open()
        await victim.stop()
        first = await asyncio.wait_for(call.read(), BOUND_S)
        await other.stop()
        rest = await asyncio.wait_for(rest_of(call), BOUND_S)
        ids = [*first.token_ids, *(i for message in rest for i in message.token_ids)]
        assert ids == expected_ids(bench, [5, 6, 7], 5, 4)


async def test_a_prefill_worker_s_own_no_is_passed_on() -> None:
    async with running() as bench:
        bench.prefill.error = InvalidArgument("sampling.top_k", "not here")
        code, error = await failure(bench.stub.Generate(request(), timeout=BOUND_S))
        assert code is grpc.StatusCode.INVALID_ARGUMENT and "top_k" in str(error)


async def test_a_decode_worker_that_dies_costs_its_streams_no_token() -> None:
    async with running(num_decode=2) as bench:
        for worker in bench.decodes:
            worker.token_gate.close()
        asked = request(token_ids={"ids": [5, 6, 7]}, sampling={"max_tokens": 4, "seed": 5})
        calls = [bench.stub.Generate(asked, timeout=BOUND_S) for _ in range(8)]
        firsts = [await call.read() for call in calls]
        victim, survivor = bench.decodes
        # Prefill's tokens come before the handover: who only holds blocks loses no stream.
        await until(lambda: victim.num_generating + survivor.num_generating == 8)
        lost = victim.num_open
        assert lost and survivor.num_open == 8 - lost
        await victim.stop()
        survivor.token_gate.open()
        num_moved = 0
        for first, call in zip(firsts, calls, strict=True):
            messages = [first, *await rest_of(call)]
            ids = [token_id for message in messages for token_id in message.token_ids]
            assert ids == expected_ids(bench, [5, 6, 7], 5, 4)
            legs = messages[-1].provenance.legs
            num_moved += [leg.ended_by for leg in legs if leg.ended_by] == ["worker_lost"]
            assert legs[-1].worker_id == survivor.worker_id
        assert num_moved == lost
        # New requests go to the one that lives.
        assert await bench.generate(request(sampling=SHORT))


async def test_a_decode_worker_that_refuses_is_passed_over() -> None:
    async with running(num_decode=3) as bench:
        # Equal prompts go to one worker while all are idle: that one, then the next one refuses.
        for _ in range(2):
            before = [worker.num_reserved for worker in bench.decodes]
            assert await bench.generate(request(sampling=SHORT))
            after = [worker.num_reserved for worker in bench.decodes]
            (favourite,) = (i for i in range(3) if after[i] > before[i])
            bench.decodes[favourite].error = NoCapacity("full")
        assert await bench.generate(request(sampling=SHORT))
        assert sum(worker.num_refused for worker in bench.decodes) >= 2
        assert bench.prefill.num_active == 0 and len(bench.prefill.requests) == 3


async def test_full_decode_workers_are_exhausted_after_a_bounded_wait() -> None:
    async with running(times=SHORT_WAITS) as bench:
        bench.decode.error = NoCapacity("full", retry_after_s=2.5)
        code, error = await failure(bench.stub.Generate(request(), timeout=BOUND_S))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error.retry_after_s == pytest.approx(2.5)
        # No prefill was started for what decode cannot take.
        assert not bench.prefill.requests


async def test_room_that_comes_is_taken() -> None:
    async with running() as bench:
        bench.decode.error = NoCapacity("full")
        call = bench.stub.Generate(request(sampling=SHORT), timeout=BOUND_S)
        reading = asyncio.create_task(call.read())
        await until(lambda: bench.decode.num_refused >= 2)
        bench.decode.error = None
        assert (await reading).token_ids
        assert await rest_of(call)


async def test_a_permanent_no_from_decode_is_not_retried() -> None:
    async with running() as bench:
        bench.decode.error = InvalidArgument("prompt", "can never fit")
        code, _ = await failure(bench.stub.Generate(request(), timeout=BOUND_S))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert not bench.prefill.requests


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_missing_role_is_named(role: str) -> None:
    async with running(num_prefill=role != "prefill", num_decode=role != "decode") as bench:
        code, error = await failure(bench.stub.Generate(request(), timeout=BOUND_S))
        assert code is grpc.StatusCode.UNAVAILABLE
        assert f"no {role} worker" in str(error) and error.retry_after_s is not None


async def test_bad_input_is_told_even_without_workers() -> None:
    async with running(num_prefill=0, num_decode=0) as bench:
        call = bench.stub.Generate(request(sampling={"top_p": 7.0}), timeout=BOUND_S)
        assert (await failure(call))[0] is grpc.StatusCode.INVALID_ARGUMENT


async def test_without_redis_known_workers_still_serve() -> None:
    async with running() as bench:
        bench.probe.remember(for_s=0.2)
        bench.redis.kill()
        messages = await bench.generate(request(text="a prompt of one block", sampling=SHORT))
        assert messages[-1].usage.num_output_tokens == 4
        status = await bench.status()
        assert not status.redis_reachable
        assert any("Redis is not reachable" in problem for problem in status.problems)
        assert {worker.worker_id for worker in status.workers} == {"p0", "d0"}
        # Back again, empty: now they are gone for real.
        await bench.redis.start()
        await until(lambda: not bench.probe.worker_ids)


async def test_a_lapsed_heartbeat_takes_a_worker_out() -> None:
    async with running(num_prefill=2) as bench:
        await bench.lapse(bench.prefills[0])
        for _ in range(3):
            await bench.generate(request(sampling=SHORT))
        assert not bench.prefills[0].requests and len(bench.prefills[1].requests) == 3


async def test_a_restarted_worker_is_met_under_its_new_life() -> None:
    async with running() as bench:
        assert await bench.generate(request(sampling=SHORT))
        bench.decode.token_gate.close()
        call = bench.stub.Generate(request(sampling=SHORT), timeout=BOUND_S)
        assert (await call.read()).token_ids
        old = bench.decodes.pop()
        # The old process is gone without a word; its successor registers under the same id.
        successor = FakeDecode("d0", bench.model)
        await old.stop()
        await bench.add(successor)
        assert (await rest_of(call))[-1].provenance.legs[-1].incarnation == successor.incarnation
        messages = await bench.generate(request(sampling=SHORT))
        assert messages[-1].provenance.legs[1].incarnation == successor.incarnation


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_new_request_waits_for_the_only_worker_to_be_back(
    role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before and after the registry drops the dead one: both requests were refused once."""
    async with running() as bench:
        assert await bench.generate(request(sampling=SHORT))
        looks = Looks(monkeypatch)
        workers: Any = bench.prefills if role == "prefill" else bench.decodes
        old = workers.pop()
        await old.stop()
        early = asyncio.create_task(bench.generate(request(sampling=SHORT)))
        await looks.more(12)
        await bench.lapse(old)
        late = asyncio.create_task(bench.generate(request(sampling=SHORT)))
        await looks.more(10)
        assert not early.done() and not late.done()
        await bench.add(type(old)(old.worker_id, bench.model))
        for messages in await asyncio.gather(early, late):
            assert messages[-1].usage.num_output_tokens == 4


async def test_a_request_that_waits_for_a_lost_worker_ends_with_its_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    deadlines = Deadlines(monkeypatch)
    async with running() as bench:
        looks = Looks(monkeypatch)
        old = bench.decodes.pop()
        await old.stop()
        await bench.lapse(old)
        call = bench.stub.Generate(request(sampling=SHORT), timeout=BOUND_S)
        await looks.more(1)
        deadlines.end_all()
        code, _ = await failure(call)
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_worker_that_stays_away_is_waited_for_a_bounded_time() -> None:
    async with running(times=SHORT_WAITS) as bench:
        old = bench.decodes.pop()
        await old.stop()
        await bench.lapse(old)
        code, error = await failure(bench.stub.Generate(request(sampling=SHORT), timeout=BOUND_S))
        assert code is grpc.StatusCode.UNAVAILABLE and "no decode worker" in str(error)
        assert error.retry_after_s is not None


async def test_a_request_waits_for_a_worker_that_is_starting() -> None:
    """It has said so in the registry, and no worker of its role was there before."""
    async with running(num_decode=0) as bench:
        async with bench.starting_decode("d0"):
            asked = asyncio.create_task(bench.generate(request(sampling=SHORT)))
            await until(lambda: bench.probe.num_held == 1)
            await bench.add(FakeDecode("d0", bench.model))
        assert (await asked)[-1].usage.num_output_tokens == 4


@pytest.mark.parametrize("where", ["waiting to be admitted", "prefilling", "decoding"])
async def test_a_budget_that_is_spent_is_said_with_where_it_went(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients read "Stream removed (Deadline Exceeded)": their own clock ended the call first."""
    deadlines = Deadlines(monkeypatch)
    async with running(admission={"max_active_requests": 1}) as bench:
        bench.decode.token_gate.close()
        if where == "prefilling":
            bench.prefill.gate.close()
        other = None
        if where == "waiting to be admitted":
            other = bench.stub.Generate(request(sampling=SHORT), timeout=BOUND_S)
            assert (await other.read()).token_ids
        async with Client(bench.router.address) as client:
            asked = client.complete("hello", max_tokens=4, timeout_s=BOUND_S)
            completing = asyncio.create_task(asked)
            await until(lambda: where in bench.probe.states)
            bench.probe.age_requests(100.0)
            deadlines.end_all()
            with pytest.raises(DeadlineExceeded) as caught:
                await completing
        if other is not None:
            other.cancel()
        told = str(caught.value)
        spent = rf"the request.s budget of [0-9.]+ s ran out while {where}"
        assert re.match(rf"{spent}; it went to: {where} 1\d\d s", told)


async def test_a_lone_worker_that_hangs_without_heartbeat_loses_its_streams() -> None:
    """A stopped process keeps its connection: only the missing heartbeat tells."""
    times = {**SHORT_WAITS, "poll_interval_s": 0.1, "lapse_grace_s": 0.5}
    async with running(num_decode=1, times=times) as bench:
        bench.decode.token_gate.close()
        call = bench.stub.Generate(request(sampling=SHORT), timeout=BOUND_S)
        assert (await call.read()).token_ids
        await bench.silence(bench.decode)
        code, error = await failure(call)
        assert code is grpc.StatusCode.UNAVAILABLE and "heartbeat" in str(error)


async def test_workers_of_another_model_or_tokenizer_are_not_used_and_said() -> None:
    async with running() as bench:
        foreign = fake_model(tokenizer_digest="11" * 32)
        await bench.add(FakePrefill("px", foreign))
        await bench.add(FakeDecode("dy", fake_model(name="another")))
        for _ in range(3):
            await bench.generate(request(sampling=SHORT))
        assert not bench.prefills[1].requests and not bench.decodes[1].num_reserved
        problems = (await bench.status()).problems
        assert any("px has another tokenizer" in problem for problem in problems)
        assert any("dy serves another model" in problem for problem in problems)


async def test_a_draining_worker_gets_nothing_new() -> None:
    async with running(num_decode=2) as bench:
        bench.decodes[0].is_draining = True
        await bench.publish(bench.decodes[0])
        for _ in range(3):
            await bench.generate(request(sampling=SHORT))
        assert bench.decodes[0].num_reserved == 0


async def test_pairs_that_cannot_exchange_kv_are_not_formed() -> None:
    async with running(num_decode=0) as bench:
        await bench.add(FakeDecode("d9", fake_model(fingerprint="cd" * 32)))
        code, error = await failure(bench.stub.Generate(request(), timeout=BOUND_S))
        assert code is grpc.StatusCode.UNAVAILABLE and "same model" in str(error)


async def test_a_worker_that_does_not_answer_is_shown_as_last_heard_of() -> None:
    async with running(expect_idle=True) as bench:
        await bench.prefill.stop()
        status = await bench.status()
        assert {worker.worker_id for worker in status.workers} == {"p0", "d0"}
        assert "p0 does not answer" in status.problems


async def test_a_busy_port_is_one_clear_error() -> None:
    async with running() as bench:
        with pytest.raises(Unavailable, match="port is taken"):
            async with bench.another_router(listen=bench.router.address):
                pass


async def test_a_request_whose_prefill_worker_went_silent_says_what_it_waits_for() -> None:
    async with running(times={"lapse_grace_s": 0.1}) as bench:
        bench.prefill.gate.close()
        call = bench.stub.Generate(request(sampling=SHORT), timeout=BOUND_S)
        await bench.prefill.gate.reached.wait()
        await bench.lapse(bench.prefill)

        await until(lambda: "waiting for a prefill worker" in bench.probe.states)
        call.cancel()
        bench.prefill.gate.open()


async def test_a_worker_or_store_without_heartbeat_is_a_problem() -> None:
    async with running(num_decode=2) as bench:
        await bench.add_store("store-0")
        assert not any("heartbeat" in each for each in (await bench.status()).problems)
        await bench.lapse(bench.decodes[1])
        client = bench.redis.client()
        await client.delete("baton:store:store-0:beat")
        await client.aclose()
        problems = (await bench.status()).problems
        for name in ("decode worker d1", "store store-0"):
            assert f"{name} has no heartbeat: its process hangs, or was killed" in problems
