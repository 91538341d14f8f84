"""One prompt at a real prefill worker, on a stream of its own: what a router's end sees."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from process import serving
from process.errors import BatonError
from protos import prefill_pb2

KEY = 7
_MARGIN_S = 20.0
"""A worker that says nothing for so long beyond a request's own time is stuck."""


class PrefillCall:
    """Its messages as they come; its end is what the worker says of it, or what the broken stream
    means, as an error.
    """

    def __init__(
        self,
        stub: Any,
        request: prefill_pb2.PrefillRequest,
        *,
        timeout_s: float | None = None,
        traceparent: str = "",
    ) -> None:
        """timeout_s: the request's own time; None: it names none."""
        if timeout_s is not None:
            request.budget_ms = int(timeout_s * 1000)
        request.traceparent = traceparent
        self._bound_s = (timeout_s or 0.0) + _MARGIN_S
        self._stream = stub.Stream()
        self._commands: asyncio.Queue[prefill_pb2.PrefillCommand] = asyncio.Queue()
        self._events: list[prefill_pb2.PrefillEvent] = []
        self._is_over = False
        self._commands.put_nowait(prefill_pb2.PrefillCommand(key=KEY, prefill=request))
        self._writer = asyncio.create_task(self._write())

    async def read(self) -> Any:
        """The next message; grpc.aio.EOF behind the account. Raises: BatonError."""
        while not self._events:
            if self._is_over:
                return grpc.aio.EOF
            await self._take()
        event = self._events.pop(0)
        assert event.key == KEY
        if event.HasField("failed"):
            await self._end()
            failed = event.failed
            retry_after_s = failed.retry_after_s if failed.HasField("retry_after_s") else None
            raise serving.error_of_code(failed.code, failed.message, retry_after_s)
        if event.reply.HasField("leg"):
            await self._end()
        return event.reply

    async def answer(self) -> list[prefill_pb2.PrefillReply]:
        """First tokens, and the account behind them. Partial handles are left out, which come
        before them or not, as quick as the store is."""
        return [message async for message in self if not message.handle.is_partial]

    async def __aiter__(self) -> AsyncIterator[prefill_pb2.PrefillReply]:
        while isinstance(message := await self.read(), prefill_pb2.PrefillReply):
            yield message

    def cancel(self) -> None:
        """As a router that does not want it any more; nothing when it is over."""
        cancel = prefill_pb2.CancelPrefill()
        self._commands.put_nowait(prefill_pb2.PrefillCommand(key=KEY, cancel=cancel))

    def vanish(self) -> None:
        """As a router that is gone: the stream breaks."""
        self._is_over = True
        self._writer.cancel()
        self._stream.cancel()

    async def error(self) -> BatonError | None:
        """How it ends; None: with an account."""
        try:
            while await self.read() is not grpc.aio.EOF:
                pass
        except BatonError as error:
            return error
        return None

    async def _take(self) -> None:
        try:
            async with asyncio.timeout(self._bound_s):
                message: Any = await self._stream.read()
        except grpc.aio.AioRpcError as error:
            await self._end()
            raise serving.error_from_rpc(error) from error
        assert isinstance(message, prefill_pb2.PrefillEvents), "the stream ended without a word"
        self._events += message.events

    async def _end(self) -> None:
        """No more is asked for: the worker ends the stream, in order."""
        self._is_over = True
        self._writer.cancel()
        await asyncio.gather(self._writer, return_exceptions=True)
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await self._stream.done_writing()

    async def _write(self) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                await self._stream.write(await self._commands.get())
