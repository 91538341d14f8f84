"""Several prompts of one body: one time for all of them, and one error of theirs."""

from __future__ import annotations

from typing import Any

import pytest

from process.deadline import Deadline
from process.errors import Unavailable
from protos import inference_pb2
from services.router.callers import ANYBODY
from services.router.openai.routes import EachPrompt
from services.router.request_stats import StageTimes
from services.router.tracing import TracedCall

BUDGET_S = 5.0


class Desk:
    """Serves each request with one message, and notes its deadline."""

    def __init__(self) -> None:
        self.deadlines: list[Deadline] = []

    def deadline(self, request: inference_pb2.GenerateRequest) -> Deadline:
        return Deadline.after(BUDGET_S)

    async def serve(self, request: Any, caller: Any, *, deadline: Deadline, **more: Any) -> None:
        self.deadlines.append(deadline)
        await more["send"](inference_pb2.GenerateResponse())


def each(desk: Any, num_prompts: int) -> EachPrompt:
    requests = [inference_pb2.GenerateRequest(text="a") for _ in range(num_prompts)]
    return EachPrompt(desk, ANYBODY, requests, StageTimes(), TracedCall(), 1, str)


async def test_those_that_wait_for_others_do_not_get_their_time_anew() -> None:
    desk = Desk()
    taken: list[int] = []

    async def take(prompt: int, message: inference_pb2.GenerateResponse) -> None:
        taken.append(prompt)

    await each(desk, 5).serve(take)
    assert taken == [0, 1, 2, 3, 4]
    assert len(set(map(id, desk.deadlines))) == 1


@pytest.mark.parametrize("error", [Unavailable("away"), ConnectionResetError("gone")])
@pytest.mark.parametrize("num_prompts", [1, 3])
async def test_what_ends_one_ends_all_and_is_raised_as_it_is(
    error: Exception, num_prompts: int
) -> None:
    desk = Desk()

    async def take(prompt: int, message: inference_pb2.GenerateResponse) -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        await each(desk, num_prompts).serve(take)
    assert caught.value is error
