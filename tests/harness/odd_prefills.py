"""Fake prefill workers that say the wrong thing, or at the wrong time."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from services.router.fakes.prefill import FakePrefill
from services.router.fakes.worker import Context


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
