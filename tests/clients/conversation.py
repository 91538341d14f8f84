"""What every client asks.

The bundled model was taught no tools, so each answer that a test looks at is made certain: a named
tool and a schema leave it only few values, and `baton.choice` one text.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

MODEL = "baton-5m"
QUESTION = "What is the weather in Lima?"
RESULT = '{"degrees": 21}'
"""Of the tool."""
ANSWER = "It is 21 degrees in Lima."
TELL = "Tell me a story about a dog."
TOLD: dict[str, Any] = {"max_tokens": 24}
"""Of the story."""
TOO_LONG = "word " * 5000
"""Beyond the model's window of 2,048 tokens."""
MAX_TOKENS = 100
"""More than the longest call, choice or `Trip` has (38 tokens), so none is cut."""


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Lima", "Oslo"]
    unit: Literal["celsius", "fahrenheit"]


class Trip(BaseModel):
    """A trip: its place and its length."""

    city: Literal["Lima", "Oslo"]
    num_days: Literal[1, 2, 3]
    is_paid: bool


TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": Weather.model_json_schema(),
    },
}
NAMED: dict[str, Any] = {"type": "function", "function": {"name": "get_weather"}}
CALL = Weather(city="Oslo", unit="celsius")


def saying(text: str) -> dict[str, Any]:
    """The fields beyond OpenAI's by which the model says this text and nothing else."""
    return {"baton": {"choice": [text]}}


CALLING = saying(
    f'<tool_call>\n{{"name": "get_weather", "arguments": {CALL.model_dump_json()}}}\n</tool_call>'
)
"""With `tool_choice` "auto": the model calls the tool of its own accord, with `CALL`."""
