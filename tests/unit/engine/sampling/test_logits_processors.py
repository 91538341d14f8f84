"""Each processor apart: against the slow reference, and against transformers' own where it has the
same one."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.generation import logits_process as theirs

from engine.sampling.logits_processors import process
from engine.sampling.metadata import Row, SamplingRequest, metadata_of
from tests.unit.engine.sampling.reference import bitmask_of, make_draw, processed

Scale = Callable[[int], int]
VOCAB_SIZE = 60


def _ours(logits: torch.Tensor, draws: list[SamplingRequest]) -> torch.Tensor:
    """[R, V] float32 after steps 1 to 9."""
    rows = [Row(place, one, metadata_of(one.sampling)) for place, one in enumerate(draws)]
    out = logits.clone()
    process(out, rows)
    return out


def _tokens(rng: random.Random, least: int = 1) -> list[int]:
    return [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(least, 25))]


def _ids(rng: random.Random, least: int = 0) -> frozenset[int]:
    return frozenset(rng.sample(range(VOCAB_SIZE), rng.randrange(least, 12)))


def _words(rng: random.Random, tokens: list[int]) -> tuple[tuple[int, ...], ...]:
    """Some that the sequence is about to complete, and some at random."""
    words = [(*tokens[-k:], rng.randrange(VOCAB_SIZE)) for k in range(1, 5)]
    words += [tuple(_tokens(rng)[:3]) for _ in range(4)]
    return tuple(rng.sample(words, rng.randrange(1, 8)))


def _grammar(rng: random.Random) -> torch.Tensor:
    return bitmask_of(_ids(rng, 1), VOCAB_SIZE)


EACH: dict[str, Callable[[random.Random, list[int]], dict[str, Any]]] = {
    "repetition_penalty": lambda r, _: {"repetition_penalty": r.choice([0.01, 0.7, 1.3, 100.0])},
    "presence_penalty": lambda r, _: {"presence_penalty": r.uniform(-3, 3)},
    "frequency_penalty": lambda r, _: {"frequency_penalty": r.uniform(-3, 3)},
    "logit_bias": lambda r, _: {"logit_bias": tuple((i, r.uniform(-50, 50)) for i in _ids(r))},
    "allowed_token_ids": lambda r, _: {"allowed_token_ids": _ids(r, 1)},
    "bad_words": lambda r, tokens: {"bad_words": _words(r, tokens)},
    "no_repeat_ngram": lambda r, _: {"no_repeat_ngram": r.choice([1, 2, 3, 5, 30])},
    "min_tokens": lambda r, _: {"min_tokens": r.randrange(30), "ends": _ids(r)},
    "grammar": lambda r, _: {"bitmask": _grammar(r)},
}


@pytest.mark.parametrize("name", EACH)
def test_each_processor_is_what_the_slow_reference_says(name: str, seed: int, scale: Scale) -> None:
    """To the last bit, in batches in which some rows ask for it and others do not."""
    rng = random.Random(f"{name} {seed}")
    for number in range(scale(1000)):
        generator = torch.Generator().manual_seed(seed + number)
        logits = torch.randn(5, VOCAB_SIZE, generator=generator) * 5
        draws, wanted = [], []
        for row in range(5):
            prompt, output = _tokens(rng), _tokens(rng, 0)
            if rng.random() < 0.3:  # something to repeat
                output = prompt[-4:] + output + prompt[-4:]
            fields = EACH[name](rng, prompt + output) if rng.random() < 0.7 else {}
            draws.append(make_draw(prompt, output, **fields))
            wanted.append(processed(logits[row], draws[row], prompt, output))
        assert torch.equal(_ours(logits, draws), torch.stack(wanted)), draws


def _their_processor(name: str, draw: SamplingRequest, prompt: list[int]) -> Any:
    one = draw.sampling
    if name == "repetition_penalty":
        return theirs.RepetitionPenaltyLogitsProcessor(one.repetition_penalty)
    if name == "no_repeat_ngram":
        return theirs.NoRepeatNGramLogitsProcessor(one.no_repeat_ngram)
    if name == "bad_words":
        return theirs.NoBadWordsLogitsProcessor([list(word) for word in set(one.bad_words)])
    ends = torch.tensor(sorted(draw.end_token_ids))
    return theirs.MinNewTokensLengthLogitsProcessor(len(prompt), one.min_tokens, ends)


@pytest.mark.parametrize(
    "name", ["repetition_penalty", "no_repeat_ngram", "bad_words", "min_tokens"]
)
def test_each_processor_is_what_transformers_makes_of_it(
    name: str, seed: int, scale: Scale
) -> None:
    rng = random.Random(f"{name} {seed}")
    for number in range(scale(1000)):
        generator = torch.Generator().manual_seed(seed + number)
        logits = torch.randn(1, VOCAB_SIZE, generator=generator) * 5
        prompt, output = _tokens(rng), _tokens(rng, 0)
        output = output + prompt[-3:]
        fields = EACH[name](rng, prompt + output)
        if name == "bad_words":
            # Longer than the sequence: 5.17 does not look at one that all of it begins; 5.23 does.
            num_tokens = len(prompt + output)
            known = tuple(word for word in fields["bad_words"] if len(word) <= num_tokens)
            fields = {"bad_words": known}
        if not all(fields.values()):
            continue  # transformers has no such processor
        draw = make_draw(prompt, output, **fields)
        input_ids = torch.tensor([prompt + output])
        wanted = _their_processor(name, draw, prompt)(input_ids, logits.clone())
        assert torch.equal(_ours(logits, [draw]), wanted), draw


def test_a_bad_word_may_begin_with_all_that_there_is() -> None:
    """Its last token is the next one; a longer word's is not."""
    words = ((51, 59, 51, 49), (51, 59, 51, 48, 47))
    logits = torch.zeros(1, VOCAB_SIZE)
    ours = _ours(logits, [make_draw((51, 59), (51,), bad_words=words)])
    assert torch.isneginf(ours[0]).nonzero().flatten().tolist() == [49]


def test_a_frequency_counts_the_output_and_not_the_prompt() -> None:
    draw = make_draw((4, 4, 5), (4, 6, 6, 6), frequency_penalty=0.5, presence_penalty=2.0)
    expected = torch.zeros(1, 8)
    expected[0, 4], expected[0, 6] = -2.5, -3.5
    assert torch.equal(_ours(torch.zeros(1, 8), [draw]), expected)


def test_a_repetition_makes_either_sign_less_likely() -> None:
    draw = make_draw((0,), (1,), repetition_penalty=2.0)
    logits = torch.tensor([[3.0, -3.0, 3.0, -3.0]])
    assert _ours(logits, [draw]).tolist() == [[1.5, -6.0, 3.0, -3.0]]
