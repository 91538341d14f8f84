"""Fake prefill workers that say the wrong thing, or at the wrong time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from services.router.testing.fake_workers import Context, FakeDecode, FakePrefill
from tests.harness.waiting import until


class AccountAtCancel(FakePrefill):
    """Whose account crosses the cancel: it says its last word when it hears of it."""

    async def _live(self, key: int, asked: Any, events: Any) -> None:
        await super()._live(key, asked, events)
        word = events._queue[-1]
        assert word.failed.code == grpc.StatusCode.CANCELLED.value[0]
        word.reply.CopyFrom(self._last(asked, is_over=False))


class EndingStream(FakePrefill):
    """That ends a stream when `ends` is set: this one, not the one that it is met again by."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.ends = asyncio.Event()
        self.num_streams = 0

    async def Stream(self, commands: Any, context: Context) -> Any:
        self.num_streams += 1
        inner = super().Stream(commands, context)
        reading = asyncio.ensure_future(anext(inner))
        while True:
            ending = asyncio.create_task(self.ends.wait())
            done, _ = await asyncio.wait({reading, ending}, return_when=asyncio.FIRST_COMPLETED)
            ending.cancel()
            if reading not in done:
                self.ends.clear()
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
                return
            yield reading.result()
            reading = asyncio.ensure_future(anext(inner))


class Garbling(FakePrefill):
    """Each of whose messages has an event without news, while `garbles`."""

    garbles = True

    async def Stream(self, commands: Any, context: Context) -> Any:
        async for message in super().Stream(commands, context):
            if self.garbles:
                message.events.add(key=7)
            yield message


class LeavesOut(FakePrefill):
    """None of whose messages tells the first of its log probabilities of the prompt."""

    async def Stream(self, commands: Any, context: Context) -> Any:
        async for message in super().Stream(commands, context):
            for event in message.events:
                del event.reply.prompt_logprobs[:1]
            yield message


class Paced(FakePrefill):
    """Sends a partial handle once the decode worker has those before it: of all that wait on its
    stream only the newest is passed on."""

    decode: FakeDecode

    async def _replies(self, request: Any) -> AsyncIterator[Any]:
        num_sent = len(self.decode.prefetched)
        async for reply in super()._replies(request):
            yield reply
            if reply.handle.is_partial:
                num_sent += 1
                await until(lambda num=num_sent: len(self.decode.prefetched) >= num)


class Talkative(FakePrefill):
    """Sends partial handles that nobody wants."""

    def _partials(self, request: Any, first: int, count: int) -> Any:
        return [self._partial(request, index) for index in range(first, first + count)]


class Long(FakePrefill):
    """Partial handles of long prompts, told apart by the tokens they cover."""

    def _partial(self, request: Any, index: int) -> Any:
        reply = super()._partial(request, index)
        reply.handle.num_tokens = index + 1
        reply.handle.signature = bytes(400_000)
        return reply


class HalfHandle(FakePrefill):
    """Ends with a handle that is still partial."""

    def _last(self, request: Any, *, is_over: bool) -> Any:
        reply = super()._last(request, is_over=is_over)
        reply.handle.is_partial = True
        return reply


class NoFirst(FakePrefill):
    """A whole handle where a first token should be."""

    def _partial(self, request: Any, index: int) -> Any:
        reply = super()._partial(request, index)
        reply.handle.is_partial = False
        return reply
