"""Worker: a worker process's engine, its gRPC server, and its session in the present role (prefill
or decode).

Start: session -> gRPC server -> registry. A change of role (`set_role`) drains the session and
begins another over the same engine, under a new incarnation; the server stays. End: drain (bounded;
the registry shows it) -> out of the registry -> server -> store -> engine thread. Invariant: there
is one session at a time and only `set_role` changes it; the worker is draining meanwhile.

- RoleSession: one incarnation of a worker in one role: `begin_session` (core, role, adapters,
  store) -> `announce` (registered) -> `drain` (no new requests; those that can move continue on
  other workers) -> `leave_registry` -> `end`.
- RoleSwitch: the gRPC methods of all roles at one server. A gRPC server accepts methods only before
  it starts, so all are registered, and each call goes to the present role's servicer; a call to
  another role's method fails with the name of the present role. A call in progress belongs to the
  role with which it began: `end` cancels it. `rules` decide beforehand which callers are allowed.
- WorkerRole: what a role adds to the core. A role's code is imported when a worker first takes the
  role.
- WorkerControlServicer: the gRPC service by which the autoscaler and operators change a worker. A
  change of role that has begun continues when its caller disconnects.

One asyncio loop.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, cast

import grpc.aio

from engine.speculation.remote import DraftTraces
from process import grpc_server, logs, rpc, tls
from process.authorization import RULES, PeerRole
from process.background_tasks import end_tasks
from process.deadline import Deadline
from process.metrics import MetricsServer
from process.rpc_errors import (
    BatonError,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    Unavailable,
)
from process.settings import SettingsError
from protos import (
    decode_pb2_grpc,
    kvstore_pb2_grpc,
    prefill_pb2_grpc,
    worker_control_pb2,
    worker_control_pb2_grpc,
)
from services.worker.config import WorkerSettings, adapter_folders
from services.worker.engine_port import WorkerEngine
from services.worker.metrics import WorkerCollector
from services.worker.runtime import Heartbeat, Identity, WorkerCore

_CLASSES = {
    "prefill": ("services.prefill.role", "PrefillRole"),
    "decode": ("services.decode.role", "DecodeRole"),
}
ROLES = tuple(_CLASSES)


class WorkerRole(Protocol):
    """Interface of what a prefill or decode worker adds to the core."""

    def start(self) -> None: ...
    def add_service(self, server: grpc.aio.Server) -> None: ...
    def leave(self, by: Deadline) -> None:
        """Move requests that can continue on another worker, by the time `by`, because this one
        drains. New requests are refused already."""

    async def stop(self) -> None: ...


MakeRole = Callable[[WorkerCore], WorkerRole]


def role_class(name: str) -> MakeRole:
    """Return the class of a role by name. Raises: InvalidArgument naming the existing roles."""
    if name not in _CLASSES:
        raise InvalidArgument("role", f"{name!r} is none of {', '.join(ROLES)}")
    module, attribute = _CLASSES[name]
    return cast(MakeRole, getattr(importlib.import_module(module), attribute))


Context = grpc.aio.ServicerContext[Any, Any]

SetRole = Callable[[str], Awaitable[worker_control_pb2.SetRoleReply]]


class WorkerControlServicer(worker_control_pb2_grpc.WorkerControlServicer):
    """gRPC servicer of WorkerControl: changes the role of one worker."""

    def __init__(self, set_role: SetRole) -> None:
        self._set_role = set_role
        self._changes: set[asyncio.Future[worker_control_pb2.SetRoleReply]] = set()

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register the service with a gRPC server that has not been started yet."""
        worker_control_pb2_grpc.add_WorkerControlServicer_to_server(self, server)

    @rpc.unary
    async def SetRole(
        self, request: worker_control_pb2.SetRoleRequest, context: Context
    ) -> worker_control_pb2.SetRoleReply:
        change = asyncio.ensure_future(self._set_role(request.role))
        self._changes.add(change)
        change.add_done_callback(self._over)
        return await asyncio.shield(change)

    def _over(self, change: asyncio.Future[worker_control_pb2.SetRoleReply]) -> None:
        self._changes.discard(change)
        if not change.cancelled():
            change.exception()  # seen, also where the caller has gone


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
        """Roles of callers by method, of every role that this worker has had. A call of a role that
        it no longer has is told so; one of a role that it never had means that the caller has the
        wrong worker or certificate."""
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


logger = logging.getLogger(__name__)

MOVE_SHARE = 0.8
"""Share of the drain time after which requests that have not moved with their KV move without
it."""

LAST_WORDS_S = 1.0
"""Seconds for messages that are still being sent to routers."""


