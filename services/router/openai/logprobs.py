"""Logprobs as the two APIs write them. Pure."""

from __future__ import annotations

from typing import Any

from protos import common_pb2, inference_pb2
from tokens.token_bytes import TokenBytes

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
    """As in a choice of /v1/completions; knows where in the text the next token begins."""

    def __init__(self, names: TokenBytes) -> None:
        self._names = names
        self._offset = 0

    def take(self, entries: list[common_pb2.TokenLogprobs]) -> dict[str, Any]:
        """The next tokens."""
        taken: dict[str, Any] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for tokens in entries:
            text = self._names.text_of(tokens.chosen.token_id)
            taken["tokens"].append(text)
            taken["token_logprobs"].append(_finite(tokens.chosen.logprob))
            taken["top_logprobs"].append(
                {
                    self._names.text_of(other.token_id): _finite(other.logprob)
                    for other in tokens.top
                }
            )
            taken["text_offset"].append(self._offset)
            self._offset += len(text)
        return taken


def _entry(token: common_pb2.TokenLogprob, names: TokenBytes) -> dict[str, Any]:
    return {
        "token": names.text_of(token.token_id),
        "logprob": _finite(token.logprob),
        "bytes": list(names.of(token.token_id)),
    }


def _finite(logprob: float) -> float:
    return logprob if logprob >= _LEAST else _LEAST
