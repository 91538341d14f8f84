"""The unmodified openai client against a whole router: what it asks for is what it gets."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp
import openai
import pytest

from process.rpc_errors import NoCapacity, Unavailable
from tests.harness.router_bench import (
    BOUND_S,
    SHORT_WAITS,
    TOKENIZER,
    HttpBench,
    bytes_of,
    http_bench,
    running,
    saying,
)
from tests.harness.waiting import Deadlines, until

pytestmark = pytest.mark.oracle

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Looks things up",
            "parameters": {
                "type": "object",
                "properties": {"query": {"$ref": "#/$defs/q"}},
                "required": ["query"],
                "$defs": {"q": {"type": "string"}},
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
Client = openai.AsyncOpenAI
RUNNING_USAGE = {"include_usage": True, "continuous_usage_stats": True}
HELLO: Any = [{"role": "user", "content": "hello"}]


@asynccontextmanager
async def client_of(bench: HttpBench, **options: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{bench.url}/v1", api_key="none", max_retries=0, timeout=60, **options
    ) as client:
        yield client


@pytest.fixture
async def client(bench: HttpBench) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(bench) as made:
        yield made


def chat(client: Client, messages: Any = HELLO, **options: Any) -> Any:
    return client.chat.completions.create(model="fake", messages=messages, **options)


def complete(client: Client, prompt: Any = "x", **options: Any) -> Any:
    return client.completions.create(model="fake", prompt=prompt, **options)


async def test_a_completion_is_what_grpc_gives(client: Client, bench: HttpBench) -> None:
    messages = await bench.generate(text="hello", sampling={"max_tokens": 12, "seed": 5, "n": 2})
    expected = ["", ""]
    for message in messages:
        expected[message.sample_index] += message.text
    answer = await complete(client, "hello", max_tokens=12, seed=5, n=2)
    assert [choice.text for choice in answer.choices] == expected
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert {choice.finish_reason for choice in answer.choices} == {"length"}
    assert answer.object == "text_completion" and answer.model == "fake"
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens == len(TOKENIZER.encode("hello"))
    assert answer.usage.completion_tokens == 24
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert answer.system_fingerprint == "fp_" + bench.model.fingerprint[:16]


@pytest.mark.parametrize("kind", ["text", "chat"])
async def test_a_stream_is_the_whole_answer_in_pieces(client: Client, kind: str) -> None:
    create: Any = client.completions.create
    options: dict[str, Any] = {"model": "fake", "max_tokens": 20, "seed": 3, "n": 2}
    options["prompt"] = "hello"
    if kind == "chat":
        del options["prompt"]
        create, options["messages"] = client.chat.completions.create, HELLO
    whole = await create(**options)
    pieces, reasons, chunks = ["", ""], [None, None], []
    stream = await create(stream=True, stream_options={"include_usage": True}, **options)
    async for chunk in stream:
        chunks.append(chunk)
        for choice in chunk.choices:
            text = choice.text if kind == "text" else choice.delta.content
            pieces[choice.index] += text or ""
            reasons[choice.index] = reasons[choice.index] or choice.finish_reason
    *body, last = chunks
    texts = [c.text if kind == "text" else c.message.content for c in whole.choices]
    assert pieces == texts and reasons == ["length", "length"]
    assert len(body) > 4 and len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in body)
    assert last.choices == [] and last.usage == whole.usage
    if kind == "chat":
        roles = [c.delta.role for chunk in body for c in chunk.choices if c.delta.role]
        assert roles == ["assistant", "assistant"]
        assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}


async def test_prompts_of_every_kind_and_their_echo(client: Client) -> None:
    ids = TOKENIZER.encode("hello")

    async def texts(prompt: Any, **options: Any) -> list[str]:
        answer = await complete(client, prompt, max_tokens=4, seed=1, **options)
        assert [choice.index for choice in answer.choices] == list(range(len(answer.choices)))
        return [choice.text for choice in answer.choices]

    (text,) = await texts("hello")
    (other,) = await texts("other")
    assert await texts(ids) == [text]
    assert await texts(["other", "hello", "other"]) == [other, text, other]
    assert await texts([ids, ids]) == [text, text]
    assert await texts("hello", echo=True) == ["hello" + text]
    assert await texts(ids, echo=True) == ["hello" + text]
    stream = await complete(
        client, ["hello", "other"], max_tokens=4, seed=1, echo=True, stream=True
    )
    pieces = ["", ""]
    async for chunk in stream:
        for choice in chunk.choices:
            pieces[choice.index] += choice.text
    assert pieces == ["hello" + text, "other" + other]


async def test_sampling_reaches_the_workers(client: Client, bench: HttpBench) -> None:
    await chat(
        client,
        max_completion_tokens=3,
        temperature=0.5,
        top_p=0.9,
        presence_penalty=0.25,
        frequency_penalty=-0.5,
        logit_bias={"97": -100},
        seed=-1,
        logprobs=True,
        top_logprobs=4,
        prompt_cache_key="talk",
        extra_body={
            "top_k": 7,
            "min_p": 0.1,
            "min_tokens": 2,
            "ignore_eos": True,
            "repetition_penalty": 1.5,
            "stop_token_ids": [5],
            "bad_words": ["zq"],
            "allowed_token_ids": [97, 98],
            "baton": {"priority": 3, "no_repeat_ngram": 4, "tenant": "t2", "regex": "a+"},
        },
    )
    (asked,) = bench.prefill.requests
    sampling = asked.sampling
    assert asked.tenant == "t2" and asked.priority == 3
    assert (sampling.temperature, sampling.top_p, sampling.min_p) == (0.5, 0.9, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.25, -0.5)
    assert dict(sampling.logit_bias) == {97: -100.0} and sampling.seed == 2**64 - 1
    assert (sampling.top_k, sampling.min_tokens, sampling.ignore_eos) == (7, 2, True)
    assert (sampling.repetition_penalty, sampling.logprobs) == (1.5, 4)
    assert list(sampling.stop_token_ids) == [5] and sampling.bad_word_ids
    assert list(sampling.allowed_token_ids) == [97, 98]
    assert sampling.no_repeat_ngram == 4 and sampling.regex == "a+" and sampling.max_tokens == 3


async def test_logprobs_name_their_tokens_by_bytes() -> None:
    async with http_bench(model=saying("h\u00e9llo")) as bench, client_of(bench) as client:
        answer = await chat(client, logprobs=True, top_logprobs=0)
        (choice,) = answer.choices
        assert choice.message.content == "h\u00e9llo" and choice.finish_reason == "stop"
        assert choice.logprobs is not None and choice.logprobs.content is not None
        spelled = b"".join(bytes(entry.bytes or ()) for entry in choice.logprobs.content)
        assert spelled.decode() == "h\u00e9llo", "the end token is no part of the text"
        assert all(
            entry.logprob == -float(i)
            for entry, i in zip(
                choice.logprobs.content, TOKENIZER.encode("h\u00e9llo"), strict=True
            )
        )
        plain = await complete(client, "a", logprobs=0)
        found = plain.choices[0].logprobs
        assert found is not None and found.tokens is not None and found.text_offset is not None
        assert len(found.tokens) == len(choice.logprobs.content)
        assert found.text_offset[0] == 0 and found.text_offset == sorted(found.text_offset)


async def test_a_completions_logprobs_name_every_token_and_where_it_begins() -> None:
    text = "a\U0001f600 b\u00e9\u4f60?"
    async with http_bench(model=saying(text)) as bench, client_of(bench) as client:
        for num_top in (0, 1, 5):
            answer = await complete(client, logprobs=num_top)
            stream = await complete(client, logprobs=num_top, stream=True)
            (whole,) = answer.choices
            assert whole.text == text and whole.logprobs is not None
            found: Any = whole.logprobs
            ids = TOKENIZER.encode(text)
            assert found.token_logprobs == [-float(token_id) for token_id in ids]
            for name, logprob, top in zip(
                found.tokens, found.token_logprobs, found.top_logprobs, strict=True
            ):
                # Chosen is the second most likely: one more where one was asked for.
                assert len(top) == max(2, num_top) if num_top else len(top) == 1
                assert top[name] == logprob
                assert list(top.values()) == sorted(top.values(), reverse=True)
            if num_top == 5:
                names = {name for top in found.top_logprobs for name in top}
                assert "bytes:\\x9f" in names and "bytes:\\xf1" in names
            for name, offset in zip(found.tokens, found.text_offset, strict=True):
                if "\ufffd" not in name:
                    assert text[offset:].startswith(name)
            spelled = [bytes_of(token_id) for token_id in ids]
            begins = [len(b"".join(spelled[:i])) for i in range(len(ids))]
            assert found.text_offset == [
                max(n for n in range(len(text)) if len(text[:n].encode()) <= begin)
                for begin in begins
            ]
            pieces: dict[str, list[Any]] = {}
            async for chunk in stream:
                for key, values in chunk.choices[0].logprobs or ():
                    pieces[key] = pieces.get(key, []) + (values or [])
            assert pieces == dict(found)


async def test_stop_strings_end_the_text() -> None:
    async with http_bench(model=saying("one two three")) as bench, client_of(bench) as client:
        for stop in ("two", ["zzz", "two"]):
            answer = await chat(client, stop=stop)
            assert answer.choices[0].message.content == "one "
            assert answer.choices[0].finish_reason == "stop"


CALLS = (
    'Let me see.\n<tool_call>\n{"name": "search", "arguments": {"query": "fo\\"x"}}\n</tool_call>'
    '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)


async def test_tools_are_shown_to_the_model_and_calls_are_read_back() -> None:
    async with http_bench(model=saying(CALLS)) as bench, client_of(bench) as client:
        answer = await chat(client, tools=TOOLS, max_tokens=400)
        (choice,) = answer.choices
        assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me see."
        calls: Any = choice.message.tool_calls
        assert [call.function.name for call in calls] == ["search", "now"]
        assert json.loads(calls[0].function.arguments) == {"query": 'fo"x'}
        assert calls[1].function.arguments == "{}"
        assert len({call.id for call in calls}) == 2
        prompt = TOKENIZER.decode(bench.prefill.requests[0].prompt_token_ids)
        assert '"name": "search"' in prompt and "Looks things up" in prompt

        merged: dict[int, dict[str, str]] = {}
        content, reason = "", None
        stream = await chat(client, tools=TOOLS, max_tokens=400, stream=True)
        async for chunk in stream:
            (part,) = chunk.choices
            content += part.delta.content or ""
            reason = part.finish_reason or reason
            for call in part.delta.tool_calls or ():
                assert call.function is not None
                if call.id is not None:
                    assert call.type == "function" and call.function.name
                    merged[call.index] = {"name": call.function.name, "arguments": ""}
                merged[call.index]["arguments"] += call.function.arguments or ""
        assert content == "Let me see." and reason == "tool_calls"
        assert merged == {
            0: {"name": "search", "arguments": calls[0].function.arguments},
            1: {"name": "now", "arguments": "{}"},
        }


async def test_a_tools_answer_goes_back_through_the_template(
    client: Client, bench: HttpBench
) -> None:
    messages: Any = [
        {
            "role": "developer",
            "content": [{"type": "text", "text": "be"}, {"type": "text", "text": "kind"}],
        },
        {"role": "user", "content": "hello"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "search", "arguments": '{"query": "x"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "found it"},
    ]
    await chat(
        client,
        messages,
        tools=TOOLS,
        tool_choice="none",
        max_tokens=2,
        extra_body={"chat_template_kwargs": {"mood": "gladly "}},
    )
    prompt = TOKENIZER.decode(bench.prefill.requests[0].prompt_token_ids)
    assert prompt == (
        'system: be\nkind\nuser: hello\nassistant: [search {"query": "x"}]\n'
        "tool: found it re call_1\ngladly assistant:"
    )


async def test_what_was_answered_or_agents_keep_is_taken_as_history() -> None:
    def call(arguments: Any) -> Any:
        function = {"name": "search", "arguments": arguments}
        return {"id": "call_1", "type": "function", "function": function}

    histories: list[tuple[Any, str]] = [
        ({"content": None, "tool_calls": [call('{"query": "x"}')]}, 'None[search {"query": "x"}]'),
        (
            {"content": "", "tool_calls": [call('{"query": "unfin')]},
            '[search "{\\"query\\": \\"unfin"]',
        ),
        ({"content": None, "tool_calls": [call("")]}, "[search {}]"),
        ({"content": None, "tool_calls": [call("null")]}, "[search {}]"),
        ({"content": None, "tool_calls": [call(None)]}, "[search {}]"),
        ({"content": None, "tool_calls": [call("[1]")]}, '[search "[1]"]'),
        (
            {"content": None, "tool_calls": [call('{"query": "\\ud83d"}')]},
            '[search "{\\"query\\": \\"\\\\ud83d\\"}"]',
        ),
        ({"content": "Hi", "reasoning_content": "Hm."}, "(Hm.)Hi"),
        ({"content": "Hi", "reasoning": "Hm."}, "(Hm.)Hi"),
        ({"content": None, "reasoning_content": "Hm."}, "(Hm.)"),
        ({"content": "Hi", "reasoning_content": "", "reasoning": None}, "Hi"),
        ({"content": None, "refusal": "I will not."}, "I will not."),
        ({"content": [{"type": "refusal", "refusal": "I will not."}]}, "I will not."),
        ({"content": []}, ""),
        ({"content": [{"type": "text", "text": ""}, {"type": "text", "text": "Hi"}]}, "\nHi"),
        (
            {
                "content": "Hi",
                "refusal": None,
                "annotations": [{"type": "url_citation"}],
                "audio": None,
                "function_call": None,
                "name": "ann",
                "tool_calls": [],
            },
            "Hi",
        ),
    ]
    async with http_bench(model=saying("ok")) as bench, client_of(bench) as client:
        for said, shown in histories:
            messages: Any = [
                *HELLO,
                {"role": "assistant", **said},
                {"role": "tool", "tool_call_id": "call_1", "content": None},
                {"role": "user", "content": [], "name": "bo"},
            ]
            await chat(client, messages)
            prompt = TOKENIZER.decode(bench.prefill.requests[-1].prompt_token_ids)
            shown = shown.removeprefix("None")
            assert f"\nassistant: {shown}\ntool:  re call_1\nuser: \n" in prompt, (said, prompt)


async def test_an_answer_that_was_cut_goes_on_as_history() -> None:
    """A call cut by max_tokens, appended as the client's own object."""
    text = '[{"name": "search", "arguments": {"query": "x"}}]'
    async with http_bench(model=saying(text)) as bench, client_of(bench) as client:
        cut = await chat(client, tools=TOOLS, tool_choice="required", max_tokens=36)
        message = cut.choices[0].message
        (call,) = message.tool_calls or ()
        assert call.type == "function" and cut.choices[0].finish_reason == "length"
        with pytest.raises(ValueError):
            json.loads(call.function.arguments)
        reply: Any = {"role": "tool", "tool_call_id": call.id, "content": "not run"}
        history: Any = [*HELLO, message, reply]
        await chat(client, history, tools=TOOLS)
        prompt = TOKENIZER.decode(bench.prefill.requests[-1].prompt_token_ids)
    assert f"[search {json.dumps(call.function.arguments)}]" in prompt


