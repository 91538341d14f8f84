"""`completion_requests`, `CompletionSample`, `embedding_requests` and `embedding_answer`: the
bodies of /v1/completions and /v1/embeddings translated to one request per prompt or input, and the
messages translated to choices or embeddings. No I/O; one asyncio loop.
"""

from __future__ import annotations

import asyncio
import base64
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from process.rpc_errors import InvalidArgument
from protos import inference_pb2
from services.router.openai.answers import FINISH_REASONS, CompletionLogprobs, shown_logprobs
from services.router.openai.schemas import ResponseOptions, base_request, sampling_of
from tokens.token_bytes import TokenBytes
from tokens.tokenizer import Tokenizer

MOST_AT_ONCE = 32
"""Inputs of one body that are served at the same time. Guessed: enough to fill a prefill worker's
steps while requests of other bodies are served in between.
"""


def embedding_requests(body: Mapping[str, Any]) -> list[inference_pb2.GenerateRequest]:
    """Return one request for each input, in order."""
    base = base_request(body)
    base.embed = True
    return [with_prompt(base, prompt) for prompt in prompts_of(body["input"])]


async def embedding_answer(
    body: Mapping[str, Any],
    model: str,
    messages: Sequence[inference_pb2.GenerateResponse],
    accounts: Sequence[Mapping[str, Any]],
) -> str:
    """Return the whole answer as JSON. `messages`: one for each input; `accounts`: of each request,
    or empty. Entries are encoded one by one, with a turn of the loop between them: encoding
    millions of numbers at once would delay the tokens of all other requests.
    """
    write = _base64 if body.get("encoding_format") == "base64" else list
    entries = []
    for index, message in enumerate(messages):
        entry = {"object": "embedding", "index": index, "embedding": write(message.embedding)}
        entries.append(json.dumps(entry))
        await asyncio.sleep(0)
    num_tokens = sum(message.usage.num_prompt_tokens for message in messages)
    rest: dict[str, Any] = {
        "object": "list",
        "model": model,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }
    if accounts:
        rest["baton"] = {"requests": list(accounts)}
    return f'{{"data": [{", ".join(entries)}], {json.dumps(rest)[1:]}'


def _base64(values: Sequence[float]) -> str:
    """Return little-endian float32 in base64, as OpenAI's client decodes it."""
    return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()


KIND = "text_completion"


def completion_requests(body: Mapping[str, Any]) -> list[inference_pb2.GenerateRequest]:
    """Return one request for each prompt, in order. Raises: InvalidArgument."""
    base = base_request(body)
    base.sampling.CopyFrom(sampling_of(body, body.get("max_tokens")))
    if "logprobs" in body:
        base.sampling.logprobs = body["logprobs"]
        if body.get("echo"):
            if base.sampling.n > 1:
                raise InvalidArgument(
                    "n", "must be 1 with echo and logprobs: the prompt's are the same of each"
                )
            base.prompt_logprobs = body["logprobs"]
    return [with_prompt(base, prompt) for prompt in prompts_of(body["prompt"])]


class CompletionSample:
    """One choice of a completion."""

    def __init__(
        self,
        index: int,
        body: Mapping[str, Any],
        request: inference_pb2.GenerateRequest,
        look: ResponseOptions,
        prompt_text: Callable[[], str],
        names: TokenBytes,
    ) -> None:
        """`index`: of the choice in the answer; `request`: the request of which this is a sample;
        `prompt_text`: returns the prompt's text. It is called only when an answer arrives, so that
        a refused prompt is not decoded.
        """
        self._index = index
        self._look = look
        self._has_stop_text = request.sampling.include_stop_text
        self._prompt_text = prompt_text
        self._has_to_echo = bool(body.get("echo"))
        self._logprobs = None
        if request.sampling.HasField("logprobs"):
            self._logprobs = CompletionLogprobs(names, shows_control=request.show_special_tokens)
        self._whole: dict[str, Any] = {
            "index": index,
            "text": "",
            "logprobs": None,
            "finish_reason": None,
        }
        if look.has_token_ids:
            self._whole["token_ids"] = []

    def delta(self, message: inference_pb2.GenerateResponse) -> dict[str, Any]:
        """Add a message. Returns: an entry of a chunk's `choices`."""
        text = message.text
        if self._has_to_echo:
            text, self._has_to_echo = self._prompt_text() + text, False
        reason = FINISH_REASONS.get(message.finish_reason)
        delta: dict[str, Any] = {
            "index": self._index,
            "text": text,
            "logprobs": None,
            "finish_reason": "stop" if reason == "tool_calls" else reason,
        }
        if self._logprobs is not None and message.prompt_logprobs:
            delta["logprobs"] = self._logprobs.take_prompt(
                message.prompt_logprobs, self._prompt_text()
            )
        elif self._logprobs is not None:
            delta["logprobs"] = self._logprobs.take(
                shown_logprobs(message, has_stop_text=self._has_stop_text)
            )
        if self._look.has_token_ids:
            delta["token_ids"] = list(message.token_ids)
        self._add(delta)
        return delta

    def whole(self) -> dict[str, Any]:
        """Return an entry of a whole answer's `choices`."""
        return self._whole

    def _add(self, delta: Mapping[str, Any]) -> None:
        whole = self._whole
        whole["text"] += delta["text"]
        whole["finish_reason"] = delta["finish_reason"]
        if self._look.has_token_ids:
            whole["token_ids"] += delta["token_ids"]
        if delta["logprobs"] is None:
            return
        if whole["logprobs"] is None:
            whole["logprobs"] = {key: [] for key in delta["logprobs"]}
        for key, values in delta["logprobs"].items():
            whole["logprobs"][key] += values


def prompts_of(prompt: Any) -> list[str] | list[list[int]]:
    """Return the prompts of a body as a list of texts or a list of token id lists."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], int):
        return [prompt]
    return prompt  # type: ignore[no-any-return]


def with_prompt(
    base: inference_pb2.GenerateRequest, prompt: str | list[int]
) -> inference_pb2.GenerateRequest:
    """Return a copy of `base` with one prompt."""
    request = inference_pb2.GenerateRequest()
    request.CopyFrom(base)
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.ids.extend(prompt)
    return request


def text_of(request: inference_pb2.GenerateRequest, tokenizer: Tokenizer) -> str:
    """Return a request's prompt as text."""
    if request.WhichOneof("prompt") == "text":
        return request.text
    return tokenizer.decode(request.token_ids.ids, skip_special_tokens=False)
