"""`chat_request` and `ChatSample`: /v1/chat/completions, a body translated to a request and its
messages to choices. Pure.

Tools (`ToolUse`): with tool_choice `auto` the model writes calls in its own format, which is known
from the chat template, and the calls are read from the text. With `required` or a named tool, a
grammar makes the whole text a call or a list of calls in JSON, so that no call is left out or
malformed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from process.rpc_errors import InvalidArgument
from protos import inference_pb2
from services.router.openai.answers import FINISH_REASONS, chat_logprobs, shown_logprobs
from services.router.openai.schemas import (
    MAX_TOOLS,
    ResponseOptions,
    base_request,
    force,
    sampling_of,
)
from tokens.token_bytes import TokenBytes
from tokens.tool_call_text import (
    LISTED,
    CallsInText,
    Content,
    OneCall,
    Piece,
    ToolCallFormat,
    ToolCallReader,
)

_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_NO_ARGUMENTS = {"type": "object", "properties": {}}


@dataclass(frozen=True)
class ToolUse:
    """The tools of a body, and how the model may or must call them."""

    tools: Sequence[Mapping[str, Any]] = ()
    """Tools that the chat template receives."""
    mode: str = "none"
    """none, auto, required or named."""
    name: str = ""
    """Name of the tool that must be called; empty unless `mode` is named."""
    is_single: bool = False
    """Whether an answer has at most one call."""
    form: ToolCallFormat | None = None
    """Format in which the model writes calls; set for mode auto only."""

    def reader(self) -> ToolCallReader | None:
        """Return a reader of calls for the text of one answer. None: the text is not searched for
        calls.
        """
        if self.mode == "named":
            return OneCall(self.name)
        if self.mode == "required":
            return CallsInText(LISTED)
        return CallsInText(self.form) if self.form is not None else None

    def schema(self) -> dict[str, Any] | None:
        """Return the JSON schema of the whole text where a call is forced, else None."""
        if self.mode == "named":
            (function,) = (f for f in map(_function, self.tools) if f["name"] == self.name)
            return dict(function.get("parameters") or _NO_ARGUMENTS)
        if self.mode == "required":
            return _schema_of_calls(self.tools, self.is_single)
        return None


def tool_use(body: Mapping[str, Any], form: ToolCallFormat | None, *, takes_tools: bool) -> ToolUse:
    """Return the tool use that a body asks for. `form`: the served model's format of calls, if
    known. `takes_tools`: whether its chat template has a place for tools.

    Raises: InvalidArgument naming the field.
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
        return ToolUse()  # the model does not see the tools, so it does not call them
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
    """Return the id of a call: letters and digits, equal when the request is sent again."""
    digest = hashlib.blake2b(f"{request_id}/{sample}/{index}".encode(), digest_size=12)
    if num_chars >= 24:
        return f"call_{digest.hexdigest()}"
    return digest.hexdigest()[:num_chars]


def tool_json(tool: Mapping[str, Any]) -> str:
    """Return a tool as GenerateRequest holds it."""
    return json.dumps(tool, ensure_ascii=False)


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    return tool["function"]  # type: ignore[no-any-return]


def _schema_of_calls(tools: Sequence[Mapping[str, Any]], is_single: bool) -> dict[str, Any]:
    """Return the schema of a list of calls. The parameters of each tool are a definition, and
    references inside them are rewritten to point into it.
    """
    definitions: dict[str, Any] = {}
    calls = []
    for index, function in enumerate(map(_function, tools)):
        name = f"tools[{index}]"  # errors name it
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
    """Return a schema with its references rewritten for a document in which it is at `root`."""
    if isinstance(schema, list):
        return [_moved(each, root) for each in schema]
    if not isinstance(schema, dict):
        return schema
    moved: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, dict):  # schemas by name, not by keyword
            moved[key] = {name: _moved(inner, root) for name, inner in value.items()}
        else:
            moved[key] = value if key in ("const", "enum") else _moved(value, root)
    reference = schema.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        moved["$ref"] = root + reference[1:]
    return moved


KIND = "chat.completion"
CHUNK_KIND = "chat.completion.chunk"
_SAID = {"content", "refusal", "reasoning_content", "reasoning"}
"""Keys of an assistant's message; one without calls has at least one of them."""


def chat_request(body: Mapping[str, Any], use: ToolUse) -> inference_pb2.GenerateRequest:
    """Translate a body to a request. Raises: InvalidArgument naming the field."""
    request = base_request(body)
    max_tokens = body.get("max_completion_tokens", body.get("max_tokens"))
    if "max_tokens" in body and max_tokens != body["max_tokens"]:
        raise InvalidArgument("max_tokens", "differs from max_completion_tokens; send one of them")
    request.sampling.CopyFrom(sampling_of(body, max_tokens))
    if body.get("logprobs"):
        request.sampling.logprobs = body.get("top_logprobs", 0)
    elif body.get("top_logprobs"):
        raise InvalidArgument("top_logprobs", "needs logprobs: true")
    _constrain(request, body, use)
    last = len(body["messages"]) - 1
    for index, message in enumerate(body["messages"]):
        if index == last and message["role"] == "assistant" and message.get("tool_calls"):
            raise InvalidArgument(
                f"messages[{index}].tool_calls",
                "the conversation ends with calls; send each call's result in a tool message",
            )
        request.chat.messages.append(_message(message, f"messages[{index}]"))
    request.chat.tools.extend(map(tool_json, use.tools))
    if "chat_template_kwargs" in body:
        request.chat.template_arguments = json.dumps(body["chat_template_kwargs"])
    if use.form is not None:
        request.sampling.stop_at_tool_call = use.is_single
        request.show_special_tokens |= use.form.is_special
    return request


