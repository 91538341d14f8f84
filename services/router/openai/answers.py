"""Envelope: the fields around the choices of a completion or chat answer (ids, usage, provenance);
with it, finish reasons and log probabilities as each API writes them. Accumulators of one body; no
I/O.
"""

from __future__ import annotations

import codecs
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from protos import common_pb2, inference_pb2
from services.router.openai.schemas import ResponseOptions
from tokens.token_bytes import TokenBytes

FINISH_REASONS = {
    common_pb2.FINISH_REASON_EOS: "stop",
    common_pb2.FINISH_REASON_STOP_TOKEN: "stop",
    common_pb2.FINISH_REASON_STOP_STRING: "stop",
    common_pb2.FINISH_REASON_GRAMMAR: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
    common_pb2.FINISH_REASON_POLICY: "content_filter",
    common_pb2.FINISH_REASON_TOOL_CALL: "tool_calls",
}


class OutputSample(Protocol):
    """One choice of an answer, built from the messages of one sample."""

    def delta(self, message: inference_pb2.GenerateResponse) -> dict[str, Any]:
        """Add a message of this sample. Returns: an entry of a chunk's `choices`."""

    def whole(self) -> dict[str, Any]:
        """Return an entry of a whole answer's `choices`."""


@dataclass
class UsageSoFar:
    """Token counts of one body's requests so far, all prompts together."""

    num_prompt: dict[int, int] = field(default_factory=dict)
    num_cached: dict[int, int] = field(default_factory=dict)
    num_output: int = 0

    def take(self, prompt: int, message: inference_pb2.GenerateResponse) -> None:
        """Count a message of the request for prompt number `prompt`."""
        self.num_output += len(message.token_ids)
        if message.HasField("usage"):
            self.num_prompt[prompt] = message.usage.num_prompt_tokens
            self.num_cached[prompt] = message.usage.num_cached_tokens

    def to_json(self) -> dict[str, Any]:
        """Return the `usage` object."""
        num_prompt = sum(self.num_prompt.values())
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": self.num_output,
            "total_tokens": num_prompt + self.num_output,
            "prompt_tokens_details": {"cached_tokens": sum(self.num_cached.values())},
        }


