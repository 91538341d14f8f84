"""Beam search == transformers' `generate(num_beams=k)`: hypotheses, and scores to the last bit.

First the algorithm alone, on the very logits that transformers saw, so that nothing but the
algorithm can differ; then through the engine, in company and in two legs.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from checkpoints.resolve import resolve
from engine import beam_search
from engine.engine import LLMEngine
from engine.outputs import RequestOutput
from engine.request import Beam, FinishReason, Request, Sampling
from tests.harness.engines import all_events, block_hash
from tests.harness.models import VOCAB_SIZE, Tiny


@dataclass(frozen=True)
class Search:
    """What transformers did with one prompt."""

    hypotheses: list[tuple[int, ...]]
    scores: list[float]
    logits: tuple[torch.Tensor, ...]
    """One [num_beams, V] per step."""


def generate(
    oracle: Any,
    prompt: list[int],
    beam: Beam,
    num_samples: int,
    max_tokens: int,
    ends: list[int],
) -> Search:
    """transformers' own beam search."""
    with torch.inference_mode():
        output = oracle.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=max_tokens,
            do_sample=False,
            num_beams=beam.num_beams,
            num_return_sequences=num_samples,
            length_penalty=beam.length_penalty,
            early_stopping=beam.early_stopping,
            eos_token_id=ends or None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
            output_logits=True,
        )
    hypotheses = []
    for sequence, indices in zip(
        output.sequences[:, len(prompt) :].tolist(), output.beam_indices.tolist(), strict=True
    ):
        length = sum(index >= 0 for index in indices)  # behind it is padding
        hypotheses.append(tuple(sequence[:length]))
    return Search(hypotheses, output.sequences_scores.tolist(), output.logits)


def draw_case(rng: random.Random, vocab_size: int) -> tuple[Beam, int, int, list[int]]:
    """Parameters of one search: beam, samples, most tokens, end tokens."""
    num_beams = rng.randint(2, 8)
    beam = Beam(num_beams, rng.choice([-1.0, 0.0, 0.6, 1.0, 1.0, 2.0]), rng.random() < 0.5)
    num_ends = rng.choice([0, 1, 1, 2, 5])
    ends = rng.sample(range(1, vocab_size), num_ends)
    return beam, rng.randint(1, num_beams), rng.choice([1, 2, 8, 24]), ends


def replay(search: Search, beam: Beam, max_tokens: int, ends: list[int], is_split: bool) -> None:
    """Our algorithm on the same logits comes to the same, step by step."""
    state = beam_search.start(beam, frozenset(ends), max_tokens)
    for logits in search.logits:
        logprobs = torch.log_softmax(logits.float(), dim=-1)
        assert not state.is_over
        if state.num_tokens == 0 and is_split:  # the prefill leg's part, and the decode leg's
            count = beam_search.num_candidates(beam.num_beams, len(ends))
            candidates = beam_search.first_candidates(logprobs[0], count)
            state = beam_search.begin(state, candidates).state
        else:
            state = beam_search.step(state, logprobs[: len(state.open_token_ids)]).state
    assert state.is_over
    num_samples = len(search.hypotheses)
    assert [h.token_ids for h in state.finished[:num_samples]] == search.hypotheses
    assert [h.score for h in state.finished[:num_samples]] == search.scores


def common_tokens(oracle: Any, prompt: list[int], count: int) -> list[int]:
    """Tokens that a search from this prompt will meet: end tokens that end something."""
    with torch.inference_mode():
        logits = oracle(torch.tensor([prompt])).logits[0]
    return list(dict.fromkeys(logits.argmax(dim=-1).tolist() + logits[-1].topk(9)[1].tolist()))[
        -count:
    ]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_algorithm_equals_transformers_on_tiny_models(
    family: str, get_tiny: Callable[[str], Tiny], seed: int, scale: Callable[[int], int]
) -> None:
    rng = random.Random(f"{seed} {family}")
    tiny = get_tiny(family)
    for number in range(scale(400)):
        prompt = [rng.randrange(2, VOCAB_SIZE) for _ in range(rng.randint(1, 40))]
        beam, num_samples, max_tokens, ends = draw_case(rng, VOCAB_SIZE)
        if ends and rng.random() < 0.7:
            ends = common_tokens(tiny.oracle, prompt, len(ends))
        search = generate(tiny.oracle, prompt, beam, num_samples, max_tokens, ends)
        replay(search, beam, max_tokens, ends, is_split=number % 2 == 0)


def test_the_algorithm_equals_transformers_on_a_trained_model(
    seed: int, scale: Callable[[int], int]
) -> None:
    rng = random.Random(seed)
    oracle = AutoModelForCausalLM.from_pretrained(resolve("baton-5m", files="all").path)
    vocab_size = oracle.config.vocab_size
    for number in range(scale(100)):
        prompt = [rng.randrange(2, vocab_size) for _ in range(rng.randint(1, 60))]
        beam, num_samples, max_tokens, ends = draw_case(rng, vocab_size)
        if ends and rng.random() < 0.7:
            ends = common_tokens(oracle, prompt, len(ends))
        search = generate(oracle, prompt, beam, num_samples, max_tokens, ends)
        replay(search, beam, max_tokens, ends, is_split=number % 2 == 0)


