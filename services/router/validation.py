"""Every check of a request at the edge, before any work. Pure: a request and bounds in, nothing or
one error out.

Each error names the field as the client wrote it; how tokens are drawn is checked in
`sampling_checks`. Two steps: what the request alone shows (`check_request`), then what needs its
tokens and the model (`check_tokens`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from process.errors import InvalidArgument
from protos import inference_pb2
from services.router import sampling_checks
from services.router.config import RouterLimits
from services.router.sampling_checks import ModelBounds

_IDENTIFIER = re.compile(r"[A-Za-z0-9._:@/+=-]+")
_MAX_REQUEST_ID_CHARS = 128
_MAX_TENANT_CHARS = 64
_MAX_SESSION_CHARS = 256
_ROLE = re.compile(r"[A-Za-z_]{1,32}")
_MAX_NAME_CHARS = 128


class ContextLengthExceeded(InvalidArgument):
    """Prompt and answer together are longer than the model's window. Counts of tokens."""

    def __init__(
        self,
        field: str,
        problem: str,
        *,
        num_prompt_tokens: int,
        num_output_tokens: int,
        context_window: int,
    ) -> None:
        """`num_output_tokens`: asked for; where none were, the one that there has to be room
        for."""
        super().__init__(field, problem)
        self.num_prompt_tokens = num_prompt_tokens
        self.num_output_tokens = num_output_tokens
        self.context_window = context_window


def check_request(
    request: inference_pb2.GenerateRequest, *, served: Sequence[str], limits: RouterLimits
) -> None:
    """Raises: InvalidArgument for what the request alone shows to be wrong."""
    check_model(request.model, served)
    _check_identifier("request_id", request.request_id, _MAX_REQUEST_ID_CHARS)
    _check_identifier("tenant", request.tenant, _MAX_TENANT_CHARS)
    if len(request.session) > _MAX_SESSION_CHARS or not request.session.isprintable():
        raise InvalidArgument(
            "session", f"must be at most {_MAX_SESSION_CHARS} printable characters"
        )
    if len(request.adapter) > _MAX_NAME_CHARS or not request.adapter.isprintable():
        raise InvalidArgument("adapter", f"must be at most {_MAX_NAME_CHARS} printable characters")
    if request.budget_ms > limits.max_budget_s * 1000:
        raise InvalidArgument("budget_ms", f"must be at most {int(limits.max_budget_s * 1000)}")
    if request.embed and request.sampling.ByteSize():
        raise InvalidArgument("sampling", "does not go with embed, which draws nothing")
    sampling_checks.check(request.sampling, limits)
    _check_prompt_logprobs(request, limits)
    _check_prompt(request)


def check_model(model: str, served: Sequence[str]) -> None:
    """Raises: InvalidArgument for a name that is none of `served`; empty is the only one."""
    if model and model not in served:
        raise InvalidArgument("model", f"'{model[:128]}' is not served here; '{served[0]}' is")


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
    sampling = request.sampling
    num_prompt_tokens = len(prompt_token_ids)
    if num_prompt_tokens == 0:
        raise InvalidArgument(field, "has no tokens")
    if num_prompt_tokens + 1 > bounds.context_window:
        raise ContextLengthExceeded(
            field,
            f"has {num_prompt_tokens} tokens; the model's window of {bounds.context_window} leaves "
            f"room for {bounds.context_window - 1}",
            num_prompt_tokens=num_prompt_tokens,
            num_output_tokens=sampling.max_tokens or 1,
            context_window=bounds.context_window,
        )
    if request.HasField("prompt_logprobs"):
        num_logprobs = num_prompt_tokens * (1 + request.prompt_logprobs)
        if num_logprobs > limits.max_prompt_logprobs:
            raise InvalidArgument(
                "prompt_logprobs",
                f"{num_prompt_tokens} prompt tokens with {request.prompt_logprobs} alternatives "
                f"each are {num_logprobs} log probabilities, at most {limits.max_prompt_logprobs} "
                "are allowed; shorten the prompt or ask for fewer alternatives",
            )
    sampling_checks.check_vocabulary(field, prompt_token_ids, bounds)
    sampling_checks.check_ids(sampling, bounds)
    room = bounds.context_window - num_prompt_tokens
    max_tokens = min(limits.default_max_tokens, room)
    if sampling.HasField("max_tokens"):
        max_tokens = sampling.max_tokens
        if max_tokens > room:
            raise ContextLengthExceeded(
                "sampling.max_tokens",
                f"is {max_tokens}, but after {num_prompt_tokens} prompt tokens the window of "
                f"{bounds.context_window} has room for {room}",
                num_prompt_tokens=num_prompt_tokens,
                num_output_tokens=max_tokens,
                context_window=bounds.context_window,
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


def _check_prompt_logprobs(request: inference_pb2.GenerateRequest, limits: RouterLimits) -> None:
    if not request.HasField("prompt_logprobs"):
        return
    if request.prompt_logprobs > limits.max_logprobs:
        raise InvalidArgument("prompt_logprobs", f"must be at most {limits.max_logprobs}")
    if request.embed or request.sampling.HasField("beam"):
        name = "embed" if request.embed else "sampling.beam"
        raise InvalidArgument("prompt_logprobs", f"does not go with {name}")


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
