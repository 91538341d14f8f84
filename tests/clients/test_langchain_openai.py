"""langchain-openai's `ChatOpenAI`."""

from __future__ import annotations

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
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI

WAYS: list[dict[str, Any]] = [
    {"tool_choice": "get_weather"},
    {"tool_choice": "auto", "extra_body": CALLING},
]


def chat_of(server: Server, **options: Any) -> ChatOpenAI:
    made: Any = ChatOpenAI
    options = {
        "model": MODEL,
        "base_url": server.url,
        "api_key": server.key,
        "max_retries": 0,
        "timeout": 60,
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
    } | options
    return made(**options)


@pytest.mark.parametrize("way", WAYS, ids=["named", "auto"])
def test_a_conversation_with_a_tool(server: Server, way: dict[str, Any]) -> None:
    chat = chat_of(server)
    messages: list[Any] = [HumanMessage(QUESTION)]
    asked = chat.bind_tools([TOOL], **way).invoke(messages)
    (call,) = asked.tool_calls
    weather = Weather.model_validate(call["args"])
    assert call["name"] == "get_weather"
    assert way["tool_choice"] != "auto" or weather == CALL
    messages += [asked, ToolMessage(RESULT, tool_call_id=call["id"])]
    answered = chat.bind_tools([TOOL], extra_body=saying(ANSWER)).invoke(messages)
    assert answered.content == ANSWER and not answered.tool_calls
    assert answered.usage_metadata is not None and answered.usage_metadata["output_tokens"] > 0
    messages += [answered, HumanMessage(TELL)]
    assert chat.bind_tools([TOOL], extra_body={"min_tokens": 4}).invoke(messages).content


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1, "seed": 7}], ids=["greedy", "seed"])
def test_a_stream_is_the_whole_answer(server: Server, sampling: dict[str, Any]) -> None:
    chat = chat_of(server, **sampling, **TOLD)
    assert "".join(chunk.text for chunk in chat.stream(TELL)) == chat.invoke(TELL).content


@pytest.mark.parametrize("way", WAYS, ids=["named", "auto"])
def test_a_streamed_call_is_the_whole_call(server: Server, way: dict[str, Any]) -> None:
    chat = chat_of(server).bind_tools([TOOL], **way)
    (whole,) = chat.invoke(QUESTION).tool_calls
    first, *others = chat.stream(QUESTION)
    assert isinstance(first, AIMessageChunk)
    streamed: Any = sum(others, first)
    (call,) = streamed.tool_calls
    assert (call["name"], call["args"]) == (whole["name"], whole["args"])


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output_validates(server: Server, method: Any) -> None:
    made = chat_of(server).with_structured_output(Trip, method=method).invoke("Plan a trip.")
    assert isinstance(made, Trip)


def test_errors_are_the_clients_own(server: Server) -> None:
    """langchain-openai hands on the openai client's, but for one of its own."""
    with pytest.raises(ContextOverflowError):
        chat_of(server).invoke(TOO_LONG)
    with pytest.raises(openai.NotFoundError, match="baton-5m"):
        chat_of(server, model="unknown").invoke("hello")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        chat_of(server, temperature=-1).invoke("hello")
    with pytest.raises(openai.BadRequestError, match="temprature"):
        chat_of(server, extra_body={"temprature": 1}).invoke("hello")
    with pytest.raises(openai.AuthenticationError):
        chat_of(server, api_key="wrong").invoke("hello")
    limited = chat_of(server, api_key=server.limited_key)
    with pytest.raises(openai.RateLimitError):
        for _ in range(2):
            limited.invoke("hello")