class Envelope:
    """The fields around the choices in every chunk and in the whole answer."""

    def __init__(self, kind: str, answer_id: str, model: str, look: ResponseOptions) -> None:
        """`kind`: the API's name of the object; `model`: the name that the client sees."""
        self._fields = {
            "id": answer_id,
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }
        self._look = look
        self.usage = UsageSoFar()
        self._accounts: list[dict[str, Any]] = []

    def chunk(
        self, choice: Mapping[str, Any], message: inference_pb2.GenerateResponse
    ) -> dict[str, Any]:
        """Return the chunk of a stream for one message."""
        chunk: dict[str, Any] = {**self._fields, "choices": [choice]}
        if self._look.has_running_usage:
            chunk["usage"] = self.usage.to_json()
        elif self._look.has_usage:
            chunk["usage"] = None
        if self._look.has_account and message.HasField("provenance"):
            chunk["baton"] = {"requests": [account_of(message)]}
        return chunk

    def usage_chunk(self) -> dict[str, Any]:
        """Return the last chunk of a stream that was asked for usage."""
        return {**self._fields, "choices": [], "usage": self.usage.to_json()}

    def take(self, prompt: int, message: inference_pb2.GenerateResponse) -> None:
        """Count a message, and keep its provenance."""
        self.usage.take(prompt, message)
        if message.HasField("provenance"):
            self._accounts.append(account_of(message))

    def whole(self, choices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the whole answer."""
        answer = {
            **self._fields,
            "choices": list(choices),
            "usage": self.usage.to_json(),
            "system_fingerprint": self._fingerprint(),
        }
        if self._look.has_account:
            answer["baton"] = {"requests": self._accounts}
        return answer

    def _fingerprint(self) -> str | None:
        """Return `system_fingerprint`, made of the model's fingerprint: with an equal one, equal
        seeds give equal answers. None where no account has arrived or the accounts' fingerprints
        differ.
        """
        found = {account["provenance"].get("model_fingerprint", "") for account in self._accounts}
        return f"fp_{found.pop()[:16]}" if len(found) == 1 else None


def account_of(message: inference_pb2.GenerateResponse) -> dict[str, Any]:
    """Return the account of a request from its last message: id, seed, where its KV came from, and
    stage times in seconds.
    """
    return {
        "request_id": message.request_id,
        "seed": message.seed,
        "provenance": _plain(message.provenance),
        "times_s": {entry.stage: entry.seconds for entry in message.times},
    }


def _plain(message: Message) -> dict[str, Any]:
    """Return the set fields of a message; numbers stay numbers, enum values become names."""
    return {
        entry.name: [_value(entry, each) for each in value]
        if isinstance(value, Sequence) and not isinstance(value, str | bytes)
        else _value(entry, value)
        for entry, value in message.ListFields()
    }


def _value(entry: FieldDescriptor, value: Any) -> Any:
    if isinstance(value, Message):
        return _plain(value)
    if entry.enum_type is not None:
        return entry.enum_type.values_by_number[value].name
    return value


_LEAST = -9999.0
"""OpenAI's value for an impossible token: JSON has no infinity."""


def shown_logprobs(
    message: inference_pb2.GenerateResponse, *, has_stop_text: bool
) -> list[common_pb2.TokenLogprobs]:
    """Return the log probabilities of the tokens whose text is shown. The text of an end token is
    not, unless `has_stop_text`.
    """
    found = list(message.logprobs)
    if found and message.HasField("stop_token_id") and not has_stop_text:
        found.pop()
    return found


def chat_logprobs(entries: list[common_pb2.TokenLogprobs], names: TokenBytes) -> dict[str, Any]:
    """Return `logprobs` of a choice of /v1/chat/completions."""
    content = [
        {
            **_entry(tokens.chosen, names),
            "top_logprobs": [_entry(other, names) for other in tokens.top],
        }
        for tokens in entries
    ]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """`logprobs` of a choice of /v1/completions, with the offset of each token in the text.

    `top_logprobs` includes the chosen token under its name in `tokens`. A token that is a part of a
    character is named by its bytes, so that names do not collide.
    """

    def __init__(self, names: TokenBytes, *, shows_control: bool = False) -> None:
        """`shows_control`: whether the text includes control tokens."""
        self._names = names
        self._shows_control = shows_control
        self._text = _Position()
        self._prompt = _Position()

    def take_prompt(self, entries: Iterable[common_pb2.TokenLogprobs], text: str) -> dict[str, Any]:
        """Add the next tokens of an echoed prompt; the first token of a prompt has no log
        probability.

        Args:
            text: the whole prompt. It does not contain control tokens or the leading space that the
                tokenizer may have added. Offsets are approximate where the tokenizer rewrites text.
        """
        taken = _columns()
        for tokens in entries:
            name = self._names.text_of(tokens.chosen.token_id)
            is_first = math.isnan(tokens.chosen.logprob)
            taken["tokens"].append(name)
            taken["token_logprobs"].append(None if is_first else _finite(tokens.chosen.logprob))
            taken["top_logprobs"].append(None if is_first else self._top(tokens, name))
            data, begin = self._names.of(tokens.chosen.token_id), self._prompt.num_chars
            if self._names.is_control(tokens.chosen.token_id) and not text.startswith(name, begin):
                data = b""
            elif begin == 0 and not text.startswith(" "):
                data = data.removeprefix(b" ")
            taken["text_offset"].append(min(self._prompt.take(data), len(text)))
        self._text = _Position(len(text))
        return taken

    def take(self, entries: list[common_pb2.TokenLogprobs]) -> dict[str, Any]:
        """Add the next output tokens. Returns: their columns."""
        taken = _columns()
        for tokens in entries:
            text = self._names.text_of(tokens.chosen.token_id)
            taken["tokens"].append(text)
            taken["token_logprobs"].append(_finite(tokens.chosen.logprob))
            taken["top_logprobs"].append(self._top(tokens, text))
            taken["text_offset"].append(self._text.take(self._bytes_in_text(tokens.chosen)))
        return taken

    def _top(self, tokens: common_pb2.TokenLogprobs, chosen: str) -> dict[str, float]:
        """Return the most likely tokens, most likely first, and the chosen one, which is named
        `chosen`.
        """
        top: dict[str, float] = {}
        for other in tokens.top:
            is_chosen = other.token_id == tokens.chosen.token_id
            name = chosen if is_chosen else self._names.name_of(other.token_id)
            if is_chosen or name != chosen:
                top.setdefault(name, _finite(other.logprob))
        top.setdefault(chosen, _finite(tokens.chosen.logprob))
        return top

    def _bytes_in_text(self, token: common_pb2.TokenLogprob) -> bytes:
        is_shown = self._shows_control or not self._names.is_control(token.token_id)
        return self._names.of(token.token_id) if is_shown else b""


class _Position:
    """Position in a text, in characters, at which the next bytes begin. All bytes of one character
    have the position of its first byte.
    """

    def __init__(self, num_chars: int = 0) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.num_chars = num_chars
        """Number of characters before the next one."""

    def take(self, data: bytes) -> int:
        """Add bytes. Returns: the position at which they begin."""
        begin = self.num_chars
        is_within, _ = self._decoder.getstate()
        if is_within and data and not 0x80 <= data[0] < 0xC0:
            begin += 1  # after a character that stays incomplete
        self.num_chars += len(self._decoder.decode(data))
        return begin


def _columns() -> dict[str, Any]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def _entry(token: common_pb2.TokenLogprob, names: TokenBytes) -> dict[str, Any]:
    return {
        "token": names.text_of(token.token_id),
        "logprob": _finite(token.logprob),
        "bytes": list(names.of(token.token_id)),
    }


def _finite(logprob: float) -> float:
    return logprob if logprob >= _LEAST else _LEAST
