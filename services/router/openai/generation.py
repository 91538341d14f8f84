"""/v1/completions and /v1/chat/completions: one body asked, and its answer at once or as events.

An error before the first byte is a status with a body; after it, the last event of the stream,
which then ends without `[DONE]`: openai's client raises it, and others see that the end is missing.
One body each; one asyncio loop.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from process import logs
from protos import inference_pb2
from services.router.http_errors import http_error_of
from services.router.openai import chat, completions
from services.router.openai.answers import Envelope, Sample
from services.router.openai.asked import Look, look_of
from services.router.openai.each_prompt import EachPrompt
from services.router.openai.event_stream import EventStream
from services.router.openai.model_names import with_model
from services.router.openai.sampling import json_name
from services.router.openai.tools import tool_use
from services.router.served_models import ServedModels

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Asked:
    """One body, understood."""

    requests: Sequence[inference_pb2.GenerateRequest]
    look: Look
    make_sample: Callable[[int, int], Sample]
    """By prompt and sample of it."""
    kind: str
    answer_id: str
    model: str
    """As the client named it."""
    rename: Callable[[str], str]
    """What the body calls a field of its requests."""

    def samples(self) -> dict[tuple[int, int], Sample]:
        """Every choice of the answer, in the order of their indices."""
        num_samples = self.requests[0].sampling.n or 1
        return {
            (prompt, index): self.make_sample(prompt, index)
            for prompt in range(len(self.requests))
            for index in range(num_samples)
        }

    def envelope(self) -> Envelope:
        """Around them."""
        return Envelope(self.kind, self.answer_id, self.model, self.look)


Read = Callable[[Mapping[str, Any], str, ServedModels], Asked]
"""A body's fields and its request id. Raises: InvalidArgument."""


def read_completion(given: Mapping[str, Any], request_id: str, models: ServedModels) -> Asked:
    """Of /v1/completions. Raises: InvalidArgument."""
    fields, model = with_model(given, models)
    encoder = model.preparer.encoder
    requests, look = completions.requests_of(fields), look_of(fields)
    num_samples = requests[0].sampling.n or 1

    @functools.cache
    def text_of(prompt: int) -> str:
        return completions.text_of(requests[prompt], encoder.tokenizer)

    def make_sample(prompt: int, index: int) -> Sample:
        return completions.CompletionSample(
            prompt * num_samples + index,
            fields,
            requests[prompt],
            look,
            functools.partial(text_of, prompt),
            encoder.names,
        )

    return Asked(
        requests,
        look,
        make_sample,
        kind=completions.KIND,
        answer_id=f"cmpl-{request_id}",
        model=given.get("model") or model.name,
        rename=functools.partial(json_name, body=given),
    )


def read_chat(given: Mapping[str, Any], request_id: str, models: ServedModels) -> Asked:
    """Of /v1/chat/completions. Raises: InvalidArgument."""
    fields, model = with_model(given, models)
    encoder = model.preparer.encoder
    use = tool_use(fields, encoder.tool_call_format, takes_tools=encoder.takes_tools)
    request, look = chat.request_of(fields, use), look_of(fields)

    def make_sample(prompt: int, index: int) -> Sample:
        return chat.ChatSample(index, request_id, request, look, use, encoder.names)

    return Asked(
        [request],
        look,
        make_sample,
        kind=chat.CHUNK_KIND if look.is_streamed else chat.KIND,
        answer_id=f"chatcmpl-{request_id}",
        model=given.get("model") or model.name,
        rename=functools.partial(json_name, body=given),
    )


async def collect(asked: Asked, each: EachPrompt) -> dict[str, Any]:
    """The whole answer. Raises: BatonError."""
    envelope, samples = asked.envelope(), asked.samples()

    async def take(prompt: int, message: inference_pb2.GenerateResponse) -> None:
        envelope.take(prompt, message)
        samples[prompt, message.sample_index].delta(message)

    await each.serve(take)
    return envelope.whole([sample.whole() for sample in samples.values()])


async def stream(asked: Asked, each: EachPrompt, events: EventStream) -> web.StreamResponse:
    """The answer as events. Raises: before the first byte, never after it."""
    envelope, samples = asked.envelope(), asked.samples()

    async def take(prompt: int, message: inference_pb2.GenerateResponse) -> None:
        envelope.take(prompt, message)
        choice = samples[prompt, message.sample_index].delta(message)
        await events.send(envelope.chunk(choice, message))

    try:
        async with events.kept_alive():
            await each.serve(take)
        await events.end(envelope.usage_chunk() if asked.look.has_usage else None)
    except ConnectionError:
        # All was said, to a client that has gone.
        with contextlib.suppress(ConnectionError):
            await events.response.write_eof()
    except Exception as error:
        if not events.has_begun:
            raise
        found = http_error_of(error)
        if found.status == 500:
            logs.event(logger, "stream_failed", level=logging.ERROR, exc_info=True)
        await events.fail(found.body())
    return events.response
