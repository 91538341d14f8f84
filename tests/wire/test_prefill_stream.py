"""The stream between a router and a prefill worker: many prompts on one, cancels and breaks that
touch their own only, and handles that are owned at any time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import grpc.aio
import pytest

from process.rpc_errors import AlreadyExists, InvalidArgument
from tests.harness.odd_prefills import AccountAtCancel, EndingStream, Garbling
from tests.harness.prefill_decode_pair import Pair, PrefillStream, error_of
from tests.harness.router_bench import (
    BOUND_S,
    SHORT_WAITS,
    code_of,
    failure,
    request,
    rest_of,
    running,
)
from tests.harness.waiting import until

pytestmark = [pytest.mark.oracle, pytest.mark.asyncio(loop_scope="module")]


# ---- the worker's end


class Asked:
    """Prompts by number, while the worker's model is held."""

    def __init__(self, p: Pair) -> None:
        self.p = p
        self.prompts: dict[int, tuple[int, ...]] = {}
        p.prefill_model.hold()

    async def ask(self, stream: PrefillStream, number: int, wants_handle: bool = False) -> None:
        self.prompts[number] = prompt = self.p.new_prompt(20 + number)
        request = self.p.prefill_request(prompt, name=f"r{number}", wants_handle=wants_handle)
        await stream.send(number, prefill=request)

    async def are_live(self, num_requests: int) -> None:
        await until(lambda: len(self.p.at_prefill.states()) == num_requests)

    def first_of(self, number: int) -> list[int]:
        return self.p.expected(self.prompts[number], 1)


@pytest.fixture
def asked(p: Pair) -> Iterator[Asked]:
    yield Asked(p)
    p.prefill_model.release()


async def test_many_prompts_share_one_stream(p: Pair, asked: Asked) -> None:
    """Each has its own answer; what one step gave comes as one message."""
    stream = PrefillStream(p.prefill_stub)
    for number in range(8):
        await asked.ask(stream, number)
    await asked.are_live(8)
    p.prefill_model.release()
    events = await stream.until_over(set(range(8)))
    for number, prompt in asked.prompts.items():
        assert list(events[number][0].reply.token_ids) == asked.first_of(number)
        assert events[number][-1].reply.leg.num_tokens_computed == len(prompt)
    await stream.call.done_writing()
    assert await stream.call.read() is grpc.aio.EOF
    assert await stream.call.code() is grpc.StatusCode.OK


async def test_a_cancel_ends_its_own_prompt_only(p: Pair, asked: Asked) -> None:
    stream = PrefillStream(p.prefill_stub)
    for number in (1, 2, 3):
        await asked.ask(stream, number)
    await asked.are_live(3)
    await stream.send(2, cancel={})
    (event,) = await stream.read()
    assert event.key == 2 and event.failed.code == grpc.StatusCode.CANCELLED.value[0]
    await stream.send(2, cancel={})  # over: nothing
    await stream.send(77, cancel={})  # never known: nothing
    p.prefill_model.release()
    events = await stream.until_over({1, 3})
    for number in (1, 3):
        assert list(events[number][0].reply.token_ids) == asked.first_of(number)
    stream.call.cancel()


async def test_a_stream_that_breaks_cancels_all_of_its_prompts_and_no_others(
    p: Pair, asked: Asked
) -> None:
    stream, other = PrefillStream(p.prefill_stub), PrefillStream(p.prefill_stub)
    for number in range(4):
        await asked.ask(stream, number, wants_handle=True)
    await asked.ask(other, 9)
    await asked.are_live(5)
    stream.call.cancel()
    await asked.are_live(1)
    p.prefill_model.release()
    assert list((await other.until_over({9}))[9][0].reply.token_ids) == asked.first_of(9)
    other.call.cancel()


async def test_a_wrong_command_is_told_under_its_key_and_the_stream_goes_on(
    p: Pair, asked: Asked
) -> None:
    stream = PrefillStream(p.prefill_stub)
    await asked.ask(stream, 1)
    await asked.are_live(1)
    fine = p.prefill_request(p.new_prompt(20))
    without_salt = p.prefill_request(p.new_prompt(20))
    without_salt.ClearField("tenant_salt")
    for key, command, kind in (
        (2, {}, InvalidArgument),
        (3, {"prefill": without_salt}, InvalidArgument),
        (1, {"prefill": fine}, AlreadyExists),
    ):
        await stream.send(key, **command)
        (event,) = await stream.read()
        assert event.key == key
        assert isinstance(error_of(event.failed), kind), event
    p.prefill_model.release()
    assert (await stream.until_over({1}))[1][-1].reply.HasField("leg")
    stream.call.cancel()


# ---- the router's end


async def test_a_handle_that_comes_after_the_cancel_is_given_back() -> None:
    async with running(num_prefill=0) as bench:
        released = bench.probe.watch_releases()
        worker = AccountAtCancel("p0", bench.model)
        await bench.add(worker)
        worker.account_gate.close()
        call = bench.call(sampling={"max_tokens": 4})
        await worker.account_gate.reached.wait()
        call.cancel()
        await until(lambda: worker.num_cancelled == 1)
        await until(lambda: released)
        (handle,) = released
        assert handle.opened().num_tokens > 0


async def test_prompts_of_a_stream_that_ends_are_asked_again_once_the_worker_is_met_again() -> None:
    async with running(num_prefill=0) as bench:
        worker = EndingStream("p0", bench.model)
        await bench.add(worker)
        worker.gate.close()
        call = bench.call(sampling={"max_tokens": 2})
        await worker.gate.reached.wait()
        worker.ends.set()
        await until(lambda: not worker.ends.is_set())
        worker.gate.open()
        messages = await rest_of(call)
        assert messages[-1].usage.num_output_tokens == 2
        assert worker.num_streams == 2


async def test_a_message_that_cannot_be_read_ends_the_stream_not_the_router() -> None:
    async with running(num_prefill=0, times=SHORT_WAITS) as bench:
        worker = Garbling("p0", bench.model)
        await bench.add(worker)
        call = bench.call(sampling={"max_tokens": 2})
        assert "cannot be read" in str((await failure(call))[1])
        worker.garbles = False
        await until(lambda: bench.probe.is_up(worker.worker_id))
        assert await bench.generate(sampling={"max_tokens": 2})


async def test_a_worker_that_refuses_connections_is_known_at_once() -> None:
    """Not after the whole time for one attempt: the client may have another worker to go to."""
    async with running(num_prefill=2, times={**SHORT_WAITS, "connect_timeout_s": 60.0}) as bench:
        for worker in bench.prefills:
            await worker.stop()
            await until(lambda worker=worker: not bench.probe.is_up(worker.worker_id))
        call = bench.stub.Generate(request(sampling={"max_tokens": 2}), timeout=2 * BOUND_S)
        assert (
            await code_of(asyncio.wait_for(rest_of(call), BOUND_S)) is grpc.StatusCode.UNAVAILABLE
        )
