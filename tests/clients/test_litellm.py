"""litellm, which takes Baton for a server of OpenAI's API."""

from __future__ import annotations

from typing import Any

import litellm
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

WAYS: list[dict[str, Any]] = [
    {"tool_choice": NAMED},
    {"tool_choice": "auto", "extra_body": CALLING},
]


def ask(server: Server, messages: list[Any], **options: Any) -> Any:
    options = {
        "model": f"openai/{MODEL}",
        "api_base": server.url,
        "api_key": server.key,
        "max_retries": 0,
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
    } | options
    return litellm.completion(messages=messages, **options)


@pytest.mark.parametrize("way", WAYS, ids=["named", "auto"])
def test_a_conversation_with_a_tool(server: Server, way: dict[str, Any]) -> None:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    (choice,) = ask(server, messages, tools=[TOOL], **way).choices
    (call,) = choice.message.tool_calls
    weather = Weather.model_validate_json(call.function.arguments)
    assert call.function.name == "get_weather"
    assert way["tool_choice"] != "auto" or weather == CALL
    messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": RESULT}]
    (choice,) = ask(server, messages, tools=[TOOL], extra_body=saying(ANSWER)).choices
    assert (choice.message.content, choice.finish_reason) == (ANSWER, "stop")
    messages += [choice.message, {"role": "user", "content": TELL}]
    (choice,) = ask(server, messages, tools=[TOOL], extra_body={"min_tokens": 4}).choices
    assert choice.message.content


@pytest.mark.parametrize(
    "options",
    [TOLD, {"temperature": 1, "seed": 7, **TOLD}, *({"tools": [TOOL], **way} for way in WAYS)],
    ids=["greedy", "seed", "named", "auto"],
)
def test_a_stream_is_the_whole_answer(server: Server, options: dict[str, Any]) -> None:
    messages: list[Any] = [{"role": "user", "content": TELL}]
    (whole,) = ask(server, messages, **options).choices
    chunks = list(ask(server, messages, stream=True, **options))
    built: Any = litellm.stream_chunk_builder(chunks, messages=messages)
    (streamed,) = built.choices
    assert streamed.message.content == whole.message.content
    one, other = (
        [(call.function.name, call.function.arguments) for call in each.message.tool_calls or ()]
        for each in (whole, streamed)
    )
    assert one == other and bool(one) == ("tools" in options)


def test_structured_output_validates(server: Server) -> None:
    messages = [{"role": "user", "content": "Plan a trip."}]
    (choice,) = ask(server, messages, response_format=Trip).choices
    Trip.model_validate_json(choice.message.content)


def test_errors_are_the_clients_own(server: Server) -> None:
    hello = [{"role": "user", "content": "hello"}]
    with pytest.raises(litellm.ContextWindowExceededError):
        ask(server, [{"role": "user", "content": TOO_LONG}])
    with pytest.raises(litellm.NotFoundError, match="baton-5m"):
        ask(server, hello, model="openai/unknown")
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        ask(server, hello, temperature=-1)
    with pytest.raises(litellm.BadRequestError, match="temprature"):
        ask(server, hello, extra_body={"temprature": 1})
    with pytest.raises(litellm.AuthenticationError):
        ask(server, hello, api_key="wrong")
    with pytest.raises(litellm.RateLimitError):
        for _ in range(2):
            ask(server, hello, api_key=server.limited_key)
