"""The openai client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from conftest import Server
from conversation import (
    ANSWER,
    CALL,
    CALLING,
    MAX_TOKENS,
    MODEL,
    NAMED,
    QUESTION,
    RESULT,
    TELL,
    TOLD,
    TOO_LONG,
    TOOL,
    Trip,
    Weather,
    saying,
)

# How the tool comes to be called, and the reason why the answer then ends, as OpenAI gives them.
ONE = {"parallel_tool_calls": False}
WAYS: list[tuple[dict[str, Any], str]] = [
    ({"tool_choice": NAMED}, "stop"),
    ({"tool_choice": "required", **ONE}, "tool_calls"),
    ({"tool_choice": "auto", "extra_body": CALLING}, "tool_calls"),
]


def client_of(server: Server, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url, api_key=key, max_retries=0, timeout=60)


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with client_of(server, server.key) as made:
        yield made


def ask(client: openai.OpenAI, messages: list[Any], **options: Any) -> Any:
    create: Any = client.chat.completions.create
    options = {"max_tokens": MAX_TOKENS, "temperature": 0} | options
    return create(model=MODEL, messages=messages, **options)


@pytest.mark.parametrize(("way", "reason"), WAYS, ids=["named", "required", "auto"])
def test_a_conversation_with_a_tool(
    client: openai.OpenAI, way: dict[str, Any], reason: str
) -> None:
    """The client's own message goes back as it is, and so does the tool's result."""
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    (choice,) = ask(client, messages, tools=[TOOL], **way).choices
    (call,) = choice.message.tool_calls
    weather = Weather.model_validate_json(call.function.arguments)
    assert call.function.name == "get_weather" and choice.finish_reason == reason
    assert way["tool_choice"] != "auto" or weather == CALL
    messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": RESULT}]
    (choice,) = ask(client, messages, tools=[TOOL], extra_body=saying(ANSWER)).choices
    assert (choice.message.content, choice.finish_reason) == (ANSWER, "stop")
    assert not choice.message.tool_calls
    messages += [choice.message, {"role": "user", "content": TELL}]
    (choice,) = ask(client, messages, tools=[TOOL], extra_body={"min_tokens": 4}).choices
    assert choice.message.content


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1, "seed": 7}], ids=["greedy", "seed"])
def test_a_stream_is_the_whole_answer(client: openai.OpenAI, sampling: dict[str, Any]) -> None:
    sampling = sampling | TOLD
    messages = [{"role": "user", "content": TELL}]
    whole = ask(client, messages, **sampling)
    chunks = list(
        ask(client, messages, stream=True, stream_options={"include_usage": True}, **sampling)
    )
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(c.delta.content or "" for c in choices) == whole.choices[0].message.content
    assert choices[-1].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


@pytest.mark.parametrize(("way", "reason"), WAYS, ids=["named", "required", "auto"])
def test_a_streamed_call_is_the_whole_call(
    client: openai.OpenAI, way: dict[str, Any], reason: str
) -> None:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    (whole,) = ask(client, messages, tools=[TOOL], **way).choices
    stream: Any = client.chat.completions.stream
    options = {"max_tokens": MAX_TOKENS, "temperature": 0, "tools": [TOOL], **way}
    with stream(model=MODEL, messages=messages, **options) as events:
        (streamed,) = events.get_final_completion().choices
    assert streamed.finish_reason == whole.finish_reason == reason
    (one,), (other,) = whole.message.tool_calls, streamed.message.tool_calls
    assert (one.function.name, one.function.arguments) == (
        other.function.name,
        other.function.arguments,
    )


def test_structured_output_validates(client: openai.OpenAI) -> None:
    parsed = client.chat.completions.parse(
        model=MODEL,
        messages=[{"role": "user", "content": "Plan a trip."}],
        response_format=Trip,
        max_tokens=MAX_TOKENS,
    )
    assert isinstance(parsed.choices[0].message.parsed, Trip)


def test_errors_are_the_clients_own(server: Server, client: openai.OpenAI) -> None:
    hello = [{"role": "user", "content": "hello"}]
    with pytest.raises(openai.BadRequestError) as long:
        ask(client, [{"role": "user", "content": TOO_LONG}])
    assert long.value.code == "context_length_exceeded" and long.value.param == "messages"
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="unknown", messages=hello)
    assert unknown.value.code == "model_not_found" and "baton-5m" in unknown.value.message
    with pytest.raises(openai.BadRequestError) as wrong:
        ask(client, hello, temperature=-1)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as strange:
        ask(client, hello, extra_body={"temprature": 1})
    assert strange.value.param == "temprature"
    with client_of(server, "wrong") as stranger, pytest.raises(openai.AuthenticationError):
        ask(stranger, hello)
    with client_of(server, server.limited_key) as limited:
        with pytest.raises(openai.RateLimitError) as over:
            for _ in range(2):
                ask(limited, hello)
        assert int(over.value.response.headers["retry-after"]) > 60
