"""Scaler: the interface by which the autoscaler counts the workers of both pools and sets their
numbers. KubernetesScaler, LocalScaler and FakeScaler implement it; this module also has the pure
functions that they share for counting and for choosing the workers to remove.

A worker's home is the role that it was started with. The worker may have been flipped to the other
role since, and counts for its present role. Only the registry has the present roles: callers pass
them as `roles`, so no scaler keeps any state about flips. One conformance suite tests all
implementations: tests/wire/test_autoscaler_scalers.py.
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
    """Numbers of workers of one pool, as reported by the Scaler."""

    wanted: int
    """Workers that were asked for; flipped workers count for their present role."""
    ready: int
    """Workers that are ready to serve."""
    num_leaving: int = 0
    """Workers that were told to end and still exist; not part of `wanted`."""


class UnitState(StrEnum):
    """State of one worker's process or pod."""

    STARTING = "starting"
    READY = "ready"
    LEAVING = "leaving"


@dataclass(frozen=True)
class Unit:
    """Process or pod of one worker. `home`: the role that it was started with."""

    worker_id: str
    home: Role
    state: UnitState


@dataclass(frozen=True)
class Removal:
    """Workers to remove so that a pool shrinks."""

    worker_ids: Sequence[str]
    homes: Mapping[Role, int]
    """Number of workers to remove by home, including those that do not exist yet."""


Fence = Callable[[], None]
"""Check right before each change, from any thread. Raises ScalerError when this autoscaler may no
longer change anything."""


class Scaler(Protocol):
    """Interface to the system that starts and stops workers. Each implementation bounds the time of
    each call."""

    async def get(self, roles: Mapping[str, Role]) -> ByRole[PoolScale]:
        """Return the present numbers of both pools.

        Args:
            roles: role of each registered worker, by id; pending flips count as done.

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
        """Set the wanted number of workers of `role`. The workers to remove are told to drain.

        Args:
            roles: as for `get`.
            leave_first: ids in the order of removal. Workers that do not serve yet are removed
                before these, and workers that are not listed after them.
            fence: called before each change.

        Raises: ScalerError; the change may then have been made in part.
        """

    async def announce(self, decision: Decision, outcome: str, problem: str, fence: Fence) -> None:
        """Publish the decision at the pools, where the system has a place for it (Events in
        Kubernetes). A failure to publish raises nothing."""

    async def close(self) -> None:
        """Close the connections; no call may follow."""


def role_of(unit: Unit, roles: Mapping[str, Role]) -> Role:
    """Return the present role of a worker: the registered one, else its home."""
    return roles.get(unit.worker_id, unit.home)


def count(
    units: Sequence[Unit], asked: Mapping[Role, int], roles: Mapping[str, Role]
) -> ByRole[PoolScale]:
    """Return the numbers of both pools.

    Args:
        units: all existing workers, including leaving ones.
        asked: number of workers that were asked for, by home, whether or not they exist yet.
        roles: role of each registered worker, by id.
    """
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
    """Return the workers to remove so that the pool of `role` shrinks by `num_fewer`: first those
    that do not exist yet, then those that do not serve yet, then in the order of `leave_first`.

    Args:
        units, asked, roles: as for `count`.
    """
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
