"""Logprobs as the two APIs write them. Pure."""

from __future__ import annotations

import codecs
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
    """As in a choice of /v1/completions; knows where in the text the next token begins.

    `top_logprobs` holds the chosen token, too, by the name that it has in `tokens`; others that are
    part of a character go by their bytes, so that none is lost.
    """

    def __init__(self, names: TokenBytes, *, shows_control: bool = False) -> None:
        """`shows_control`: whether the text has its control tokens."""
        self._names = names
        self._shows_control = shows_control
        self._text = _Position()

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

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_chars = 0

    def take(self, data: bytes) -> int:
        """Add bytes. Returns: where they begin."""
        begin = self._num_chars
        is_within, _ = self._decoder.getstate()
        if is_within and data and not 0x80 <= data[0] < 0xC0:
            begin += 1  # behind a character that remains broken
        self._num_chars += len(self._decoder.decode(data))
        return begin


def _entry(token: common_pb2.TokenLogprob, names: TokenBytes) -> dict[str, Any]:
    return {
        "token": names.text_of(token.token_id),
        "logprob": _finite(token.logprob),
        "bytes": list(names.of(token.token_id)),
    }


def _finite(logprob: float) -> float:
    return logprob if logprob >= _LEAST else _LEAST
