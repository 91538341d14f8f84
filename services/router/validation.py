"""`check_request` and `check_tokens`: all checks of a request before the router does any work for
it. Pure.

The checks run in two steps. `check_request` checks what the request alone shows, its sampling
parameters included (`check_sampling_params`). `check_tokens` checks what needs the prompt's token
ids and the model's bounds (`check_ids` for the ids among the sampling parameters).

Each function returns, or raises one error that names the field as in GenerateRequest. Parameters
that do not work together are refused by name; none is ignored.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from process.rpc_errors import InvalidArgument
from protos import common_pb2, inference_pb2
from services.router.config import RouterLimits

# Derived: below the minimum, logits divided by the temperature leave float32's range; above the
# maximum, all tokens are about equally likely.
_MIN_TEMPERATURE = 1e-4
_MAX_TEMPERATURE = 100.0
# Guessed: beyond these a penalty or a bias outweighs the model's logits.
_MAX_PENALTY = 2.0
_MAX_REPETITION_PENALTY = 100.0
_MAX_BIAS = 100.0
_MAX_LENGTH_PENALTY = 100.0
# The engine's limit: it keeps the n - 1 predecessors of each token.
_MAX_NGRAM = 64

# Fields that a beam search uses, and the values that the other fields may have all the same.
_WITH_BEAM = frozenset({"beam", "n", "max_tokens", "seed", "stop_token_ids", "ignore_eos"})
_OFF = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


@dataclass(frozen=True)
class ModelBounds:
    """Limits of the served model, in tokens and in token ids."""

    context_window: int
    vocab_size: int


def check_sampling_params(sampling: common_pb2.SamplingParams, limits: RouterLimits) -> None:
    """Check sampling parameters without the model. Raises: InvalidArgument naming the field."""
    _check_shape(sampling)
    _check_penalties(sampling)
    _check_counts(sampling, limits)
    _check_words(sampling, limits)
    _check_grammar(sampling, limits)
    _check_beam(sampling, limits)


def check_ids(sampling: common_pb2.SamplingParams, bounds: ModelBounds) -> None:
    """Check that every token id among the sampling parameters is within the vocabulary. Raises:
    InvalidArgument naming the id that is not.
    """
    check_vocabulary("sampling.stop_token_ids", sampling.stop_token_ids, bounds)
    check_vocabulary("sampling.allowed_token_ids", sampling.allowed_token_ids, bounds)
    for index, word in enumerate(sampling.bad_word_ids):
        check_vocabulary(f"sampling.bad_word_ids[{index}].ids", word.ids, bounds)
    for token_id in sampling.logit_bias:
        if token_id >= bounds.vocab_size:
            raise InvalidArgument(
                f"sampling.logit_bias[{token_id}]",
                f"is outside the vocabulary of {bounds.vocab_size}",
            )


def check_vocabulary(field: str, token_ids: Sequence[int], bounds: ModelBounds) -> None:
    """Check that token ids are within the vocabulary. Raises: InvalidArgument naming the first one
    that is not.
    """
    # As one array: a check of each id of a long prompt in Python would block the loop.
    if token_ids and int(np.array(token_ids).max()) >= bounds.vocab_size:
        index = next(i for i, token in enumerate(token_ids) if token >= bounds.vocab_size)
        raise InvalidArgument(
            f"{field}[{index}]",
            f"is {token_ids[index]}, outside the vocabulary of {bounds.vocab_size}",
        )


def _check_shape(sampling: common_pb2.SamplingParams) -> None:
    """Check what shapes the distribution: temperature, top_p, top_k and min_p."""
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


def _check_penalties(sampling: common_pb2.SamplingParams) -> None:
    for name in ("presence_penalty", "frequency_penalty"):
        value = getattr(sampling, name)
        if not -_MAX_PENALTY <= value <= _MAX_PENALTY:
            raise InvalidArgument(
                f"sampling.{name}", f"must be from {-_MAX_PENALTY} to {_MAX_PENALTY}, got {value}"
            )
    repetition = sampling.repetition_penalty
    smallest = 1 / _MAX_REPETITION_PENALTY
    if not (repetition == 0 or smallest <= repetition <= _MAX_REPETITION_PENALTY):
        raise InvalidArgument(
            "sampling.repetition_penalty",
            f"must be from {smallest} to {_MAX_REPETITION_PENALTY} (1: off), got {repetition}",
        )
    for token_id, bias in sampling.logit_bias.items():
        if not -_MAX_BIAS <= bias <= _MAX_BIAS:
            raise InvalidArgument(
                f"sampling.logit_bias[{token_id}]",
                f"must be from {-_MAX_BIAS} to {_MAX_BIAS}, got {bias}",
            )


def _check_counts(sampling: common_pb2.SamplingParams, limits: RouterLimits) -> None:
    is_prompt_only = sampling.HasField("max_tokens") and sampling.max_tokens == 0
    if is_prompt_only and (sampling.n > 1 or sampling.HasField("beam")):
        name = "n" if sampling.n > 1 else "beam"
        raise InvalidArgument(f"sampling.{name}", "does not go with max_tokens 0: nothing is drawn")
    if sampling.HasField("logprobs") and sampling.logprobs > limits.max_logprobs:
        raise InvalidArgument("sampling.logprobs", f"must be at most {limits.max_logprobs}")
    if sampling.no_repeat_ngram > _MAX_NGRAM:
        raise InvalidArgument("sampling.no_repeat_ngram", f"must be at most {_MAX_NGRAM}")
    if sampling.n > limits.max_samples:
        raise InvalidArgument("sampling.n", f"must be at most {limits.max_samples}")
    _check_at_most("stop_token_ids", sampling.stop_token_ids, limits.max_stop_token_ids, "ids")
    _check_at_most("logit_bias", sampling.logit_bias, limits.max_logit_bias, "entries")


def _check_words(sampling: common_pb2.SamplingParams, limits: RouterLimits) -> None:
    _check_at_most("stop", sampling.stop, limits.max_stop_strings, "strings")
    _check_lengths("stop", sampling.stop, limits.max_stop_chars)
    _check_at_most("bad_words", sampling.bad_words, limits.max_bad_words, "strings")
    _check_lengths("bad_words", sampling.bad_words, limits.max_stop_chars)
    _check_at_most("bad_word_ids", sampling.bad_word_ids, limits.max_bad_words, "sequences")
    for index, word in enumerate(sampling.bad_word_ids):
        if not 1 <= len(word.ids) <= limits.max_stop_chars:
            raise InvalidArgument(
                f"sampling.bad_word_ids[{index}].ids",
                f"must have 1 to {limits.max_stop_chars} ids",
            )
    for index, bad_word in enumerate(sampling.bad_words):
        if not bad_word.strip():
            raise InvalidArgument(f"sampling.bad_words[{index}]", "is nothing but space")


def _check_grammar(sampling: common_pb2.SamplingParams, limits: RouterLimits) -> None:
    """Check a grammar's size, and what needs no tokenizer; the grammar compiler checks the rest."""
    kind = sampling.WhichOneof("grammar")
    if kind is None:
        return
    if kind == "choice":
        values = sampling.choice.values
        if not values:
            raise InvalidArgument("sampling.choice.values", "is empty")
        _check_at_most("choice.values", values, limits.max_choices, "strings")
        _check_lengths("choice.values", values, limits.max_grammar_chars)
        num_chars = sum(map(len, values))
    else:
        text: str = getattr(sampling, kind)
        if not text:
            raise InvalidArgument(f"sampling.{kind}", "is empty")
        num_chars = len(text)
    if num_chars > limits.max_grammar_chars:
        raise InvalidArgument(
            f"sampling.{kind}",
            f"has {num_chars} characters, at most {limits.max_grammar_chars} are allowed",
        )
    if kind == "json_schema":
        _check_json(sampling.json_schema)