def ask(
    name: str,
    prompt: list[int],
    beam: Beam,
    num_samples: int,
    max_tokens: int,
    ends: list[int],
    hold_after: int | None = None,
) -> Request:
    """The same search, asked of the engine."""
    sampling = Sampling(max_tokens=max_tokens, stop_token_ids=frozenset(ends), ignore_eos=True)
    return Request(
        name,
        tuple(prompt),
        sampling,
        block_hash,
        hold_after=hold_after,
        num_samples=num_samples,
        beam=beam,
    )


def finish(engine: LLMEngine) -> dict[str, list[RequestOutput]]:
    """Step until all is done, with the books checked after every step; events that tell tokens."""
    told: dict[str, list[RequestOutput]] = {}
    for event in all_events(engine):
        assert event.error is None, event.error
        if event.token_ids or event.beam_start:
            told.setdefault(event.request_id, []).append(event)
    return told


def check_told(events: list[RequestOutput], search: Search, ends: list[int]) -> None:
    """Hypotheses and their order are transformers'; scores up to the rounding of another batch."""
    assert [event.sample_index for event in events] == list(range(len(search.hypotheses)))
    assert [event.token_ids for event in events] == search.hypotheses
    assert [event.score for event in events] == pytest.approx(search.scores, rel=1e-3, abs=1e-4)
    assert [event.is_request_over for event in events] == [False] * (len(events) - 1) + [True]
    for event in events:
        is_end = event.token_ids[-1] in ends
        reason = FinishReason.STOP_TOKEN if is_end else FinishReason.LENGTH
        assert event.finish_reason is reason


def search_all(
    engine: LLMEngine, oracle: Any, rng: random.Random, count: int, vocab_size: int
) -> None:
    """`count` searches and as many greedy requests, some at a time, against transformers."""
    left = count
    while left:
        cases = {}
        for number in range(min(left, rng.randint(1, 5))):
            prompt = [rng.randrange(2, vocab_size) for _ in range(rng.randint(1, 60))]
            beam, num_samples, max_tokens, ends = draw_case(rng, vocab_size)
            if ends and rng.random() < 0.7:
                ends = common_tokens(oracle, prompt, len(ends))
            cases[str(number)] = (prompt, beam, num_samples, max_tokens, ends)
            left -= 1
        for name, case in cases.items():
            engine.reserve(ask(name, *case))
            engine.start(name)
            greedy = Sampling(max_tokens=8, ignore_eos=True)
            engine.reserve(Request(f"greedy {name}", tuple(case[0]), greedy, block_hash))
            engine.start(f"greedy {name}")
        told = finish(engine)
        for name, case in cases.items():
            check_told(told[name], generate(oracle, *case), case[-1])
            drawn = [token for event in told[f"greedy {name}"] for token in event.token_ids]
            assert drawn == Tiny("", Path(), oracle).generate(case[0], 8)
        assert engine.stats().num_referenced_blocks == 0


def test_the_engine_equals_transformers_on_tiny_models(
    get_tiny: Callable[[str], Tiny],
    load: Callable[..., Any],
    seed: int,
    scale: Callable[[int], int],
) -> None:
    rng = random.Random(f"{seed} engine")
    tiny = get_tiny("llama")
    engine = load(tiny.path, max_num_tokens_per_step=50, max_num_running=40, block_size=4)
    search_all(engine, tiny.oracle, rng, scale(100), VOCAB_SIZE)


def test_the_engine_equals_transformers_on_a_trained_model(
    load: Callable[..., Any], seed: int, scale: Callable[[int], int]
) -> None:
    rng = random.Random(f"{seed} engine")
    path = resolve("baton-5m", files="all").path
    oracle = AutoModelForCausalLM.from_pretrained(path)
    engine = load("baton-5m", max_num_tokens_per_step=100, max_num_running=64)
    search_all(engine, oracle, rng, scale(100), oracle.config.vocab_size)


def test_a_search_in_two_legs_is_the_same(
    get_tiny: Callable[[str], Tiny],
    load: Callable[..., Any],
    seed: int,
    scale: Callable[[int], int],
) -> None:
    """One engine computes the prompt and hands over candidates and KV, another one searches."""
    rng = random.Random(f"{seed} legs")
    tiny = get_tiny("llama")
    prefill, decode = (load(tiny.path, block_size=8, num_blocks=600) for _ in range(2))
    for number in range(scale(100)):
        prompt = [rng.randrange(2, VOCAB_SIZE) for _ in range(rng.randint(1, 60))]
        case = (prompt, *draw_case(rng, VOCAB_SIZE))
        name = str(number)
        source = prefill.reserve(ask(name, *case, hold_after=1)).block_ids
        prefill.start(name)
        (handed,) = finish(prefill)[name]
        assert handed.token_ids == () and handed.is_request_over
        reservation = decode.reserve(ask(name, *case))
        num_loaded = rng.choice([0, len(prompt)])
        if num_loaded:
            first = reservation.num_local_tokens // 8
            for index in range(first, -(-len(prompt) // 8)):
                target = decode.kv.block_array(reservation.block_ids[index])
                target[:] = prefill.kv.block_array(source[index])
        prefill.release(name)
        decode.start(name, num_loaded_tokens=num_loaded, beam_start=handed.beam_start)
        check_told(finish(decode)[name], generate(tiny.oracle, *case), case[-1])
