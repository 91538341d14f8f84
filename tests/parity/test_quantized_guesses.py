"""Guesses over a quantized cache on real attention, by both decoders: the tokens are plain
decoding's over the same cache, but for near ties (test_kv_dtypes.py says why)."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.engine import LLMEngine
from engine.models.loader import load_model
from engine.request import Request, Sampling
from engine.speculation.config import SpeculationConfig
from tests.conftest import LONG, SESSION_SEED
from tests.harness.engines import block_hash
from tests.harness.models import VOCAB_SIZE, Tiny, save, small_config
from tests.parity.test_kv_dtypes import NUM_OUTPUT, QUANTIZED, _assert_same, _run
from tests.unit.engine.speculation.test_manager import KnowsTheAnswers

FAMILIES = "llama", "mistral-window", "qwen3"
OTHERS = "gemma2", "deepseek_v3"
"""Capped scores; latents. No experts: which of them is taken may turn on a byte."""
_RNG = random.Random(SESSION_SEED)
CHOSEN = [
    (decoder, family, *_RNG.choice(QUANTIZED))
    for decoder, families in (("own", FAMILIES), ("transformers", FAMILIES + OTHERS))
    for family in (families if LONG else [_RNG.choice(families)])
]


@pytest.mark.parametrize(("decoder", "family", "kv_dtype", "kv_scale"), CHOSEN)
def test_guesses_change_no_token(
    decoder: str,
    family: str,
    kv_dtype: str,
    kv_scale: str,
    get_tiny: Callable[[str], Tiny],
    tmp_path: Path,
    seed: int,
) -> None:
    """Several at once, chunked, preempted, one of two samples; blocks of 4 and of 8."""
    rng = random.Random(f"{seed} {family} {kv_dtype} {kv_scale}")
    if family in FAMILIES:
        path, vocab_size = get_tiny(family).path, VOCAB_SIZE
    else:
        config = small_config(family)
        config.first_k_dense_replace = config.num_hidden_layers
        path, vocab_size = tmp_path / family, int(config.vocab_size)
        save(config, path, seed % 2**30)
    config = EngineConfig(
        model=str(path),
        device="cpu",
        decoder=decoder,
        kv_dtype=kv_dtype,
        kv_scale=kv_scale,
        block_size=rng.choice([4, 8]),
        context_window=128,
        num_threads=1,
        num_blocks=36,
        preemption="recompute",
        max_num_tokens_per_step=40,
        max_num_running=4,
    )
    model = load_model(config)
    requests = {
        str(index): Request(
            str(index),
            tuple(rng.randrange(2, vocab_size) for _ in range(length)),
            Sampling(max_tokens=NUM_OUTPUT, ignore_eos=True, logprobs=2, temperature=0.0),
            block_hash,
            num_samples=1 + (length == 9),
        )
        for index, length in enumerate((1, 7, 8, 9, 31))
    }
    plain = LLMEngine(config, model)
    expected = {}
    for name, request in requests.items():
        expected |= _run(plain, {name: request})
    answers = {
        name: {
            index: (tuple(token for token, _ in expected[name, index]), None, None, "")
            for index in range(request.num_samples)
        }
        for name, request in requests.items()
    }
    guessing = replace(config, speculation=SpeculationConfig(max_num_nodes=9, always=True))
    engine = LLMEngine(guessing, model, proposers=[KnowsTheAnswers(rng, answers, vocab_size)])
    _assert_same(_run(engine, requests), expected, is_exact=False)
    counts = engine.metrics()
    assert 0 < counts.num_kept_tokens < counts.num_guessed_tokens
