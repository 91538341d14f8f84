"""What a request is going to cost, before it is tokenized. Pure; an estimate, put right by what it
really used when it is over.
"""

from __future__ import annotations

from protos import inference_pb2
from services.router.admission import Asked

BYTES_PER_TOKEN = 4
"""Of English text, about; of other text more tokens come, and are charged at the end."""

_MESSAGE_TOKENS = 8
"""What a chat template puts around one message, about."""


def asked_of(
    request: inference_pb2.GenerateRequest, tenant: str, model: str, *, default_max_tokens: int
) -> Asked:
    """The request as admission sees it; `model`: by the name that the router has for it."""
    sampling = request.sampling
    max_tokens = sampling.max_tokens if sampling.HasField("max_tokens") else default_max_tokens
    num_sequences = max(sampling.n, sampling.beam.num_beams, 1)
    needs_decode = not request.embed and (max_tokens > 1 or sampling.HasField("beam"))
    return Asked(
        tenant,
        request.priority,
        _num_prompt_tokens(request),
        0 if request.embed else max_tokens * num_sequences,
        model,
        num_sequences if needs_decode else 0,
    )


def _num_prompt_tokens(request: inference_pb2.GenerateRequest) -> int:
    kind = request.WhichOneof("prompt")
    if kind == "token_ids":
        return len(request.token_ids.ids)
    if kind == "chat":
        num_bytes = request.chat.ByteSize()
        return num_bytes // BYTES_PER_TOKEN + _MESSAGE_TOKENS * len(request.chat.messages)
    return max(1, len(request.text) // BYTES_PER_TOKEN)
