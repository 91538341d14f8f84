"""One body's requests at the front desk, several prompts at the same time. One asyncio loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from process.deadline import Deadline
from process.errors import AlreadyExists, BatonError, InvalidArgument
from protos import inference_pb2
from services.router.caller import Caller
from services.router.front_desk import FrontDesk
from services.router.request_trace import Call
from services.router.times import StageTimes

Take = Callable[[int, inference_pb2.GenerateResponse], Awaitable[None]]
"""Gets each message with the number of its prompt."""


_PROMPT_FIELDS = ("text", "token_ids.ids")


@dataclass(frozen=True)
class EachPrompt:
    """The requests of one body, named and ready."""

    desk: FrontDesk
    caller: Caller
    requests: Sequence[inference_pb2.GenerateRequest]
    times: StageTimes
    """Began with the body; the first request's."""
    call: Call
    most_at_once: int
    rename: Callable[[str], str]
    """What the body calls a field of its requests."""

    async def serve(self, take: Take) -> None:
        """Serve all of them.

        Raises: BatonError, which names fields as the body does, or ConnectionError of `take`: the
            first one; the other requests have been cancelled by then.
        """
        # One for the whole body: those that wait for others' end do not get their time anew.
        deadline = self.desk.deadline(self.requests[0])
        if len(self.requests) == 1:
            await self._one(0, take, deadline)
            return
        room = asyncio.Semaphore(self.most_at_once)

        async def in_turn(prompt: int) -> None:
            async with room:
                await self._one(prompt, take, deadline)

        problem: BaseException | None = None
        try:
            async with asyncio.TaskGroup() as group:
                for prompt in range(len(self.requests)):
                    group.create_task(in_turn(prompt))
        except* (BatonError, ConnectionError) as errors:
            problem = _first(errors)
        # Not raised above: what is raised there may come out as a group of its own.
        if problem is not None:
            raise problem from None

    async def _one(self, prompt: int, take: Take, deadline: Deadline) -> None:
        try:
            await self.desk.serve(
                self.requests[prompt],
                self.caller,
                deadline=deadline,
                send=partial(take, prompt),
                times=self.times if prompt == 0 else StageTimes(),
                call=self.call,
            )
        except InvalidArgument as error:
            field = error.field if len(self.requests) == 1 else _of_prompt(error.field, prompt)
            raise error.renamed(self.rename(field)) from None
        except AlreadyExists:
            raise AlreadyExists(
                f"idempotency-key: {self.requests[prompt].request_id} is under way with another "
                "body; send the same one, or another key"
            ) from None


def name_requests(requests: Sequence[inference_pb2.GenerateRequest], request_id: str) -> None:
    """Several prompts have an id each, the same ones when the body is sent again."""
    for number, request in enumerate(requests):
        request.request_id = request_id if len(requests) == 1 else f"{request_id}.{number}"


def _of_prompt(name: str, prompt: int) -> str:
    """A field's name with the number of the prompt in it, where it is the prompt's."""
    field, bracket, rest = name.partition("[")
    return f"{field}[{prompt}]{bracket}{rest}" if field in _PROMPT_FIELDS else name


def _first(errors: BaseExceptionGroup[Exception]) -> BaseException:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
