"""FakeScaler: a Scaler over a list in memory, for tests and demonstrations. Its workers become
ready or disappear when the test calls `settle`, and its calls can be made to fail. One asyncio
loop.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from services.autoscaler import scaler
from services.autoscaler.decision import Decision
from services.autoscaler.scaler import Fence, PoolScale, ScalerError, Unit, UnitState
from services.autoscaler.signals import ByRole, Role


class FakeScaler:
    """Scaler of imaginary workers."""

    def __init__(self, prefill: int = 0, decode: int = 0) -> None:
        """prefill, decode: numbers of workers that are ready at first."""
        self.units: list[Unit] = []
        self.error: ScalerError | None = None
        """Raised by every call while it is set."""
        self.num_changes = 0
        self.announced: list[tuple[Decision, str, str]] = []
        self._numbers = {role: itertools.count() for role in Role}
        for role, num in ((Role.PREFILL, prefill), (Role.DECODE, decode)):
            self._start(role, num)
        self.settle()

    def settle(self) -> None:
        """Make starting workers ready, and remove leaving ones."""
        self.units = [
            replace(unit, state=UnitState.READY)
            for unit in self.units
            if unit.state is not UnitState.LEAVING
        ]

    async def get(self, roles: Mapping[str, Role]) -> ByRole[PoolScale]:
        """See Scaler."""
        self._check()
        return scaler.count(self.units, self._asked(), roles)

    async def set(
        self,
        role: Role,
        wanted: int,
        *,
        roles: Mapping[str, Role],
        leave_first: Sequence[str],
        fence: Fence,
    ) -> None:
        """See Scaler."""
        self._check()
        fence()
        asked = self._asked()
        change = wanted - scaler.count(self.units, asked, roles).of(role).wanted
        self.num_changes += change != 0
        if change > 0:
            self._start(role, change)
        elif change < 0:
            gone = scaler.removal(
                role, -change, units=self.units, asked=asked, roles=roles, leave_first=leave_first
            ).worker_ids
            self.units = [
                replace(unit, state=UnitState.LEAVING) if unit.worker_id in gone else unit
                for unit in self.units
            ]

    async def announce(self, decision: Decision, outcome: str, problem: str, fence: Fence) -> None:
        """See Scaler."""
        self.announced.append((decision, outcome, problem))

    async def close(self) -> None:
        """See Scaler."""

    def _check(self) -> None:
        if self.error is not None:
            raise self.error

    def _asked(self) -> Mapping[Role, int]:
        return Counter(unit.home for unit in self.units if unit.state is not UnitState.LEAVING)

    def _start(self, role: Role, num: int) -> None:
        for _ in range(num):
            name = f"{role.value}-{next(self._numbers[role])}"
            self.units.append(Unit(name, role, UnitState.STARTING))
