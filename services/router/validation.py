"""Every check of a request at the edge, before any work. Pure: a request and bounds in, nothing or
one error out.

Each error names the field as the client wrote it. What this version does not serve is refused by
name, never ignored. Two steps: what the request alone shows (`check_request`), then what needs its
tokens and the model (`check_tokens`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from process.errors import InvalidArgument
from protos import common_pb2, inference_pb2
from services.router.config import RouterLimits

_IDENTIFIER = re.compile(r"[A-Za-z0-9._:@/+=-]+")
_MAX_REQUEST_ID_CHARS = 128
_MAX_TENANT_CHARS = 64
_MAX_SESSION_CHARS = 256
_ROLE = re.compile(r"[A-Za-z_]{1,32}")
_MAX_NAME_CHARS = 128
# Below, logits divided by it leave float32's range; above, every choice is as likely as any other.
# Derived.
_MIN_TEMPERATURE = 1e-4
_MAX_TEMPERATURE = 100.0


@dataclass(frozen=True)
class ModelBounds:
    """What the served model allows."""

    context_window: int
    vocab_size: int


def check_request(
    request: inference_pb2.GenerateRequest, *, served: Sequence[str], limits: RouterLimits
) -> None:
    """Raises: InvalidArgument for what the request alone shows to be wrong."""
    if request.model and request.model not in served:
        raise InvalidArgument(
            "model", f"'{request.model[:128]}' is not served here; '{served[0]}' is"
        )
    _check_identifier("request_id", request.request_id, _MAX_REQUEST_ID_CHARS)
    _check_identifier("tenant", request.tenant, _MAX_TENANT_CHARS)
    if len(request.session) > _MAX_SESSION_CHARS or not request.session.isprintable():
        raise InvalidArgument(
            "session", f"must be at most {_MAX_SESSION_CHARS} printable characters"
        )
    if request.adapter:
        raise InvalidArgument("adapter", "adapters are not served by this version")
    if request.budget_ms > limits.max_budget_s * 1000:
        raise InvalidArgument("budget_ms", f"must be at most {int(limits.max_budget_s * 1000)}")
    _refuse_unserved(request.sampling)
    _check_sampling(request.sampling, limits)
    _check_prompt(request)


def check_tokens(
    prompt_token_ids: Sequence[int],
    request: inference_pb2.GenerateRequest,
    *,
    bounds: ModelBounds,
    limits: RouterLimits,
) -> int:
    """Check the prompt's ids, stop ids and lengths against the model.

    Returns: the most output tokens the request may have (its own number, or the default).
    Raises: InvalidArgument.
    """
    field = {"token_ids": "token_ids.ids", "chat": "chat"}.get(
        request.WhichOneof("prompt") or "", "text"
    )
    num_prompt_tokens = len(prompt_token_ids)
    if num_prompt_tokens == 0:
        raise InvalidArgument(field, "has no tokens")
    if num_prompt_tokens + 1 > bounds.context_window:
        raise InvalidArgument(
            field,
            f"has {num_prompt_tokens} tokens; the model's window of {bounds.context_window} leaves "
            f"room for {bounds.context_window - 1}",
        )
    _check_vocabulary(field, prompt_token_ids, bounds)
    sampling = request.sampling
    _check_vocabulary("sampling.stop_token_ids", sampling.stop_token_ids, bounds)
    room = bounds.context_window - num_prompt_tokens
    max_tokens = min(limits.default_max_tokens, room)
    if sampling.HasField("max_tokens"):
        max_tokens = sampling.max_tokens
        if max_tokens > room:
            raise InvalidArgument(
                "sampling.max_tokens",
                f"is {max_tokens}, but after {num_prompt_tokens} prompt tokens the window of "
                f"{bounds.context_window} has room for {room}",
            )
    if sampling.min_tokens > max_tokens:
        raise InvalidArgument(
            "sampling.min_tokens", f"is {sampling.min_tokens}, above max_tokens {max_tokens}"
        )
    return max_tokens


def _check_identifier(field: str, value: str, max_chars: int) -> None:
    if value and not (len(value) <= max_chars and _IDENTIFIER.fullmatch(value)):
        raise InvalidArgument(
            field, f"must be at most {max_chars} letters, digits and any of . _ : @ / + = -"
        )


def _refuse_unserved(sampling: common_pb2.SamplingParams) -> None:
    asked = {
        "n": sampling.n > 1,
        "presence_penalty": sampling.presence_penalty != 0.0,
        "frequency_penalty": sampling.frequency_penalty != 0.0,
        "repetition_penalty": sampling.repetition_penalty not in (0.0, 1.0),
        "logit_bias": bool(sampling.logit_bias),
        "allowed_token_ids": bool(sampling.allowed_token_ids),
        "trace": sampling.trace,
    }
    grammar = sampling.WhichOneof("grammar")
    if grammar is not None:
        asked[grammar] = True
    for name, is_asked in asked.items():
        if is_asked:
            raise InvalidArgument(f"sampling.{name}", "is not served by this version")


def _check_sampling(sampling: common_pb2.SamplingParams, limits: RouterLimits) -> None:
    if sampling.HasField("temperature"):
        temperature = sampling.temperature
        in_range = temperature == 0 or _MIN_TEMPERATURE <= temperature <= _MAX_TEMPERATURE
        if not (math.isfinite(temperature) and in_range):
            raise InvalidArgument(
                "sampling.temperature",
                f"must be 0 (greedy) or from {_MIN_TEMPERATURE} to {_MAX_TEMPERATURE}, got "
                f"{temperature}",
            )
    # Written so that NaN fails each of them.
    if sampling.HasField("top_p") and not 0 < sampling.top_p <= 1:
        raise InvalidArgument("sampling.top_p", f"must be in (0, 1], got {sampling.top_p}")
    if sampling.HasField("min_p") and not 0 <= sampling.min_p < 1:
        raise InvalidArgument("sampling.min_p", f"must be in [0, 1), got {sampling.min_p}")
    if sampling.HasField("top_k") and sampling.top_k > 2**31 - 1:
        raise InvalidArgument("sampling.top_k", f"must be below 2^31, got {sampling.top_k}")
    if sampling.HasField("max_tokens") and sampling.max_tokens == 0:
        raise InvalidArgument("sampling.max_tokens", "must be at least 1")
    if sampling.HasField("logprobs") and sampling.logprobs > limits.max_logprobs:
        raise InvalidArgument("sampling.logprobs", f"must be at most {limits.max_logprobs}")
    if len(sampling.stop_token_ids) > limits.max_stop_token_ids:
        raise InvalidArgument(
            "sampling.stop_token_ids", f"must be at most {limits.max_stop_token_ids} ids"
        )
    if len(sampling.stop) > limits.max_stop_strings:
        raise InvalidArgument("sampling.stop", f"must be at most {limits.max_stop_strings} strings")
    for index, stop in enumerate(sampling.stop):
        if not 1 <= len(stop) <= limits.max_stop_chars:
            raise InvalidArgument(
                f"sampling.stop[{index}]", f"must have 1 to {limits.max_stop_chars} characters"
            )


def _check_prompt(request: inference_pb2.GenerateRequest) -> None:
    kind = request.WhichOneof("prompt")
    if kind is None:
        raise InvalidArgument("prompt", "is not set; set one of text, token_ids, chat")
    if kind == "text" and not request.text:
        raise InvalidArgument("text", "is empty")
    if kind == "token_ids" and not request.token_ids.ids:
        raise InvalidArgument("token_ids.ids", "has no tokens")
    if kind != "chat":
        return
    if not request.chat.messages:
        raise InvalidArgument("chat.messages", "is empty")
    for index, message in enumerate(request.chat.messages):
        if not _ROLE.fullmatch(message.role):
            raise InvalidArgument(
                f"chat.messages[{index}].role", "must be a word such as user, at most 32 letters"
            )
        if len(message.name) > _MAX_NAME_CHARS or not message.name.isprintable():
            raise InvalidArgument(
                f"chat.messages[{index}].name",
                f"must be at most {_MAX_NAME_CHARS} printable characters",
            )


def _check_vocabulary(field: str, token_ids: Sequence[int], bounds: ModelBounds) -> None:
    if token_ids and max(token_ids) >= bounds.vocab_size:
        index = next(i for i, token in enumerate(token_ids) if token >= bounds.vocab_size)
        raise InvalidArgument(
            f"{field}[{index}]",
            f"is {token_ids[index]}, outside the vocabulary of {bounds.vocab_size}",
        )
