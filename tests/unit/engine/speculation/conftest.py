"""A model whose forward passes write late."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from engine.sampling.copies import Mark
from engine.sampling.metadata import SamplerOutput
from engine.sampling.sampler import PendingSample, Sampler
from tests.unit.engine.speculation.late_steps import LateFake


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[LateFake]:
    """A model that writes no sooner than its draws, or its end, are waited for."""
    fake = LateFake()
    begin = Sampler.begin

    class LateSample:
        def __init__(self, pending: PendingSample) -> None:
            self.pending = pending

        def result(self) -> list[SamplerOutput]:
            fake.num_waits += 1
            fake.settle()
            return self.pending.result()

    def begin_late(*args: Any, **fields: Any) -> LateSample:
        return LateSample(begin(*args, **fields))

    class LateMark(Mark):
        def wait(self) -> None:
            fake.num_waits += 1
            fake.settle()
            super().wait()

    monkeypatch.setattr(Sampler, "begin", begin_late)
    monkeypatch.setattr("engine.begun.Mark", LateMark)
    yield fake