async def test_a_forced_call_is_a_grammar() -> None:
    text = '[{"name": "search", "arguments": {"query": "x"}}, {"name": "now", "arguments": {}}]'
    async with http_bench(model=saying(text)) as bench, client_of(bench) as client:
        answer = await chat(client, tools=TOOLS, tool_choice="required", max_tokens=200)
        calls: Any = answer.choices[0].message.tool_calls
        assert [call.function.name for call in calls] == ["search", "now"]
        assert answer.choices[0].finish_reason == "tool_calls"
        assert answer.choices[0].message.content is None
        schema = json.loads(bench.prefill.requests[0].sampling.json_schema)
        assert schema["minItems"] == 1
        search, now = schema["items"]["anyOf"]
        assert search["properties"]["arguments"] == {"$ref": "#/$defs/tools[0]"}
        parameters = schema["$defs"]["tools[0]"]
        assert parameters["properties"] == {"query": {"$ref": "#/$defs/tools[0]/$defs/q"}}
        assert parameters["$defs"] == {"q": {"type": "string"}}
        assert now["properties"]["name"] == {"const": "now"}

    async with http_bench(model=saying('{"query": "x"}')) as bench, client_of(bench) as client:
        answer = await chat(
            client, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "search"}}
        )
        (call,) = answer.choices[0].message.tool_calls or ()
        assert call.type == "function"
        assert (call.function.name, call.function.arguments) == ("search", '{"query": "x"}')
        assert answer.choices[0].finish_reason == "stop"
        schema = json.loads(bench.prefill.requests[0].sampling.json_schema)
        assert schema == TOOLS[0]["function"]["parameters"]


