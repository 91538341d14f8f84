"""Acting upon a decision: the only place from which pools are changed.

Nothing is done unless this autoscaler leads, and nothing is begun once it leads no more: the fence
is asked in the moment before each change. What fails is told and not tried again: the next decision
is made from what is true by then. One asyncio loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from enum import StrEnum

from process.errors import BatonError
from protos import common_pb2
from services.autoscaler.decision import Decision, Direction
from services.autoscaler.flips import Flips
from services.autoscaler.leader import Leadership
from services.autoscaler.scaler import Scaler, ScalerError
from services.autoscaler.signals import Role


class Outcome(StrEnum):
    """What became of a decision."""

    NOTHING = ""
    """There was nothing to do."""
    DONE = "done"
    ORDERED = "ordered"
    """Workers were told to flip; whether they did is told when they answer."""
    FAILED = "failed"
    NOT_LEADER = "not_leader"
    """Another autoscaler acts."""
    ADVISED = "advised"
    """Somebody else acts upon the numbers (act=false)."""


class Acting:
    """See the module."""

    def __init__(
        self,
        scaler: Scaler,
        flips: Flips,
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
    ) -> tuple[Outcome, str]:
        """Do what was decided. Returns: what became of it, and of a failure why."""
        if not decision.is_action:
            return Outcome.NOTHING, ""
        if not self._act:
            return Outcome.ADVISED, ""
        if self._leadership.left_s <= 0:
            return Outcome.NOT_LEADER, ""
        outcome, problem = Outcome.DONE, ""
        try:
            if decision.direction is Direction.FLIP:
                outcome = Outcome.ORDERED
                self._order_flips(decision, workers)
            else:
                await self._set(decision, roles, leave_first)
        except BatonError as error:
            outcome, problem = Outcome.FAILED, str(error)
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

    async def _announce(self, decision: Decision, outcome: Outcome, problem: str) -> None:
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
