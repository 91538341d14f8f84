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

_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_NO_ARGUMENTS = {"type": "object", "properties": {}}


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
    """A list of calls. Each tool's parameters are a definition, within which their own references
    lead.
    """
    definitions: dict[str, Any] = {}
    calls = []
    for index, function in enumerate(map(_function, tools)):
        name = f"tools[{index}]"  # a refusal names it
        definitions[name] = _moved(function.get("parameters") or _NO_ARGUMENTS, f"#/$defs/{name}")
        calls.append(
            {
                "type": "object",
                "properties": {
                    "name": {"const": function["name"]},
                    "arguments": {"$ref": f"#/$defs/{name}"},
                },
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    return {
        "type": "array",
        "items": {"anyOf": calls},
        "minItems": 1,
        "maxItems": 1 if is_single else MAX_TOOLS,
        "$defs": definitions,
    }


def _moved(schema: Any, root: str) -> Any:
    """A schema with its references as they are where the document is `root`."""
    if isinstance(schema, list):
        return [_moved(each, root) for each in schema]
    if not isinstance(schema, dict):
        return schema
    moved: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, dict):  # of schemas by names that are no keywords
            moved[key] = {name: _moved(inner, root) for name, inner in value.items()}
        else:
            moved[key] = value if key in ("const", "enum") else _moved(value, root)
    reference = schema.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        moved["$ref"] = root + reference[1:]
    return moved
