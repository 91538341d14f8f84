"""Answers through a whole router with fake workers: text, ids, stops, samples, accounts."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import grpc.aio
import pytest

from baton import Client, InvalidArgument, SyncClient
from process.rpc_errors import Unavailable
from protos import common_pb2, inference_pb2, inference_pb2_grpc
from tests.harness.router_bench import (
    BOUND_S,
    EOS,
    TOKENIZER,
    Bench,
    HttpBench,
    fake_model,
    ids_of,
    lease_store,
    request,
    rest_of,
    running,
)
from tests.harness.waiting import until

pytestmark = pytest.mark.oracle


async def test_the_happy_path_with_its_account(bench: Bench) -> None:
    messages = await bench.generate(
        text="hello", sampling={"max_tokens": 20, "seed": 7}, request_id="r1"
    )
    prompt = TOKENIZER.encode("hello")
    ids = bench.expected_ids(prompt, 7, 20)
    assert ids_of(messages) == ids
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


async def test_the_first_token_does_not_wait_for_decode(bench: Bench) -> None:
    bench.decode.token_gate.close()
    call = bench.call(sampling={"max_tokens": 3})
    first = await call.read()
    assert len(first.token_ids) == 1 and len(first.text) == 1
    bench.decode.token_gate.open()
    rest = await rest_of(call)
    assert len(ids_of(rest)) == 2


async def test_workers_get_every_field_and_ids_that_cannot_meet() -> None:
    async with running() as bench:
        await bench.generate(sampling={"max_tokens": 2, "stop": ["zzz"]}, request_id="a")
        await bench.generate(sampling={"max_tokens": 2}, request_id="a", tenant="t2", priority=5)
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


async def test_one_token_never_touches_decode(bench: Bench) -> None:
    # The token is shown at once, its account follows.
    first, last = await bench.generate(sampling={"max_tokens": 1})
    assert len(first.token_ids) == 1
    assert bench.decode.num_reserved == 0
    assert not bench.prefill.requests[0].wants_handle
    assert last.finish_reason == common_pb2.FINISH_REASON_LENGTH
    assert last.usage.num_output_tokens == 1
    assert [leg.role for leg in last.provenance.legs] == ["prefill"]


@pytest.mark.parametrize("how", ["eos", "stop_token", "stop_string"])
async def test_a_stop_at_the_first_token_frees_the_reservation(how: str) -> None:
    async with running(model=fake_model(eos_at=0 if how == "eos" else None)) as bench:
        first = bench.expected_ids(TOKENIZER.encode("hello"), 3, 1)[0]
        sampling: dict[str, object] = {"max_tokens": 9, "seed": 3}
        if how == "stop_token":
            sampling["stop_token_ids"] = [first]
        if how == "stop_string":
            sampling["stop"] = [TOKENIZER.decode([first])]
        shown, last = await bench.generate(sampling=sampling)
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
            first = bench.expected_ids(prompt, 3, 1)
            stop = {"stop": [TOKENIZER.decode(first)], "seed": 3, "max_tokens": 9}
            await bench.generate(sampling=stop)
            await until(lambda: store.released)
            assert sorted(store.released) == ["lease-run", "lease-tail"]
            store.released.clear()
            # Taken over: the decode worker's business.
            await bench.generate(sampling={"max_tokens": 4})
        assert not store.released


async def test_eos_in_the_middle() -> None:
    async with running(model=fake_model(eos_at=4)) as bench:
        messages = await bench.generate(sampling={"max_tokens": 50})
    last = messages[-1]
    assert last.finish_reason == common_pb2.FINISH_REASON_EOS
    assert last.stop_token_id == EOS
    assert last.usage.num_output_tokens == 5
    assert len("".join(m.text for m in messages)) == 4


@pytest.mark.parametrize("include", [False, True])
async def test_a_stop_string_across_tokens_ends_decode(include: bool) -> None:
    async with running() as bench:
        ids = bench.expected_ids(TOKENIZER.encode("hello"), 11, 40)
        text = TOKENIZER.decode(ids)
        stop = text[10:14]
        begin = text.index(stop)
        # A little overshoot, then it would go on for ever: only a cancel ends it.
        bench.decode.pause_at = begin + 10
        messages = await bench.generate(
            sampling={
                "max_tokens": 400,
                "seed": 11,
                "stop": ["never", stop],
                "include_stop_text": include,
            }
        )
    assert bench.decode.num_cancelled == 1
    last = messages[-1]
    assert "".join(m.text for m in messages) == text[: begin + 4 if include else begin]
    assert last.finish_reason == common_pb2.FINISH_REASON_STOP_STRING
    assert last.stop_string == stop
    # Each fake token is one letter: the stop's last letter is the last token that counts.
    assert last.usage.num_output_tokens == begin + 4
    assert ids_of(messages) == ids[: begin + 4]
    # The cancelled worker's account still came.
    assert [leg.role for leg in last.provenance.legs] == ["prefill", "decode"]


async def test_a_slow_reader_gets_fewer_and_larger_messages(bench: Bench) -> None:
    """Coalescing: what comes while the reader is behind is merged into one message for it."""
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
    assert ids == bench.expected_ids(TOKENIZER.encode("hello"), 1, 400)
    assert len(rest) < 100


async def test_logprobs_come_with_their_tokens(bench: Bench) -> None:
    messages = await bench.generate(
        sampling={"max_tokens": 12, "logprobs": 0, "stop": ["zz"], "seed": 5}
    )
    for message in messages:
        chosen = [entry.chosen.token_id for entry in message.logprobs]
        assert chosen == list(message.token_ids)
    assert sum(len(m.logprobs) for m in messages) == 12


async def test_prompts_of_every_kind() -> None:
    async with running() as bench:
        sampling = {"max_tokens": 1}
        await bench.generate(token_ids={"ids": [5, 6, 7]}, sampling=sampling)
        chat = {"messages": [{"role": "user", "content": "Hi", "name": "ann"}]}
        await bench.generate(chat=chat, sampling=sampling)
        await bench.generate(text="word " * 50, sampling=sampling)
        long = "ab " * 1000
        with pytest.raises(Exception, match="window"):
            await bench.generate(text=long, sampling=sampling)
    ids = [list(r.prompt_token_ids) for r in bench.prefill.requests]
    assert ids[0] == [5, 6, 7]
    user, end = TOKENIZER.find_token_id("<|user|>"), EOS
    assert ids[1] == [user, *TOKENIZER.encode("Hi (ann)"), end]
    assert ids[2] == TOKENIZER.encode("word " * 50)


async def test_an_unseeded_request_repeats_by_its_id(bench: Bench) -> None:
    runs = [
        (await bench.generate(request_id=name, tenant=tenant))[-1].seed
        for name, tenant in (("a", "t"), ("a", "t"), ("b", "t"), ("a", "u"), ("", ""), ("", ""))
    ]
    assert runs[0] == runs[1]
    assert len({runs[0], *runs[2:]}) == 5


async def test_many_at_once_share_one_stream(bench: Bench) -> None:
    answers = await asyncio.gather(
        *(bench.generate(sampling={"max_tokens": 30, "seed": seed}) for seed in range(32))
    )
    assert bench.decode.num_streams == 1
    prompt = TOKENIZER.encode("hello")
    for seed, messages in enumerate(answers):
        ids = ids_of(messages)
        assert ids == bench.expected_ids(prompt, seed, 30)


async def test_models_and_status(bench: Bench) -> None:
    await bench.generate(sampling={"max_tokens": 2})
    (model,) = (await bench.stub.ListModels(inference_pb2.ListModelsRequest())).models
    status = await bench.status()
    assert (model.model, model.context_window) == ("fake", 512)
    assert {w.worker_id for w in status.workers} == {"p0", "d0"}
    assert status.redis_reachable and not status.problems
    assert (status.num_requests_finished, status.num_requests_failed) == (1, 0)
    assert status.num_requests_in_flight == 0


async def test_a_prefill_worker_that_is_done_is_never_cancelled(bench: Bench) -> None:
    """An account is the last word: nothing is said about its key any more."""
    for _ in range(3):
        messages = await bench.generate(sampling={"max_tokens": 2})
        assert len(ids_of(messages)) == 2
    # A prompt that follows on the same stream: what was said before it has arrived.
    assert bench.prefill.num_cancelled == bench.prefill.num_cancelled_late == 0


async def test_a_model_without_tool_calls_says_so() -> None:
    async with running() as bench:
        _, error = await bench.failure(sampling={"stop_at_tool_call": True})
        assert str(error).startswith("sampling.stop_at_tool_call: this model")


async def test_words_become_ids_for_the_workers(bench: Bench) -> None:
    """A worker knows no text: it is sent both spellings of each word, and none of the words."""
    sampling = {"max_tokens": 1, "bad_words": ["hell"], "bad_word_ids": [{"ids": [7]}]}
    await bench.generate(sampling=sampling)
    (asked,) = bench.prefill.requests
    ids = [list(word.ids) for word in asked.sampling.bad_word_ids]
    assert ids == [[7], TOKENIZER.encode("hell"), TOKENIZER.encode(" hell")]
    assert not asked.sampling.bad_words


# ---- several samples: each has its own text, end and stop, and the request one account


PROMPT = TOKENIZER.encode("hello")


def _expected(bench: Bench, seed: int, num_tokens: int, sample_index: int) -> list[int]:
    return bench.expected_ids(PROMPT, seed, num_tokens, sample_index)


def _by_sample(messages: Sequence[Any]) -> dict[int, list[Any]]:
    parts: dict[int, list[Any]] = defaultdict(list)
    for message in messages:
        parts[message.sample_index].append(message)
    return parts


def _check_account(messages: list[inference_pb2.GenerateResponse], n: int) -> None:
    """Each sample ends once; the request's account comes with its very last message."""
    *earlier, last = messages
    assert all(not m.HasField("provenance") and not m.times for m in earlier)
    assert [leg.role for leg in last.provenance.legs][:1] == ["prefill"]
    for index, part in _by_sample(messages).items():
        assert [bool(m.finish_reason) for m in part] == [False] * (len(part) - 1) + [True], index
        assert part[-1].usage.num_output_tokens == len(ids_of(part))
        assert part[-1].usage.num_prompt_tokens == len(PROMPT)
    assert set(_by_sample(messages)) == set(range(n))


