"""Exactness: whatever happens to a request on its way, its tokens are those that it gets alone.

The FakeModel's next token is a function of what really lies in the request's blocks: a block that
is missing, stale, swapped with another or someone else's is a wrong token from there on.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from checkpoints.resolve import resolve
from engine.config import EngineConfig
from engine.engine import LLMEngine
from engine.grammar.config import GrammarLimits
from engine.grammar.service import GrammarService
from engine.models.loader import load_model
from engine.request import GrammarKind, GrammarSpec
from engine.testing.fake_model import FakeModel
from tests.harness.adapters import save_adapter
from tests.harness.workloads import (
    PLAIN,
    SIZE,
    WINDOW,
    Bench,
    disturbed,
    small_engine,
    undisturbed,
    workload,
)

pytestmark = pytest.mark.usefixtures("one_compile_process")

GRAMMARS = (
    GrammarSpec(GrammarKind.REGEX, r"(19|20)[0-9]{2}-[01][0-9] is the date"),
    GrammarSpec(GrammarKind.CHOICE, choices=("yes", "no, thank you", "yesterday")),
    GrammarSpec(GrammarKind.JSON_SCHEMA, '{"type": "array", "items": {"enum": ["a", "bc"]}}'),
)


def _each(name: str, num: int, bench: Bench = PLAIN) -> Iterator[LLMEngine]:
    """Engines, each of which a random workload has left as if it had been undisturbed."""
    for index in range(num):
        rng = random.Random(f"{name} {index}")
        requests = workload(rng, bench)
        expected = undisturbed(requests, bench)
        engine = small_engine(rng, bench)
        assert disturbed(engine, requests, rng, expected) == expected, f"workload {name} {index}"
        yield engine


def test_random_workloads_end_as_if_undisturbed(seed: int, scale: Callable[[int], int]) -> None:
    """500 workloads: random chunk sizes, policies, prefix hits, samples, penalties, handovers amid
    answers, preemptions forced at random steps and by lack of blocks, swaps that are
    late, refused or lost."""
    causes: Counter[str] = Counter()
    num_shared = 0
    for engine in _each(f"{seed}", scale(500)):
        causes.update(dict(engine.stats().num_preemptions))
        num_shared += engine.stats().num_local_prefix_tokens
    # It was disturbed: a test that preempts nobody proves nothing.
    assert min(causes[cause] for cause in ("recompute", "swap", "refused", "lost")) > 0, causes
    assert num_shared > 0


def test_workloads_with_grammars(seed: int, scale: Callable[[int], int]) -> None:
    """100 more, half of whose requests follow a grammar, with text jumped over."""
    folder = resolve("baton-5m", files="tokenizer").path
    service = GrammarService.from_checkpoint(folder, 4096, GrammarLimits())
    bench = Bench(
        make_model=lambda: FakeModel(vocab_size=4096, context_window=WINDOW, block_size=SIZE),
        make_grammars=lambda: service,
        grammars=GRAMMARS,
    )
    try:
        assert all(_each(f"grammars {seed}", scale(100), bench))
    finally:
        service.close()


def test_workloads_on_the_bundled_model(
    seed: int, scale: Callable[[int], int], tmp_path: Path
) -> None:
    """60 on real attention over real KV, with two adapters and without, in float32: what is
    computed again, in other chunks and beside others, may differ by rounding, and no token may."""
    size = 8
    config = EngineConfig(
        model="baton-5m", device="cpu", dtype="float32", block_size=size, context_window=WINDOW,
        num_threads=1,
    )  # fmt: skip
    model = load_model(config)
    plain = AutoModelForCausalLM.from_pretrained(resolve("baton-5m", files="all").path)
    engine = LLMEngine(config, model)  # the model keeps them
    for index, name in enumerate(("first", "second")):
        engine.load_adapter(name, save_adapter(tmp_path / name, plain, seed + index))
    bench = Bench(make_model=lambda: model, size=size, adapters=("", "first", "second"))
    assert all(_each(f"bundled {seed}", scale(60), bench))
