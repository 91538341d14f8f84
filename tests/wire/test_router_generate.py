"""Answers through a whole router with fake workers: text, ids, stops, accounts."""

from __future__ import annotations

import asyncio

import grpc.aio
import pytest

from protos import common_pb2, inference_pb2, inference_pb2_grpc
from tests.harness.router_bench import (
    BOUND_S,
    EOS,
    TOKENIZER,
    expected_ids,
    fake_model,
    lease_store,
    request,
    rest_of,
    running,
)
from tests.harness.waiting import until

pytestmark = pytest.mark.oracle


async def test_the_happy_path_with_its_account() -> None:
    async with running() as bench:
        messages = await bench.generate(
            request(text="hello", sampling={"max_tokens": 20, "seed": 7}, request_id="r1")
        )
    prompt = TOKENIZER.encode("hello")
    ids = expected_ids(bench, prompt, 7, 20)
    assert [i for m in messages for i in m.token_ids] == ids
    assert "".join(m.text for m in messages) == TOKENIZER.decode(ids)
    assert {m.request_id for m in messages} == {"r1"}
    *earlier, last = messages
    assert all(not m.finish_reason for m in earlier)
    assert last.finish_reason == common_pb2.FINISH_REASON_LENGTH
    assert last.usage.num_prompt_tokens == len(prompt)
    assert last.usage.num_output_tokens == 20
    assert [leg.role for leg in last.provenance.legs] == ["prefill", "decode"]
    for leg in last.provenance.legs:
        from_store = sum(count.num_tokens for count in leg.from_store)
        assert leg.num_tokens_computed + leg.num_tokens_local + from_store == len(prompt)
    assert last.provenance.legs[1].num_tokens_computed == 0
    assert last.provenance.model_fingerprint == bench.model.fingerprint
    assert last.seed == 7
    stages = [stage.stage for stage in last.times]
    assert len(stages) == len(set(stages))
    assert {"receive", "tokenize", "lookup", "reserve", "handover", "decode"} <= set(stages)
    assert all(stage.seconds >= 0 for stage in last.times)


async def test_the_first_token_does_not_wait_for_decode() -> None:
    async with running() as bench:
        bench.decode.token_gate.close()
        call = bench.stub.Generate(request(sampling={"max_tokens": 3}), timeout=BOUND_S)
        first = await call.read()
        assert len(first.token_ids) == 1 and len(first.text) == 1
        bench.decode.token_gate.open()
        rest = await rest_of(call)
        assert sum(len(m.token_ids) for m in rest) == 2


async def test_workers_get_every_field_and_ids_that_cannot_meet() -> None:
    async with running() as bench:
        await bench.generate(request(sampling={"max_tokens": 2, "stop": ["zzz"]}, request_id="a"))
        await bench.generate(
            request(sampling={"max_tokens": 2}, request_id="a", tenant="t2", priority=5)
        )
    first, second = bench.prefill.requests
    for name in ("temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"):
        assert first.sampling.HasField(name)
    assert first.sampling.temperature == 0 and not first.sampling.stop
    assert first.tenant == "default" and second.tenant == "t2" and second.priority == 5
    assert first.request_id != second.request_id
    assert first.tenant_salt != second.tenant_salt and len(first.tenant_salt) == 32
    assert first.model_fingerprint == bench.model.fingerprint and first.wants_handle
    (generate, _) = bench.decode.generated
    assert generate.handle.request_id == first.request_id
    assert len(generate.output_token_ids) == 1


async def test_one_token_never_touches_decode() -> None:
    async with running() as bench:
        # The token is shown at once, its account follows.
        first, last = await bench.generate(request(sampling={"max_tokens": 1}))
        assert len(first.token_ids) == 1
        assert bench.decode.num_reserved == 0
        assert not bench.prefill.requests[0].wants_handle
    assert last.finish_reason == common_pb2.FINISH_REASON_LENGTH
    assert last.usage.num_output_tokens == 1
    assert [leg.role for leg in last.provenance.legs] == ["prefill"]


@pytest.mark.parametrize("how", ["eos", "stop_token", "stop_string"])
async def test_a_stop_at_the_first_token_frees_the_reservation(how: str) -> None:
    async with running(model=fake_model(eos_at=0 if how == "eos" else None)) as bench:
        first = expected_ids(bench, TOKENIZER.encode("hello"), 3, 1)[0]
        sampling: dict[str, object] = {"max_tokens": 9, "seed": 3}
        if how == "stop_token":
            sampling["stop_token_ids"] = [first]
        if how == "stop_string":
            sampling["stop"] = [TOKENIZER.decode([first])]
        shown, last = await bench.generate(request(sampling=sampling))
        assert shown.text == "" and list(shown.token_ids) == [first]
        # The account came without waiting for decode; the worker hears of it in the same trip.
        async with asyncio.timeout(BOUND_S):
            await bench.decode.idle.wait()
        assert bench.decode.num_reserved == 1 and not bench.decode.generated
    assert last.text == "" and last.usage.num_output_tokens == 1
    assert common_pb2.FinishReason.Name(last.finish_reason) == f"FINISH_REASON_{how.upper()}"
    assert last.HasField("stop_token_id") == (how != "stop_string")
    assert last.stop_token_id == {"eos": EOS, "stop_token": first, "stop_string": 0}[how]
    assert last.stop_string == (TOKENIZER.decode([first]) if how == "stop_string" else "")


