"""Translation of protobuf SamplingParams to the engine's values: sampling, number of samples,
grammar and beam search.

Stop strings, tool calls and words are the router's (text is made there): a worker that receives one
of them refuses, since it would be ignored otherwise. Ranges are checked by the engine at `reserve`.
Pure.
"""

from __future__ import annotations

import dataclasses

from engine.input_processor import MAX_SAMPLES
from engine.request import Beam, GrammarKind, GrammarSpec, Sampling
from process.errors import InvalidArgument
from protos import common_pb2

_REQUIRED = ("temperature", "top_p", "max_tokens", "seed")
_SAMPLING_FIELDS = frozenset(field.name for field in dataclasses.fields(Sampling))
_WIRE_NAMES = {
    "num_samples": "sampling.n",
    "beam": "sampling.beam",
    "bad_words": "sampling.bad_word_ids",
    "wants_embedding": "embed",
}
"""Protobuf names of fields that the engine names differently."""
_GRAMMARS = {
    "json_schema": GrammarKind.JSON_SCHEMA,
    "regex": GrammarKind.REGEX,
    "ebnf": GrammarKind.EBNF,
}


def sampling_from_proto(params: common_pb2.SamplingParams, sample_index: int) -> Sampling:
    """Translate sampling parameters. Raises: InvalidArgument naming the field that is missing or
    belongs to the router."""
    for name in _REQUIRED:
        if not params.HasField(name):
            raise InvalidArgument(f"sampling.{name}", "is absent; the router sets it")
    for name in ("stop", "bad_words", "stop_at_tool_call"):
        if getattr(params, name):
            raise InvalidArgument(f"sampling.{name}", "is the router's; a worker knows no text")
    return Sampling(
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        min_tokens=params.min_tokens,
        seed=params.seed,
        sample_index=sample_index,
        stop_token_ids=frozenset(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
        logprobs=params.logprobs if params.HasField("logprobs") else None,
        repetition_penalty=params.repetition_penalty or 1.0,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=tuple(sorted(params.logit_bias.items())),
        bad_words=tuple(tuple(word.ids) for word in params.bad_word_ids),
        allowed_token_ids=frozenset(params.allowed_token_ids) or None,
        no_repeat_ngram=params.no_repeat_ngram,
        grammar=grammar_from_proto(params),
        trace=params.trace,
    )


def grammar_from_proto(params: common_pb2.SamplingParams) -> GrammarSpec | None:
    """Return the grammar that the output must follow; None: unconstrained."""
    kind = params.WhichOneof("grammar")
    if kind is None:
        return None
    if kind == "choice":
        return GrammarSpec(GrammarKind.CHOICE, choices=tuple(params.choice.values))
    return GrammarSpec(_GRAMMARS[kind], getattr(params, kind))


def beam_from_proto(params: common_pb2.SamplingParams) -> Beam | None:
    """Return the requested beam search; None: sampling."""
    if not params.HasField("beam"):
        return None
    beam = params.beam
    penalty = beam.length_penalty if beam.HasField("length_penalty") else 1.0
    return Beam(beam.num_beams, penalty, beam.early_stopping)


def num_samples_of(params: common_pb2.SamplingParams) -> int:
    """Return the number of samples; 0 in the message means 1. Raises: InvalidArgument for more than
    an engine accepts, since the number sizes per-request state before the engine checks it."""
    if params.n > MAX_SAMPLES:
        raise InvalidArgument("sampling.n", f"{params.n} is above {MAX_SAMPLES}")
    return params.n or 1


def named_on_wire(error: Exception, sampling: Sampling) -> Exception:
    """Return `error` with its field named as in the client's message."""
    if not isinstance(error, InvalidArgument):
        return error
    name = _WIRE_NAMES.get(error.field)
    if name is None and error.field in _SAMPLING_FIELDS:
        name = f"sampling.{error.field}"
    if error.field.startswith("beam."):
        name = f"sampling.{error.field}"
    if error.field == "grammar" and sampling.grammar is not None:
        name = f"sampling.{sampling.grammar.kind.value}"
    if name is None:
        return error
    return InvalidArgument(name, str(error).removeprefix(f"{error.field}: "))
