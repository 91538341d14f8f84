"""What both APIs' answers have in common: ids, usage, the account of a request, why samples end.

Values and small accumulators; no I/O. One body each.

Logprobs as the two APIs write them. Pure.
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
    """One choice of an answer, while it comes."""

    def delta(self, message: inference_pb2.GenerateResponse) -> dict[str, Any]:
        """A message of this sample as an entry of a chunk's `choices`."""

    def whole(self) -> dict[str, Any]:
        """All of it as an entry of a whole answer's `choices`."""


@dataclass
class UsageSoFar:
    """Tokens of one body's requests, several prompts together."""

    num_prompt: dict[int, int] = field(default_factory=dict)
    num_cached: dict[int, int] = field(default_factory=dict)
    num_output: int = 0

    def take(self, prompt: int, message: inference_pb2.GenerateResponse) -> None:
        """A message of the request for the `prompt`-th prompt."""
        self.num_output += len(message.token_ids)
        if message.HasField("usage"):
            self.num_prompt[prompt] = message.usage.num_prompt_tokens
            self.num_cached[prompt] = message.usage.num_cached_tokens

    def to_json(self) -> dict[str, Any]:
        """As the API writes it."""
        num_prompt = sum(self.num_prompt.values())
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": self.num_output,
            "total_tokens": num_prompt + self.num_output,
            "prompt_tokens_details": {"cached_tokens": sum(self.num_cached.values())},
        }


class Envelope:
    """What stands around the choices of every chunk and of the whole answer."""

    def __init__(self, kind: str, answer_id: str, model: str, look: ResponseOptions) -> None:
        """`kind`: the API's name of the object; `model`: as the client is to see it."""
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
        """One message of a stream."""
        chunk: dict[str, Any] = {**self._fields, "choices": [choice]}
        if self._look.has_running_usage:
            chunk["usage"] = self.usage.to_json()
        elif self._look.has_usage:
            chunk["usage"] = None
        if self._look.has_account and message.HasField("provenance"):
            chunk["baton"] = {"requests": [account_of(message)]}
        return chunk

    def usage_chunk(self) -> dict[str, Any]:
        """The last one of a stream that asked for usage."""
        return {**self._fields, "choices": [], "usage": self.usage.to_json()}

    def take(self, prompt: int, message: inference_pb2.GenerateResponse) -> None:
        """Count a message in."""
        self.usage.take(prompt, message)
        if message.HasField("provenance"):
            self._accounts.append(account_of(message))

    def whole(self, choices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The answer at once."""
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
        """Of the model that answered: equal answers to a seed are promised under an equal one."""
        found = {account["provenance"].get("model_fingerprint", "") for account in self._accounts}
        return f"fp_{found.pop()[:16]}" if len(found) == 1 else None


def account_of(message: inference_pb2.GenerateResponse) -> dict[str, Any]:
    """A request's last message: whose it is, its seed, where its KV came from and when what was
    done.
    """
    return {
        "request_id": message.request_id,
        "seed": message.seed,
        "provenance": _plain(message.provenance),
        "times_s": {entry.stage: entry.seconds for entry in message.times},
    }


def _plain(message: Message) -> dict[str, Any]:
    """What is set of a message, numbers as numbers and enum values by name."""
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
"""OpenAI's for what is not possible; JSON has no infinity."""


def shown_logprobs(
    message: inference_pb2.GenerateResponse, *, has_stop_text: bool
) -> list[common_pb2.TokenLogprobs]:
    """Those of the tokens that are part of the text: an end token is not, unless it was asked
    for.
    """
    found = list(message.logprobs)
    if found and message.HasField("stop_token_id") and not has_stop_text:
        found.pop()
    return found


def chat_logprobs(entries: list[common_pb2.TokenLogprobs], names: TokenBytes) -> dict[str, Any]:
    """As in a choice of /v1/chat/completions."""
    content = [
        {
            **_entry(tokens.chosen, names),
            "top_logprobs": [_entry(other, names) for other in tokens.top],
        }
        for tokens in entries
    ]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """As in a choice of /v1/completions; knows where in the text the next token begins.

    `top_logprobs` holds the chosen token, too, by the name that it has in `tokens`; others that are
    part of a character go by their bytes, so that none is lost.
    """

    def __init__(self, names: TokenBytes, *, shows_control: bool = False) -> None:
        """`shows_control`: whether the text has its control tokens."""
        self._names = names
        self._shows_control = shows_control
        self._text = _Position()
        self._prompt = _Position()

    def take_prompt(self, entries: Iterable[common_pb2.TokenLogprobs], text: str) -> dict[str, Any]:
        """The next tokens of an echoed prompt; the first of all has no log probabilities.

        Args: text: of the whole prompt. The tokenizer may have put control tokens around it, and a
            space before it: they are not in it. Where it has rewritten it, offsets are about so.
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
        """The next tokens."""
        taken = _columns()
        for tokens in entries:
            text = self._names.text_of(tokens.chosen.token_id)
            taken["tokens"].append(text)
            taken["token_logprobs"].append(_finite(tokens.chosen.logprob))
            taken["top_logprobs"].append(self._top(tokens, text))
            taken["text_offset"].append(self._text.take(self._bytes_in_text(tokens.chosen)))
        return taken

    def _top(self, tokens: common_pb2.TokenLogprobs, chosen: str) -> dict[str, float]:
        """The most likely ones, most likely first, and the one that is named `chosen`."""
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
    """Where in a text the next bytes stand, in characters: those of one character all where it
    begins."""

    def __init__(self, num_chars: int = 0) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.num_chars = num_chars
        """Before the next character."""

    def take(self, data: bytes) -> int:
        """Add bytes. Returns: where they begin."""
        begin = self.num_chars
        is_within, _ = self._decoder.getstate()
        if is_within and data and not 0x80 <= data[0] < 0xC0:
            begin += 1  # behind a character that remains broken
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
