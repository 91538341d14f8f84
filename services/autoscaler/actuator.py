"""Actuator: carries out decisions; nothing else changes the pools.

It does so only while this autoscaler leads: the fence is asked right before each change. What fails
is reported and not tried again: the next decision is made from what is true by then.

RoleFlips: running workers that are told to take the other role, one call each, in the background.

    ordered -> done      the worker serves in its new role
    ordered -> failed    it refused, did not answer in time, or is gone

A worker that refuses because of its certificate is not asked again for a while (it may get another
one without a restart), and one that cannot flip not again in that life. Invariant: `under_way` are
exactly the workers with a pending call. One asyncio loop.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import grpc.aio

from process import logs, rpc
from process.authorization import PeerRole
from process.background_tasks import end_tasks, start_task
from process.rpc import Dialer
from process.rpc_errors import BatonError, FailedPrecondition, Internal, PermissionDenied
from protos import common_pb2, worker_control_pb2, worker_control_pb2_grpc
from services.autoscaler.decision import ActionOutcome, Decision, Direction
from services.autoscaler.leader import Leadership
from services.autoscaler.scaler import Scaler, ScalerError
from services.autoscaler.signals import Role

# ---- role flips

logger = logging.getLogger(__name__)

FORGET_S = 300.0
"""After so long a worker that refused may be asked again: what renews certificates, and the kubelet
that brings them to pods, need minutes."""

_MAX_REFUSED = 4096


@dataclass(frozen=True)
class _Ordered:
    to: Role
    task: asyncio.Task[None]


class RoleFlips:
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


# ---- carrying out decisions


class Actuator:
    """See the module."""

    def __init__(
        self,
        scaler: Scaler,
        flips: RoleFlips,
        leadership: Leadership,
        *,
        act: bool,
        timeout_s: float,
    ) -> None:
        """timeout_s: for one decision, flips aside."""
        self._scaler = scaler
        self._flips = flips
        self._leadership = leadership
        self._act = act
        self._timeout_s = timeout_s
        self._announced_problem = ""

    async def act(
        self,
        decision: Decision,
        *,
        roles: Mapping[str, Role],
        leave_first: Sequence[str],
        workers: Mapping[str, common_pb2.WorkerStatus],
    ) -> tuple[ActionOutcome, str]:
        """Do what was decided. Returns: what became of it, and of a failure why."""
        if not decision.is_action:
            return ActionOutcome.NOTHING, ""
        if not self._act:
            return ActionOutcome.ADVISED, ""
        if self._leadership.left_s <= 0:
            return ActionOutcome.NOT_LEADER, ""
        outcome, problem = ActionOutcome.DONE, ""
        try:
            if decision.direction is Direction.FLIP:
                outcome = ActionOutcome.ORDERED
                self._order_flips(decision, workers)
            else:
                await self._set(decision, roles, leave_first)
        except BatonError as error:
            outcome, problem = ActionOutcome.FAILED, str(error)
        await self._announce(decision, outcome, problem)
        return outcome, problem

    def fence(self) -> None:
        """See scaler.Fence."""
        if self._leadership.left_s <= 0:
            raise ScalerError("another autoscaler may lead by now: nothing more is changed")

    async def _set(
        self, decision: Decision, roles: Mapping[str, Role], leave_first: Sequence[str]
    ) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                for role in Role:
                    if decision.change(role):
                        await self._scaler.set(
                            role,
                            decision.wanted.of(role),
                            roles=roles,
                            leave_first=leave_first,
                            fence=self.fence,
                        )
        except TimeoutError as error:
            raise ScalerError(f"not done within {self._timeout_s:g} s") from error

    def _order_flips(
        self, decision: Decision, workers: Mapping[str, common_pb2.WorkerStatus]
    ) -> None:
        gone = [flip.worker_id for flip in decision.flips if flip.worker_id not in workers]
        if gone:
            raise ScalerError(f"gone before they could be flipped: {', '.join(gone)}")
        for flip in decision.flips:
            self._flips.order(workers[flip.worker_id], flip.to)

    async def _announce(self, decision: Decision, outcome: ActionOutcome, problem: str) -> None:
        """A failure that goes on is announced once."""
        is_known = bool(problem) and problem == self._announced_problem
        self._announced_problem = problem
        if is_known:
            return
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._scaler.announce(decision, outcome.value, problem, self.fence)
        except TimeoutError:  # the log and the metrics have it
            return