async def test_a_handle_that_no_decode_worker_takes_over_is_given_back() -> None:
    """A stop in the first token's text: the prefill worker could not know, its leases are ours."""
    async with lease_store() as store:
        async with running() as bench:
            bench.prefill.store_address = store.address
            prompt = TOKENIZER.encode("hello")
            first = expected_ids(bench, prompt, 3, 1)
            stop = {"stop": [TOKENIZER.decode(first)], "seed": 3, "max_tokens": 9}
            await bench.generate(request(sampling=stop))
            await until(lambda: store.released)
            assert sorted(store.released) == ["lease-run", "lease-tail"]
            store.released.clear()
            # Taken over: the decode worker's business.
            await bench.generate(request(sampling={"max_tokens": 4}))
        assert not store.released


async def test_eos_in_the_middle() -> None:
    async with running(model=fake_model(eos_at=4)) as bench:
        messages = await bench.generate(request(sampling={"max_tokens": 50}))
    last = messages[-1]
    assert last.finish_reason == common_pb2.FINISH_REASON_EOS
    assert last.stop_token_id == EOS
    assert last.usage.num_output_tokens == 5
    assert len("".join(m.text for m in messages)) == 4


@pytest.mark.parametrize("include", [False, True])
async def test_a_stop_string_across_tokens_ends_decode(include: bool) -> None:
    async with running() as bench:
        ids = expected_ids(bench, TOKENIZER.encode("hello"), 11, 40)
        text = TOKENIZER.decode(ids)
        stop = text[10:14]
        begin = text.index(stop)
        # A little overshoot, then it would go on for ever: only a cancel ends it.
        bench.decode.pause_at = begin + 10
        messages = await bench.generate(
            request(
                sampling={
                    "max_tokens": 400,
                    "seed": 11,
                    "stop": ["never", stop],
                    "include_stop_text": include,
                }
            )
        )
    assert bench.decode.num_cancelled == 1
    last = messages[-1]
    assert "".join(m.text for m in messages) == text[: begin + 4 if include else begin]
    assert last.finish_reason == common_pb2.FINISH_REASON_STOP_STRING
    assert last.stop_string == stop
    # Each fake token is one letter: the stop's last letter is the last token that counts.
    assert last.usage.num_output_tokens == begin + 4
    assert [i for m in messages for i in m.token_ids] == ids[: begin + 4]
    # The cancelled worker's account still came.
    assert [leg.role for leg in last.provenance.legs] == ["prefill", "decode"]


@pytest.mark.parametrize("goes", ["moves", "moves without its KV", "dies"])
async def test_an_answer_that_another_decode_worker_ends_repeats_no_token(goes: str) -> None:
    async with running(num_decode=2) as bench:
        for worker in bench.decodes:
            worker.pause_at = 5
        asked = request(text="hello", sampling={"max_tokens": 12, "seed": 7})
        call, messages = bench.stub.Generate(asked, timeout=BOUND_S), []
        while sum(len(message.token_ids) for message in messages) < 5:
            messages.append(await call.read())
        await until(lambda: any(not worker.token_gate.is_open for worker in bench.decodes))
        (left,) = [worker for worker in bench.decodes if not worker.token_gate.is_open]
        for worker in bench.decodes:
            worker.pause_at = None
        if goes == "dies":
            await left.stop()
        else:
            left.move_all(with_handles=goes == "moves")
        messages += await rest_of(call)
    ids = expected_ids(bench, TOKENIZER.encode("hello"), 7, 12)
    assert [i for message in messages for i in message.token_ids] == ids
    assert "".join(message.text for message in messages) == TOKENIZER.decode(ids)
    assert messages[-1].usage.num_output_tokens == 12
    workers = [leg.worker_id for leg in messages[-1].provenance.legs if leg.role == "decode"]
    assert len(set(workers)) == 2


