"""A model whose forward passes write late."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from engine.sampling import pipeline
from engine.sampling.copies import Mark
from tests.unit.engine.speculation.late_steps import LateFake


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[LateFake]:
    """A model that writes no sooner than its draws, or its end, are waited for."""
    fake = LateFake()
    begin = pipeline.begin

    def begin_late(*args: Any, **fields: Any) -> Callable[[], Any]:
        drawing = begin(*args, **fields)

        def wait() -> Any:
            fake.num_waits += 1
            fake.settle()
            return drawing()

        return wait

    class LateMark(Mark):
        def wait(self) -> None:
            fake.num_waits += 1
            fake.settle()
            super().wait()

    monkeypatch.setattr("engine.begun.pipeline.begin", begin_late)
    monkeypatch.setattr("engine.begun.Mark", LateMark)
    yield fake
