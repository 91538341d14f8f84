"""Answers of engines whose model and draft models are tables, and how likely they are: whatever
guesses, each token has the distribution of plain decoding, given those before it.

False alarms: a right engine fails one of these comparisons (`LIMIT`) with probability 1e-9 by the
normal approximation, and below 1e-6 by what that leaves out. Wrong ones pass with less than 1e-9.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from engine.config import EngineConfig
from engine.engine import LLMEngine
from engine.models.interface import Guesses
from engine.request import FinishReason, Request, Sampling
from engine.sampling.metadata import SamplingRequest
from engine.speculation.config import SpeculationConfig
from engine.speculation.draft_model import DraftModelProposer
from engine.speculation.proposer import Proposer
from engine.speculation.rejection_sampler import Distribution
from tests.harness.engines import hasher
from tests.unit.engine.sampling.reference import processed
from tests.unit.engine.speculation.markov import MarkovModel, Table, Tally, context, random_table

VOCAB = 5
LIMIT = 1e-9
NUM_TOKENS = 80
"""Of one request."""

PLAIN = Sampling(max_tokens=1, temperature=1.0, ignore_eos=True, seed=0)

Outputs = dict[tuple[str, int], tuple[list[int], FinishReason | None]]


def world(seed: int, num_proposers: int, likeness: float) -> tuple[Table, list[Table]]:
    """A model's table, and one of each draft model, like it or not."""
    rng = np.random.default_rng(seed)
    model = random_table(rng, VOCAB, 0.5)
    others = [random_table(rng, VOCAB, 0.5) for _ in range(num_proposers)]
    return model, [likeness * model + (1.0 - likeness) * other for other in others]


def make_engine(
    model: MarkovModel | Table,
    proposers: Sequence[Proposer],
    rule: str = "multi_step",
    *,
    clock: Callable[[], float] = time.monotonic,
    **fields: Any,
) -> LLMEngine:
    """One that computes all that is guessed, or as `fields` of its speculation say."""
    fields = {"always": True} | fields
    config = EngineConfig(
        num_blocks=1024,
        max_num_tokens_per_step=512,
        max_num_running=32,
        speculation=SpeculationConfig(acceptance=rule, **fields),
    )
    model = model if isinstance(model, MarkovModel) else MarkovModel(model)
    return LLMEngine(config, model, proposers=proposers, clock=clock)


def draft_model_of(table: Table, *expansion: int, takes_trees: bool = True) -> DraftModelProposer:
    """It guesses by this table."""
    model = MarkovModel(table)
    model.guesses = Guesses.TREES if takes_trees else Guesses.CHAINS
    return DraftModelProposer(model, expansion, num_blocks=1024, max_num_tokens=512)


def requests_of(
    num_requests: int, seed: int, num_samples: int = 1, **sampling: Any
) -> list[Request]:
    """Each with a seed of its own."""
    fields = {"max_tokens": NUM_TOKENS, "temperature": 1.0, "ignore_eos": True} | sampling
    return [
        Request(
            f"r{index}",
            (1, index % VOCAB),
            Sampling(seed=(seed + index) % 2**64, **fields),  # type: ignore[arg-type]
            hasher(),
            num_samples=num_samples,
        )
        for index in range(num_requests)
    ]


def answer(engine: LLMEngine, requests: Sequence[Request]) -> Outputs:
    """By request and sample; 32 requests at a time."""
    outputs: Outputs = {}
    for start in range(0, len(requests), 32):
        for request in requests[start : start + 32]:
            engine.submit(request)
        while engine.has_work():
            for event in engine.step().events:
                assert event.error is None
                key = event.request_id, event.sample_index
                so_far = outputs.get(key, ([], None))[0]
                outputs[key] = [*so_far, *event.token_ids], event.finish_reason
    engine.check_integrity()
    return outputs


def _expected(table: Table, request: Request, output: Sequence[int]) -> Distribution:
    """By the reference of the processors, and truncation in a few words."""
    prompt, one = request.prompt_token_ids, request.sampling
    own = table[context(*[*prompt, *output][-2:], VOCAB)]
    logits = torch.from_numpy(np.log(own).astype(np.float32))
    draw = SamplingRequest(one, len(prompt) + len(output), num_output_tokens=len(output))
    scores = processed(logits, draw, prompt, output).numpy().astype(np.float64)
    shares = np.exp((scores - scores.max()) / one.temperature)
    if one.top_k:
        shares[shares < np.sort(shares)[-one.top_k]] = 0.0
    shares /= shares.sum()
    if one.top_p < 1.0:
        ranked = np.sort(shares)[::-1]
        shares[shares < ranked[int((np.cumsum(ranked) < one.top_p).sum())]] = 0.0
    shares[shares < one.min_p * shares.max()] = 0.0
    return shares / shares.sum()


def likelihood(table: Table, requests: Sequence[Request], outputs: Outputs) -> float:
    """Of the answers; by the token before each, that a distribution may depend on what was kept."""
    tally = Tally(VOCAB)
    for request in requests:
        is_plain = replace(request.sampling, max_tokens=1, seed=0) == PLAIN
        for index in range(request.num_samples):
            text = [*request.prompt_token_ids, *outputs[request.request_id, index][0]]
            for place in range(2, len(text)):
                group = context(text[place - 2], text[place - 1], VOCAB)
                expected = table[group]
                if not is_plain:
                    expected = _expected(table, request, text[2:place])
                tally.add(group, text[place], expected)
    return tally.likelihood()
