"""One tiny checkpoint per family and session, and a way to run requests through an engine."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.engine import LLMEngine, load_engine
from engine.request import Request, Sampling
from tests.conftest import SESSION_SEED
from tests.harness.engines import all_events, block_hash
from tests.harness.models import FAMILIES, VOCAB_SIZE, Tiny, save

DEVICES = ["cpu", *(["cuda:0"] if torch.cuda.is_available() else [])]
ROUTES = [
    ("llama", "transformers"),
    ("mistral-window", "transformers"),
    ("llama", "own"),
    ("qwen3", "own"),
]
"""(family, decoder)"""


def endless(max_tokens: int, **fields: Any) -> Sampling:
    return Sampling(max_tokens=max_tokens, ignore_eos=True, **fields)


def random_sampling(rng: random.Random, max_tokens: int) -> Sampling:
    return Sampling(
        max_tokens=max_tokens,
        ignore_eos=True,
        temperature=rng.choice([0.0, 0.7, 1.0, 3.0]),
        top_k=rng.choice([0, 0, 5, 50]),
        top_p=rng.choice([1.0, 0.9, 0.5]),
        min_p=rng.choice([0.0, 0.0, 0.05]),
        seed=rng.getrandbits(64),
        sample_index=rng.randrange(4),
    )


def prompts_of(
    rng: random.Random, lengths: Iterable[int], vocab_size: int = VOCAB_SIZE
) -> dict[str, list[int]]:
    """Random ones, by their place."""
    return {
        str(place): [rng.randrange(2, vocab_size) for _ in range(length)]
        for place, length in enumerate(lengths)
    }


@pytest.fixture(scope="session")
def get_tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tiny]:
    """`get_tiny(family)`: random weights by this run's seed, made once."""
    return _maker(tmp_path_factory)


@pytest.fixture(scope="session")
def get_wide(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tiny]:
    """`get_wide(family)`: as `get_tiny`, with heads that kernels do."""
    return _maker(tmp_path_factory, head_dim=16)


def _maker(folders: pytest.TempPathFactory, **changes: int) -> Callable[[str], Tiny]:
    made: dict[str, Tiny] = {}

    def get(family: str) -> Tiny:
        if family not in made:
            config, path = FAMILIES[family](), folders.mktemp(family)
            for name, value in changes.items():
                setattr(config, name, value)
            made[family] = Tiny(family, path, save(config, path, SESSION_SEED))
        return made[family]

    return get


@pytest.fixture
def load() -> Callable[..., LLMEngine]:
    """`load(path, <EngineConfig fields>)`."""

    def make(path: object, **fields: Any) -> LLMEngine:
        fields = {"num_threads": 1, "device": "cpu", "num_blocks": 1000} | fields
        return load_engine(EngineConfig(model=str(path), **fields))

    return make


@pytest.fixture
def run() -> Callable[..., dict[str, list[int]]]:
    """`run(engine, {id: (prompt, Sampling)})` -> output tokens by id. All start before the first
    step; integrity is checked after every step."""

    def go(
        engine: LLMEngine, requests: dict[str, tuple[list[int], Sampling]]
    ) -> dict[str, list[int]]:
        for name, (prompt, sampling) in requests.items():
            engine.reserve(Request(name, tuple(prompt), sampling, block_hash))
            engine.start(name)
        outputs: dict[str, list[int]] = {name: [] for name in requests}
        for event in all_events(engine):
            assert event.error is None
            outputs[event.request_id] += event.token_ids
        assert engine.stats().num_referenced_blocks == 0
        return outputs

    return go
