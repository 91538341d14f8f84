"""SamplingParams: sampling parameters of `LLM` in plain Python values, and their translation into
an engine's parameters.

Everything is checked here or by the engine before any work; an error names the field. What is left
out is the model's own default. No torch. Values: any thread.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import msgspec

from checkpoints.sampling_defaults import SamplingDefaults
from engine.request import Beam, GrammarKind, GrammarSpec, ModelInfo, Sampling
from process.rpc_errors import InvalidArgument
from tokens.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 128
_T = TypeVar("_T")
_MAX_SEED = 2**64 - 1
_GRAMMARS = ("json_schema", "regex", "ebnf", "choice")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of a prompt. `None` means the model's own default
    (`generation_config.json`)."""

    n: int = 1
    """Number of samples of each prompt."""

    max_tokens: int | None = None
    """Most output tokens; None: 128, or as many as the context window has room for."""

    temperature: float | None = None
    """Sampling temperature; 0 is greedy."""

    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None

    min_tokens: int = 0
    """Fewest output tokens before EOS or a stop token id may end the output."""

    seed: int | None = None
    """Seed of the sampling noise: the same seed gives the same output; None: a random one, which
    the answer contains."""

    stop: str | Sequence[str] = ()
    """Stop strings; the output ends before the first of them."""

    include_stop_text: bool = False
    """Whether the output includes the stop string that ended it."""

    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False

    logprobs: int | None = None
    """Number of alternatives whose log-probabilities are returned with those of each output token;
    0: of the output tokens alone."""

    prompt_logprobs: int | None = None
    """Number of alternatives as for `logprobs`, for each prompt token; the whole prompt is computed
    for them, cached or not."""

    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Bias added to the logit of each token id."""

    bad_words: Sequence[str] = ()
    """Texts that must not appear, alone or after a space."""

    bad_word_ids: Sequence[Sequence[int]] = ()
    """Token id sequences that must not appear."""

    allowed_token_ids: Sequence[int] | None = None
    no_repeat_ngram: int = 0

    json_schema: str | Mapping[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    choice: Sequence[str] | None = None

    num_beams: int = 0
    """Number of beams of a beam search instead of sampling; the n best beams are the samples."""
    length_penalty: float = 1.0
    early_stopping: bool = False

    trace: bool = False
    """Whether every token is reported with a trace of how it was drawn."""

    skip_special_tokens: bool = True
    """Whether control tokens are left out of the text."""

    def check_types(self) -> None:
        """Check the types of all fields. Raises: InvalidArgument naming the field that holds a
        value of another type."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        try:
            msgspec.convert(values, type=SamplingParams)
        except msgspec.ValidationError as error:
            problem, _, path = str(error).partition(" - at `$.")
            raise InvalidArgument(path.rstrip("`") or "params", problem) from error

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Return `stop` as a tuple of strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


@dataclass(frozen=True)
class Translated:
    """Parameters of an engine request, translated from SamplingParams."""

    sampling: Sampling
    num_samples: int
    beam: Beam | None


def translate(
    params: SamplingParams,
    *,
    num_prompt_tokens: int,
    seed: int,
    model: ModelInfo,
    defaults: SamplingDefaults,
    tokenizer: Tokenizer | None,
) -> Translated:
    """Translate parameters into those of an engine; the engine checks their ranges.

    Args:
        seed: seed to use where `params` has none.
        tokenizer: None: there is none, and `bad_words` are refused.
    Raises: InvalidArgument naming the field.
    """
    params.check_types()
    _check(params)
    if params.num_beams:
        defaults = SamplingDefaults()  # nothing is drawn, whatever the model would have it like
    room = max(1, model.context_window - num_prompt_tokens)
    if params.max_tokens is not None and params.max_tokens > room:
        raise InvalidArgument(
            "max_tokens",
            f"is {params.max_tokens}, but after {num_prompt_tokens} prompt tokens the window of "
            f"{model.context_window} has room for {room}",
        )
    max_tokens = min(DEFAULT_MAX_TOKENS, room) if params.max_tokens is None else params.max_tokens
    sampling = Sampling(
        max_tokens=max_tokens,
        temperature=_or(params.temperature, defaults.temperature),
        top_p=_or(params.top_p, defaults.top_p),
        top_k=_or(params.top_k, defaults.top_k),
        min_p=_or(params.min_p, defaults.min_p),
        min_tokens=params.min_tokens,
        seed=_or(params.seed, seed),
        stop_token_ids=frozenset(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
        logprobs=params.logprobs,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=tuple(params.logit_bias.items()),
        bad_words=_bad_words(params, tokenizer),
        allowed_token_ids=_frozen(params.allowed_token_ids),
        no_repeat_ngram=params.no_repeat_ngram,
        grammar=_grammar(params),
        trace=params.trace,
    )
    beam = None
    if params.num_beams:
        beam = Beam(params.num_beams, params.length_penalty, params.early_stopping)
    return Translated(sampling, params.n, beam)


def _check(params: SamplingParams) -> None:
    """Check parameters that the engine does not see, or would name differently."""
    if params.n < 1:
        raise InvalidArgument("n", f"{params.n} is below 1")
    if params.seed is not None and not 0 <= params.seed <= _MAX_SEED:
        raise InvalidArgument("seed", f"{params.seed} is outside [0, 2^64)")
    for index, stop in enumerate(params.stop_strings):
        if not stop:
            where = "stop" if isinstance(params.stop, str) else f"stop[{index}]"
            raise InvalidArgument(where, "is empty")
    given = [name for name in _GRAMMARS if getattr(params, name) is not None]
    if len(given) > 1:
        raise InvalidArgument(given[1], f"only one grammar at a time; there is {given[0]}, too")
    if params.num_beams == 1 or params.num_beams < 0:
        raise InvalidArgument("num_beams", f"{params.num_beams}; at least 2, or 0 for none")
    if not params.num_beams and (params.length_penalty != 1.0 or params.early_stopping):
        name = "early_stopping" if params.early_stopping else "length_penalty"
        raise InvalidArgument(name, "belongs to beam search; set num_beams")


def _grammar(params: SamplingParams) -> GrammarSpec | None:
    if params.json_schema is not None:
        schema = params.json_schema
        text = schema if isinstance(schema, str) else json.dumps(schema)
        return GrammarSpec(GrammarKind.JSON_SCHEMA, text)
    if params.regex is not None:
        return GrammarSpec(GrammarKind.REGEX, params.regex)
    if params.ebnf is not None:
        return GrammarSpec(GrammarKind.EBNF, params.ebnf)
    if params.choice is not None:
        return GrammarSpec(GrammarKind.CHOICE, choices=tuple(params.choice))
    return None


def _bad_words(params: SamplingParams, tokenizer: Tokenizer | None) -> tuple[tuple[int, ...], ...]:
    words = [tuple(ids) for ids in params.bad_word_ids]
    for index, word in enumerate(params.bad_words):
        if tokenizer is None:
            raise InvalidArgument("bad_words", "there is no tokenizer; use bad_word_ids")
        if not word.strip():
            raise InvalidArgument(f"bad_words[{index}]", "is empty")
        for text in (word, f" {word}"):
            words.append(tuple(tokenizer.encode(text, add_special_tokens=False)))
    return tuple(dict.fromkeys(words))


def _frozen(token_ids: Sequence[int] | None) -> frozenset[int] | None:
    return None if token_ids is None else frozenset(token_ids)


def _or(value: _T | None, default: _T) -> _T:
    return default if value is None else value
