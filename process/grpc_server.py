"""A gRPC server that no malformed request can end.

gRPC's asyncio server (1.85) decodes the path of a call of an unregistered method as UTF-8 in its
main loop: one such call whose path is not UTF-8, from any client that can connect, ends that loop,
and with it the server, for good. So calls of methods that were not registered never reach that
loop: they are answered with UNIMPLEMENTED here, and their path is not decoded.

Each method stands behind a `Door`, where there is one: also a method that its servicer adds
tomorrow.

A message that cannot be read becomes InvalidArgument for its caller: before the handler sees it
(`check_readable`), or, one in a stream, where the handler reads it.

It uses names of gRPC that are not public, for no public one is called before that decoding:
pyproject.toml bounds grpcio to the minor version that they were read in, and
tests/unit/process/test_grpc_server.py lists them. One asyncio loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc._cython import cygrpc
from grpc.aio import _server

from process.errors import InvalidArgument
from process.late_reading import Door

_Read = Callable[[bytes], Any]

ExecuteBatchError: type[Exception] = cygrpc.ExecuteBatchError
"""What gRPC raises where a call can send nothing more, such as behind a write that is stuck."""


_MAX_REFUSALS = 256
"""Calls of unregistered methods that are being answered."""
_REFUSE_S = 5.0
"""For such an answer to go out."""


class _Unreadable:
    """What a handler is called with instead of a request that cannot be read."""


def check_readable(request: object) -> None:
    """Raises: InvalidArgument for a request that could not be read."""
    if isinstance(request, _Unreadable):
        raise _unreadable()


def _unreadable() -> InvalidArgument:
    return InvalidArgument("request", "cannot be read")


def _reading_one(read: _Read) -> _Read:
    """gRPC knows no error here but its own: the handler has to say it."""

    def tolerant(data: bytes) -> Any:
        try:
            return read(data)
        except DecodeError:
            return _Unreadable()

    return tolerant


def _reading_many(read: _Read) -> _Read:
    def telling(data: bytes) -> Any:
        try:
            return read(data)
        except DecodeError as error:
            raise _unreadable() from error

    return telling


class _Core(cygrpc.AioServer):  # type: ignore[misc]
    def __init__(self, loop: asyncio.AbstractEventLoop, *args: Any) -> None:
        super().__init__(loop, *args)
        self._serving_loop = loop
        self._no_methods = cygrpc._MethodResolver([], {})  # noqa: SLF001
        self._refusing: set[asyncio.Task[None]] = set()

    async def _request_call(self) -> Any:
        """The next call of an unregistered method, for gRPC's main loop: it gets none."""
        while True:
            call = await super()._request_call()
            if len(self._refusing) < _MAX_REFUSALS:
                task = self._serving_loop.create_task(self._refuse(call))
                self._refusing.add(task)
                task.add_done_callback(self._refusing.discard)
            # Beyond that many, dropping the call cancels it.

    async def _refuse(self, call: Any) -> None:
        """Answer UNIMPLEMENTED, as gRPC does for a method that it does not find."""
        # Its client has gone or reads nothing, or its headers are no text: dropping cancels it.
        with contextlib.suppress(TimeoutError, ExecuteBatchError, UnicodeDecodeError):
            async with asyncio.timeout(_REFUSE_S):
                await cygrpc._handle_rpc(  # noqa: SLF001
                    "", self._no_methods, (), call, self._serving_loop, False
                )


class _Server(_server.Server):
    def __init__(self, options: Sequence[tuple[str, Any]], door: Door | None) -> None:
        self._door = door
        self._loop = cygrpc.get_working_loop()
        self._server = _Core(self._loop, None, (), None, tuple(options), None)

    def add_registered_method_handlers(
        self, service_name: str, method_handlers: Mapping[str, Any]
    ) -> None:
        """Each with its way to read requests in ours."""
        readers = {True: _reading_many, False: _reading_one}
        tolerant = {
            name: handler._replace(
                request_deserializer=readers[handler.request_streaming](
                    handler.request_deserializer
                )
            )
            if handler.request_deserializer is not None  # else it takes bytes and reads them itself
            else handler
            for name, handler in method_handlers.items()
        }
        if self._door is not None:
            tolerant = {
                name: self._door.handler(handler, f"/{service_name}/{name}")
                for name, handler in tolerant.items()
            }
        super().add_registered_method_handlers(service_name, tolerant)


def make(options: Sequence[tuple[str, Any]], door: Door | None = None) -> grpc.aio.Server:
    """A server of registered methods, as the generated `add_..._to_server` register them.

    Raises: RuntimeError when this gRPC keeps no registered methods apart: they would be dropped.
    """
    if not hasattr(cygrpc.AioServer, "_request_registered_call"):
        raise RuntimeError("this grpcio is too old: install 1.85")
    return cast(grpc.aio.Server, _Server(options, door))
