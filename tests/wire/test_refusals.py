"""Both workers refuse what is wrong by its field's name before any work, keep a bad request's
trouble to itself, drain, and go out of service when the engine fails.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from process.rpc_errors import (
    BatonError,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    Unavailable,
)
from protos import common_pb2
from tests.harness.gated_engine import BLOCK_SIZE, prompt_of
from tests.harness.handles import changed
from tests.harness.prefill_decode_pair import Pair, error_of, pair, patient, whole
from tests.harness.waiting import until

pytestmark = [pytest.mark.oracle, pytest.mark.asyncio(loop_scope="module")]

PROMPT = prompt_of(30, start=3)

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"prompt_token_ids": []}, "prompt_token_ids"),
    ({"prompt_token_ids": [1, 97]}, "prompt_token_ids"),
    ({"prompt_token_ids": [2**32 - 1]}, "prompt_token_ids"),
    ({"prompt_token_ids": prompt_of(256)}, "prompt_token_ids"),
    ({"tenant_salt": b""}, "tenant_salt"),
    ({"sampling.temperature": -1.0}, "sampling.temperature"),
    ({"sampling.temperature": float("nan")}, "sampling.temperature"),
    ({"sampling.top_p": 0.0}, "sampling.top_p"),
    ({"sampling.top_p": 1.5}, "sampling.top_p"),
    ({"sampling.max_tokens": 0}, "sampling.max_tokens"),
    ({"sampling.logprobs": 1000}, "sampling.logprobs"),
    ({"sampling.presence_penalty": float("inf")}, "sampling.presence_penalty"),
    ({"sampling.allowed_token_ids": [1, 97]}, "sampling.allowed_token_ids"),
    ({"sampling.no_repeat_ngram": 10_000}, "sampling.no_repeat_ngram"),
    ({"sampling.n": 10_000}, "sampling.n"),
    ({"sampling.stop": ["x"]}, "sampling.stop"),
]


async def refusals(p: Pair, changes: dict[str, Any]) -> list[BatonError]:
    """What prefill and decode say to the same wrong request."""
    request = changed(p.prefill_request(PROMPT), changes)
    with pytest.raises(BatonError) as caught:
        await whole(p.call(request))
    async with p.stream() as stream:
        key = await stream.reserve(changed(p.reserve(PROMPT), changes))
        failed = (await stream.next(key)).failed
    return [caught.value, error_of(failed)]


async def test_wrong_fields_are_refused_by_name_before_any_work(p: Pair) -> None:
    before = p.prefill_model.num_forwards, p.decode_model.num_forwards
    for changes, field in WRONG:
        for error in await refusals(p, changes):
            assert isinstance(error, InvalidArgument), changes
            assert error.field == field
    # Another worker may have what this one has not.
    for changes in ({"model_fingerprint": "ab" * 32}, {"adapter": "lora"}):
        for error in await refusals(p, changes):
            assert isinstance(error, FailedPrecondition)
            assert str(error).startswith(f"{next(iter(changes))}: ")
    assert (p.prefill_model.num_forwards, p.decode_model.num_forwards) == before


async def test_one_token_is_the_whole_answer_and_nothing_is_handed_over(p: Pair) -> None:
    prompt = p.new_prompt(30)
    reply = await p.run_prefill(prompt, max_tokens=1)
    assert list(reply.token_ids) == p.expected(prompt, 1)
    assert reply.finish_reason == common_pb2.FINISH_REASON_LENGTH
    assert not reply.HasField("handle")
    assert reply.leg.num_blocks_behind > 0  # the prefix will be there for the next one
    await p.check()
    assert p.num_stored(prompt) == len(prompt) // BLOCK_SIZE


async def test_a_stop_at_the_first_token_hands_nothing_over(p: Pair) -> None:
    prompt = p.new_prompt(30)
    first = p.expected(prompt, 1)[0]
    reply = await p.run_prefill(prompt, stop_token_ids=[first])
    assert reply.finish_reason == common_pb2.FINISH_REASON_STOP_TOKEN
    assert reply.stop_token_id == first
    assert not reply.HasField("handle")


async def test_logits_that_are_no_numbers_end_their_request_only(p: Pair) -> None:
    bad, fine, prompt = prompt_of(10, start=5), prompt_of(9, start=6), p.new_prompt(30)
    p.prefill_model.poison = frozenset({bad[-1]})
    good = asyncio.create_task(p.run_prefill(fine, name="good"))
    with pytest.raises(Internal):
        await p.run_prefill(bad, name="bad")
    reply = await good
    p.prefill_model.poison = frozenset()
    expected = p.expected(prompt, 3)
    p.decode_model.poison = frozenset({expected[1]})
    async with p.reserved(prompt) as (stream, key):
        await stream.compute(key, expected[:1])
        answer = await stream.collect(key)
    assert answer.token_ids == expected[1:2]
    assert answer.failed is not None
    assert answer.failed.code == grpc.StatusCode.INTERNAL.value[0]
    p.decode_model.poison = frozenset()
    assert (await p.decode_from(reply, fine, name="good")).token_ids == p.expected(fine, 8)


async def test_a_draining_worker_finishes_what_it_has_and_takes_nothing_new(tmp_path: Path) -> None:
    async with pair(tmp_path) as p, p.reserved(PROMPT) as (stream, key):
        reply = await p.run_prefill(PROMPT)
        drained = [asyncio.create_task(each.drain()) for each in (p.at_prefill, p.at_decode)]
        await until(lambda: p.at_prefill.is_draining and p.at_decode.is_draining)
        with pytest.raises(Unavailable):
            await p.run_prefill(PROMPT)
        other = await stream.reserve(p.reserve(PROMPT, name="new"))
        failed = (await stream.next(other)).failed
        assert failed.code == grpc.StatusCode.UNAVAILABLE.value[0]
        answer = await stream.answer(key, reply)
        assert answer.token_ids == p.expected(PROMPT, 8)
        assert await asyncio.gather(*drained) == [True, True]
        assert p.at_decode.status().draining
        await p.check()


async def test_a_failed_engine_fails_its_requests_and_takes_no_more(tmp_path: Path) -> None:
    """As UNAVAILABLE: by no fault of theirs, so that routers go on with them elsewhere."""
    async with pair(tmp_path) as p, p.stream() as stream:
        for model in (p.prefill_model, p.decode_model):
            model.hold()
        running = asyncio.create_task(p.run_prefill(PROMPT))
        key = await stream.begin(p.reserve(PROMPT))
        waiting = await stream.begin(p.reserve(PROMPT, name="waiting"))
        await stream.compute(key)
        for model in (p.prefill_model, p.decode_model):
            await until(model.is_held.is_set)
            model.break_down()
            model.release()
        with pytest.raises(Unavailable, match="the engine failed") as caught:
            await running
        assert caught.value.retry_after_s != 0.0  # it is not one that goes in order
        failed = (await stream.collect(key)).failed
        assert failed is not None and failed.code == grpc.StatusCode.UNAVAILABLE.value[0]
        assert "the engine failed" in failed.message and failed.retry_after_s != 0.0
        await stream.compute(waiting)
        failed = (await stream.collect(waiting)).failed
        assert failed is not None and failed.code == grpc.StatusCode.UNAVAILABLE.value[0]
        with pytest.raises(Unavailable):
            await p.run_prefill(PROMPT, name="next")
        for worker in (p.at_prefill, p.at_decode):
            assert worker.has_failed
            assert "the engine failed" in (await worker.checked_status()).integrity_error
            await until(lambda w=worker: w.is_idle)
            await worker.unreferenced(is_engine_dead=True)


async def test_a_worker_that_does_not_fit_its_store_does_not_start(p: Pair) -> None:
    """Another KV layout at the same store is said at the start, not worked around in silence."""
    with pytest.raises(FailedPrecondition, match="another KV layout"):
        await p.start_misfit()


async def test_a_store_that_does_not_answer_costs_one_wait_not_one_per_request(
    tmp_path: Path,
) -> None:
    # Of the third request each call has so long, however busy the machine is.
    async with pair(tmp_path, limits=patient(transfer_budget_s=1.5, put_budget_s=1.5)) as p:
        answers = asyncio.Event()
        waiting = [each.home.silence(answers) for each in (p.at_prefill, p.at_decode)]
        legs = []
        for start in (3, 8):
            prompt = prompt_of(30, start=start)
            answer = await p.generate(prompt, name=f"r{start}")
            assert answer.token_ids == p.expected(prompt, 8) and answer.prefill is not None
            legs.append([count.reason for count in answer.prefill.leg.recomputed])
        assert legs == [["deadline"], ["store_unavailable"]]
        assert not p.at_prefill.has_store
        # What waits for it still is answered, later than it was asked for or not.
        answers.set()
        await until(lambda: not any(num_waiting() for num_waiting in waiting))
        await p.store_status()  # what gave up a moment ago has said so by now
        await p.reattached()
        third = await p.generate(prompt_of(30, start=9), name="third")
        assert third.leg.num_tokens_computed == 0
        await p.check()


async def test_a_status_says_what_the_worker_did(tmp_path: Path) -> None:
    async with pair(tmp_path) as p:
        await p.generate(PROMPT)
        status = await p.at_decode.checked_status()
        assert (status.role, status.integrity_error) == ("decode", "")
        assert status.model_fingerprint == p.model.info.fingerprint
        assert status.num_prompt_tokens_from_store == len(PROMPT)
        assert status.num_output_tokens == 7
        assert status.address == p.decode.address
        assert status.store_node_id == (await p.store_status()).node_id
        await p.check()