def _check_json(text: str) -> None:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        why = "is nested too deep" if isinstance(error, RecursionError) else f"is no JSON: {error}"
        raise InvalidArgument("sampling.json_schema", why) from error
    if not isinstance(schema, dict | bool):
        raise InvalidArgument("sampling.json_schema", "must be a JSON object (or true or false)")


def _check_beam(sampling: common_pb2.SamplingParams, limits: RouterLimits) -> None:
    """Check a beam search. The text of a hypothesis changes until the end, so a parameter that ends
    a sample by its text is refused.
    """
    if not sampling.HasField("beam"):
        return
    beam = sampling.beam
    if not 2 <= beam.num_beams <= limits.max_samples:
        raise InvalidArgument("sampling.beam.num_beams", f"must be from 2 to {limits.max_samples}")
    if sampling.n > beam.num_beams:
        raise InvalidArgument(
            "sampling.n", f"is {sampling.n}, above the {beam.num_beams} beams that there are"
        )
    if not -_MAX_LENGTH_PENALTY <= beam.length_penalty <= _MAX_LENGTH_PENALTY:
        raise InvalidArgument(
            "sampling.beam.length_penalty",
            f"must be from {-_MAX_LENGTH_PENALTY} to {_MAX_LENGTH_PENALTY}",
        )
    for field, value in sampling.ListFields():
        if field.name not in _WITH_BEAM and value != _OFF.get(field.name):
            raise InvalidArgument(
                f"sampling.{field.name}", "does not go with beam, which draws nothing"
            )


