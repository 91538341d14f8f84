"""Both workers refuse what is wrong by its field's name before any work, keep a bad request's
trouble to itself, drain, and go out of service when the engine fails.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf import json_format

from engine.config import EngineConfig
from engine.fake import FakeModel
from engine.loop import Engine
from process import serving
from process.deadline import Deadline
from process.errors import (
    BatonError,
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    Unavailable,
)
from protos import common_pb2, prefill_pb2
from services.prefill.role import PrefillRole
from services.worker import main
from services.worker.config import WorkerLimits, WorkerSettings
from services.worker.status import status_to_json
from tests.harness.gated_engine import prompt_of
from tests.harness.prefill_decode_pair import WAIT_S, Pair, PrefillCall, pair, whole
from tests.harness.waiting import until

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


def changed(message: Any, changes: dict[str, Any]) -> Any:
    for path, value in changes.items():
        *parents, name = path.split(".")
        target = message
        for parent in parents:
            target = getattr(target, parent)
        if isinstance(value, list | tuple):
            target.ClearField(name)
            getattr(target, name).extend(value)
        else:
            setattr(target, name, value)
    return message


async def refusals(p: Pair, changes: dict[str, Any]) -> list[BatonError]:
    """What prefill and decode say to the same wrong request."""
    request = changed(p.prefill_request(PROMPT), changes)
    with pytest.raises(BatonError) as caught:
        await whole(PrefillCall(p.prefill_stub, request, timeout_s=WAIT_S))
    async with p.stream() as stream:
        key = await stream.reserve(changed(p.reserve(PROMPT), changes))
        failed = (await stream.next(key)).failed
    return [
        caught.value,
        serving.error_of_code(failed.code, failed.message),
    ]


async def test_wrong_fields_are_refused_by_name_before_any_work(tmp_path: Path) -> None:
    async with pair(tmp_path) as p:
        for changes, field in WRONG:
            for error in await refusals(p, changes):
                assert isinstance(error, InvalidArgument), changes
                assert error.field == field
        # Another worker may have what this one has not.
        for changes in ({"model_fingerprint": "ab" * 32}, {"adapter": "lora"}):
            for error in await refusals(p, changes):
                assert isinstance(error, FailedPrecondition)
                assert str(error).startswith(f"{next(iter(changes))}: ")
        assert p.prefill_model.num_forwards == p.decode_model.num_forwards == 0
        await p.check()


async def test_one_token_is_the_whole_answer_and_nothing_is_handed_over(tmp_path: Path) -> None:
    async with pair(tmp_path) as p:
        reply = await p.run_prefill(PROMPT, max_tokens=1)
        assert list(reply.token_ids) == p.expected(PROMPT, 1)
        assert reply.finish_reason == common_pb2.FINISH_REASON_LENGTH
        assert not reply.HasField("handle")
        assert reply.leg.num_bytes_written > 0  # the prefix is there for the next one
        await p.check()


async def test_a_stop_at_the_first_token_hands_nothing_over(tmp_path: Path) -> None:
    async with pair(tmp_path) as p:
        first = p.expected(PROMPT, 1)[0]
        reply = await p.run_prefill(PROMPT, stop_token_ids=[first])
        assert reply.finish_reason == common_pb2.FINISH_REASON_STOP_TOKEN
        assert reply.stop_token_id == first
        assert not reply.HasField("handle")
        await p.check()


async def test_logits_that_are_no_numbers_end_their_request_only(tmp_path: Path) -> None:
    async with pair(tmp_path) as p, p.stream() as stream:
        bad = prompt_of(10, start=5)
        p.prefill_model.poison = frozenset({bad[-1]})
        good = asyncio.create_task(p.run_prefill(prompt_of(9, start=6), name="good"))
        with pytest.raises(Internal):
            await p.run_prefill(bad, name="bad")
        reply = await good
        expected = p.expected(PROMPT, 3)
        p.decode_model.poison = frozenset({expected[1]})
        key = await stream.reserve(p.reserve(PROMPT))
        await stream.next(key)
        await stream.generate(key, prefill_pb2.PrefillReply(token_ids=expected[:1]))
        answer = await stream.collect(key)
        assert answer.token_ids == expected[1:2]
        assert answer.failed is not None
        assert answer.failed.code == grpc.StatusCode.INTERNAL.value[0]
        other = await stream.reserve(p.reserve(prompt_of(9, start=6), name="good"))
        await stream.next(other)
        p.decode_model.poison = frozenset()
        await stream.generate(other, reply)
        assert (await stream.collect(other)).finished is not None
        await p.check()


async def test_a_draining_worker_finishes_what_it_has_and_takes_nothing_new(
    tmp_path: Path,
) -> None:
    async with pair(tmp_path) as p, p.stream() as stream:
        key = await stream.reserve(p.reserve(PROMPT))
        await stream.next(key)
        reply = await p.run_prefill(PROMPT)
        drained = [asyncio.create_task(w.core.drain(WAIT_S)) for w in (p.prefill, p.decode)]
        await asyncio.sleep(0)
        with pytest.raises(Unavailable):
            await p.run_prefill(PROMPT)
        other = await stream.reserve(p.reserve(PROMPT, name="new"))
        failed = (await stream.next(other)).failed
        assert failed.code == grpc.StatusCode.UNAVAILABLE.value[0]
        await stream.generate(key, reply)
        answer = await stream.collect(key)
        assert [*reply.token_ids, *answer.token_ids] == p.expected(PROMPT, 8)
        assert await asyncio.gather(*drained) == [True, True]
        assert p.decode.core.status().draining
        await p.check()


async def test_a_failed_engine_fails_its_requests_and_takes_no_more(tmp_path: Path) -> None:
    """As UNAVAILABLE: by no fault of theirs, so that routers go on with them elsewhere."""
    async with pair(tmp_path) as p, p.stream() as stream:
        for model in (p.prefill_model, p.decode_model):
            model.hold()
        running = asyncio.create_task(p.run_prefill(PROMPT))
        key = await stream.reserve(p.reserve(PROMPT))
        await stream.next(key)
        waiting = await stream.reserve(p.reserve(PROMPT, name="waiting"))
        await stream.next(waiting)
        await stream.generate(key, prefill_pb2.PrefillReply())
        for model in (p.prefill_model, p.decode_model):
            await until(model.is_held.is_set)
            model._memory = None  # the step that is held will raise
            model.release()
        with pytest.raises(Unavailable, match="the engine failed") as caught:
            await running
        assert caught.value.retry_after_s != 0.0  # it is not one that goes in order
        failed = (await stream.collect(key)).failed
        assert failed is not None and failed.code == grpc.StatusCode.UNAVAILABLE.value[0]
        assert "the engine failed" in failed.message and failed.retry_after_s != 0.0
        await stream.generate(waiting, prefill_pb2.PrefillReply())
        failed = (await stream.collect(waiting)).failed
        assert failed is not None and failed.code == grpc.StatusCode.UNAVAILABLE.value[0]
        with pytest.raises(Unavailable):
            await p.run_prefill(PROMPT, name="next")
        for worker in (p.prefill, p.decode):
            assert worker.core.failed.is_set()
            status = await worker.core.checked_status()
            assert "the engine failed" in status.integrity_error
            await until(lambda w=worker: w.core.num_live == 0)
            engine = worker.core.thread._engine
            await until(lambda e=engine: e.stats().num_referenced_blocks == 0)
            engine.check_integrity()


async def test_a_worker_that_does_not_fit_its_store_does_not_start(tmp_path: Path) -> None:
    """Another KV layout at the same store is said at the start, not worked around in silence."""
    async with pair(tmp_path) as p:
        other = FakeModel(block_size=8)
        engine = Engine(EngineConfig(block_size=8, num_blocks=64), other)
        settings = WorkerSettings(
            redis_url="",
            store_address=p.store.address,
            handle_keys_file=p.prefill.core.settings.handle_keys_file,
        )
        with pytest.raises(FailedPrecondition, match="another KV layout"):
            await main.start(engine, settings, "prefill", PrefillRole)
        await p.check()


async def test_a_store_that_does_not_answer_costs_one_wait_not_one_per_request(
    tmp_path: Path,
) -> None:
    # Of the third request each call has so long, however busy the machine is.
    limits = WorkerLimits(
        store_wait_s=WAIT_S, transfer_budget_s=1.5, put_budget_s=1.5, drain_s=0.2, stop_grace_s=0.05
    )
    async with pair(tmp_path, limits=limits) as p:
        answers: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        num_waiting = 0

        def silence(rpc: Any) -> None:
            """Calls wait until the store answers, those that have the time for it."""
            real = rpc.call

            async def call(method: Any, request: Any, deadline: Any, **options: Any) -> Any:
                nonlocal num_waiting
                num_waiting += 1
                try:
                    await asyncio.wait([answers], timeout=deadline.left_s())
                    if not answers.done():
                        raise DeadlineExceeded("the store")
                    return await real(method, request, Deadline.after(WAIT_S), **options)
                finally:
                    num_waiting -= 1

            rpc.call = call

        for worker in (p.prefill, p.decode):
            client = worker.core.connector.client
            assert client is not None
            silence(client._rpc)
        answer = await p.generate(PROMPT, name="first")
        assert answer.token_ids == p.expected(PROMPT, 8)
        assert answer.prefill is not None
        assert [c.reason for c in answer.prefill.leg.recomputed] == ["deadline"]
        again = await p.generate(prompt_of(30, start=8), name="second")
        assert again.token_ids == p.expected(prompt_of(30, start=8), 8)
        assert again.prefill is not None
        assert [c.reason for c in again.prefill.leg.recomputed] == ["store_unavailable"]
        assert p.prefill.core.connector.client is None
        # Whoever waits for it still is answered, later than he asked for it or not.
        answers.set_result(None)
        await until(lambda: num_waiting == 0)
        await p.store_status()  # whoever gave up a moment ago has said so by now
        await p.reattached()
        third = await p.generate(prompt_of(30, start=9), name="third")
        assert third.leg.num_tokens_computed == 0
        await p.check()


async def test_a_status_survives_its_registry_form(tmp_path: Path) -> None:
    async with pair(tmp_path) as p:
        await p.generate(PROMPT)
        status = await p.decode_stub.GetWorkerStatus(
            common_pb2.GetWorkerStatusRequest(), timeout=WAIT_S
        )
        parsed = json_format.Parse(status_to_json(status), common_pb2.WorkerStatus())
        assert parsed == status
        assert status.role == "decode"
        assert status.model_fingerprint == p.model.info.fingerprint
        assert status.num_prompt_tokens_from_store == len(PROMPT)
        assert status.num_output_tokens == 7
        assert status.address == p.decode.address
        assert status.store_node_id == p.store.node.node_id
        await p.check()
