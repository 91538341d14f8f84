"""LocalScaler: the Scaler of `baton up`. It asks the LocalScale gRPC service of `baton up` to list,
start and stop worker processes. It starts no process itself. One asyncio loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Mapping, Sequence
from typing import TypeVar

import grpc.aio

from process import rpc
from protos import local_scale_pb2, local_scale_pb2_grpc
from services.autoscaler import scaler
from services.autoscaler.decision import Decision
from services.autoscaler.scaler import Fence, PoolScale, ScalerError, Unit, UnitState
from services.autoscaler.signals import ByRole, Role

Reply = TypeVar("Reply")


class LocalScaler:
    """Scaler of the worker processes of `baton up`."""

    def __init__(self, address: str, timeout_s: float) -> None:
        """
        Args:
            address: host:port or unix:path of the LocalScale service.
            timeout_s: of one call.
        """
        self._channel = rpc.channel(address)
        self._stub = local_scale_pb2_grpc.LocalScaleStub(self._channel)
        self._timeout_s = timeout_s

    async def get(self, roles: Mapping[str, Role]) -> ByRole[PoolScale]:
        """See Scaler."""
        units = await self._units()
        return scaler.count(units, _asked(units), roles)

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
        units = await self._units()
        asked = _asked(units)
        change = wanted - scaler.count(units, asked, roles).of(role).wanted
        fence()
        if change > 0:
            start = local_scale_pb2.StartWorkersRequest(role=role.value, num_workers=change)
            await self._answer(self._stub.StartWorkers(start, timeout=self._timeout_s))
        elif change < 0:
            gone = scaler.removal(
                role, -change, units=units, asked=asked, roles=roles, leave_first=leave_first
            )
            stop = local_scale_pb2.StopWorkersRequest(worker_ids=gone.worker_ids)
            await self._answer(self._stub.StopWorkers(stop, timeout=self._timeout_s))

    async def announce(self, decision: Decision, outcome: str, problem: str, fence: Fence) -> None:
        """Do nothing: the autoscaler's log has the decision already."""

    async def close(self) -> None:
        """See Scaler."""
        await self._channel.close()

    async def _units(self) -> list[Unit]:
        request = local_scale_pb2.ListWorkersRequest()
        reply = await self._answer(self._stub.ListWorkers(request, timeout=self._timeout_s))
        try:
            return [
                Unit(worker.worker_id, Role(worker.role), UnitState(worker.state))
                for worker in reply.workers
            ]
        except ValueError as error:
            raise ScalerError(f"`baton up` lists a worker that makes no sense: {error}") from error

    async def _answer(self, call: Awaitable[Reply]) -> Reply:
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            problem = rpc.error_from_rpc(error)
            raise ScalerError(f"`baton up` does not scale its workers: {problem}") from error


def _asked(units: Sequence[Unit]) -> Mapping[Role, int]:
    """Return the number of workers that were asked for, by home. Each of them has a process, at
    least a starting one."""
    return Counter(unit.home for unit in units if unit.state is not UnitState.LEAVING)
