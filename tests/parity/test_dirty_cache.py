"""What lies in a block before its request writes there must not matter: not even NaN, which a
weight of zero does not hide (0 * NaN = NaN). It comes from a request whose own logits overflowed,
and from refused transfers.

Compared with the same engine without it, to the bit: another one rounds otherwise, and a tie of two
tokens would fail once in some hundred runs."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine.layers.torch_attention import Scratch
from engine.request import Sampling
from tests.harness.models import VOCAB_SIZE, Tiny

CASES = [
    ("llama", "transformers", "cpu"),
    ("mistral-window", "transformers", "cpu"),
    ("qwen3", "own", "cpu"),
    ("mistral-window", "own", "cpu"),
    # Where steps are launched ahead: they clear no block that they enter.
    *([("qwen3", "own", "cuda:0")] if torch.cuda.is_available() else []),
]

SMALL: dict[str, Any] = {"dtype": "float32", "max_num_tokens_per_step": 24, "max_num_running": 8}


@pytest.mark.parametrize(("family", "decoder", "device"), CASES)
def test_nan_in_every_free_block_changes_no_token(
    family: str,
    decoder: str,
    device: str,
    get_tiny: Callable[[str], Tiny],
    load: Callable[..., Any],
    run: Callable[..., Any],
    seed: int,
) -> None:
    rng = random.Random(seed)
    tiny = get_tiny(family)
    prompts = [[rng.randrange(2, VOCAB_SIZE) for _ in range(n)] for n in (1, 5, 16, 17, 33, 100)]
    sampling = Sampling(max_tokens=40, ignore_eos=True)
    outputs = []
    for left_there in (0.0, float("nan")):
        engine = load(tiny.path, decoder=decoder, device=device, **SMALL)
        engine.kv.cache.fill_(left_there)
        asked = {str(i): (prompt, sampling) for i, prompt in enumerate(prompts)}
        outputs.append(run(engine, asked))
    assert outputs[0] == outputs[1]
    assert all(len(tokens) == 40 for tokens in outputs[0].values())


def test_nan_in_what_steps_gather_into_changes_no_token(
    get_tiny: Callable[[str], Tiny],
    load: Callable[..., Any],
    run: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
) -> None:
    """On a CPU it is the same memory in each layer of each step, and gone when the engine is."""
    taken: set[Scratch] = set()
    take = Scratch.take

    def dirty(one: Scratch, *wanted: Any) -> torch.Tensor:
        taken.add(one)
        return take(one, *wanted).fill_(float("nan"))

    rng = random.Random(seed)
    tiny = get_tiny("llama")
    prompts = [[rng.randrange(2, VOCAB_SIZE) for _ in range(n)] for n in (1, 17, 33, 60)]
    sampling = Sampling(max_tokens=20, ignore_eos=True)
    asked = {str(i): (prompt, sampling) for i, prompt in enumerate(prompts)}
    clean = run(load(tiny.path, decoder="transformers", device="cpu", **SMALL), asked)
    monkeypatch.setattr(Scratch, "take", dirty)
    engine = load(tiny.path, decoder="transformers", device="cpu", **SMALL)
    assert run(engine, asked) == clean
    assert all(len(tokens) == 20 for tokens in clean.values())
    engine.check_integrity()
    (scratch,) = taken
    assert scratch.num_bytes > 0
    engine.close()
    assert scratch.num_bytes == 0
    engine.check_integrity()
