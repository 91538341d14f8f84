"""A chat as chat templates take it: plain values out of the message, its JSON parts read.

The form is the one that `transformers` gives to templates: arguments of calls as objects where they
are some, tools as OpenAI writes them. Pure; any thread.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from process.errors import InvalidArgument
from protos import inference_pb2

MAX_DEPTH = 64
"""Levels of a JSON part; templates walk them recursively."""


@dataclass(frozen=True)
class Chat:
    """What a template is rendered with."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Further variables."""


def read_chat(chat: inference_pb2.ChatMessages) -> Chat:
    """Raises: InvalidArgument naming the tool, or the template's arguments, that is no JSON object,
    or not of the right form.
    """
    tools = [_read_tool(text, f"chat.tools[{index}]") for index, text in enumerate(chat.tools)]
    arguments = {}
    if chat.template_arguments:
        arguments = read_object(chat.template_arguments, "chat.template_arguments")
    messages = [_read_message(message) for message in chat.messages]
    return Chat(messages, tools, arguments)


def read_object(text: str, path: str) -> dict[str, Any]:
    """The JSON object in `text`. Raises: InvalidArgument."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        why = "is nested too deep" if isinstance(error, RecursionError) else "is no JSON"
        raise InvalidArgument(path, why) from error
    if not isinstance(value, dict):
        raise InvalidArgument(path, "must be a JSON object")
    if _depth(value) > MAX_DEPTH:
        raise InvalidArgument(path, f"is nested deeper than {MAX_DEPTH} levels")
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise InvalidArgument(path, "holds half a surrogate pair, which is no character") from None
    return value


def read_arguments(text: str) -> dict[str, Any] | str:
    """Arguments of a call that a model wrote: as an object where they are one, else the text: what
    was cut, or was never JSON, stands in a conversation all the same. Empty or null is {}.
    """
    if text.strip() in ("", "null"):
        return {}
    try:
        return read_object(text, "arguments")
    except InvalidArgument:
        return text


def _read_tool(text: str, path: str) -> dict[str, Any]:
    tool = read_object(text, path)
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict):
        raise InvalidArgument(path, 'must be {"type": "function", "function": {...}}')
    name = function.get("name")
    if not (isinstance(name, str) and name):
        raise InvalidArgument(f"{path}.function.name", "is needed")
    return tool


def _read_message(message: inference_pb2.ChatMessage) -> dict[str, Any]:
    entry: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name:
        entry["name"] = message.name
    if message.tool_calls:
        entry["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": read_arguments(call.arguments),
                },
            }
            for call in message.tool_calls
        ]
    if message.reasoning_content:
        entry["reasoning_content"] = message.reasoning_content
    if message.tool_call_id:
        entry["tool_call_id"] = message.tool_call_id
    return entry


def _depth(value: object) -> int:
    """Levels of objects and lists. Not recursive."""
    deepest, left = 0, [(value, 1)]
    while left:
        part, level = left.pop()
        inner = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
        deepest = max(deepest, level)
        left += [(each, level + 1) for each in inner if isinstance(each, dict | list)]
    return deepest
