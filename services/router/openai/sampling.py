"""A body's sampling fields to SamplingParams, and the names of fields back. Pure.

What the fields may be is checked twice: here for the form (`fields`), at the front desk for the
meaning, whose errors speak of the message's fields: `json_name` says what the client called them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from process.errors import InvalidArgument
from protos import common_pb2

_AS_THEY_ARE = (
    *("temperature", "top_p", "min_p", "n", "stop_token_ids", "presence_penalty"),
    *("frequency_penalty", "repetition_penalty", "allowed_token_ids", "bad_words", "min_tokens"),
    "ignore_eos",
)
_TOKEN_ID = re.compile(r"\d{1,10}")

_PROMPT_NAMES = ("text", "token_ids.ids")
_CALL = re.compile(r"chat\.(messages\[\d+\]\.tool_calls\[\d+\])\.(name|arguments)")
_JSON_NAMES = {
    "chat": "messages",
    "chat.messages": "messages",
    "chat.tools": "tools",
    "chat.template_arguments": "chat_template_kwargs",
    "request_id": "idempotency-key",
    "sampling.include_stop_text": "include_stop_str_in_output",
    "sampling.json_schema": "response_format",
    "sampling.choice.values": "baton.choice",
    "sampling.stop_at_tool_call": "parallel_tool_calls",
    **{f"sampling.{name}": f"baton.{name}" for name in ("regex", "ebnf", "no_repeat_ngram")},
    **{name: f"baton.{name}" for name in ("budget_ms", "tenant", "session", "adapter", "priority")},
}


def sampling_of(body: Mapping[str, Any], max_tokens: int | None) -> common_pb2.SamplingParams:
    """How tokens are drawn, but for logprobs and what a chat forces. Raises: InvalidArgument."""
    sampling = common_pb2.SamplingParams()
    for name in _AS_THEY_ARE:
        if name in body:
            _set(sampling, name, body[name])
    if max_tokens is not None:
        sampling.max_tokens = max_tokens
    if "top_k" in body:
        sampling.top_k = max(0, body["top_k"])
    if "seed" in body:
        sampling.seed = body["seed"] % 2**64  # OpenAI's are signed
    stop = body.get("stop", ())
    sampling.stop.extend([stop] if isinstance(stop, str) else stop)
    sampling.include_stop_text = body.get("include_stop_str_in_output", False)
    for token, bias in body.get("logit_bias", {}).items():
        if not _TOKEN_ID.fullmatch(token) or int(token) >= 2**31:
            raise InvalidArgument("logit_bias", "its keys must be token ids")
        sampling.logit_bias[int(token)] = bias
    own = body.get("baton", {})
    sampling.no_repeat_ngram = own.get("no_repeat_ngram", 0)
    grammars = [name for name in ("regex", "ebnf", "choice") if name in own]
    if len(grammars) > 1:
        raise InvalidArgument(f"baton.{grammars[1]}", f"does not go with baton.{grammars[0]}")
    for name in grammars:
        force(sampling, name, own[name])
    return sampling


def force(sampling: common_pb2.SamplingParams, kind: str, grammar: Any) -> None:
    """Constrain the text: `kind` is a member of the message's grammar; a schema comes as its
    object.
    """
    if kind == "choice":
        sampling.choice.values.extend(grammar)
    elif kind == "json_schema":
        sampling.json_schema = json.dumps(grammar, ensure_ascii=False)
    else:
        setattr(sampling, kind, grammar)


def json_name(field: str, *, body: Mapping[str, Any]) -> str:
    """What `body`, as it was sent, calls a field of GenerateRequest that was made of it."""
    own = body.get("baton", {})
    if field == "prompt_logprobs":
        return "logprobs"
    if field == "sampling.logprobs" and "messages" in body:
        return "top_logprobs"
    if field == "sampling.max_tokens" and "max_completion_tokens" in body:
        return "max_completion_tokens"
    if field == "sampling.json_schema" and "response_format" not in body:
        return "tools"  # a call that is forced
    if field == "session" and "session" not in own:
        return "prompt_cache_key"
    if field == "adapter" and "adapter" not in own:
        return "model"
    whole, bracket, rest = field.partition("[")
    if whole in _PROMPT_NAMES:
        return ("input" if "input" in body else "prompt") + bracket + rest
    if call := _CALL.fullmatch(field):
        return f"{call[1]}.function.{call[2]}"
    for known in (field, whole):
        if known in _JSON_NAMES:
            return _JSON_NAMES[known] + (bracket + rest if known == whole else "")
    return field.removeprefix("sampling.").removeprefix("chat.")


def _set(sampling: common_pb2.SamplingParams, name: str, value: Any) -> None:
    if isinstance(value, list):
        getattr(sampling, name).extend(value)
    else:
        setattr(sampling, name, value)
