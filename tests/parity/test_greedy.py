"""Engine == unmodified transformers, token for token, greedy, float32: through its code and through
our own decoder. On the GPU, too, where there is one: then these are its kernels' numbers.

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
from engine.engine import LLMEngine
from tests.conftest import LONG, SESSION_SEED, third
from tests.harness.models import FAMILIES, VOCAB_SIZE, Tiny
from tests.parity.conftest import DEVICES, endless, prompts_of

EDGES = [1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 127, 128, 129, 255, 256, 257, 600]
NUM_OUTPUT = 12
BUDGETS = [7, 16, 64, 100, 512]
# Of our own decoder, each run takes four families, by its seed; the full run all.
OWN = sorted(FAMILIES) if LONG else random.Random(SESSION_SEED).sample(sorted(FAMILIES), 4)
BY_DECODER = [("transformers", "cpu"), *(("own", device) for device in DEVICES)]
"""(decoder, device)"""

Get = Callable[[str], Tiny]


@pytest.fixture
def make(load: Callable[..., LLMEngine]) -> Callable[..., LLMEngine]:
    """`make(path, decoder, device, <EngineConfig fields>)`"""

    def go(path: object, decoder: str, device: str, **fields: Any) -> LLMEngine:
        engine = load(path, decoder=decoder, device=device, **fields)
        assert (engine.model_info.decoder == "own") == (decoder == "own")
        return engine

    return go


def _prompts(rng: random.Random, count: int, vocab_size: int = VOCAB_SIZE) -> dict[str, list[int]]:
    lengths = rng.sample(EDGES, min(count, len(EDGES)))
    lengths += [rng.randint(1, 600) for _ in range(count - len(lengths))]
    return prompts_of(rng, lengths, vocab_size)


@pytest.mark.parametrize(
    ("family", "decoder", "device"),
    [
        *((family, "transformers", "cpu") for family in FAMILIES),
        *((family, "own", device) for family in OWN for device in DEVICES),
    ],
)
@pytest.mark.timeout(600)
def test_a_ragged_batch_equals_transformers(
    *,
    family: str,
    decoder: str,
    device: str,
    get_tiny: Get,
    get_wide: Get,
    make: Callable[..., LLMEngine],
    run: Callable[..., Any],
    seed: int,
    scale: Callable[[int], int],
) -> None:
    """Small budgets cut prompts into chunks that share steps with decodes; the second time the
    blocks are cached."""
    rng = random.Random(f"{seed} {decoder} {family}")
    tiny = get_wide(family) if decoder == "own" else get_tiny(family)
    prompts = _prompts(rng, scale(200 if decoder == "transformers" else 120))
    expected = {name: tiny.generate(prompt, NUM_OUTPUT) for name, prompt in prompts.items()}
    left, engines = list(prompts), dict[int, LLMEngine]()
    while left:
        batch = [left.pop() for _ in range(min(len(left), rng.randint(1, 32)))]
        requests = {name: (prompts[name], endless(NUM_OUTPUT)) for name in batch}
        budget = rng.choice(BUDGETS)
        if budget not in engines:
            fields = {"max_num_tokens_per_step": budget, "max_num_running": 7}
            engines[budget] = make(tiny.path, decoder, device, **fields)
        for is_hit in (False, True):
            before = engines[budget].stats().num_local_prefix_tokens
            outputs = run(engines[budget], requests)
            for name, tokens in outputs.items():
                assert tokens == expected[name], (family, budget, is_hit, name)
            if is_hit:
                hit = engines[budget].stats().num_local_prefix_tokens - before
                assert hit == sum((len(prompts[name]) - 1) // 16 * 16 for name in batch)


@pytest.mark.parametrize(
    ("family", "block_size", "decoder", "device"),
    [
        *third(
            (family, block_size, "transformers", "cpu")
            for family, block_size in itertools.product(
                ["llama", "mistral-window", "qwen3"], [4, 1, 32]
            )
        ),
        *(("mistral-window", size, "own", device) for size in (1, 32) for device in DEVICES),
    ],
)
def test_the_block_size_changes_no_token(
    *,
    family: str,
    block_size: int,
    decoder: str,
    device: str,
    get_tiny: Get,
    get_wide: Get,
    make: Callable[..., LLMEngine],
    run: Callable[..., Any],
    seed: int,
) -> None:
    rng = random.Random(f"{seed} {family} {block_size}")
    tiny = get_wide(family) if decoder == "own" else get_tiny(family)
    fields = {"block_size": block_size, "max_num_tokens_per_step": 20, "max_num_running": 4}
    engine = make(tiny.path, decoder, device, **fields)
    prompts = prompts_of(rng, (1, 31, 32, 33))
    outputs = run(engine, {name: (own, endless(NUM_OUTPUT)) for name, own in prompts.items()})
    for name, prompt in prompts.items():
        assert outputs[name] == tiny.generate(prompt, NUM_OUTPUT)


@pytest.mark.parametrize(("decoder", "device"), BY_DECODER)
@pytest.mark.parametrize("name", bundled_names())
def test_the_bundled_models_equal_transformers(
    *,
    name: str,
    decoder: str,
    device: str,
    make: Callable[..., LLMEngine],
    run: Callable[..., Any],
    seed: int,
    scale: Callable[[int], int],
) -> None:
    """A trained model: its logits are as close together as real ones are."""
    rng = random.Random(f"{seed} {name}")
    path = resolve(name, files="all").path
    fields = {"dtype": "float32", "max_num_tokens_per_step": 100, "max_num_running": 32}
    engine = make(name, decoder, device, **fields)
    oracle = Tiny(name, path, AutoModelForCausalLM.from_pretrained(path, dtype="float32"))
    count = scale(200 if decoder == "transformers" else 120)
    prompts = _prompts(rng, count, engine.model_info.vocab_size)
    outputs = run(engine, {key: (prompt, endless(24)) for key, prompt in prompts.items()})
    for key, prompt in prompts.items():
        assert outputs[key] == oracle.generate(prompt, 24), (name, len(prompt))


def test_eos_ends_where_transformers_ends(
    get_tiny: Get, load: Callable[..., Any], run: Callable[..., Any], seed: int
) -> None:
    tiny = get_tiny("llama")
    prompt = prompts_of(random.Random(seed), [40])["0"]
    free = tiny.generate(prompt, 30)
    stop = free[11]
    sampling = endless(30, stop_token_ids=frozenset({stop}))
    assert run(load(tiny.path), {"a": (prompt, sampling)})["a"] == free[: free.index(stop) + 1]
