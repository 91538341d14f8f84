"""Partial handles: from prefill to the decode leg while prefill runs, and to nobody else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio
import pytest

from process.rpc_errors import Unavailable
from tests.harness.odd_prefills import HalfHandle, Long, NoFirst, Paced, Talkative
from tests.harness.router_bench import (
    BOUND_S,
    SHORT_WAITS,
    Bench,
    failure,
    ids_of,
    lease_store,
    rest_of,
    running,
)
from tests.harness.waiting import until

pytestmark = pytest.mark.oracle

PROMPT = list(range(5, 105))
FIELDS = {"token_ids": {"ids": PROMPT}, "sampling": {"max_tokens": 4, "seed": 3}}


@asynccontextmanager
async def _paced(num_prefill: int = 1) -> AsyncIterator[Bench]:
    async with running(num_prefill=0) as bench:
        for index in range(num_prefill):
            worker = Paced(f"p{index}", bench.model)
            worker.decode = bench.decode
            await bench.add(worker)
        yield bench


def _partials(bench: Bench) -> list[int]:
    """Tokens that each partial handle covered, in the order in which they came."""
    return [handle.num_tokens for _, handle in bench.decode.prefetched]


async def test_decode_hears_of_what_is_stored_while_prefill_still_runs() -> None:
    async with _paced() as bench:
        bench.prefill.num_partials = 3
        bench.prefill.gate.close()
        call = bench.call(**FIELDS)
        await until(lambda: len(bench.decode.prefetched) == 3)
        assert bench.prefill.num_active == 1 and not bench.decode.generated
        assert _partials(bench) == [16, 32, 48]
        (reserved,) = {request_id for request_id, _ in bench.decode.prefetched}
        assert reserved == bench.prefill.requests[0].request_id
        assert all(handle.is_partial for _, handle in bench.decode.prefetched)
        bench.prefill.gate.open()
        await rest_of(call)
        (told,) = bench.decode.generated
        assert told.HasField("handle") and not told.handle.is_partial


async def test_the_client_sees_the_same_with_and_without_them() -> None:
    async with _paced() as bench:
        plain = await bench.generate(request_id="a", **FIELDS)
        bench.prefill.num_partials = bench.prefill.num_late_partials = 2
        early = await bench.generate(request_id="a", **FIELDS)
        assert len(bench.decode.prefetched) == 4
        # How many tokens a message has is the reader's pace; that each has some is not.
        assert all(message.token_ids or message.finish_reason for message in early)
        for messages in (plain, early):
            assert ids_of(messages) == bench.expected_ids(PROMPT, 3, 4)
        assert "".join(m.text for m in early) == "".join(m.text for m in plain)
        assert early[-1].finish_reason == plain[-1].finish_reason


async def test_what_is_stored_behind_the_first_tokens_is_passed_on_too() -> None:
    async with _paced() as bench:
        bench.prefill.num_late_partials = 2
        bench.prefill.account_gate.close()
        call = bench.call(**FIELDS)
        assert (await call.read()).token_ids
        await until(lambda: _partials(bench) == [16, 32])
        bench.prefill.account_gate.open()
        await rest_of(call)


async def test_many_samples_have_one_prompt() -> None:
    async with _paced() as bench:
        bench.prefill.num_partials = 2
        await bench.generate(token_ids={"ids": PROMPT}, sampling={"max_tokens": 3, "n": 3})
        assert _partials(bench) == [16, 32]


async def test_without_a_decode_leg_nobody_is_told() -> None:
    async with running(num_prefill=0) as bench:
        worker = Talkative("p0", bench.model)
        worker.num_partials, worker.num_late_partials = 2, 1
        await bench.add(worker)
        messages = await bench.generate(sampling={"max_tokens": 1})
        assert len(ids_of(messages)) == 1
        assert not bench.decode.prefetched


async def test_an_answer_that_ended_with_its_first_token_fetches_no_more(bench: Bench) -> None:
    """The decode leg has its cancel; what prefill stores after that is not for it."""
    (stop,) = bench.expected_ids(PROMPT, 3, 1)
    bench.prefill.num_partials, bench.prefill.num_late_partials = 1, 3
    options = {"max_tokens": 4, "seed": 3, "stop_token_ids": [stop]}
    await bench.generate(token_ids={"ids": PROMPT}, sampling=options)
    await until(lambda: bench.decode.num_cancelled == 1)
    assert _partials(bench) == [16]
    # `running` also checks that none came behind the cancel.


async def test_a_cancelled_request_fetches_no_more(bench: Bench) -> None:
    bench.prefill.num_partials = 1
    bench.prefill.gate.close()
    call = bench.call(**FIELDS)
    await until(lambda: bench.decode.prefetched)
    call.cancel()
    await until(lambda: bench.decode.num_open == 0 and bench.prefill.num_active == 0)


async def test_both_tries_of_a_prefill_are_passed_on() -> None:
    """The first worker's blocks are in its store, whoever computes the rest."""
    async with _paced(num_prefill=2) as bench:
        for worker in bench.prefills:
            worker.num_partials = 2
            worker.gate.close()
        call = bench.call(**FIELDS)
        await until(lambda: len(bench.decode.prefetched) == 2)
        victim, other = await bench.busy_prefill()
        other.gate.open()
        await victim.stop()
        messages = await rest_of(call)
        assert ids_of(messages) == bench.expected_ids(PROMPT, 3, 4)
        assert _partials(bench) == [16, 32, 16, 32]