CUT = '{"query": "x", "more": "yyyyyyyyyyyyyyyyyyyyyyyyy"}'


@pytest.mark.parametrize("choice", ["required", "auto"])
async def test_a_call_that_was_cut_is_not_called_complete(choice: Any) -> None:
    call = f'{{"name": "search", "arguments": {CUT}}}'
    text = f"[{call}]" if choice == "required" else f"<tool_call>{call}</tool_call>"
    async with http_bench(model=saying(text)) as bench, client_of(bench) as client:
        # arguments: "" where no name was known yet: it is content; None: some.
        for stop, max_tokens, arguments, reason in (
            ('"x"', 200, '{"query": ', "stop"),
            (None, 60, None, "length"),
            ("earch", 200, "", "stop"),
            (None, 10, "", "length"),
            ("zzz", 200, CUT, "tool_calls"),
        ):
            options = {
                "tools": TOOLS,
                "tool_choice": choice,
                "max_tokens": max_tokens,
                "stop": stop,
            }
            (found,) = (await chat(client, **options)).choices
            stream = await chat(client, stream=True, **options)
            last = [chunk.choices[0] async for chunk in stream][-1]
            assert found.finish_reason == last.finish_reason == reason
            if arguments == "":
                assert found.message.tool_calls is None
                assert found.message.content and text.startswith(found.message.content)
                continue
            (called,) = found.message.tool_calls or ()
            assert called.type == "function" and called.function.name == "search"
            assert found.message.content is None
            assert arguments is None or called.function.arguments == arguments


