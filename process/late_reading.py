"""Calls whose message is read only when it is known who calls, and while there is room for it.

gRPC reads a unary request whole before it asks anybody; one that streams is read by its handler. On
the wire the two are the same, so a method of one request is registered as one of a stream, of which
one message is read: after the guard, within the intake, and within a time. Until then a call costs
what HTTP/2 lets its client send ahead. Knows no error's status: it is told how a call is refused.
One asyncio loop.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
import grpc.aio

from process.errors import BatonError, DeadlineExceeded, InvalidArgument
from process.intake import Intake, Room

Guard = Callable[[str, Any], Awaitable[str]]
"""Told a method's path and the call's context before the call is handled: aborts it, or says whose
call it is."""

Refuse = Callable[[Any, BatonError], Awaitable[NoReturn]]
"""Ends the call of a context with an error."""

_KINDS = {
    "unary_unary": "stream_unary",
    "unary_stream": "stream_stream",
    "stream_unary": "stream_unary",
    "stream_stream": "stream_stream",
}


@dataclass(frozen=True)
class Door:
    """What stands before every method of one server."""

    guard: Guard
    refuse: Refuse
    intake: Intake | None = None
    """Room for messages that are read; None: without bound."""
    max_bytes: int = 0
    """Most that one message may have, with an intake."""
    read_s: float = 60.0
    """For a message to arrive; less where others wait for its room (`process.intake`)."""

    def handler(self, handler: Any, path: str) -> Any:
        """The same handler behind this door."""
        (kind,) = [kind for kind in _KINDS if getattr(handler, kind) is not None]
        behaviour = getattr(handler, kind)
        is_one = not handler.request_streaming
        if inspect.isasyncgenfunction(behaviour):

            async def streaming(requests: Any, context: Any) -> AsyncIterator[Any]:
                async with self._asked(path, requests, context, is_one) as asked:
                    async for reply in behaviour(asked, context):
                        yield reply

            passed: Any = streaming
        else:

            async def unary(requests: Any, context: Any) -> Any:
                async with self._asked(path, requests, context, is_one) as asked:
                    if not inspect.iscoroutinefunction(behaviour):  # generated: nobody serves it
                        await context.abort(
                            grpc.StatusCode.UNIMPLEMENTED, f"{path} is not served here"
                        )
                    return await behaviour(asked, context)

            passed = unary
        changes = {kind: None, _KINDS[kind]: passed, "request_streaming": True}
        return handler._replace(**changes)

    @asynccontextmanager
    async def _asked(
        self, path: str, requests: Any, context: Any, is_one: bool
    ) -> AsyncIterator[Any]:
        """What the handler is called with."""
        owner = await self.guard(path, context)
        if not is_one:
            yield requests
        elif self.intake is None:
            try:
                request = await self._read(context, nullcontext())
            except BatonError as error:
                await self.refuse(context, error)
            yield request
        else:
            room = self.intake.room(owner, self.max_bytes)
            try:
                request = await self._read_within(context, room)
            except BatonError as error:
                # By now the room is others': to refuse who does not read takes its time.
                await self.refuse(context, error)
            try:
                yield request
            finally:
                room.release()

    async def _read_within(self, context: Any, room: Room) -> Any:
        """As `_read`; the room is taken where it returns, and only there. Raises: NoCapacity."""
        await room.take()
        try:
            request = await self._read(context, room.reading())
            # One that is written otherwise may come out longer than it was sent.
            room.shrink(min(_num_bytes(request), room.num_bytes))
        except BaseException:
            room.release()
            raise
        return request

    async def _read(self, context: Any, reading: AbstractAsyncContextManager[None]) -> Any:
        """The one message. Raises: DeadlineExceeded; InvalidArgument; whatever `reading` does."""
        try:
            async with asyncio.timeout(self.read_s), reading:
                request = await context.read()
        except TimeoutError:
            problem = f"the request did not arrive within {self.read_s:g} s"
            raise DeadlineExceeded(problem) from None
        if request is grpc.aio.EOF:
            raise InvalidArgument("request", "there is none")
        return request


def _num_bytes(request: Any) -> int:
    if isinstance(request, bytes):
        return len(request)
    return request.ByteSize() if hasattr(request, "ByteSize") else 0