class ChatSample:
    """One choice of a chat answer."""

    def __init__(
        self,
        index: int,
        request_id: str,
        request: inference_pb2.GenerateRequest,
        look: ResponseOptions,
        use: ToolUse,
        names: TokenBytes,
    ) -> None:
        self._index = index
        self._request_id = request_id
        self._look = look
        self._use = use
        self._names = names
        self._reader = use.reader()
        self._has_logprobs = request.sampling.HasField("logprobs")
        self._has_stop_text = request.sampling.include_stop_text
        self._is_first = True
        self._content: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._logprobs: list[dict[str, Any]] = []
        self._token_ids: list[int] = []
        self._reason: str | None = None

    def delta(self, message: inference_pb2.GenerateResponse) -> dict[str, Any]:
        """Add a message. Returns: an entry of a chunk's `choices`."""
        content, calls = self._read(message)
        delta: dict[str, Any] = {}
        if self._is_first:
            delta["role"], self._is_first = "assistant", False
        if content or (not calls and "role" in delta):
            delta["content"] = content
        if calls:
            delta["tool_calls"] = calls
        if message.finish_reason:
            self._reason = self._finish_reason(message)
        choice: dict[str, Any] = {
            "index": self._index,
            "delta": delta,
            "logprobs": None,
            "finish_reason": self._reason,
        }
        if self._has_logprobs:
            entries = shown_logprobs(message, has_stop_text=self._has_stop_text)
            choice["logprobs"] = chat_logprobs(entries, self._names)
            self._logprobs += choice["logprobs"]["content"]
        if self._look.has_token_ids:
            choice["token_ids"] = list(message.token_ids)
            self._token_ids += message.token_ids
        return choice

    def whole(self) -> dict[str, Any]:
        """Return an entry of a whole answer's `choices`."""
        content = "".join(self._content)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": content if content or not self._calls else None,
            "refusal": None,
        }
        if self._calls:
            message["tool_calls"] = self._calls
        choice: dict[str, Any] = {
            "index": self._index,
            "message": message,
            "logprobs": None,
            "finish_reason": self._reason,
        }
        if self._has_logprobs:
            choice["logprobs"] = {"content": self._logprobs, "refusal": None}
        if self._look.has_token_ids:
            choice["token_ids"] = self._token_ids
        return choice

    def _read(self, message: inference_pb2.GenerateResponse) -> tuple[str, list[dict[str, Any]]]:
        """Return the content and the parts of calls that a message adds."""
        if self._reader is None:
            self._content.append(message.text)
            return message.text, []
        pieces: Sequence[Piece] = self._reader.feed(message.text)
        if message.finish_reason:
            pieces = [*pieces, *self._reader.finish()]
        content, calls = "", []
        for piece in pieces:
            if isinstance(piece, Content):
                content += piece.text
            else:
                calls.append(self._part(piece.index, piece.name, piece.arguments))
        self._content.append(content)
        return content, calls

    def _part(self, index: int, name: str, arguments: str) -> dict[str, Any]:
        if not name:
            self._calls[index]["function"]["arguments"] += arguments
            return {"index": index, "function": {"arguments": arguments}}
        num_chars = self._use.form.id_chars if self._use.form is not None else 24
        call = {
            "id": call_id(self._request_id, self._index, index, num_chars),
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        self._calls.append({**call, "function": {"name": name, "arguments": arguments}})
        return {"index": index, **call}

    def _finish_reason(self, message: inference_pb2.GenerateResponse) -> str | None:
        reason = FINISH_REASONS.get(message.finish_reason)
        if reason not in ("stop", "tool_calls"):
            return reason
        # As OpenAI's API: "stop" after a call that the client named, for the model did not choose
        # it. Also after a call that a stop string or token cut, which must not be executed.
        is_cut = self._reader is not None and self._reader.is_cut
        is_called = self._calls and not is_cut and self._use.mode != "named"
        return "tool_calls" if is_called else "stop"


def _constrain(
    request: inference_pb2.GenerateRequest, body: Mapping[str, Any], use: ToolUse
) -> None:
    """Set the grammar for a forced call or for the response format. Raises: InvalidArgument."""
    sampling = request.sampling
    schema, field = use.schema(), "tool_choice"
    response = body.get("response_format", {"type": "text"})
    if response["type"] == "json_object":
        schema, field = {"type": "object"}, "response_format"
    elif response["type"] == "json_schema":
        schema, field = response["json_schema"]["schema"], "response_format"
    if schema is None:
        return
    if sampling.WhichOneof("grammar") is not None:
        raise InvalidArgument(field, f"does not go with baton.{sampling.WhichOneof('grammar')}")
    force(sampling, "json_schema", schema)


def _message(entry: Mapping[str, Any], path: str) -> inference_pb2.ChatMessage:
    message = inference_pb2.ChatMessage(
        # Chat templates use the older name of the role.
        role="system" if entry["role"] == "developer" else entry["role"],
        content=_text_of(entry.get("content", "")) or entry.get("refusal", ""),
        reasoning_content=entry.get("reasoning_content", "") or entry.get("reasoning", ""),
        name=entry.get("name", ""),
        tool_call_id=entry.get("tool_call_id", ""),
    )
    calls = entry.get("tool_calls", ())
    if entry["role"] == "assistant" and not calls and not _SAID & entry.keys():
        raise InvalidArgument(f"{path}.content", "is needed, for there are no tool_calls")
    for call in calls:
        message.tool_calls.add(id=call["id"], **call["function"])
    return message


def _text_of(content: str | Sequence[Mapping[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part[part["type"]] for part in content)
