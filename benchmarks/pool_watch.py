"""What an autoscaler says of its pools, again and again while a load runs."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import grpc.aio

from baton import LocalCluster
from baton.load.course import ROLES, Moment, PoolSize
from protos import autoscaler_pb2, autoscaler_pb2_grpc

LOOK_S = 0.5
_CALL_S = 5.0
_FIRST_S = 30.0


@contextlib.asynccontextmanager
async def watching(
    cluster: LocalCluster, moments: list[Moment], begin_s: float
) -> AsyncIterator[None]:
    """Look at the pools all the while, into `moments`; the first look is there when this begins.

    Args: begin_s: of the load, on the monotonic clock.
    """
    async with grpc.aio.insecure_channel(cluster.autoscaler_address) as channel:
        stub = autoscaler_pb2_grpc.AutoscalerStub(channel)

        async def look() -> None:
            asked = autoscaler_pb2.GetDecisionsRequest(num_decisions=1)
            reply = await stub.GetDecisions(asked, timeout=_CALL_S)
            pools = {pool.role: PoolSize(pool.num_wanted, pool.num_ready) for pool in reply.pools}
            if set(pools) == set(ROLES):  # not before its first look
                sizes = {role: pools[role] for role in ROLES}
                moments.append(Moment(time.monotonic() - begin_s, sizes))

        async def again() -> None:
            while True:
                await asyncio.sleep(LOOK_S)
                await look()

        async with asyncio.timeout(_FIRST_S):
            while not moments:
                await look()
                await asyncio.sleep(LOOK_S)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(again())
            yield
            task.cancel()