@dataclass
class RoleSession:
    """One incarnation of a worker in one role: its core, role, adapters and registry entry."""

    core: WorkerCore
    role: WorkerRole
    heartbeat: Heartbeat | None = None

    def announce(self, address: str, metrics_address: str) -> None:
        """Register the worker in the registry as serving at `address`."""
        core, settings = self.core, self.core.settings
        core.address = settings.advertised or address
        core.metrics_address = metrics_address
        if not settings.redis_url:
            return
        self.heartbeat = Heartbeat(
            settings.redis_url,
            worker_id=core.identity.worker_id,
            incarnation=core.identity.incarnation.hex(),
            status=core.status,
            access=settings.redis,
            on_wishes=core.adapters.follow,
        )
        core.adapters.on_change = self.heartbeat.beat_now
        self.heartbeat.start()

    async def drain(self) -> None:
        """Refuse new requests, move those that can continue elsewhere, and wait for the rest and
        for readers of lent blocks: at most `drain_s` seconds, and not at all with a failed
        engine."""
        core = self.core
        drain_s = core.limits.drain_s if core.thread.failure is None else 0.0
        core.draining = True
        if self.heartbeat is not None:
            self.heartbeat.beat_now()  # routers choose others
        self.role.leave(Deadline.after(MOVE_SHARE * drain_s))
        if not await core.drain(drain_s):
            logs.event(logger, "drain_cut_short", level=logging.WARNING, num=core.num_live)
        await core.say_last_words(LAST_WORDS_S)

    async def leave_registry(self) -> None:
        """Remove the registry entry, within Redis' timeouts."""
        if self.heartbeat is not None:
            await self.heartbeat.stop()

    async def end(self, *, closes_engine: bool = True) -> None:
        """End the session after the last call and free its resources.

        Raises: Internal for an engine that is to be kept, and is not as it was before the first
        request.
        """
        await self.role.stop()
        await self.core.stop(closes_engine=closes_engine)
        stats = self.core.thread.stats
        num_left = stats.num_reserved + stats.num_waiting + stats.num_running + stats.num_holding
        num_blocks = stats.num_quarantined_blocks + stats.num_referenced_blocks
        if not closes_engine and (num_left or num_blocks):
            raise Internal(
                f"{num_left} requests and {num_blocks} of their blocks are left in the engine of a "
                "life that is over"
            )


async def begin_session(
    engine: WorkerEngine,
    settings: WorkerSettings,
    role_name: str,
    make_role: MakeRole,
    *,
    draft_traces: DraftTraces | None = None,
    before: WorkerCore | None = None,
) -> RoleSession:
    """Create a session that is not registered yet.

    Args:
        draft_traces: see WorkerCore.
        before: core of the previous session, over the same engine.
    Raises: FailedPrecondition from the store; InvalidArgument for an adapter that does not fit.
    """
    worker_id = settings.worker_id if before is None else before.identity.worker_id
    identity = Identity.new(role_name, worker_id)
    core = WorkerCore(engine, settings, identity, draft_traces=draft_traces, before=before)
    core.tracing.start()
    role = make_role(core)
    role.start()
    life = RoleSession(core, role)
    try:
        if before is None:
            for name, folder in adapter_folders(settings):
                await core.adapters.load(name, folder)
        await core.attach(settings.limits.store_wait_s)
    except BaseException:
        await life.end()
        raise
    return life