@pytest.mark.parametrize("text", ["The tag <tool_call> is used so.", "So: <tool_call> {1}", "a <"])
async def test_text_that_only_mentions_a_call_comes_whole(text: str) -> None:
    async with http_bench(model=saying(text)) as bench, client_of(bench) as client:
        answer = await chat(client, tools=TOOLS, max_tokens=200)
        stream = await chat(client, tools=TOOLS, max_tokens=200, stream=True)
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert answer.choices[0].message.content == "".join(pieces) == text
    assert answer.choices[0].finish_reason == "stop"


async def test_response_formats_are_grammars() -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    async with http_bench(model=saying('{"n": 4}')) as bench, client_of(bench) as client:
        answer = await chat(
            client,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": schema, "strict": True},
            },
        )
        assert json.loads(answer.choices[0].message.content or "") == {"n": 4}
        await chat(client, response_format={"type": "json_object"})
        await chat(client, response_format={"type": "text"})
        first, second, third = bench.prefill.requests
    assert json.loads(first.sampling.json_schema) == schema
    assert json.loads(second.sampling.json_schema) == {"type": "object"}
    assert third.sampling.WhichOneof("grammar") is None


async def test_errors_are_those_that_the_client_knows(
    client: Client, bench: HttpBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    deadlines = Deadlines(monkeypatch)
    create = client.chat.completions.create
    with pytest.raises(openai.NotFoundError) as caught:
        await create(model="gpt-5", messages=HELLO)
    assert caught.value.code == "model_not_found" and caught.value.param == "model"
    with pytest.raises(openai.BadRequestError) as refused:
        await create(model="fake", messages=HELLO, max_tokens=10**6)
    assert refused.value.param == "max_tokens" and "has room for" in refused.value.message
    with pytest.raises(openai.BadRequestError) as refused:
        await create(model="fake", messages=HELLO, extra_body={"temprature": 1})
    assert refused.value.param == "temprature" and "temperature?" in refused.value.message

    bench.prefill.error = NoCapacity("all is full", retry_after_s=2.5)
    with pytest.raises(openai.RateLimitError) as full:
        await create(model="fake", messages=HELLO)
    assert full.value.response.headers["retry-after"] == "3"
    assert full.value.response.headers["retry-after-ms"] == "2500"
    assert full.value.request_id is not None
    bench.prefill.error = None
    bench.prefill.gate.close()
    headers = {"x-baton-budget-ms": "60000"}
    asking = asyncio.create_task(create(model="fake", messages=HELLO, extra_headers=headers))
    await until(bench.prefill.gate.reached.is_set)
    assert bench.prefill.requests[-1].budget_ms <= 60_000
    await until(lambda: any("prefilling" in state for state in bench.probe.states))
    deadlines.end_all()
    with pytest.raises(openai.InternalServerError) as late:
        await asking
    assert late.value.status_code == 504 and "prefilling" in late.value.message
    bench.prefill.gate.open()


async def test_what_is_longer_than_the_window_is_refused_in_openais_words(
    client: Client, bench: HttpBench
) -> None:
    """litellm and langchain look for the code and for the first sentence."""
    window, long = bench.model.context_window, "x" * 2000
    asked: list[tuple[Any, str]] = [
        (chat(client, max_tokens=10_000), ""),
        (chat(client, max_completion_tokens=10_000, stream=True), "max_completion_tokens"),
        (chat(client, [{"role": "user", "content": long}]), "messages"),
        (complete(client, ["x", long]), "prompt[1]"),
        (client.embeddings.create(model="fake", input=["x", long]), "input[1]"),
    ]
    for call, param in asked:
        with pytest.raises(openai.BadRequestError) as refused:
            await call
        error = refused.value
        assert error.code == "context_length_exceeded" and error.status_code == 400
        assert error.param == (param or "max_tokens")
        words = f"This model's maximum context length is {window} tokens. However, you requested"
        assert isinstance(error.body, dict) and error.body["message"].startswith(words)


async def test_no_worker_is_a_503_that_says_when_to_come_again() -> None:
    async with (
        http_bench(num_prefill=0) as bench,
        client_of(bench) as client,
        aiohttp.ClientSession() as session,
    ):
        with pytest.raises(openai.InternalServerError) as away:
            await complete(client)
        assert away.value.status_code == 503
        assert away.value.response.headers["retry-after"] == "1"
        async with session.get(f"{bench.url}/ready") as response:
            assert response.status == 503 and "prefill" in await response.text()
        async with session.get(f"{bench.url}/health") as response:
            assert response.status == 200


@pytest.mark.parametrize("is_chat", [False, True])
async def test_an_error_in_the_middle_of_a_stream_reaches_the_client(is_chat: bool) -> None:
    async with http_bench(times=SHORT_WAITS) as bench, client_of(bench) as client:
        bench.decode.pause_at = 3
        stream: Any = await (
            chat(client, max_tokens=20, stream=True)
            if is_chat
            else complete(client, max_tokens=20, stream=True)
        )
        text = ""

        async def read() -> None:
            nonlocal text
            async for chunk in stream:
                (choice,) = chunk.choices
                text += (choice.delta.content or "") if is_chat else choice.text

        reading = asyncio.create_task(read())
        await until(lambda: len(text) == 3)  # of tokens; one chunk may have several
        await bench.decode.stop()
        with pytest.raises(openai.APIError) as caught:
            await asyncio.wait_for(reading, BOUND_S)
        assert caught.value.code == "unavailable" and caught.value.type is not None
        bench.decodes.clear()


async def test_a_stream_that_waits_gets_comments() -> None:
    times = {"sse_keep_alive_s": 0.02}
    body = {"prompt": "x", "max_tokens": 6, "seed": 1, "stream": True}
    async with (
        http_bench(times=times) as bench,
        client_of(bench) as client,
        aiohttp.ClientSession() as session,
    ):
        bench.prefill.gate.close()
        bench.decode.token_gate.close()
        async with session.post(f"{bench.url}/v1/completions", json=body) as response:
            lines = response.content
            assert response.status == 200
            for _ in range(3):  # before the first token
                assert await lines.readline() == b": keep-alive\n"
                assert await lines.readline() == b"\n"
            bench.prefill.gate.open()
            while not (line := await lines.readline()).startswith(b"data: "):
                assert line in (b": keep-alive\n", b"\n")
            first = json.loads(line[6:])["choices"][0]["text"]
            assert await lines.readline() == b"\n"
            assert await lines.readline() == b": keep-alive\n"  # behind it
            bench.decode.token_gate.open()
            rest = (await lines.read()).decode()
        assert rest.endswith("data: [DONE]\n\n")
        pieces = [json.loads(line[6:]) for line in rest.split("\n") if line.startswith("data: {")]
        text = first + "".join(piece["choices"][0]["text"] for piece in pieces)

        bench.prefill.gate.close()
        stream = await complete(
            client, max_tokens=6, seed=1, stream=True
        )  # returned, so the answer has begun
        bench.prefill.gate.open()
        assert "".join([chunk.choices[0].text async for chunk in stream]) == text


async def test_an_error_behind_a_comment_is_the_last_event() -> None:
    async with http_bench(times={"sse_keep_alive_s": 0.02}) as bench, client_of(bench) as client:
        bench.prefill.gate.close()
        stream = await chat(client, stream=True)
        bench.prefill.error = NoCapacity("all is full", retry_after_s=2.5)
        bench.prefill.gate.open()
        with pytest.raises(openai.APIError) as caught:
            async for _ in stream:
                pass
        assert caught.value.code == "no_capacity" and "all is full" in caught.value.message


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_client_that_goes_away_ends_both_legs(
    client: Client, bench: HttpBench, is_streamed: bool
) -> None:
    bench.decode.token_gate.close()
    call: Any = complete(client, max_tokens=50, stream=is_streamed)

    async def read() -> None:
        answer = await call
        if is_streamed:
            async for _ in answer:
                pass

    reading = asyncio.create_task(read())
    await until(lambda: bench.decode.generated)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await until(lambda: bench.decode.num_open == 0)
    await until(bench.is_idle)
    assert bench.decode.num_cancelled == 1
    bench.decode.token_gate.open()


async def test_a_trace_id_is_echoed_and_logged_and_may_be_shared(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A mesh copies x-request-id from one call to all that it causes."""
    headers = {"x-request-id": "trace 1; a=b"}
    caplog.set_level(logging.INFO)
    async with http_bench() as bench, client_of(bench) as client:

        async def ask(prompt: str, **options: Any) -> Any:
            return await complete(client, prompt, max_tokens=12, extra_headers=headers, **options)

        bench.decode.token_gate.close()
        asking = [asyncio.create_task(ask(prompt)) for prompt in ("x", "y", "x")]
        await until(lambda: len(bench.prefill.requests) == 3)
        bench.decode.token_gate.open()
        answers = [*await asyncio.gather(*asking), await ask("x")]
        assert {answer._request_id for answer in answers} == {"trace 1; a=b"}
        assert len({answer.id for answer in answers}) == 4
        assert len({bench_request.sampling.seed for bench_request in bench.prefill.requests}) == 4
        with pytest.raises(openai.BadRequestError) as refused:
            await ask("x", stop=[""])
        assert refused.value.request_id == "trace 1; a=b"
        embedded = await client.embeddings.create(model="fake", input="x", extra_headers=headers)
        assert embedded._request_id == "trace 1; a=b"
    told = [record.fields for record in caplog.records if record.message == "http_request"]  # type: ignore[attr-defined]
    assert {fields["x_request_id"] for fields in told} == {"trace 1; a=b"}
    assert {f"cmpl-{fields['request_id']}" for fields in told} >= {answer.id for answer in answers}


async def test_a_request_sent_again_by_its_key_ends_the_first_and_is_the_same(
    client: Client, bench: HttpBench
) -> None:
    headers = {"Idempotency-Key": "again-1", "x-request-id": "trace-1"}

    async def ask(prompt: str = "x") -> Any:
        return await complete(client, prompt, max_tokens=6, extra_headers=headers)

    bench.decode.token_gate.close()
    first = asyncio.create_task(ask())
    await until(lambda: bench.decode.generated)
    with pytest.raises(openai.ConflictError) as conflict:
        await ask("y")
    assert conflict.value.message.startswith("Error code: 409")
    assert "idempotency-key: again-1" in conflict.value.message
    assert "another body" in conflict.value.message
    second = asyncio.create_task(ask())
    with pytest.raises(openai.APIStatusError) as superseded:
        await first
    assert superseded.value.status_code == 499
    bench.decode.token_gate.open()
    answer = await second
    assert answer.id == "cmpl-again-1" and answer._request_id == "trace-1"
    assert (await ask()).choices[0].text == answer.choices[0].text


async def test_the_account_comes_when_it_is_asked_for(client: Client) -> None:
    answer = await complete(
        client,
        ["x", "y"],
        max_tokens=4,
        extra_body={"baton": {"provenance": True, "token_ids": True}},
    )
    one, two = answer.model_extra["baton"]["requests"]  # type: ignore[index]
    for account in (one, two):
        legs = account["provenance"]["legs"]
        assert [leg["role"] for leg in legs] == ["prefill", "decode"]
        assert legs[0]["num_tokens_computed"] == 1 and account["times_s"]["tokenize"] >= 0
    assert [len(choice.model_extra["token_ids"]) for choice in answer.choices] == [4, 4]  # type: ignore[index]
    stream = await complete(
        client, max_tokens=4, stream=True, extra_headers={"x-baton-provenance": "1"}
    )
    chunks = [chunk async for chunk in stream]
    accounts = [c.model_extra["baton"] for c in chunks if "baton" in (c.model_extra or {})]
    assert len(accounts) == 1 and "baton" in (chunks[-1].model_extra or {})
    plain = await complete(client, max_tokens=1)
    assert "baton" not in (plain.model_extra or {})


async def test_models_are_listed(client: Client, bench: HttpBench) -> None:
    listed = [model async for model in client.models.list()]
    assert [model.id for model in listed] == ["fake"]
    for worker in (bench.prefills[0], bench.decodes[0]):
        await bench.lapse(worker)
    assert [model async for model in client.models.list()] == listed  # they are waited for
    assert (await client.models.retrieve("fake")).owned_by == "baton"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("other")


async def test_running_usage_grows(client: Client) -> None:
    stream: Any = await complete(client, max_tokens=5, stream=True, stream_options=RUNNING_USAGE)
    usages = [chunk.usage async for chunk in stream]
    whole = await complete(client, max_tokens=5)
    counts = [usage.completion_tokens for usage in usages]
    assert counts == sorted(counts) and counts[-1] == 5 and counts[0] == 1
    assert whole.usage is not None and whole.usage.prompt_tokens > 0
    assert {usage.prompt_tokens for usage in usages} == {whole.usage.prompt_tokens}
    assert all(u.total_tokens == u.prompt_tokens + u.completion_tokens for u in usages)


async def test_running_usage_has_the_cached_tokens_from_the_first_chunk_on(
    client: Client, bench: HttpBench
) -> None:
    """What the router expects the prefill worker to find is told before its account is there."""
    prompt = list(range(5, 105))
    held = bench.chain(prompt)[:3]
    bench.prefill.num_local = num_found = len(held) * bench.model.block_size
    bench.prefill.store_node_id = "n0"
    await bench.publish(bench.prefill)
    await bench.hold("n0", await bench.add_store("n0"), held)
    bench.prefill.account_gate.close()
    stream: Any = await complete(
        client, prompt, max_tokens=5, stream=True, stream_options=RUNNING_USAGE
    )
    first = await anext(aiter(stream))
    bench.prefill.account_gate.open()
    usages = [first.usage, *[chunk.usage async for chunk in stream]]
    cached = {usage.prompt_tokens_details.cached_tokens for usage in usages}
    assert cached == {num_found}


async def test_a_slow_reader_holds_nothing_but_its_own_request_up() -> None:
    """Its tokens are merged where they wait, so few large chunks come instead of many."""
    async with (
        # What is reserved is answered behind the tokens that are on their way.
        http_bench(model=saying("x" * 3000)) as bench,
        client_of(bench) as client,
        aiohttp.ClientSession() as session,
    ):
        body = {"prompt": "x", "max_tokens": 3000, "stream": True}
        async with session.post(f"{bench.url}/v1/completions", json=body) as slow:
            await slow.content.readany()
            other = await complete(client, max_tokens=2)
            assert other.choices[0].text == "xx"
            text = (await slow.content.read()).decode()
        assert text.rstrip().endswith("data: [DONE]")


async def test_the_blocking_client_works(bench: HttpBench) -> None:

    def ask() -> list[str]:
        with openai.OpenAI(
            base_url=f"{bench.url}/v1", api_key="none", max_retries=0, timeout=BOUND_S
        ) as client:
            whole = chat(client, max_tokens=5, seed=1)
            stream = chat(client, max_tokens=5, seed=1, stream=True)
            pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
            return [whole.choices[0].message.content or "", "".join(pieces)]

    whole, streamed = await asyncio.to_thread(ask)
    assert whole == streamed and len(whole) == 5


async def test_decode_that_fails_before_the_first_token_is_a_status() -> None:
    async with http_bench(times=SHORT_WAITS) as bench, client_of(bench) as client:
        bench.decode.error = Unavailable("going away", retry_after_s=4)
        with pytest.raises(openai.InternalServerError) as caught:
            await complete(client, max_tokens=20, stream=True)
        assert caught.value.status_code == 503


async def test_embeddings_come_as_numbers_in_the_order_of_the_inputs(
    client: Client, bench: HttpBench
) -> None:
    ids = TOKENIZER.encode("hello")
    (one,) = (await client.embeddings.create(model="fake", input="hello")).data
    assert one.embedding == pytest.approx(bench.model.embedding(ids), abs=1e-6)
    inputs = [f"text {number}" for number in range(70)] + ["hello"]
    many = await client.embeddings.create(model="fake", input=inputs)
    assert [entry.index for entry in many.data] == list(range(71))
    assert many.data[70].embedding == one.embedding != many.data[0].embedding
    assert many.usage.prompt_tokens == sum(len(TOKENIZER.encode(text)) for text in inputs)
    plain = await client.embeddings.create(
        model="fake",
        input=[ids, ids],
        encoding_format="float",
        extra_body={"baton": {"provenance": True}},
    )
    assert plain.data[1].embedding == pytest.approx(one.embedding, abs=1e-6)
    accounts = plain.model_extra["baton"]["requests"]  # type: ignore[index]
    assert [a["provenance"]["legs"][0]["role"] for a in accounts] == ["prefill", "prefill"]
    with pytest.raises(openai.BadRequestError) as refused:
        await client.embeddings.create(model="fake", input="x", dimensions=4)
    assert refused.value.param == "dimensions"
    with pytest.raises(openai.BadRequestError) as refused:
        await client.embeddings.create(model="fake", input=["x", "y" * 4000])
    assert refused.value.param == "input[1]" and "window" in refused.value.message


class _OfAFolder(HttpBench):
    @property
    def model_for_router(self) -> Any:
        model = super().model_for_router
        model.served = replace(model.served, names=(model.name, "./fake"))
        return model


async def test_a_model_that_is_served_from_a_folder_is_listed_once() -> None:
    """It answers to the folder's path, too."""
    async with running(http_listen="127.0.0.1:0", make=_OfAFolder) as bench:
        assert isinstance(bench, HttpBench)
        async with client_of(bench) as client:
            assert [model.id async for model in client.models.list()] == ["fake"]
            for name in ("fake", "./fake"):
                assert (await client.models.retrieve(name)).id == "fake"
                answer = await client.completions.create(model=name, prompt="x", max_tokens=2)
                assert answer.choices[0].finish_reason


async def test_a_conversation_that_ends_with_calls_is_refused_by_its_path(client: Client) -> None:
    call: Any = {"id": "c", "type": "function", "function": {"name": "now", "arguments": "x"}}
    messages: Any = [*HELLO, {"role": "assistant", "tool_calls": [call]}]
    with pytest.raises(openai.BadRequestError, match="send each call's result") as caught:
        await chat(client, messages)
    assert caught.value.param == "messages[1].tool_calls"
