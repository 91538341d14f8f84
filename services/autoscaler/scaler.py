"""Scaler: how many workers there are and shall be, whoever starts and stops them. The Protocol that
Kubernetes, `baton up` and the fake keep, and the counting that they share.

A worker's home is the role that it was started with; it may have been flipped to the other one
since, and counts where it is. Which role a worker has now is the registry's to know: callers bring
it along as `roles`, so that nothing about flips needs to be kept anywhere else. One conformance
suite for all of them: tests/wire/test_autoscaler_scalers.py.

Values and pure functions but for the Protocol.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from process.rpc_errors import BatonError
from services.autoscaler.decision import Decision
from services.autoscaler.signals import ByRole, Role


class ScalerError(BatonError):
    """Workers could not be counted or changed; the message says what failed."""


@dataclass(frozen=True)
class PoolScale:
    """One pool, as who starts and stops its workers sees it."""

    wanted: int
    """Workers that were asked for; flipped ones count where they are now."""
    ready: int
    num_leaving: int = 0
    """Beside `wanted`: told to end, and still there."""


class UnitState(StrEnum):
    """Of one worker's process."""

    STARTING = "starting"
    READY = "ready"
    LEAVING = "leaving"


@dataclass(frozen=True)
class Unit:
    """One worker's process or pod."""

    worker_id: str
    home: Role
    state: UnitState


@dataclass(frozen=True)
class Removal:
    """What has to go for a pool to shrink."""

    worker_ids: Sequence[str]
    homes: Mapping[Role, int]
    """By how many workers each home shrinks, those that do not exist yet included."""


Fence = Callable[[], None]
"""Raises ScalerError when nothing may be changed any more; asked in the moment before each change,
from any thread."""


class Scaler(Protocol):
    """See the module. Every call is bounded by its implementation."""

    async def get(self, roles: Mapping[str, Role]) -> ByRole[PoolScale]:
        """Both pools now. roles: of registered workers, flips under way counted as done.

        Raises: ScalerError.
        """

    async def set(
        self,
        role: Role,
        wanted: int,
        *,
        roles: Mapping[str, Role],
        leave_first: Sequence[str],
        fence: Fence,
    ) -> None:
        """Ask for so many workers of that role. Where some must go, it is those that do not serve
        yet, then as `leave_first` has them, then others; they are told to drain.

        Raises: ScalerError; what was asked for may have been done in part then.
        """

    async def announce(self, decision: Decision, outcome: str, problem: str, fence: Fence) -> None:
        """Tell those who watch the pools what was decided, where there is a place for it. Never
        raises for that."""

    async def close(self) -> None:
        """No calls from here on."""


def role_of(unit: Unit, roles: Mapping[str, Role]) -> Role:
    """Where a worker counts."""
    return roles.get(unit.worker_id, unit.home)


def count(
    units: Sequence[Unit], asked: Mapping[Role, int], roles: Mapping[str, Role]
) -> ByRole[PoolScale]:
    """Both pools. asked: workers that were asked for by home, whether or not they exist yet."""
    ready, leaving = Counter[Role](), Counter[Role]()
    wanted = Counter(asked)
    for unit in units:
        role = role_of(unit, roles)
        if unit.state is UnitState.LEAVING:
            leaving[role] += 1
            continue
        if role is not unit.home:
            wanted[unit.home] -= 1
            wanted[role] += 1
        ready[role] += unit.state is UnitState.READY

    def pool(role: Role) -> PoolScale:
        return PoolScale(max(0, wanted[role]), ready[role], leaving[role])

    return ByRole(pool(Role.PREFILL), pool(Role.DECODE))


def removal(
    role: Role,
    num_fewer: int,
    *,
    units: Sequence[Unit],
    asked: Mapping[Role, int],
    roles: Mapping[str, Role],
    leave_first: Sequence[str],
) -> Removal:
    """Who goes when the pool of `role` shrinks by `num_fewer`: who does not exist yet, who does not
    serve yet, then by `leave_first`."""
    here = [
        unit
        for unit in units
        if unit.state is not UnitState.LEAVING and role_of(unit, roles) is role
    ]
    at_home = sum(unit.home is role for unit in units if unit.state is not UnitState.LEAVING)
    num_missing = max(0, asked.get(role, 0) - at_home)
    num_unborn = min(num_fewer, num_missing)
    order = {worker_id: index for index, worker_id in enumerate(leave_first)}
    here.sort(
        key=lambda unit: (
            unit.state is UnitState.READY,
            order.get(unit.worker_id, len(order)),
            unit.worker_id,
        )
    )
    chosen = here[: num_fewer - num_unborn]
    homes = Counter(unit.home for unit in chosen)
    homes[role] += num_unborn
    return Removal([unit.worker_id for unit in chosen], homes)
