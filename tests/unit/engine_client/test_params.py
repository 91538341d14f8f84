"""A user's parameters reach the engine whole, and what is wrong with them is named."""

from __future__ import annotations

import dataclasses

import pytest

from checkpoints.resolve import resolve
from checkpoints.sampling_defaults import SamplingDefaults
from engine.request import Beam, GrammarKind, GrammarSpec, Sampling
from engine.testing.fake_model import FakeModel
from engine_client.params import SamplingParams, Translated, translate
from process.rpc_errors import InvalidArgument
from tokens.tokenizer import Tokenizer

MODEL = FakeModel(vocab_size=2048, context_window=256).info


def run(params: SamplingParams, *, tokenizer: Tokenizer | None = None, num: int = 10) -> Translated:
    return translate(
        params,
        num_prompt_tokens=num,
        seed=77,
        model=MODEL,
        defaults=SamplingDefaults(temperature=0.6, top_p=0.9, top_k=20, min_p=0.1),
        tokenizer=tokenizer,
    )


def test_what_is_left_out_is_the_models() -> None:
    assert run(SamplingParams()) == Translated(
        Sampling(max_tokens=128, temperature=0.6, top_p=0.9, top_k=20, min_p=0.1, seed=77), 1, None
    )
    assert run(SamplingParams(), num=200).sampling.max_tokens == 56
    zeros = run(SamplingParams(temperature=0, top_p=1, top_k=0, min_p=0, seed=0)).sampling
    assert (zeros.temperature, zeros.top_p, zeros.top_k, zeros.min_p, zeros.seed) == (0, 1, 0, 0, 0)


def test_every_field_of_the_engine_can_be_set() -> None:
    """A field of Sampling that nobody can reach would be a promise not kept."""
    tokenizer = Tokenizer.load(resolve("baton-5m", files="tokenizer").path)
    params = SamplingParams(
        n=3,
        max_tokens=5,
        temperature=1.5,
        top_p=0.5,
        top_k=7,
        min_p=0.2,
        min_tokens=2,
        seed=9,
        stop=["x"],
        stop_token_ids=[4, 5],
        ignore_eos=True,
        logprobs=2,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.4,
        logit_bias={3: -1.0},
        bad_words=["dog"],
        bad_word_ids=[[9, 10]],
        allowed_token_ids=list(range(100)),
        no_repeat_ngram=3,
        regex="a+",
        num_beams=4,
        length_penalty=0.5,
        early_stopping=True,
        trace=True,
    )
    done = run(params, tokenizer=tokenizer)
    assert (done.num_samples, done.beam) == (3, Beam(4, 0.5, True))
    default = Sampling(max_tokens=1)
    # The place among several legs is not the user's.
    unreachable = {"sample_index"}
    for field in dataclasses.fields(Sampling):
        if field.name not in unreachable:
            assert getattr(done.sampling, field.name) != getattr(default, field.name), field.name
    dog = tuple(tokenizer.encode("dog", add_special_tokens=False))
    spaced = tuple(tokenizer.encode(" dog", add_special_tokens=False))
    assert done.sampling.bad_words == ((9, 10), dog, spaced)
    assert done.sampling.grammar == GrammarSpec(GrammarKind.REGEX, "a+")


def test_grammars() -> None:
    schema = run(SamplingParams(json_schema={"type": "integer"})).sampling.grammar
    assert schema == GrammarSpec(GrammarKind.JSON_SCHEMA, '{"type": "integer"}')
    choice = run(SamplingParams(choice=["yes", "no"])).sampling.grammar
    assert choice == GrammarSpec(GrammarKind.CHOICE, choices=("yes", "no"))
    ebnf = run(SamplingParams(ebnf='root ::= "a"')).sampling.grammar
    assert ebnf == GrammarSpec(GrammarKind.EBNF, 'root ::= "a"')


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"n": 0}, "n"),
        ({"n": "2"}, "n"),
        ({"temperature": "hot"}, "temperature"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 247}, "max_tokens"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop": ["a", 3]}, "stop[1]"),
        ({"stop_token_ids": [1, "b"]}, "stop_token_ids[1]"),
        ({"logit_bias": {3: "much"}}, "logit_bias[...]"),
        ({"regex": "a", "choice": ["b"]}, "choice"),
        ({"num_beams": 1}, "num_beams"),
        ({"num_beams": -3}, "num_beams"),
        ({"early_stopping": True}, "early_stopping"),
        ({"length_penalty": 2.0}, "length_penalty"),
        ({"bad_words": ["a"]}, "bad_words"),
    ],
)
def test_what_is_wrong_is_named(values: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        run(SamplingParams(**values))  # type: ignore[arg-type]
    assert caught.value.field == field
