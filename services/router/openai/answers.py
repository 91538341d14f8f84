"""What both APIs' answers have in common: ids, usage, the account of a request, why samples end.

Values and small accumulators; no I/O. One body each.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from protos import common_pb2, inference_pb2
from services.router.openai.asked import Look

FINISH_REASONS = {
    common_pb2.FINISH_REASON_EOS: "stop",
    common_pb2.FINISH_REASON_STOP_TOKEN: "stop",
    common_pb2.FINISH_REASON_STOP_STRING: "stop",
    common_pb2.FINISH_REASON_GRAMMAR: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
    common_pb2.FINISH_REASON_POLICY: "content_filter",
    common_pb2.FINISH_REASON_TOOL_CALL: "tool_calls",
}


class Sample(Protocol):
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

    def __init__(self, kind: str, answer_id: str, model: str, look: Look) -> None:
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