async def test_a_slow_reader_gets_fewer_and_larger_messages() -> None:
    """Coalescing: what comes while the reader is behind is merged into one message for it."""
    async with running() as bench:
        bench.decode.token_gate.close()
        # A client that grants almost no window: writes to it block as soon as it does not read.
        options = [("grpc.http2.lookahead_bytes", 64), ("grpc.http2.bdp_probe", 0)]
        async with grpc.aio.insecure_channel(bench.router.address, options=options) as channel:
            call = inference_pb2_grpc.InferenceStub(channel).Generate(
                request(sampling={"max_tokens": 400, "seed": 1}), timeout=BOUND_S
            )
            first = await call.read()
            bench.decode.token_gate.open()
            async with asyncio.timeout(BOUND_S):
                await bench.decode.idle.wait()
            await until(lambda: bench.probe.num_open_legs == 0)
            rest = await rest_of(call)
        ids = [i for m in [first, *rest] for i in m.token_ids]
        assert ids == expected_ids(bench, TOKENIZER.encode("hello"), 1, 400)
        assert len(rest) < 100


async def test_logprobs_come_with_their_tokens() -> None:
    async with running() as bench:
        messages = await bench.generate(
            # A seed: an answer may have "zz" in it by chance.
            request(sampling={"max_tokens": 12, "logprobs": 0, "stop": ["zz"], "seed": 5})
        )
    for message in messages:
        chosen = [entry.chosen.token_id for entry in message.logprobs]
        assert chosen == list(message.token_ids)
    assert sum(len(m.logprobs) for m in messages) == 12


async def test_prompts_of_every_kind() -> None:
    async with running() as bench:
        sampling = {"max_tokens": 1}
        await bench.generate(request(token_ids={"ids": [5, 6, 7]}, sampling=sampling))
        chat = {"messages": [{"role": "user", "content": "Hi", "name": "ann"}]}
        await bench.generate(request(chat=chat, sampling=sampling))
        await bench.generate(request(text="word " * 50, sampling=sampling))
        long = "ab " * 1000
        with pytest.raises(Exception, match="window"):
            await bench.generate(request(text=long, sampling=sampling))
    ids = [list(r.prompt_token_ids) for r in bench.prefill.requests]
    assert ids[0] == [5, 6, 7]
    user, end = TOKENIZER.find_token_id("<|user|>"), EOS
    assert ids[1] == [user, *TOKENIZER.encode("Hi (ann)"), end]
    assert ids[2] == TOKENIZER.encode("word " * 50)


async def test_an_unseeded_request_repeats_by_its_id() -> None:
    async with running() as bench:
        runs = [
            (await bench.generate(request(request_id=name, tenant=tenant)))[-1].seed
            for name, tenant in (("a", "t"), ("a", "t"), ("b", "t"), ("a", "u"), ("", ""), ("", ""))
        ]
    assert runs[0] == runs[1]
    assert len({runs[0], *runs[2:]}) == 5


async def test_many_at_once_share_one_stream() -> None:
    async with running() as bench:
        answers = await asyncio.gather(
            *(
                bench.generate(request(sampling={"max_tokens": 30, "seed": seed}))
                for seed in range(32)
            )
        )
        assert bench.decode.num_streams == 1
        prompt = TOKENIZER.encode("hello")
        for seed, messages in enumerate(answers):
            ids = [i for m in messages for i in m.token_ids]
            assert ids == expected_ids(bench, prompt, seed, 30)


async def test_models_and_status() -> None:
    async with running() as bench:
        await bench.generate(request(sampling={"max_tokens": 2}))
        (model,) = (await bench.stub.ListModels(inference_pb2.ListModelsRequest())).models
        status = await bench.stub.GetClusterStatus(inference_pb2.GetClusterStatusRequest())
    assert (model.model, model.context_window) == ("fake", 512)
    assert {w.worker_id for w in status.workers} == {"p0", "d0"}
    assert status.redis_reachable and not status.problems
    assert (status.num_requests_finished, status.num_requests_failed) == (1, 0)
    assert status.num_requests_in_flight == 0


async def test_a_prefill_worker_that_is_done_is_never_cancelled() -> None:
    """An account is the last word: nothing is said about its key any more."""
    async with running() as bench:
        for _ in range(3):
            messages = await bench.generate(request(sampling={"max_tokens": 2}))
            assert sum(len(message.token_ids) for message in messages) == 2
        # A prompt that follows on the same stream: what was said before it has arrived.
        assert bench.prefill.num_cancelled == bench.prefill.num_cancelled_late == 0


async def test_a_model_without_tool_calls_says_so() -> None:
    async with running() as bench:
        with pytest.raises(grpc.aio.AioRpcError, match=r"sampling\.stop_at_tool_call: this model"):
            await bench.generate(request(sampling={"stop_at_tool_call": True}))


async def test_words_become_ids_for_the_workers() -> None:
    """A worker knows no text: it is sent both spellings of each word, and none of the words."""
    async with running() as bench:
        sampling = {"max_tokens": 1, "bad_words": ["hell"], "bad_word_ids": [{"ids": [7]}]}
        await bench.generate(request(sampling=sampling))
        (asked,) = bench.prefill.requests
    ids = [list(word.ids) for word in asked.sampling.bad_word_ids]
    assert ids == [[7], TOKENIZER.encode("hell"), TOKENIZER.encode(" hell")]
    assert not asked.sampling.bad_words
