"""A router's stream that breaks gives back every handle that nobody heard of."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from process.deadline import Deadline
from process.trace_spans import NOOP_SPAN
from services.prefill.session import PrefillSession


class Answer:
    def __init__(self, problem: Exception | None) -> None:
        self.problem = problem
        self.num_taken_back = 0

    def take_back(self) -> None:
        self.num_taken_back += 1
        if self.problem is not None:
            raise self.problem


class Worker:
    """Each prompt is answered at once; what it asks for is its answer."""

    async def prefill(self, ask: Any, deadline: Deadline, sink: Any, tell: Any) -> None:
        tell(ask)


class Sink:
    def answered(self, answer: Any) -> None:
        pass

    def failed(self, error: BaseException) -> None:
        raise AssertionError from error


@pytest.mark.parametrize("bad", [(), (0,), (1,), (2,), (0, 1, 2)])
async def test_one_that_cannot_be_taken_back_keeps_no_other_from_it(bad: tuple[int, ...]) -> None:
    answers: list[Any] = [
        Answer(RuntimeError("the store is gone") if place in bad else None) for place in range(3)
    ]
    session = PrefillSession(Worker())  # type: ignore[arg-type]
    for key, answer in enumerate(answers):
        session.begin(key, answer, Deadline.after(60.0), Sink(), NOOP_SPAN)  # type: ignore[arg-type]
    async with asyncio.timeout(60.0):
        await session.wait_idle()
    if bad:
        with pytest.raises(RuntimeError, match="the store is gone"):
            session.close()
    else:
        session.close()
    assert [answer.num_taken_back for answer in answers] == [1, 1, 1]
    session.close()
    assert [answer.num_taken_back for answer in answers] == [1, 1, 1]
