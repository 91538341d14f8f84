"""Flips: running workers told to take the other role, one call each, behind the decisions.

    ordered -> done      the worker serves in its new role
    ordered -> failed    it refused, did not answer in time, or is gone; nothing is kept of it
A worker that refuses for its certificate is not asked again for a while: another may be brought to
it, and needs no restart. One that knows no flips is not asked again in that life. Law: `under_way`
are exactly the workers with a call out. One asyncio loop.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import grpc.aio

from process import logs, rpc
from process.authorization import PeerRole
from process.background_tasks import end_tasks, start_task
from process.errors import FailedPrecondition, Internal, PermissionDenied
from process.rpc import Dialer
from protos import common_pb2, worker_control_pb2, worker_control_pb2_grpc
from services.autoscaler.signals import Role

logger = logging.getLogger(__name__)

FORGET_S = 300.0
"""After so long a worker that refused may be asked again: what renews certificates, and the kubelet
that brings them to pods, need minutes."""

_MAX_REFUSED = 4096


@dataclass(frozen=True)
class _Ordered:
    to: Role
    task: asyncio.Task[None]


class Flips:
    """See the module."""

    def __init__(
        self,
        dial: Dialer,
        *,
        timeout_s: float,
        on_end: Callable[[str, Role, str], None] = lambda worker_id, to, problem: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """timeout_s: for one worker to change. on_end: told how each ended; no problem: done."""
        self._dial = dial
        self._timeout_s = timeout_s
        self._on_end = on_end
        self._clock = clock
        self._ordered: dict[str, _Ordered] = {}
        self._refused: dict[tuple[str, str], float] = {}
        """Lives of workers, and until when each is not asked; who refused last is last."""

    @property
    def under_way(self) -> Mapping[str, Role]:
        """Workers that were told to take that role, and have not answered yet."""
        return {worker_id: ordered.to for worker_id, ordered in self._ordered.items()}

    def may_ask(self, worker: common_pb2.WorkerStatus) -> bool:
        """Whether this life of the worker has not refused, or its refusal is forgotten."""
        return self._refused.get(_life(worker), -math.inf) <= self._clock()

    def order(self, worker: common_pb2.WorkerStatus, to: Role) -> None:
        """Tell the worker; does not wait. One that is told already is not told again."""
        worker_id = worker.worker_id
        if worker_id not in self._ordered:
            task = start_task(self._flip(worker, to), f"flip {worker_id}")
            self._ordered[worker_id] = _Ordered(to, task)
            # Also of a task that is cancelled before it began.
            task.add_done_callback(lambda _: self._ordered.pop(worker_id, None))

    async def stop(self) -> None:
        """Wait for no answer any more; workers that were told go on by themselves."""
        await end_tasks([ordered.task for ordered in self._ordered.values()])

    def check_integrity(self) -> None:
        """Raises: Internal when a flip is kept whose call is over."""
        over = [worker_id for worker_id, ordered in self._ordered.items() if ordered.task.done()]
        if over:
            raise Internal(f"flips are kept whose calls are over: {', '.join(over)}")

    async def _flip(self, worker: common_pb2.WorkerStatus, to: Role) -> None:
        problem = ""
        try:
            async with self._dial(worker.address, PeerRole(worker.role)) as channel:
                stub = worker_control_pb2_grpc.WorkerControlStub(channel)
                await stub.SetRole(
                    worker_control_pb2.SetRoleRequest(role=to.value), timeout=self._timeout_s
                )
        except grpc.aio.AioRpcError as error:
            said = rpc.error_from_rpc(error)
            problem = str(said)
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                self._refuse(worker, for_s=math.inf)
            elif isinstance(said, FailedPrecondition | PermissionDenied):
                self._refuse(worker, for_s=FORGET_S)
        logs.event(
            logger,
            "flip_failed" if problem else "flipped",
            level=logging.WARNING if problem else logging.INFO,
            worker_id=worker.worker_id,
            role=to.value,
            why=problem,
        )
        self._on_end(worker.worker_id, to, problem)

    def _refuse(self, worker: common_pb2.WorkerStatus, *, for_s: float) -> None:
        self._refused.pop(_life(worker), None)
        self._refused[_life(worker)] = self._clock() + for_s
        for life in list(self._refused)[:-_MAX_REFUSED]:
            del self._refused[life]


def _life(worker: common_pb2.WorkerStatus) -> tuple[str, str]:
    return worker.worker_id, worker.incarnation
