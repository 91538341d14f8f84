"""Workers, stores, Redis and routers that go away: a clear status in time, nothing left over."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import aiohttp
import grpc
import grpc.aio
import pytest

from baton.client import Client
from process.rpc_errors import (
    BatonError,
    DeadlineExceeded,
    InvalidArgument,
    NoCapacity,
    Unavailable,
)
from tests.harness.router_bench import (
    BOUND_S,
    SHORT_WAITS,
    Bench,
    FakeDecode,
    FakePrefill,
    HttpBench,
    Looks,
    code_of,
    failure,
    fake_model,
    http_bench,
    ids_of,
    request,
    rest_of,
    running,
)
from tests.harness.waiting import Deadlines, until

pytestmark = pytest.mark.oracle

SHORT = {"max_tokens": 4}
INVALID = grpc.StatusCode.INVALID_ARGUMENT


async def test_a_prefill_worker_that_dies_is_replaced() -> None:
    async with running(num_prefill=2) as bench:
        for worker in bench.prefills:
            worker.gate.close()
        call = bench.call(sampling=SHORT)
        victim, other = await bench.busy_prefill()
        other.gate.open()
        await victim.stop()
        assert len(ids_of(await rest_of(call))) == 4
        # As long as it is suspect, the other one is asked first.
        assert await bench.generate(sampling=SHORT)
        assert len(other.requests) == 2


async def test_a_lone_prefill_worker_that_dies_is_unavailable_with_a_retry_time() -> None:
    async with running(times=SHORT_WAITS) as bench:
        bench.prefill.gate.close()
        call = bench.call()
        await bench.prefill.gate.reached.wait()
        await bench.prefill.stop()
        code, error = await failure(call)
        assert code is grpc.StatusCode.UNAVAILABLE and error.retry_after_s is not None
        await until(lambda: bench.decode.num_open == 0)


async def test_the_first_token_does_not_wait_for_the_store(bench: Bench) -> None:
    bench.prefill.account_gate.close()
    call = bench.call(sampling=SHORT)
    first = await asyncio.wait_for(call.read(), BOUND_S)
    assert len(first.token_ids) == 1
    assert not bench.decode.generated
    bench.prefill.account_gate.open()
    assert len(ids_of(await rest_of(call))) == 3


@pytest.mark.parametrize("num_prefill", [1, 2])
async def test_a_prefill_worker_that_dies_after_its_token_costs_no_token(num_prefill: int) -> None:
    """The decode worker goes on from it and computes the prompt; of two one died before it."""
    async with running(num_prefill=num_prefill) as bench:
        for worker in bench.prefills:
            worker.gate.close()
            worker.account_gate.close()
        call = bench.call(token_ids={"ids": [5, 6, 7]}, sampling={"max_tokens": 4, "seed": 5})
        if num_prefill == 2:
            victim, other = await bench.busy_prefill()
            await victim.stop()
        else:
            other = bench.prefill
        other.gate.open()
        first = await asyncio.wait_for(call.read(), BOUND_S)
        await other.stop()
        rest = await asyncio.wait_for(rest_of(call), BOUND_S)
        ids = ids_of([first, *rest])
        assert ids == bench.expected_ids([5, 6, 7], 5, 4)
        (told,) = bench.decode.generated
        assert not told.HasField("handle")
        assert list(told.output_token_ids) == ids[:1]
        assert [leg.role for leg in rest[-1].provenance.legs] == ["decode"]


async def test_an_answer_that_ends_with_its_first_token_frees_decode_before_the_account(
    bench: Bench,
) -> None:
    bench.prefill.account_gate.close()
    (stop,) = bench.expected_ids([5, 6, 7], 5, 1)
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
    """The store may be slow: it ends without that leg."""
    async with running(times={"finish_wait_s": 0.2}) as bench:
        bench.prefill.account_gate.close()
        call = bench.call(sampling={"max_tokens": 1})
        shown, last = await asyncio.wait_for(rest_of(call), BOUND_S)
        assert len(shown.token_ids) == 1
        assert last.usage.num_output_tokens == 1 and not last.provenance.legs
        bench.prefill.account_gate.open()


@pytest.mark.parametrize(
    ("role", "error", "code", "retry_after_s"),
    [
        ("prefill", InvalidArgument("sampling.top_k", "not here"), INVALID, None),
        ("decode", InvalidArgument("prompt", "can never fit"), INVALID, None),
        ("decode", NoCapacity("full", retry_after_s=2.5), grpc.StatusCode.RESOURCE_EXHAUSTED, 2.5),
    ],
)
async def test_a_worker_s_own_no_is_passed_on(
    role: str, error: BatonError, code: grpc.StatusCode, retry_after_s: float | None
) -> None:
    """One for good at once, else after a bounded wait."""
    async with running(times=SHORT_WAITS) as bench:
        getattr(bench, role).error = error
        found, told = await bench.failure()
        assert found is code and str(error) in str(told)
        assert told.retry_after_s == (retry_after_s and pytest.approx(retry_after_s))
        # No prefill was started for what decode cannot take.
        assert role == "prefill" or not bench.prefill.requests


async def test_a_decode_worker_that_dies_costs_its_streams_no_token() -> None:
    async with running(num_decode=2) as bench:
        for worker in bench.decodes:
            worker.token_gate.close()
        asked = request(token_ids={"ids": [5, 6, 7]}, sampling={"max_tokens": 4, "seed": 5})
        calls = [bench.call(asked) for _ in range(8)]
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
            ids = ids_of(messages)
            assert ids == bench.expected_ids([5, 6, 7], 5, 4)
            legs = messages[-1].provenance.legs
            num_moved += [leg.ended_by for leg in legs if leg.ended_by] == ["worker_lost"]
            assert legs[-1].worker_id == survivor.worker_id
        assert num_moved == lost
        # New requests go to the one that lives.
        assert await bench.generate(sampling=SHORT)


async def test_a_decode_worker_that_refuses_is_passed_over() -> None:
    async with running(num_decode=3) as bench:
        # Equal prompts go to one worker while all are idle: that one, then the next one refuses.
        for _ in range(2):
            before = [worker.num_reserved for worker in bench.decodes]
            assert await bench.generate(sampling=SHORT)
            after = [worker.num_reserved for worker in bench.decodes]
            (favourite,) = (i for i in range(3) if after[i] > before[i])
            bench.decodes[favourite].error = NoCapacity("full")
        assert await bench.generate(sampling=SHORT)
        assert sum(worker.num_refused for worker in bench.decodes) >= 2
        assert bench.prefill.num_active == 0 and len(bench.prefill.requests) == 3


async def test_room_that_comes_is_taken(bench: Bench) -> None:
    bench.decode.error = NoCapacity("full")
    call = bench.call(sampling=SHORT)
    reading = asyncio.create_task(call.read())
    await until(lambda: bench.decode.num_refused >= 2)
    bench.decode.error = None
    assert (await reading).token_ids
    assert await rest_of(call)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_missing_role_is_named(role: str) -> None:
    async with running(num_prefill=role != "prefill", num_decode=role != "decode") as bench:
        code, error = await bench.failure()
        assert code is grpc.StatusCode.UNAVAILABLE
        assert f"no {role} worker" in str(error) and error.retry_after_s is not None


async def test_bad_input_is_told_even_without_workers() -> None:
    async with running(num_prefill=0, num_decode=0) as bench:
        call = bench.call(sampling={"top_p": 7.0})
        assert await code_of(call) is grpc.StatusCode.INVALID_ARGUMENT


async def test_without_redis_known_workers_still_serve(bench: Bench) -> None:
    bench.probe.remember(for_s=0.2)
    bench.redis.kill()
    messages = await bench.generate(text="a prompt of one block", sampling=SHORT)
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
            await bench.generate(sampling=SHORT)
        assert not bench.prefills[0].requests and len(bench.prefills[1].requests) == 3


async def test_a_restarted_worker_is_met_under_its_new_life(bench: Bench) -> None:
    assert await bench.generate(sampling=SHORT)
    bench.decode.token_gate.close()
    call = bench.call(sampling=SHORT)
    assert (await call.read()).token_ids
    old = bench.decodes.pop()
    # The old process is gone without a word; its successor registers under the same id.
    successor = FakeDecode("d0", bench.model)
    await old.stop()
    await bench.add(successor)
    assert (await rest_of(call))[-1].provenance.legs[-1].incarnation == successor.incarnation
    messages = await bench.generate(sampling=SHORT)
    assert messages[-1].provenance.legs[1].incarnation == successor.incarnation


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_new_request_waits_for_the_only_worker_to_be_back(
    bench: Bench, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before and after the registry drops the dead one: both requests were refused once."""
    assert await bench.generate(sampling=SHORT)
    looks = Looks(monkeypatch)
    workers: Any = bench.prefills if role == "prefill" else bench.decodes
    old = workers.pop()
    await old.stop()
    early = asyncio.create_task(bench.generate(sampling=SHORT))
    await looks.more(12)
    await bench.lapse(old)
    late = asyncio.create_task(bench.generate(sampling=SHORT))
    await looks.more(10)
    assert not early.done() and not late.done()
    await bench.add(type(old)(old.worker_id, bench.model))
    for messages in await asyncio.gather(early, late):
        assert messages[-1].usage.num_output_tokens == 4


