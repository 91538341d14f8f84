"""Engines on a FakeModel: its next token is a function of what really lies in the KV blocks, so any
mistake with blocks shows as a wrong token. Every engine made here is checked after its test, and
every such test runs twice: with plain steps, and with launches ahead that are computed as late as
may be, so that a block which was given away too early shows, too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.engine import LLMEngine
from engine.models.interface import LoadedModel
from engine.request import Request
from engine.testing.ahead_model import AheadModel
from engine.testing.fake_model import FakeModel
from tests.harness import engines
from tests.harness.compile_process import one_compile_process as one_compile_process


@pytest.fixture
def make_request() -> Callable[..., Request]:
    return engines.make_request


@pytest.fixture(params=["plain", "ahead"])
def make_engine(request: pytest.FixtureRequest) -> Iterator[Callable[..., LLMEngine]]:
    """`make_engine(num_blocks=..., budget=..., running=..., <FakeModel fields>)`."""
    made: list[LLMEngine] = []

    def make(
        *,
        num_blocks: int = 64,
        budget: int = 16,
        running: int = 8,
        preemption: str = "never",
        **model: Any,
    ) -> LLMEngine:
        config = EngineConfig(
            num_blocks=num_blocks,
            max_num_tokens_per_step=budget,
            max_num_running=running,
            preemption=preemption,
        )
        fake: LoadedModel = FakeModel(**({"context_window": num_blocks * 4} | model))
        if request.param == "ahead":
            fake = AheadModel(fake, is_late=True)
        engine = LLMEngine(config, fake)
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.check_integrity()
