"""A router's stream that breaks gives back every handle that was not delivered."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from process.deadline import Deadline
from process.trace_spans import NOOP_SPAN
from services.prefill.server import PrefillSession


class Answer:
    def __init__(self, *, is_bad: bool) -> None:
        self.is_bad = is_bad
        self.num_taken_back = 0

    def take_back(self) -> None:
        self.num_taken_back += 1
        if self.is_bad:
            raise RuntimeError("the store is gone")


@pytest.mark.parametrize("bad", [(), (0,), (1,), (2,), (0, 1, 2)])
async def test_one_that_cannot_be_taken_back_keeps_no_other_from_it(bad: tuple[int, ...]) -> None:
    answers: list[Any] = [Answer(is_bad=place in bad) for place in range(3)]

    async def prefill(ask: Any, deadline: Deadline, sink: Any, tell: Any) -> None:
        tell(ask)  # each prompt is answered at once, by what it asks for

    worker: Any = SimpleNamespace(prefill=prefill)
    sink: Any = SimpleNamespace(answered=lambda answer: None)
    session = PrefillSession(worker)
    for key, answer in enumerate(answers):
        session.begin(key, answer, Deadline.after(60.0), sink, NOOP_SPAN)
    async with asyncio.timeout(60.0):
        await session.wait_idle()
    if bad:
        with pytest.raises(RuntimeError, match="the store is gone"):
            session.close()
    session.close()
    assert [answer.num_taken_back for answer in answers] == [1, 1, 1]
