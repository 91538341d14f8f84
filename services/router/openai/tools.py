"""Tools of a chat: what the model may or must call, the grammar that forces a call, and the calls
read back. Pure.

`auto`: the model writes calls in its own way, which the chat template shows. `required` and a named
tool: a grammar makes the whole text calls as JSON, so a call cannot be left out or malformed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from process.errors import InvalidArgument
from services.router.openai.fields import MAX_TOOLS
from tokens.tool_call_text import (
    LISTED,
    CallsInText,
    OneCall,
    ToolCallFormat,
    ToolCallReader,
)

_NO_ARGUMENTS = {"type": "object", "properties": {}}
_REFERENCES = ("#/$defs/", "#/definitions/")


@dataclass(frozen=True)
class ToolUse:
    """What a body says of tools."""

    tools: Sequence[Mapping[str, Any]] = ()
    """What the template is given."""
    mode: str = "none"
    """none, auto, required or named."""
    name: str = ""
    """Of the tool that must be called, if it is named."""
    is_single: bool = False
    """At most one call."""
    form: ToolCallFormat | None = None
    """How the model writes calls; of auto."""

    def reader(self) -> ToolCallReader | None:
        """Of one answer's text; None: calls are not looked for."""
        if self.mode == "named":
            return OneCall(self.name)
        if self.mode == "required":
            return CallsInText(LISTED)
        return CallsInText(self.form) if self.form is not None else None

    def schema(self) -> dict[str, Any] | None:
        """Of the whole text, where a call is forced."""
        if self.mode == "named":
            (function,) = (f for f in map(_function, self.tools) if f["name"] == self.name)
            return dict(function.get("parameters") or _NO_ARGUMENTS)
        if self.mode == "required":
            return _schema_of_calls(self.tools, self.is_single)
        return None


def tool_use(body: Mapping[str, Any], form: ToolCallFormat | None, *, takes_tools: bool) -> ToolUse:
    """`form`: how the served model writes calls, if that is known. `takes_tools`: whether its chat
    template shows tools to it.

    Raises: InvalidArgument.
    """
    tools, choice = body.get("tools", []), body.get("tool_choice")
    if not tools:
        if choice not in (None, "none"):
            raise InvalidArgument("tool_choice", "needs tools")
        if "parallel_tool_calls" in body:
            raise InvalidArgument("parallel_tool_calls", "needs tools")
        return ToolUse()
    names = [_function(tool)["name"] for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise InvalidArgument(f"tools[{index}].function.name", "is there twice")
    mode = choice if isinstance(choice, str) else "auto" if choice is None else "named"
    if mode == "none":
        return ToolUse()  # what the model does not see it does not call
    if not takes_tools:
        raise InvalidArgument(
            "tools", "this model's chat template takes no tools, whatever tool_choice says"
        )
    name = choice["function"]["name"] if isinstance(choice, dict) else ""
    if mode == "named" and name not in names:
        raise InvalidArgument("tool_choice.function.name", "is not among the tools")
    if body.get("response_format", {}).get("type", "text") != "text":
        raise InvalidArgument("response_format", "does not go with tools; let a tool take it")
    if mode == "auto" and form is None:
        raise InvalidArgument(
            "tools",
            "this model's chat template shows no form of calls that is known here, so auto cannot "
            "read them; set tool_choice to required or to a function, which force one by a grammar",
        )
    is_single = not body.get("parallel_tool_calls", True)
    return ToolUse(tools, mode, name, is_single, form if mode == "auto" else None)


def call_id(request_id: str, sample: int, index: int, num_chars: int) -> str:
    """The same again for a request that is sent again; letters and digits."""
    digest = hashlib.blake2b(f"{request_id}/{sample}/{index}".encode(), digest_size=12)
    if num_chars >= 24:
        return f"call_{digest.hexdigest()}"
    return digest.hexdigest()[:num_chars]


def tool_json(tool: Mapping[str, Any]) -> str:
    """As the message to the front desk holds it."""
    return json.dumps(tool, ensure_ascii=False)


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    return tool["function"]  # type: ignore[no-any-return]


def _schema_of_calls(tools: Sequence[Mapping[str, Any]], is_single: bool) -> dict[str, Any]:
    """A list of calls. Each tool's definitions move to the top, where alone they may stand, under
    names of their own.
    """
    definitions: dict[str, Any] = {}
    calls = []
    for index, function in enumerate(map(_function, tools)):
        parameters = dict(function.get("parameters") or _NO_ARGUMENTS)
        own = {**parameters.pop("definitions", {}), **parameters.pop("$defs", {})}
        is_whole_named = _mentions_root(parameters) or any(map(_mentions_root, own.values()))
        prefix = f"t{index}_"
        for name, definition in own.items():
            definitions[prefix + name] = _moved(definition, prefix)
        arguments = _moved(parameters, prefix)
        if is_whole_named:
            definitions[prefix] = arguments
            arguments = {"$ref": f"#/$defs/{prefix}"}
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": function["name"]}, "arguments": arguments},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    schema: dict[str, Any] = {
        "type": "array",
        "items": {"anyOf": calls},
        "minItems": 1,
        "maxItems": 1 if is_single else MAX_TOOLS,
    }
    if definitions:
        schema["$defs"] = definitions
    return schema


def _moved(schema: Any, prefix: str) -> Any:
    """A schema with its references as they are behind `prefix`."""
    if isinstance(schema, list):
        return [_moved(each, prefix) for each in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {
        key: value if key in ("const", "enum") else _moved(value, prefix)
        for key, value in schema.items()
    }
    ref = schema.get("$ref")
    if isinstance(ref, str):
        if ref == "#":
            moved["$ref"] = f"#/$defs/{prefix}"
        for start in _REFERENCES:
            if ref.startswith(start):
                moved["$ref"] = f"#/$defs/{prefix}{ref.removeprefix(start)}"
    return moved


def _mentions_root(schema: Any) -> bool:
    if isinstance(schema, list):
        return any(map(_mentions_root, schema))
    if not isinstance(schema, dict):
        return False
    return schema.get("$ref") == "#" or any(map(_mentions_root, schema.values()))
