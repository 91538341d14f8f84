"""What the largest step takes is measured on steps as large as an engine's can be."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.batch import Batch
from engine.config import EngineConfig
from engine.errors import LoadError
from engine.models.memory_profile import largest_step_bytes
from engine.scheduler import MAX_PROMPT_ROWS
from engine.speculation.config import SpeculationConfig


class _Model:
    """Counts; nothing of it lies on a device."""

    def __init__(self, device: str = "cuda:0", error: Exception | None = None) -> None:
        self.info = SimpleNamespace(device=device, context_window=100, weight_bytes=123)
        self.batches: list[Batch] = []
        self._error = error

    def make_memory(self, num_blocks: int) -> int:
        return num_blocks

    def attach(self, memory: int) -> None:
        assert memory == 1

    def forward(self, batch: Batch) -> torch.Tensor:
        if self._error is not None:
            raise self._error
        self.batches.append(batch)
        return torch.zeros(len(batch.draw_indices), 8)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("synchronize", "reset_peak_memory_stats", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 1000)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 1700)


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(("tokens", "running"), [(512, 64), (64, 64), (7, 1), (1, 1)])
def test_steps_are_as_large_as_they_can_be(tokens: int, running: int) -> None:
    config = EngineConfig(max_num_tokens_per_step=tokens, max_num_running=running)
    model: Any = _Model()
    assert largest_step_bytes(model, config) == 700
    decodes, mixed = model.batches
    assert len(decodes.token_ids) == len(decodes.draw_indices) == running
    assert len(mixed.token_ids) == tokens
    for batch in model.batches:
        ends = [sum(span.num_tokens for span in batch.spans[: i + 1]) for i in range(running)]
        draws = {end - 1 for end in ends[: min(running, len(batch.spans))]}
        scored = range(len(batch.token_ids))[-MAX_PROMPT_ROWS:]
        assert list(batch.draw_indices) == sorted(draws.union(scored))
        assert not any(span.block_ids for span in batch.spans)
        assert max(span.num_tokens for span in batch.spans) <= 100


@pytest.mark.usefixtures("cuda")
def test_a_step_that_does_not_fit_says_so_in_one_line() -> None:
    model: Any = _Model(error=torch.cuda.OutOfMemoryError("tried 5 GiB\nmore"))
    with pytest.raises(LoadError, match=r"^a step of 512 tokens does not fit on cuda:0 .*lower"):
        largest_step_bytes(model, EngineConfig())


def test_nothing_is_measured_on_a_cpu() -> None:
    model: Any = _Model("cpu")
    assert largest_step_bytes(model, EngineConfig()) == 0
    assert not model.batches


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(("num_layers", "layers"), [(0, ()), (2, (0, 1)), (32, (0, 1, 2))])
def test_what_heads_may_want_of_a_step_is_measured(
    num_layers: int, layers: tuple[int, ...]
) -> None:
    model: Any = _Model()
    model.ends = SimpleNamespace(num_layers=num_layers)
    config = EngineConfig(speculation=SpeculationConfig(draft_heads=("x",)))
    largest_step_bytes(model, config)
    for batch in model.batches:
        assert batch.wants_hidden and batch.wants_every_hidden
        assert batch.wants_layers == layers