async def test_each_sample_is_drawn_for_itself(bench: Bench) -> None:
    messages = await bench.generate(sampling={"max_tokens": 12, "seed": 4, "n": 3})
    _check_account(messages, 3)
    for index, part in _by_sample(messages).items():
        ids = _expected(bench, 4, 12, index)
        assert ids_of(part) == ids
        assert "".join(m.text for m in part) == TOKENIZER.decode(ids)
    (asked,) = bench.prefill.requests
    assert asked.sampling.n == 3
    (generate,) = bench.decode.generated
    assert [list(o.token_ids) for o in generate.outputs] == [
        _expected(bench, 4, 1, index) for index in range(3)
    ]
    assert not generate.output_token_ids


async def test_a_stop_string_ends_its_own_sample_only(bench: Bench) -> None:
    texts = [TOKENIZER.decode(_expected(bench, 9, 60, index)) for index in range(3)]
    stop = next(
        texts[1][at : at + 3]
        for at in range(5, 40)
        if all(texts[1][at : at + 3] not in texts[other] for other in (0, 2))
    )
    # Nobody runs to the end before the worker has heard of the stop.
    bench.decode.pause_at = 50
    asked = request(sampling={"max_tokens": 60, "seed": 9, "n": 3, "stop": [stop]})
    generating = asyncio.create_task(bench.generate(asked))
    gate = bench.decode.token_gate
    await until(lambda: bench.decode.num_samples_cancelled == 1 and not gate.is_open)
    gate.open()
    messages = await generating
    _check_account(messages, 3)
    parts = _by_sample(messages)
    reasons = {index: part[-1].finish_reason for index, part in parts.items()}
    assert reasons == {
        0: common_pb2.FINISH_REASON_LENGTH,
        1: common_pb2.FINISH_REASON_STOP_STRING,
        2: common_pb2.FINISH_REASON_LENGTH,
    }
    assert "".join(m.text for m in parts[1]) == texts[1][: texts[1].index(stop)]
    for index in (0, 2):
        assert "".join(m.text for m in parts[index]) == texts[index]
    assert bench.decode.num_cancelled == 0