class Worker:
    """A started worker; `stop` ends it. Tests and `run` use the same class."""

    def __init__(
        self,
        engine: WorkerEngine,
        life: RoleSession,
        switch: RoleSwitch,
        metrics: MetricsServer,
        collector: WorkerCollector,
    ) -> None:
        self.metrics = metrics
        self._engine = engine
        self._life = life
        self._switch = switch
        self._collector = collector
        self._turn = asyncio.Lock()
        self._is_stopping = False
        self._has_no_life = False
        self._broken: BatonError | None = None
        self._listens_at = ""
        self._control = WorkerControlServicer(self.set_role)
        self._shown: tls.TlsIdentity | None = None
        """What the server shows. Another certificate is taken up only if it names the role that the
        worker has then: peers that dial it as that would refuse any other."""
        self._server: grpc.aio.Server | None = None

    @property
    def core(self) -> WorkerCore:
        return self._life.core

    @property
    def role(self) -> WorkerRole:
        return self._life.role

    @property
    def heartbeat(self) -> Heartbeat | None:
        return self._life.heartbeat

    @property
    def address(self) -> str:
        return self.core.address

    def why_not_ready(self) -> str:
        """Return why the worker is not ready, in one line for probes; empty: it serves. Any
        thread."""
        core, heartbeat = self.core, self.heartbeat
        if core.draining:
            return "draining"
        if core.thread.failure is not None:
            return str(core.thread.failure)
        if heartbeat is not None and not heartbeat.num_beats:
            return "Redis was not reached yet: no router knows this worker"
        return ""

    @property
    def failure(self) -> BatonError | None:
        """Return the error because of which the worker ends by itself; None while it serves."""
        return self.core.thread.failure or self._broken

    async def listen(self) -> None:
        """Serve the present role. Raises: Unavailable when the port is in use."""
        core = self.core
        role_name = core.identity.role
        if core.tls is not None:
            self._shown = tls.TlsIdentity(core.settings.tls, PeerRole(role_name))
        self._switch.serve(role_name, self.role.add_service)
        self._server, self._listens_at = await grpc_server.listen(
            core.settings.listen,
            [self._switch.add_to, self._control.add_to],
            identity=self._shown,
            rules=self._switch.rules,
        )
        self._life.announce(self._listens_at, self.metrics.address)

    async def set_role(self, role_name: str) -> worker_control_pb2.SetRoleReply:
        """Drain, then serve another role with the same engine, under a new incarnation. One change
        at a time.

        Raises: InvalidArgument for no role, FailedPrecondition where the certificate does not name
        it (as it is on disk now), Unavailable while the worker stops or when it is told to
        meanwhile; Internal when the next session could not begin: the worker ends.
        """
        make_role = role_class(role_name)
        async with self._turn:
            if self._is_stopping:
                raise Unavailable(f"{self.core.identity.worker_id} is stopping")
            if self.core.identity.role != role_name:
                self._check_certificate(role_name)
                await self._change(role_name, make_role)
            identity = self.core.identity
        return worker_control_pb2.SetRoleReply(
            worker_id=identity.worker_id,
            role=identity.role,
            incarnation=identity.incarnation.hex(),
        )

    def _check_certificate(self, role_name: str) -> None:
        try:
            tls.TlsIdentity.of(self.core.settings.tls, PeerRole(role_name))
        except SettingsError as error:
            raise FailedPrecondition(f"cannot serve as {role_name}: {error}") from error

    async def _change(self, role_name: str, make_role: MakeRole) -> None:
        before = self._life
        logs.event(logger, "role_changing", before=before.core.identity.role, after=role_name)
        try:
            await before.drain()
            await before.leave_registry()
            await self._switch.end(role_name)
            keeps_engine = not self._is_stopping
            await before.end(closes_engine=not keeps_engine)
            life: RoleSession | None = None
            if not self._is_stopping:
                settings = before.core.settings
                life = await begin_session(
                    self._engine, settings, role_name, make_role, before=before.core
                )
        except Exception as error:  # neither role is whole: only a new process helps
            logger.error("role_not_changed", exc_info=error)
            self._broken = Internal(f"could not become {role_name}: {error}")
            self.core.failed.set()
            raise self._broken from error
        if life is None or self._is_stopping:  # told to stop meanwhile: no other role is announced
            self._has_no_life = True
            if life is not None:
                await life.end()
            elif keeps_engine:
                await asyncio.to_thread(self._engine.close)
            raise Unavailable(f"{before.core.identity.worker_id} is stopping")
        self._life = life
        if self._shown is not None and life.core.tls is not None:
            # Not what it shows when files were refused: that may not name the role for a while yet.
            self._shown.take_over(life.core.tls)
        self._collector.follow(life.core)
        self._switch.serve(role_name, life.role.add_service)
        life.announce(self._listens_at, self.metrics.address)
        incarnation = life.core.identity.incarnation.hex()
        logs.event(logger, "role_changed", role=role_name, incarnation=incarnation)

    async def stop(self) -> None:
        """Drain, leave the registry, then end. A change of role in progress ends its old session
        first and begins no other."""
        self._is_stopping = True
        async with self._turn:
            is_whole = self._broken is None and not self._has_no_life
            if is_whole:
                await self._life.drain()
                await self._life.leave_registry()
            await asyncio.to_thread(self.metrics.stop)
            if self._server is not None:
                await self._server.stop(self._life.core.settings.limits.stop_grace_s)
            if is_whole:
                await self._life.end()


async def start(
    engine: WorkerEngine,
    settings: WorkerSettings,
    role_name: str,
    make_role: MakeRole,
    metrics: MetricsServer | None = None,
    *,
    draft_traces: DraftTraces | None = None,
) -> Worker:
    """Start a worker with a loaded engine; returns when it serves.

    Args:
        metrics: metrics server that was started before; None: one is created, and started where
            configured.
        draft_traces: see WorkerCore.
    Raises: Unavailable when the port is taken; InvalidArgument for an adapter that does not fit.
    """
    life = await begin_session(engine, settings, role_name, make_role, draft_traces=draft_traces)
    is_listening = metrics is not None
    metrics = metrics or MetricsServer()
    collector = WorkerCollector(life.core, asyncio.get_running_loop())
    metrics.add(collector)
    switch = RoleSwitch(life.core.identity.worker_id)
    worker = Worker(engine, life, switch, metrics, collector)
    try:
        if settings.metrics_listen and not is_listening:
            metrics.start(settings.metrics_listen)
        await worker.listen()
    except BaseException:
        await asyncio.to_thread(metrics.stop)
        await life.end()
        raise
    return worker
