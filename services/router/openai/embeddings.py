"""/v1/embeddings: a body to one request for each input, and their messages to the answer's text.

No I/O; one asyncio loop, which others have in between.
"""

from __future__ import annotations

import asyncio
import base64
import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from protos import inference_pb2
from services.router.openai.asked import base_request
from services.router.openai.completions import prompts_of, with_prompt

MOST_AT_ONCE = 32
"""Inputs of one body that are served at the same time: enough to fill a prefill worker's steps,
while others come in between. Guessed.
"""


def requests_of(body: Mapping[str, Any]) -> list[inference_pb2.GenerateRequest]:
    """One for each input, in their order."""
    base = base_request(body)
    base.embed = True
    return [with_prompt(base, prompt) for prompt in prompts_of(body["input"])]


async def answer(
    body: Mapping[str, Any],
    model: str,
    messages: Sequence[inference_pb2.GenerateResponse],
    accounts: Sequence[Mapping[str, Any]],
) -> str:
    """The whole answer as JSON; `messages`: the one of each input; `accounts`: theirs, if they are
    wanted. Written entry by entry: millions of numbers at once would hold everybody's tokens up.
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
    """Little-endian float32, as openai's client reads it."""
    return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()
