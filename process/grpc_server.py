"""A gRPC server that no malformed request can end.

gRPC's asyncio server (1.85) decodes a request's path as UTF-8 in its main loop: one request whose
path is not UTF-8, from anybody who can connect, ends that loop, and with it the server, for good.
Calls of methods that were registered never take that way. So everything that does (an unknown
method, a path that is no text) is dropped before it is looked at: its caller sees the call
cancelled, nobody else sees anything.

Each method stands behind a `Door`, where there is one: also a method that its servicer adds
tomorrow.

A message that cannot be read becomes InvalidArgument for its caller: before the handler sees it
(`check_readable`), or, one in a stream, where the handler reads it.

Rests on names of gRPC that are not public; tests/unit/process/test_grpc_server.py fails when a new
version changes them. One asyncio loop.
"""

from __future__ import annotations

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
    async def _request_call(self) -> Any:
        """The next call of a method that nobody registered: there is none."""
        while True:
            # Letting go of it is what ends it.
            await super()._request_call()


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
        raise RuntimeError("this grpcio is too old: install 1.85 or newer")
    return cast(grpc.aio.Server, _Server(options, door))
