"""pydantic-ai's agents, over its model of OpenAI's chat API."""

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
from pydantic_ai import (
    Agent,
    DeferredToolRequests,
    DeferredToolResults,
    ModelHTTPError,
    NativeOutput,
    ToolDefinition,
    ToolOutput,
    direct,
)
from pydantic_ai.messages import ModelRequest, ToolCallPart
from pydantic_ai.models import ModelRequestParameters
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.toolsets import ExternalToolset

GET_WEATHER = ToolDefinition(
    name="get_weather", parameters_json_schema=TOOL["function"]["parameters"]
)


def model_of(server: Server, name: str = MODEL, key: str = "", **settings: Any) -> OpenAIChatModel:
    client = openai.AsyncOpenAI(
        base_url=server.url, api_key=key or server.key, max_retries=0, timeout=60
    )
    made: Any = {"max_tokens": MAX_TOKENS, "temperature": 0} | settings
    return OpenAIChatModel(name, provider=OpenAIProvider(openai_client=client), settings=made)


def test_a_conversation_with_a_tool(server: Server) -> None:
    """The agent keeps the conversation; the tool's result comes to it from outside."""
    made: Any = Agent
    agent = made(
        model_of(server),
        toolsets=[ExternalToolset([GET_WEATHER])],
        output_type=[str, DeferredToolRequests],
    )
    asked = agent.run_sync(QUESTION, model_settings={"extra_body": CALLING})
    (call,) = asked.output.calls
    assert call.tool_name == "get_weather"
    assert Weather.model_validate(call.args_as_dict()) == CALL
    answered = agent.run_sync(
        message_history=asked.all_messages(),
        deferred_tool_results=DeferredToolResults(calls={call.tool_call_id: RESULT}),
        model_settings={"extra_body": saying(ANSWER)},
    )
    assert answered.output == ANSWER
    told = agent.run_sync(
        TELL,
        message_history=answered.all_messages(),
        model_settings={"extra_body": {"min_tokens": 4}},
    )
    assert told.output and told.usage.output_tokens > 0


def test_a_named_tool_is_called(server: Server) -> None:
    parameters = ModelRequestParameters(function_tools=[GET_WEATHER])
    settings: Any = {"tool_choice": ["get_weather"], "parallel_tool_calls": False}
    response = direct.model_request_sync(
        model_of(server),
        [ModelRequest.user_text_prompt(QUESTION)],
        model_settings=settings,
        model_request_parameters=parameters,
    )
    (call,) = (part for part in response.parts if isinstance(part, ToolCallPart))
    Weather.model_validate(call.args_as_dict())


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1, "seed": 7}], ids=["greedy", "seed"])
def test_a_stream_is_the_whole_answer(server: Server, sampling: dict[str, Any]) -> None:
    agent = Agent(model_of(server, **sampling, **TOLD))
    streamed = agent.run_stream_sync(TELL)
    text = "".join(streamed.stream_text(delta=True))
    assert text == agent.run_sync(TELL).output


@pytest.mark.parametrize("way", [ToolOutput, NativeOutput])
def test_structured_output_validates_streamed_or_not(server: Server, way: Any) -> None:
    agent: Any = Agent(model_of(server), output_type=way(Trip))
    whole = agent.run_sync("Plan a trip.").output
    assert isinstance(whole, Trip)
    assert agent.run_stream_sync("Plan a trip.").get_output() == whole


def test_errors_are_the_clients_own(server: Server) -> None:
    def refused(status: int, model: OpenAIChatModel, text: str = "hello") -> Any:
        with pytest.raises(ModelHTTPError) as caught:
            for _ in range(2):
                Agent(model).run_sync(text)
        assert caught.value.status_code == status
        return caught.value.body

    assert refused(400, model_of(server), TOO_LONG)["code"] == "context_length_exceeded"
    assert refused(404, model_of(server, "unknown"))["code"] == "model_not_found"
    assert refused(400, model_of(server, temperature=-1))["param"] == "temperature"
    strange = refused(400, model_of(server, extra_body={"temprature": 1}))
    assert strange["param"] == "temprature"
    assert refused(401, model_of(server, key="wrong"))["code"] == "invalid_api_key"
    refused(429, model_of(server, key=server.limited_key))
