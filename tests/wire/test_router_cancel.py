"""Cancel, deadline and repetition in each state; after each, nothing is left anywhere."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest

from protos import inference_pb2_grpc
from tests.harness.router_bench import (
    BOUND_S,
    Bench,
    Gate,
    code_of,
    failure,
    ids_of,
    request,
    rest_of,
    running,
)
from tests.harness.waiting import Deadlines, until

pytestmark = pytest.mark.oracle

STATES = ("reserving", "prefilling", "storing", "decoding")


def _gate(bench: Bench, state: str) -> Gate:
    """The gate that holds a request in `state`."""
    return {
        "reserving": bench.decode.reserve_gate,
        "prefilling": bench.prefill.gate,
        "storing": bench.prefill.account_gate,
        "decoding": bench.decode.token_gate,
    }[state]


async def _held(bench: Bench, state: str, **fields: Any) -> Any:
    """A call whose request is held in `state`."""
    gate = _gate(bench, state)
    gate.close()
    call = bench.call(**fields)
    async with asyncio.timeout(BOUND_S):
        await gate.reached.wait()
    return call


async def _assert_all_over(bench: Bench, state: str) -> None:
    """Both legs end although the gate stays closed, then the whole bench is idle."""
    await until(lambda: bench.decode.num_open == 0 and bench.prefill.num_active == 0)
    await until(bench.is_idle)
    assert bench.prefill.num_cancelled == (state in ("prefilling", "storing"))
    _gate(bench, state).open()


@pytest.mark.parametrize("state", STATES)
async def test_a_client_that_cancels_ends_both_legs(bench: Bench, state: str) -> None:
    call = await _held(bench, state)
    call.cancel()
    await _assert_all_over(bench, state)
    assert await bench.generate(sampling={"max_tokens": 2})


@pytest.mark.parametrize("state", STATES)
async def test_a_client_that_vanishes_ends_both_legs(bench: Bench, state: str) -> None:
    gate = _gate(bench, state)
    gate.close()
    channel = grpc.aio.insecure_channel(
        bench.router.address, options=[("grpc.use_local_subchannel_pool", 1)]
    )
    call = inference_pb2_grpc.InferenceStub(channel).Generate(request())
    reading = asyncio.create_task(call.read())
    async with asyncio.timeout(BOUND_S):
        await gate.reached.wait()
    await channel.close()
    await asyncio.gather(reading, return_exceptions=True)
    await _assert_all_over(bench, state)


@pytest.mark.parametrize("state", STATES)
async def test_the_deadline_ends_every_state(
    bench: Bench, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    deadlines = Deadlines(monkeypatch)
    call = await _held(bench, state)
    deadlines.end_all()
    assert await code_of(call) is grpc.StatusCode.DEADLINE_EXCEEDED
    await _assert_all_over(bench, state)


@pytest.mark.parametrize(("budget_ms", "timeout_s"), [(300, BOUND_S), (0, 0.3)])
async def test_the_request_s_budget_counts_and_the_rpc_s(
    bench: Bench, budget_ms: int, timeout_s: float
) -> None:
    bench.prefill.gate.close()
    call = bench.stub.Generate(request(budget_ms=budget_ms), timeout=timeout_s)
    assert await code_of(call) is grpc.StatusCode.DEADLINE_EXCEEDED
    await until(bench.is_idle)
    # How far it came in its time is the machine's pace.
    assert bench.prefill.num_cancelled == len(bench.prefill.requests)


@pytest.mark.parametrize("state", STATES)
async def test_the_same_request_again_takes_over(bench: Bench, state: str) -> None:
    """A client that lost its stream retries: the old attempt ends, the answer is the same."""
    fields = {"request_id": "r", "sampling": {"max_tokens": 5}}
    old = await _held(bench, state, **fields)
    # The retry's own budget may differ: it is not part of the body.
    new = bench.call(budget_ms=9000, **fields)
    code, error = await failure(old)
    assert code is grpc.StatusCode.CANCELLED and "newer attempt" in str(error)
    _gate(bench, state).open()
    messages = await rest_of(new)
    prompt = list(bench.prefill.requests[-1].prompt_token_ids)
    ids = ids_of(messages)
    assert ids == bench.expected_ids(prompt, messages[-1].seed, 5)
    seeds = {r.sampling.seed for r in bench.prefill.requests}
    assert seeds == {messages[-1].seed}


async def test_an_attempt_that_waits_for_its_reader_is_superseded(bench: Bench) -> None:
    """The old client does not read: its blocked write must not hold the retry up."""
    options = [("grpc.http2.lookahead_bytes", 64), ("grpc.http2.bdp_probe", 0)]
    async with grpc.aio.insecure_channel(bench.router.address, options=options) as channel:
        fields = {"request_id": "r", "sampling": {"max_tokens": 200}}
        old = inference_pb2_grpc.InferenceStub(channel).Generate(request(**fields))
        assert await old.read()
        await bench.decode.idle.wait()
        assert bench.probe.num_requests == 1
        messages = await bench.generate(**fields)
        assert len(ids_of(messages)) == 200
        old.cancel()


async def test_three_attempts_only_the_last_goes_on(bench: Bench) -> None:
    fields = {"request_id": "r", "sampling": {"max_tokens": 3}}
    calls = [await _held(bench, "prefilling", **fields)]
    for number in (2, 3):
        calls.append(bench.call(**fields))
        await until(lambda number=number: len(bench.prefill.requests) == number)
    for call in calls[:2]:
        assert await code_of(call) is grpc.StatusCode.CANCELLED
    bench.prefill.gate.open()
    assert await rest_of(calls[2])


async def test_the_same_id_with_another_body_is_refused(bench: Bench) -> None:
    first = await _held(bench, "decoding", request_id="r", sampling={"max_tokens": 3})
    again = bench.call(request_id="r", text="other")
    assert await code_of(again) is grpc.StatusCode.ALREADY_EXISTS
    other_tenant = bench.stub.Generate(
        request(request_id="r", text="other", tenant="t", sampling={"max_tokens": 1})
    )
    assert await rest_of(other_tenant)
    bench.decode.token_gate.open()
    assert await rest_of(first)  # untouched
    # When it is over its id is free for any body.
    assert await bench.generate(request_id="r", text="other")


async def test_too_many_at_once_are_refused_with_a_retry_time() -> None:
    async with running(limits={"max_requests_in_flight": 1}) as bench:
        first = await _held(bench, "prefilling", sampling={"max_tokens": 2})
        code, _ = await bench.failure()
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        bench.prefill.gate.open()
        assert await rest_of(first)
