"""Actuator: carries out scaling decisions. Only the actuator changes the pools.

The actuator acts only while this autoscaler is the leader, and checks the leadership (the fence)
right before each change. A failed action is reported and not retried: the next decision is made
from the then current state of the pools.

Pool sizes are set through the Scaler. Role flips go through RoleFlips: one SetRole call for each
worker, in the background.

    ordered -> done      the worker serves in its new role
    ordered -> failed    the worker refused, did not answer in time, or is gone

A worker that refuses because of its certificate is not asked again for FORGET_S, since it may get
another certificate without a restart. A worker that does not implement SetRole is not asked again
in the same incarnation. Invariant: `under_way` holds exactly the workers with a pending call. One
asyncio loop.
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
"""Seconds until a worker that refused may be asked again. The renewal of a certificate, and the
kubelet that mounts it into the pod, take minutes."""

_MAX_REFUSED = 4096


@dataclass(frozen=True)
class _Ordered:
    to: Role
    task: asyncio.Task[None]


class RoleFlips:
    """Pending SetRole calls: workers that were told to take the other role."""

    def __init__(
        self,
        dial: Dialer,
        *,
        timeout_s: float,
        on_end: Callable[[str, Role, str], None] = lambda worker_id, to, problem: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            timeout_s: for one worker to change its role.
            on_end: called at the end of each flip with the worker's id, its new role and the
                problem; an empty problem means success.
            clock: monotonic, in seconds.
        """
        self._dial = dial
        self._timeout_s = timeout_s
        self._on_end = on_end
        self._clock = clock
        self._ordered: dict[str, _Ordered] = {}
        self._refused: dict[tuple[str, str], float] = {}
        """For each worker and incarnation that refused, the time (by the clock) until which it is
        not asked; the latest refusal is last."""

    @property
    def under_way(self) -> Mapping[str, Role]:
        """Workers with a pending call, by id, and the role that each was told to take."""
        return {worker_id: ordered.to for worker_id, ordered in self._ordered.items()}

    def may_ask(self, worker: common_pb2.WorkerStatus) -> bool:
        """Return whether the worker's incarnation has not refused, or its refusal has expired."""
        return self._refused.get(_life(worker), -math.inf) <= self._clock()

    def order(self, worker: common_pb2.WorkerStatus, to: Role) -> None:
        """Start a SetRole call to the worker, in the background. Nothing happens if a call to it
        is pending."""
        worker_id = worker.worker_id
        if worker_id not in self._ordered:
            task = start_task(self._flip(worker, to), f"flip {worker_id}")
            self._ordered[worker_id] = _Ordered(to, task)
            # Also of a task that is cancelled before it began.
            task.add_done_callback(lambda _: self._ordered.pop(worker_id, None))

    async def stop(self) -> None:
        """Cancel all pending calls. The workers continue their change of role by themselves."""
        await end_tasks([ordered.task for ordered in self._ordered.values()])

    def check_integrity(self) -> None:
        """Check the invariant of `under_way`.

        Raises: Internal when a flip is kept whose call has ended.
        """
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
    """Executor of scaling decisions: sets pool sizes through the Scaler and orders role flips."""

    def __init__(
        self,
        scaler: Scaler,
        flips: RoleFlips,
        leadership: Leadership,
        *,
        act: bool,
        timeout_s: float,
    ) -> None:
        """
        Args:
            leadership: nothing is changed unless it has time left.
            act: False: decisions are only advice, and nothing is changed.
            timeout_s: for one decision, not counting flips.
        """
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
        """Carry out the decision.

        Args:
            roles: current role of each registered worker, by id.
            leave_first: ids of workers in the order in which they should be removed.
            workers: registered workers by id, for flips.

        Returns: the outcome, and the problem if it is FAILED (else empty).
        """
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
        """Check that this autoscaler still leads; a scaler.Fence.

        Raises: ScalerError when the leadership has ended.
        """
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
        """Announce the decision through the Scaler; a repeated failure only once."""
        is_known = bool(problem) and problem == self._announced_problem
        self._announced_problem = problem
        if is_known:
            return
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._scaler.announce(decision, outcome.value, problem, self.fence)
        except TimeoutError:  # the log and the metrics have it
            return
