"""Sampling at a worker's door: every field arrives, and what is not a worker's is refused by its
name.
"""

from __future__ import annotations

import dataclasses

import pytest

from engine.request import Beam, GrammarKind, GrammarSpec
from process.rpc_errors import InvalidArgument, NotFound
from protos import common_pb2
from services.worker import stream_servicer as mapping
from services.worker.stream_servicer import sampling_from_proto


def params(**fields: object) -> common_pb2.SamplingParams:
    values = {"temperature": 0.5, "top_p": 0.9, "max_tokens": 7, "seed": 2**64 - 1} | fields
    return common_pb2.SamplingParams(**values)  # type: ignore[arg-type]


def test_every_served_field_arrives() -> None:
    sampling = sampling_from_proto(
        params(
            top_k=5,
            min_p=0.1,
            min_tokens=2,
            stop_token_ids=[3, 4],
            ignore_eos=True,
            logprobs=0,
        ),
        sample_index=2,
    )
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.5, 0.9, 7)
    assert (sampling.seed, sampling.sample_index) == (2**64 - 1, 2)
    assert (sampling.top_k, sampling.min_p, sampling.min_tokens) == (5, 0.1, 2)
    assert sampling.stop_token_ids == {3, 4}
    assert sampling.ignore_eos
    assert sampling.logprobs == 0
    assert sampling_from_proto(params(), 0).logprobs is None


def test_what_is_absent_is_off() -> None:
    sampling = sampling_from_proto(params(), 0)
    assert sampling.repetition_penalty == 1.0
    assert sampling.allowed_token_ids is None and sampling.grammar is None
    assert mapping.beam_from_proto(params()) is None
    assert mapping.num_samples_of(params()) == 1


def test_too_many_samples_are_refused_before_anything_is_made_of_them() -> None:
    assert mapping.num_samples_of(params(n=128)) == 128
    with pytest.raises(InvalidArgument, match=r"^sampling\.n: "):
        mapping.num_samples_of(params(n=2**31 - 1))


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({"json_schema": "{}"}, GrammarSpec(GrammarKind.JSON_SCHEMA, "{}")),
        ({"regex": "a*"}, GrammarSpec(GrammarKind.REGEX, "a*")),
        ({"ebnf": "root ::= x"}, GrammarSpec(GrammarKind.EBNF, "root ::= x")),
        (
            {"choice": common_pb2.StringList(values=["b", "a"])},
            GrammarSpec(GrammarKind.CHOICE, choices=("b", "a")),
        ),
    ],
)
def test_grammars(fields: dict[str, object], grammar: GrammarSpec) -> None:
    assert mapping.grammar_from_proto(params(**fields)) == grammar


def test_beams() -> None:
    message = params(beam=common_pb2.BeamParams(num_beams=4), n=3)
    assert mapping.beam_from_proto(message) == Beam(4)
    assert mapping.num_samples_of(message) == 3
    beam = common_pb2.BeamParams(num_beams=2, length_penalty=0.0, early_stopping=True)
    assert mapping.beam_from_proto(params(beam=beam)) == Beam(2, 0.0, True)


@pytest.mark.parametrize("name", ["temperature", "top_p", "max_tokens", "seed"])
def test_what_the_router_forgot_is_named(name: str) -> None:
    message = params()
    message.ClearField(name)
    with pytest.raises(InvalidArgument) as caught:
        sampling_from_proto(message, 0)
    assert caught.value.field == f"sampling.{name}"


@pytest.mark.parametrize(
    ("name", "value"),
    [("stop", ["x"]), ("bad_words", ["x"]), ("stop_at_tool_call", True)],
)
def test_what_is_about_text_is_refused(name: str, value: object) -> None:
    with pytest.raises(InvalidArgument, match="the router's") as caught:
        sampling_from_proto(params(**{name: value}), 0)
    assert caught.value.field == f"sampling.{name}"


def test_what_shapes_the_draw_arrives() -> None:
    sampling = sampling_from_proto(
        params(
            presence_penalty=0.1,
            frequency_penalty=-0.2,
            repetition_penalty=1.1,
            logit_bias={9: -1.0, 1: 2.0},
            allowed_token_ids=[1, 9],
            bad_word_ids=[common_pb2.TokenSequence(ids=[3, 4]), common_pb2.TokenSequence(ids=[5])],
            no_repeat_ngram=3,
            trace=True,
        ),
        0,
    )
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.1, -0.2)
    assert sampling.repetition_penalty == 1.1
    assert sampling.logit_bias == ((1, 2.0), (9, -1.0))
    assert sampling.allowed_token_ids == {1, 9}
    assert sampling.bad_words == ((3, 4), (5,))
    assert sampling.no_repeat_ngram == 3 and sampling.trace


def test_the_engines_words_become_the_wires() -> None:
    sampling = sampling_from_proto(params(), 0)
    for theirs, ours in (
        ("top_p", "sampling.top_p"),
        ("num_samples", "sampling.n"),
        ("beam.num_beams", "sampling.beam.num_beams"),
        ("bad_words", "sampling.bad_word_ids"),
        ("prompt_token_ids", "prompt_token_ids"),
    ):
        named = mapping.named_on_wire(InvalidArgument(theirs, "is wrong"), sampling)
        assert str(named) == f"{ours}: is wrong"
    ruled = dataclasses.replace(sampling, grammar=GrammarSpec(GrammarKind.REGEX, "("))
    named = mapping.named_on_wire(InvalidArgument("grammar", "is broken"), ruled)
    assert str(named) == "sampling.regex: is broken"
    other = NotFound("gone")
    assert mapping.named_on_wire(other, sampling) is other