async def test_stops_of_all_samples_cancel_the_request(bench: Bench) -> None:
    texts = [TOKENIZER.decode(_expected(bench, 2, 400, index)) for index in range(2)]
    messages = await bench.generate(sampling={"max_tokens": 400, "seed": 2, "n": 2, "stop": ["e"]})
    _check_account(messages, 2)
    for index, part in _by_sample(messages).items():
        assert "".join(m.text for m in part) == texts[index].partition("e")[0]
        assert part[-1].stop_string == "e"


async def test_samples_that_end_with_their_first_token_are_not_decoded(bench: Bench) -> None:
    firsts = [_expected(bench, 5, 1, index)[0] for index in range(4)]
    over = [index for index in range(4) if firsts[index] == firsts[0]]
    assert len(over) < 4
    messages = await bench.generate(
        sampling={"max_tokens": 6, "seed": 5, "n": 4, "stop_token_ids": [firsts[0]]}
    )
    _check_account(messages, 4)
    (generate,) = bench.decode.generated
    assert [o.is_over for o in generate.outputs] == [index in over for index in range(4)]
    for index in over:
        assert ids_of(_by_sample(messages)[index]) == [firsts[0]]


async def test_all_samples_over_at_once_never_decode() -> None:
    async with running(model=fake_model(eos_at=0)) as bench:
        messages = await bench.generate(sampling={"max_tokens": 6, "n": 3})
        _check_account(messages, 3)
        assert not bench.decode.generated
        single = await bench.generate(sampling={"max_tokens": 1, "n": 3})
        _check_account(single, 3)


