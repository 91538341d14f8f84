"""Engine == unmodified transformers, token for token, greedy, float32.

Prompt lengths lie at block edges +-1 and at random; batches are ragged; chunk sizes do and do not
divide; with and without a prefix hit. 200 prompts a family in the full run.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from checkpoints.resolve import bundled_names, resolve
from engine.request import Sampling
from tests.conftest import third
from tests.harness.models import FAMILIES, VOCAB_SIZE, Tiny

EDGES = [1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 127, 128, 129, 255, 256, 257, 600]
NUM_OUTPUT = 12
BUDGETS = [7, 16, 64, 100, 512]


def _greedy(max_tokens: int = NUM_OUTPUT) -> Sampling:
    return Sampling(max_tokens=max_tokens, ignore_eos=True)


def _prompts(rng: random.Random, count: int, vocab_size: int) -> list[list[int]]:
    lengths = rng.sample(EDGES, min(count, len(EDGES)))
    lengths += [rng.randint(1, 600) for _ in range(count - len(lengths))]
    return [[rng.randrange(2, vocab_size) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.timeout(600)
def test_a_ragged_batch_equals_transformers(
    family: str,
    get_tiny: Callable[[str], Tiny],
    load: Callable[..., Any],
    run: Callable[..., Any],
    seed: int,
    scale: Callable[[int], int],
) -> None:
    rng = random.Random(f"{seed} {family}")
    tiny = get_tiny(family)
    prompts = _prompts(rng, scale(200), VOCAB_SIZE)
    expected = {str(i): tiny.generate(prompt, NUM_OUTPUT) for i, prompt in enumerate(prompts)}
    left = list(enumerate(prompts))
    engines: dict[int, Any] = {}
    while left:
        batch = [left.pop() for _ in range(min(len(left), rng.randint(1, 32)))]
        requests = {str(i): (prompt, _greedy()) for i, prompt in batch}
        budget = rng.choice(BUDGETS)
        if budget not in engines:
            engines[budget] = load(tiny.path, max_num_tokens_per_step=budget, max_num_running=7)
        for is_hit in (False, True):  # the second time the blocks are cached
            before = engines[budget].stats().num_local_prefix_tokens
            outputs = run(engines[budget], requests)
            for name, tokens in outputs.items():
                assert tokens == expected[name], (family, budget, is_hit, name)
            if is_hit:
                hit = engines[budget].stats().num_local_prefix_tokens - before
                assert hit == sum((len(prompt) - 1) // 16 * 16 for _, prompt in batch)


@pytest.mark.parametrize(
    ("family", "block_size"),
    third(itertools.product(["llama", "mistral-window", "qwen3"], [4, 1, 32])),
)
def test_the_block_size_changes_no_token(
    family: str,
    block_size: int,
    get_tiny: Callable[[str], Tiny],
    load: Callable[..., Any],
    run: Callable[..., Any],
    seed: int,
) -> None:
    rng = random.Random(f"{seed} {family} {block_size}")
    tiny = get_tiny(family)
    engine = load(tiny.path, block_size=block_size, max_num_tokens_per_step=20, max_num_running=4)
    prompts = {str(n): [rng.randrange(2, VOCAB_SIZE) for _ in range(n)] for n in (1, 31, 32, 33)}
    outputs = run(engine, {name: (prompt, _greedy()) for name, prompt in prompts.items()})
    for name, prompt in prompts.items():
        assert outputs[name] == tiny.generate(prompt, NUM_OUTPUT)


@pytest.mark.parametrize("name", bundled_names())
def test_the_bundled_models_equal_transformers(
    name: str,
    load: Callable[..., Any],
    run: Callable[..., Any],
    seed: int,
    scale: Callable[[int], int],
) -> None:
    """A trained model: its logits are as close together as real ones are."""
    rng = random.Random(f"{seed} {name}")
    path = resolve(name, files="all").path
    engine = load(name, max_num_tokens_per_step=100, max_num_running=32)
    oracle = Tiny(name, path, AutoModelForCausalLM.from_pretrained(path, dtype="float32"))
    prompts = _prompts(rng, scale(200), engine.model_info.vocab_size)
    requests = {str(i): (prompt, _greedy(24)) for i, prompt in enumerate(prompts)}
    outputs = run(engine, requests)
    for key, (prompt, _) in requests.items():
        assert outputs[key] == oracle.generate(prompt, 24), (name, len(prompt))


def test_eos_ends_where_transformers_ends(
    get_tiny: Callable[[str], Tiny], load: Callable[..., Any], run: Callable[..., Any], seed: int
) -> None:
    tiny = get_tiny("llama")
    engine = load(tiny.path)
    rng = random.Random(seed)
    prompt = [rng.randrange(2, VOCAB_SIZE) for _ in range(40)]
    free = tiny.generate(prompt, 30)
    stop = free[11]
    sampling = Sampling(max_tokens=30, stop_token_ids=frozenset({stop}), ignore_eos=True)
    assert run(engine, {"a": (prompt, sampling)})["a"] == free[: free.index(stop) + 1]