async def test_a_request_that_waits_for_a_lost_worker_ends_with_its_budget(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    deadlines = Deadlines(monkeypatch)
    looks = Looks(monkeypatch)
    old = bench.decodes.pop()
    await old.stop()
    await bench.lapse(old)
    call = bench.call(sampling=SHORT)
    await looks.more(1)
    deadlines.end_all()
    code, _ = await failure(call)
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_worker_that_stays_away_is_waited_for_a_bounded_time() -> None:
    async with running(times=SHORT_WAITS) as bench:
        old = bench.decodes.pop()
        await old.stop()
        await bench.lapse(old)
        code, error = await bench.failure(sampling=SHORT)
        assert code is grpc.StatusCode.UNAVAILABLE and "no decode worker" in str(error)
        assert error.retry_after_s is not None


async def test_a_request_waits_for_a_worker_that_is_starting() -> None:
    """It has said so in the registry, and no worker of its role was there before."""
    async with running(num_decode=0) as bench:
        async with bench.starting_decode("d0"):
            asked = asyncio.create_task(bench.generate(sampling=SHORT))
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
            other = bench.call(sampling=SHORT)
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
        call = bench.call(sampling=SHORT)
        assert (await call.read()).token_ids
        await bench.silence(bench.decode)
        code, error = await failure(call)
        assert code is grpc.StatusCode.UNAVAILABLE and "heartbeat" in str(error)


async def test_workers_of_another_model_or_tokenizer_are_not_used_and_said(bench: Bench) -> None:
    foreign = fake_model(tokenizer_digest="11" * 32)
    await bench.add(FakePrefill("px", foreign))
    await bench.add(FakeDecode("dy", fake_model(name="another")))
    for _ in range(3):
        await bench.generate(sampling=SHORT)
    assert not bench.prefills[1].requests and not bench.decodes[1].num_reserved
    problems = (await bench.status()).problems
    assert any("px has another tokenizer" in problem for problem in problems)
    assert any("dy serves another model" in problem for problem in problems)


async def test_a_draining_worker_gets_nothing_new() -> None:
    async with running(num_decode=2) as bench:
        bench.decodes[0].is_draining = True
        await bench.publish(bench.decodes[0])
        for _ in range(3):
            await bench.generate(sampling=SHORT)
        assert bench.decodes[0].num_reserved == 0


async def test_pairs_that_cannot_exchange_kv_are_not_formed() -> None:
    async with running(num_decode=0) as bench:
        await bench.add(FakeDecode("d9", fake_model(fingerprint="cd" * 32)))
        code, error = await bench.failure()
        assert code is grpc.StatusCode.UNAVAILABLE and "same model" in str(error)


async def test_a_worker_that_does_not_answer_is_shown_as_last_heard_of() -> None:
    async with running(expect_idle=True) as bench:
        await bench.prefill.stop()
        status = await bench.status()
        assert {worker.worker_id for worker in status.workers} == {"p0", "d0"}
        assert "p0 does not answer" in status.problems


async def test_a_busy_port_is_one_clear_error(bench: Bench) -> None:
    with pytest.raises(Unavailable, match="port is taken"):
        async with bench.another_router(listen=bench.router.address):
            pass


async def test_a_request_whose_prefill_worker_went_silent_says_what_it_waits_for() -> None:
    async with running(times={"lapse_grace_s": 0.1}) as bench:
        bench.prefill.gate.close()
        call = bench.call(sampling=SHORT)
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
        await bench.redis_client.delete("baton:store:store-0:beat")
        problems = (await bench.status()).problems
        for name in ("decode worker d1", "store store-0"):
            assert f"{name} has no heartbeat: its process hangs, or was killed" in problems


# ---- Redis is killed and replaced by an empty one, as a pod is


async def _serves(bench: Bench) -> None:
    messages = await bench.generate(text="a prompt of one block", sampling=SHORT)
    assert messages[-1].usage.num_output_tokens == 4


@pytest.mark.parametrize("is_seen_away", [True, False])
async def test_no_request_fails_while_redis_is_replaced(bench: Bench, is_seen_away: bool) -> None:
    """Whether the router found it away, or meets the new one at its next look."""
    async with bench.beating(bench.prefill, bench.decode) as beats:
        await bench.probe.look()
        bench.redis.kill()
        if is_seen_away:
            await until(lambda: not bench.probe.is_redis_reachable)
            await until(lambda: not any(beat.is_registered for beat in beats))
            await _serves(bench)
        await bench.redis.start()
        before = [beat.num_beats for beat in beats]
        assert len(await bench.probe.look()) == 2
        await _serves(bench)
        while not all(beat.num_beats > num for beat, num in zip(beats, before, strict=True)):
            await _serves(bench)
        assert len(await bench.probe.look()) == 2 and bench.probe.is_redis_reachable
        await _serves(bench)


async def test_who_does_not_come_back_is_gone_when_its_time_is_over() -> None:
    async with running(num_decode=2) as bench, bench.beating(bench.prefill, bench.decodes[0]):
        assert len(await bench.probe.look()) == 3
        bench.redis.kill()
        await bench.redis.start()
        assert len(await bench.probe.look()) == 3
        await until(lambda: bench.probe.worker_ids == {"p0", "d0"})
        await _serves(bench)


# ---- the router is told to end


async def test_streams_that_outlast_the_drain_end_with_an_error() -> None:
    async with http_bench(times={"drain_s": 0.2}) as bench, aiohttp.ClientSession() as session:
        bench.decode.token_gate.close()
        bench.decode.token_gate.let_pass(2)
        call = bench.call()
        body = {"prompt": "hello", "stream": True, "max_tokens": 8}
        async with session.post(f"{bench.url}/v1/completions", json=body) as response:
            first = await response.content.readline()
            await call.read()
            stopping = asyncio.create_task(bench.router.stop())
            rest = (await response.content.read()).decode()
            code, stopped = await failure(call)
            await stopping
    assert first.startswith(b"data: ")
    events = [line for line in rest.splitlines() if line.startswith("data: ")]
    error = json.loads(events[-1].removeprefix("data: "))["error"]
    assert error["code"] == "unavailable" and "this router stops" in error["message"]
    assert code is grpc.StatusCode.UNAVAILABLE and "this router stops" in str(stopped)


async def test_a_stream_that_ends_within_the_drain_is_whole(bench: HttpBench) -> None:
    async with aiohttp.ClientSession() as session:
        bench.decode.token_gate.close()
        bench.decode.token_gate.let_pass(1)
        body = {"prompt": "hello", "stream": True, "max_tokens": 4}
        async with session.post(f"{bench.url}/v1/completions", json=body) as response:
            await response.content.readline()
            stopping = asyncio.create_task(bench.router.stop())
            bench.decode.token_gate.open()
            rest = (await response.content.read()).decode()
            await stopping
    assert rest.rstrip().endswith("data: [DONE]") and "error" not in rest