async def test_a_prefill_worker_lost_between_two_first_tokens() -> None:
    """What was shown is not shown again; the other worker draws the same."""
    async with running(num_prefill=2) as bench:
        for worker in bench.prefills:
            worker.error, worker.error_after = Unavailable("lost"), 1
        bench.prefills[1].error = None
        messages: list[Any] = []
        async with asyncio.timeout(BOUND_S):
            for attempt in range(20):  # until the choice falls on the worker that fails
                messages = await bench.generate(
                    text="hello",
                    sampling={"max_tokens": 5, "seed": attempt, "n": 3},
                    session=f"s{attempt}",
                )
                for index, part in _by_sample(messages).items():
                    assert ids_of(part) == _expected(bench, attempt, 5, index)
                if bench.prefills[0].requests:
                    break
        assert bench.prefills[0].requests, "the failing worker was never chosen"
        _check_account(messages, 3)


async def test_logprobs_go_with_their_sample(bench: Bench) -> None:
    messages = await bench.generate(sampling={"max_tokens": 7, "n": 2, "logprobs": 0})
    for message in messages:
        assert [e.chosen.token_id for e in message.logprobs] == list(message.token_ids)


async def test_random_stops_and_lengths(
    bench: Bench, seed: int, scale: Callable[[int], int]
) -> None:
    """Each sample's text is what its tokens give, cut at its first stop, whatever the others do."""
    rng = random.Random(seed)
    for _ in range(scale(200)):
        n, draw, num_tokens = rng.randint(1, 5), rng.randrange(2**32), rng.randint(1, 40)
        stops = ["".join(rng.choices("abcdefghijkl", k=rng.randint(1, 2))) for _ in range(2)]
        messages = await bench.generate(
            sampling={"max_tokens": num_tokens, "seed": draw, "n": n, "stop": stops}
        )
        _check_account(messages, n)
        for index, part in _by_sample(messages).items():
            text = TOKENIZER.decode(_expected(bench, draw, num_tokens, index))
            ends = [(text.index(s) + len(s), text.index(s)) for s in stops if s in text]
            expected = text[: min(ends)[1]] if ends else text
            assert "".join(m.text for m in part) == expected


@pytest.mark.parametrize("n", [0, 1])
async def test_one_sample_is_as_before(bench: Bench, n: int) -> None:
    messages = await bench.generate(sampling={"max_tokens": 4, "n": n, "seed": 1})
    assert ids_of(messages) == _expected(bench, 1, 4, 0)
    (generate,) = bench.decode.generated
    assert len(generate.output_token_ids) == 1 and not generate.outputs


# ---- Baton's own client


TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
TALK = [
    {"role": "user", "content": "hi"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "c1", "function": {"name": "look", "arguments": {"x": 1}}},
            {"id": "c2", "function": {"name": "look", "arguments": '{"x": 2}'}},
        ],
    },
    {"role": "tool", "content": "seen", "tool_call_id": "c2"},
]


async def test_a_prompts_embedding(bench: HttpBench) -> None:
    async with Client(bench.router.address) as client:
        ids = TOKENIZER.encode("hello")
        found = await client.embed("hello", request_id="e1", tenant="t")
        assert found.values == pytest.approx(bench.model.embedding(ids), abs=1e-6)
        assert found.request_id == "e1" and found.usage.num_prompt_tokens == len(ids)
        assert found.usage.num_output_tokens == 0 and found.times["tokenize"] > 0
        assert [leg.role for leg in found.provenance.legs] == ["prefill"]
        with pytest.raises(InvalidArgument, match=r"^text: is empty"):
            await client.embed("")

        def ask() -> tuple[float, ...]:
            with SyncClient(bench.router.address) as blocking:
                return blocking.embed(ids).values

        assert await asyncio.to_thread(ask) == found.values


async def test_tools_go_to_the_template(bench: HttpBench) -> None:
    async with Client(bench.router.address) as client:
        await client.complete(
            TALK, tools=TOOLS, template_arguments={"mood": "gladly "}, max_tokens=1
        )
        prompt = TOKENIZER.decode(bench.prefill.requests[0].prompt_token_ids)
        assert '"name": "look"' in prompt and prompt.endswith("gladly assistant:")
        assert 'assistant: [look {"x": 1}][look {"x": 2}]\ntool: seen re c2\n' in prompt
        with pytest.raises(InvalidArgument, match=r"^chat.tools: needs chat messages"):
            await client.complete("text", tools=TOOLS)
        with pytest.raises(InvalidArgument, match=r"^prompt: "):
            await client.complete([{"role": "assistant", "content": "", "tool_calls": [{}]}])
        with pytest.raises(InvalidArgument, match=r"^chat.tools\[0\]: must be"):
            await client.complete(TALK, tools=[{"name": "look"}])