async def test_a_decode_worker_that_stopped_reading_gets_the_newest_and_not_all() -> None:
    """What waits for it here is one partial handle of each request, however many were made."""
    async with running(num_prefill=0) as bench:
        worker = Long("p0", bench.model)
        worker.num_partials = 100
        worker.gate.close()
        await bench.add(worker)
        bench.decode.read_gate.close()
        bench.decode.read_gate.let_pass(1)  # the reservation
        call = bench.call(**FIELDS)
        await until(lambda: worker.gate.reached.is_set())
        await until(lambda: bench.probe.num_tokens_announced("d0") == 100)
        assert bench.probe.num_unsent("d0") == 1
        bench.decode.read_gate.open()
        await until(lambda: _partials(bench)[-1:] == [100])
        assert len(_partials(bench)) < 50
        worker.gate.open()
        messages = await rest_of(call)
        assert ids_of(messages) == bench.expected_ids(PROMPT, 3, 4)


async def test_a_decode_worker_that_died_is_told_nothing_and_the_error_is_its() -> None:
    async with running(times=SHORT_WAITS) as bench:
        bench.prefill.num_partials, bench.prefill.num_late_partials = 1, 2
        bench.prefill.gate.close()
        call = bench.call(**FIELDS)
        await until(lambda: bench.decode.prefetched)
        await bench.decode.stop()
        await until(lambda: not bench.probe.is_up("d0"))
        bench.prefill.gate.open()
        _, error = await failure(call)
        assert isinstance(error, Unavailable) and "decode worker d0" in str(error)


async def test_a_partial_handle_s_lease_is_never_given_back() -> None:
    """It is the prefill worker's, which may still be writing under it."""
    async with lease_store() as store:
        async with _paced() as bench:
            bench.prefill.store_address = store.address
            bench.prefill.num_partials = 2
            bench.prefill.gate.close()
            call = bench.call(**FIELDS)
            await until(lambda: len(bench.decode.prefetched) == 2)
            call.cancel()
            await until(bench.is_idle)
        assert not store.released


async def test_an_account_with_a_partial_handle_is_no_account() -> None:
    """It would hand over leases that are not the worker's to give; decode computes the prompt."""
    async with running(num_prefill=0) as bench:
        await bench.add(HalfHandle("p0", bench.model))
        messages = await bench.generate(**FIELDS)
        assert ids_of(messages) == bench.expected_ids(PROMPT, 3, 4)
        (told,) = bench.decode.generated
        assert not told.HasField("handle")


async def test_a_handle_that_is_not_partial_is_no_first_token() -> None:
    async with running(num_prefill=0) as bench:
        worker = NoFirst("p0", bench.model)
        worker.num_partials = 1
        await bench.add(worker)
        assert await bench.code_of(**FIELDS) is grpc.StatusCode.INTERNAL
        assert not bench.decode.prefetched
        await asyncio.wait_for(bench.decode.idle.wait(), BOUND_S)