def _check_at_most(field: str, values: Iterable[object], most: int, what: str) -> None:
    if sum(1 for _ in values) > most:
        raise InvalidArgument(f"sampling.{field}", f"must be at most {most} {what}")


def _check_lengths(field: str, values: Iterable[str], max_chars: int) -> None:
    for index, value in enumerate(values):
        if not 1 <= len(value) <= max_chars:
            raise InvalidArgument(
                f"sampling.{field}[{index}]", f"must have 1 to {max_chars} characters"
            )


_IDENTIFIER = re.compile(r"[A-Za-z0-9._:@/+=-]+")
_MAX_REQUEST_ID_CHARS = 128
_MAX_TENANT_CHARS = 64
_MAX_SESSION_CHARS = 256
_ROLE = re.compile(r"[A-Za-z_]{1,32}")
_MAX_NAME_CHARS = 128


class ContextLengthExceeded(InvalidArgument):
    """Error for a prompt and output that together exceed the model's context window. Counts are in
    tokens.
    """

    def __init__(
        self,
        field: str,
        problem: str,
        *,
        num_prompt_tokens: int,
        num_output_tokens: int,
        context_window: int,
    ) -> None:
        """`num_output_tokens`: output tokens that the request asks for; 1 where it names none."""
        super().__init__(field, problem)
        self.num_prompt_tokens = num_prompt_tokens
        self.num_output_tokens = num_output_tokens
        self.context_window = context_window


def check_request(
    request: inference_pb2.GenerateRequest, *, served: Sequence[str], limits: RouterLimits
) -> None:
    """Check a request without its tokens and the model. `served`: names of the served models.
    Raises: InvalidArgument naming the field.
    """
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
    check_sampling_params(request.sampling, limits)
    _check_prompt_logprobs(request, limits)
    _check_prompt(request)


def check_model(model: str, served: Sequence[str]) -> None:
    """Check that a model name is one of `served`; an empty name means the only model. Raises:
    InvalidArgument.
    """
    if model and model not in served:
        raise InvalidArgument("model", f"'{model[:128]}' is not served here; '{served[0]}' is")


def check_tokens(
    prompt_token_ids: Sequence[int],
    request: inference_pb2.GenerateRequest,
    *,
    bounds: ModelBounds,
    limits: RouterLimits,
) -> int:
    """Check the prompt's token ids, the sampling parameters' ids, and all lengths against the
    model.

    Returns: the limit of output tokens: the request's max_tokens, or the default.
    Raises: InvalidArgument; ContextLengthExceeded where prompt and output exceed the window.
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
    check_vocabulary(field, prompt_token_ids, bounds)
    check_ids(sampling, bounds)
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
