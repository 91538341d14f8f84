"""Sampled output is a function of (model, prompt, parameters, seed, sample index): not of the batch
around it, the chunks it was computed in, a prefix hit, or the place where it was resumed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from engine.request import Request
from tests.harness.engines import block_hash
from tests.harness.models import Tiny
from tests.parity.conftest import endless, prompts_of, random_sampling

NUM_OUTPUT = 16


@pytest.mark.timeout(600)
def test_same_seed_same_tokens_whatever_the_batch(
    get_tiny: Callable[[str], Tiny],
    load: Callable[..., Any],
    run: Callable[..., Any],
    seed: int,
    scale: Callable[[int], int],
) -> None:
    rng = random.Random(f"{seed} sampled")
    path = get_tiny("qwen3").path
    count = max(8, scale(100))
    prompts = prompts_of(rng, (rng.randint(1, 150) for _ in range(count)))
    requests = {name: (own, random_sampling(rng, NUM_OUTPUT)) for name, own in prompts.items()}
    alone = load(path)
    expected: dict[str, list[int]] = {}
    for name, one in requests.items():
        expected |= run(alone, {name: one})
    for budget, running in ((512, 64), (33, 5), (8, 8)):
        engine = load(path, max_num_tokens_per_step=budget, max_num_running=running)
        names = rng.sample(list(requests), count)
        assert run(engine, {name: requests[name] for name in names}) == expected
    assert run(alone, requests) == expected  # with every prefix cached


def test_seed_and_sample_index_change_the_draw(
    get_tiny: Callable[[str], Tiny], load: Callable[..., Any], run: Callable[..., Any], seed: int
) -> None:
    """At temperature 50 over 260 tokens: 16 equal tokens by chance, about 260^-16."""
    engine = load(get_tiny("llama").path)
    requests = {
        f"{a} {b}": (
            list(range(2, 30)),
            endless(NUM_OUTPUT, temperature=50.0, seed=a, sample_index=b),
        )
        for a in (seed, seed + 1)
        for b in (0, 1)
    }
    assert len({tuple(tokens) for tokens in run(engine, requests).values()}) == 4


@pytest.mark.parametrize("num_drawn", [1, 5, NUM_OUTPUT - 1])
def test_a_resumed_request_draws_what_it_would_have_drawn(
    num_drawn: int,
    get_tiny: Callable[[str], Tiny],
    load: Callable[..., Any],
    run: Callable[..., Any],
    seed: int,
) -> None:
    """From its token ids, seed and parameters alone: on another engine, nothing loaded."""
    rng = random.Random(f"{seed} resumed")
    path = get_tiny("mistral").path
    prompt = prompts_of(rng, [37])["0"]
    sampling = endless(NUM_OUTPUT, temperature=5.0, seed=seed)
    whole = run(load(path), {"a": (prompt, sampling)})["a"]
    other = load(path, max_num_tokens_per_step=10, max_num_running=2)
    other.reserve(Request("a", tuple(prompt), sampling, block_hash))
    other.start("a", outputs=[whole[:num_drawn]])
    rest: list[int] = []
    while other.has_work():
        rest += [token for event in other.step().events for token in event.token_ids]
    assert whole[:num_drawn] + rest == whole
