"""A gRPC server that no malformed request can end.

gRPC's asyncio server (1.85) decodes a request's path as UTF-8 in its main loop: one request whose
path is not UTF-8, from anybody who can connect, ends that loop, and with it the server, for good.
Calls of methods that were registered never take that way. So everything that does (an unknown
method, a path that is no text) is dropped before it is looked at: its caller sees the call
cancelled, nobody else sees anything.

Rests on names of gRPC that are not public; tests/unit/process/test_grpc_server.py fails when a new
version changes them. One asyncio loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import grpc.aio
from grpc._cython import cygrpc
from grpc.aio import _server


class _Core(cygrpc.AioServer):  # type: ignore[misc]
    async def _request_call(self) -> Any:
        """The next call of a method that nobody registered: there is none."""
        while True:
            # Letting go of it is what ends it.
            await super()._request_call()


class _Server(_server.Server):
    def __init__(self, options: Sequence[tuple[str, Any]]) -> None:
        self._loop = cygrpc.get_working_loop()
        self._server = _Core(self._loop, None, (), None, tuple(options), None)


def make(options: Sequence[tuple[str, Any]]) -> grpc.aio.Server:
    """A server of registered methods, as the generated `add_..._to_server` register them.

    Raises: RuntimeError when this gRPC keeps no registered methods apart: they would be dropped.
    """
    if not hasattr(cygrpc.AioServer, "_request_registered_call"):
        raise RuntimeError("this grpcio is too old: install 1.85 or newer")
    return cast(grpc.aio.Server, _Server(options))
