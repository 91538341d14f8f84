"""Worker: a process's engine, its gRPC server, and its life in the present role.

Start: a life (services/worker/life.py) -> gRPC server -> registry. A change of role drains that
life and begins another over the same engine; the server stays and dispatches calls to the present
role (services/worker/role_switch.py). End: drain (bounded; the registry says so) -> out of the
registry -> server -> store -> engine thread.

Invariant: it has one life at a time, and only `set_role` changes it; while it does, it is
draining. Belongs to the loop's thread.
"""

from __future__ import annotations

import asyncio
import logging

import grpc.aio

from engine.speculation.remote import DraftTraces
from process import grpc_server, logs, tls
from process.authorization import PeerRole
from process.errors import BatonError, FailedPrecondition, Internal, Unavailable
from process.metrics import MetricsServer
from process.settings import SettingsError
from protos import worker_control_pb2
from services.worker.config import WorkerSettings
from services.worker.control import WorkerControlServicer
from services.worker.core import WorkerCore
from services.worker.engine_port import WorkerEngine
from services.worker.heartbeat import Heartbeat
from services.worker.life import Life, begin
from services.worker.metrics import WorkerCollector
from services.worker.role_switch import RoleSwitch
from services.worker.roles import MakeRole, Role, role_class

logger = logging.getLogger(__name__)


class Worker:
    """A started worker; `stop` ends it. Tests and `run` use the same class."""

    def __init__(
        self,
        engine: WorkerEngine,
        life: Life,
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
    def role(self) -> Role:
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
        meanwhile; Internal when the next life could not begin: the worker ends.
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
            life: Life | None = None
            if not self._is_stopping:
                settings = before.core.settings
                life = await begin(self._engine, settings, role_name, make_role, before=before.core)
        except Exception as error:  # neither role is whole: only a new process helps
            logger.error("role_not_changed", exc_info=error)
            self._broken = Internal(f"could not become {role_name}: {error}")
            self.core.failed.set()
            raise self._broken from error
        if life is None or self._is_stopping:  # told to stop meanwhile: nobody hears of another
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
        """Drain, leave the registry, then end. A change of role in progress ends its old life first
        and begins no other."""
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
    life = await begin(engine, settings, role_name, make_role, draft_traces=draft_traces)
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
