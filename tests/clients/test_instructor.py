"""instructor over the openai client: by a tool that it forces, and by a response format."""

from __future__ import annotations

from typing import Any

import instructor
import openai
import pytest
from conftest import Server
from conversation import (
    ANSWER,
    MAX_TOKENS,
    MODEL,
    QUESTION,
    RESULT,
    TELL,
    TOO_LONG,
    Trip,
    Weather,
    saying,
)
from instructor.core.exceptions import InstructorRetryException

MODES = [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA]


def asking(server: Server, mode: instructor.Mode = MODES[0], key: str = "") -> Any:
    """`create` and its like, of one client."""
    inner = openai.OpenAI(base_url=server.url, api_key=key or server.key, max_retries=0, timeout=60)
    made: Any = instructor.from_openai(inner, mode=mode)
    return made.chat.completions


def options(text: str, **more: Any) -> dict[str, Any]:
    asked = {"messages": [{"role": "user", "content": text}], "response_model": Trip}
    fixed = {"model": MODEL, "max_tokens": MAX_TOKENS, "temperature": 0, "max_retries": 0}
    return fixed | asked | more


@pytest.mark.parametrize("mode", MODES)
def test_a_response_model_validates_streamed_or_not(server: Server, mode: instructor.Mode) -> None:
    create = asking(server, mode)
    trip = create.create(**options("Plan a trip."))
    assert isinstance(trip, Trip)
    *_, last = create.create_partial(**options("Plan a trip."))
    assert last.model_dump() == trip.model_dump()


def test_a_conversation_with_a_tool(server: Server) -> None:
    """The message of the raw completion goes back."""
    create = asking(server)
    asked = options(QUESTION, response_model=Weather)
    weather, completion = create.create_with_completion(**asked)
    (choice,) = completion.choices
    (call,) = choice.message.tool_calls
    in_call = Weather.model_validate_json(call.function.arguments)
    assert weather.model_dump() == in_call.model_dump()
    messages = [
        *asked["messages"],
        choice.message.model_dump(),
        {"role": "tool", "tool_call_id": call.id, "content": RESULT},
    ]
    plain = options("", response_model=None, messages=messages)
    (choice,) = create.create(**plain, extra_body=saying(ANSWER)).choices
    assert choice.message.content == ANSWER
    messages += [choice.message.model_dump(), {"role": "user", "content": TELL}]
    assert isinstance(create.create(**options("", messages=messages)), Trip)


def test_errors_are_the_clients_own(server: Server) -> None:
    """instructor wraps the openai client's."""
    create = asking(server)

    def refused(kind: type[openai.APIStatusError], create: Any, **asked: Any) -> Any:
        with pytest.raises(InstructorRetryException) as caught:
            for _ in range(2):
                create.create(**options("hello", **asked))
        error: Any = caught.value.__cause__
        assert isinstance(error, kind)
        return error

    long = refused(openai.BadRequestError, create, messages=[{"role": "user", "content": TOO_LONG}])
    assert long.code == "context_length_exceeded"
    assert "baton-5m" in refused(openai.NotFoundError, create, model="unknown").message
    assert refused(openai.BadRequestError, create, temperature=-1).param == "temperature"
    strange = refused(openai.BadRequestError, create, extra_body={"temprature": 1})
    assert strange.param == "temprature"
    refused(openai.AuthenticationError, asking(server, key="wrong"))
    refused(openai.RateLimitError, asking(server, key=server.limited_key))
