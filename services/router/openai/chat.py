"""/v1/chat/completions: a body to a request, and its messages to choices. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from process.errors import InvalidArgument
from protos import inference_pb2
from services.router.openai.answers import FINISH_REASONS
from services.router.openai.asked import Look, base_request
from services.router.openai.logprobs import chat_logprobs, shown_logprobs
from services.router.openai.sampling import force, sampling_of
from services.router.openai.tools import ToolUse, call_id, tool_json
from tokens.token_bytes import TokenBytes
from tokens.tool_call_text import Content, Piece

KIND = "chat.completion"
CHUNK_KIND = "chat.completion.chunk"
_SAID = {"content", "refusal", "reasoning_content", "reasoning"}
"""What an assistant's message without calls holds, one of it at least."""


def request_of(body: Mapping[str, Any], use: ToolUse) -> inference_pb2.GenerateRequest:
    """Raises: InvalidArgument."""
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
    """One choice."""

    def __init__(
        self,
        index: int,
        request_id: str,
        request: inference_pb2.GenerateRequest,
        look: Look,
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
        """A message as an entry of a chunk's `choices`."""
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
        """All of it."""
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
        """The content and the parts of calls that a message makes visible."""
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
        # As OpenAI's: a call that was named beforehand is no decision of the model's. And one that
        # a stop string or token cut is none to be made.
        is_cut = self._reader is not None and self._reader.is_cut
        is_called = self._calls and not is_cut and self._use.mode != "named"
        return "tool_calls" if is_called else "stop"


def _constrain(
    request: inference_pb2.GenerateRequest, body: Mapping[str, Any], use: ToolUse
) -> None:
    """The grammar that a forced call or the response format is. Raises: InvalidArgument."""
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
        # Templates know the older name of the role.
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
