"""RoleSwitch: gRPC methods of every role at one server, of which those of the present role are
served; calls of other methods fail with the name of the present role.

A gRPC server accepts methods only before it starts: so those of all roles are registered, and each
call goes to the servicer of the method at that moment. Calls in progress belong to the role that
they began with: `end` cancels them. `rules` decide beforehand which callers are allowed. Knows no
request. One asyncio loop.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, cast

import grpc.aio

from process import rpc
from process.authorization import RULES, PeerRole
from process.background_tasks import end_tasks
from process.errors import Unavailable
from protos import decode_pb2_grpc, kvstore_pb2_grpc, prefill_pb2_grpc

AddService = Callable[[grpc.aio.Server], None]

_KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")

_SHAPES: tuple[AddService, ...] = (
    lambda server: prefill_pb2_grpc.add_PrefillServicer_to_server(
        prefill_pb2_grpc.PrefillServicer(), server
    ),
    lambda server: decode_pb2_grpc.add_DecodeServicer_to_server(
        decode_pb2_grpc.DecodeServicer(), server
    ),
    lambda server: kvstore_pb2_grpc.add_KvStoreServicer_to_server(  # of a lender
        kvstore_pb2_grpc.KvStoreServicer(), server
    ),
)
"""Generated gRPC services of all roles, which define the kinds of their methods."""


class _Collector:
    """Stand-in for a server that records the handlers that a role registers."""

    def __init__(self) -> None:
        self.handlers: dict[str, dict[str, Any]] = {}

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """Record the handlers, as older gRPC versions pass them."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        self.handlers[service] = dict(handlers)

    @classmethod
    def of(cls, add_service: AddService) -> dict[str, dict[str, Any]]:
        collector = cls()
        add_service(cast(grpc.aio.Server, collector))
        return collector.handlers


class RoleSwitch:
    """gRPC handlers of all roles, dispatching to the present role."""

    def __init__(self, worker_id: str) -> None:
        self.rules: dict[str, frozenset[PeerRole]] = {}
        """Who may call what: of every role that this worker has had. Who asks for one that it has
        no more is told so; for one that it never had, he has the wrong worker or certificate."""
        self._worker_id = worker_id
        self._says = "is starting"
        self._behaviours: dict[str, Any] = {}  # of the present role, by path
        self._calls: set[asyncio.Task[Any]] = set()
        self._ended: set[asyncio.Task[Any]] = set()

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register every role's methods with a gRPC server that has not been started yet."""
        for shape in _SHAPES:
            for service, handlers in _Collector.of(shape).items():
                switched = {
                    name: self._switched(handler, f"/{service}/{name}")
                    for name, handler in handlers.items()
                }
                server.add_registered_method_handlers(service, switched)

    def serve(self, role_name: str, add_service: AddService) -> None:
        """Serve a role's methods from now on."""
        self.rules.update(RULES[PeerRole(role_name)])
        self._says = f"has the role {role_name} now"
        self._behaviours = {
            f"/{service}/{name}": _behaviour(handler)[1]
            for service, handlers in _Collector.of(add_service).items()
            for name, handler in handlers.items()
        }

    async def end(self, next_role: str) -> None:
        """Stop serving the present role: its calls are cancelled and new ones refused."""
        self._says = f"is taking the role {next_role}"
        self._behaviours = {}
        calls = set(self._calls)
        self._ended |= calls
        await end_tasks(calls)

    def _switched(self, handler: Any, path: str) -> Any:
        kind, _ = _behaviour(handler)

        async def call(request: Any, context: Any) -> Any:
            behaviour = self._behaviours.get(path)
            if behaviour is None:
                return await self._refuse(context)
            task = asyncio.current_task()
            assert task is not None
            self._calls.add(task)
            try:
                if not inspect.isasyncgenfunction(behaviour):
                    return await behaviour(request, context)
                async for reply in behaviour(request, context):
                    await context.write(reply)
            except asyncio.CancelledError:
                if task not in self._ended:
                    raise
                task.uncancel()
                return await self._refuse(context)
            finally:
                self._calls.discard(task)
                self._ended.discard(task)

        return handler._replace(**{kind: call})

    async def _refuse(self, context: Any) -> NoReturn:
        await rpc.abort(context, Unavailable(f"{self._worker_id} {self._says}", retry_after_s=0.0))


def _behaviour(handler: Any) -> tuple[str, Any]:
    """Return the kind of a method and the function that serves it."""
    (kind,) = [kind for kind in _KINDS if getattr(handler, kind) is not None]
    return kind, getattr(handler, kind)
