"""An autoscaler with everything real but the workers and its clock: Redis, its services over gRPC,
its metrics over HTTP; beats of routers and workers are written as they write them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
from google.protobuf import json_format

from process import grpc_server, registry, rpc
from process.rpc_errors import BatonError
from protos import common_pb2, router_status_pb2, worker_control_pb2, worker_control_pb2_grpc
from services.autoscaler.app import Autoscaler
from services.autoscaler.config import (
    AutoscalerSettings,
    Pace,
    PlanSettings,
    PoolLimits,
    ScaleLimits,
)
from services.autoscaler.testing.fake_scaler import FakeScaler
from tests.harness.redis_server import RedisServer
from tests.harness.waiting import Clock, until

QUICK = Pace(
    window_s=1.0,
    up_s=0.0,
    down_s=0.0,
    flip_s=0.0,
    flip_cooldown_s=0.0,
    down_cooldown_s=0.0,
    settle_s=0.0,
    idle_s=0.3,
    stale_s=5.0,
    lead_s=0.0,
)


class Worker:
    """One that answers SetRole, and nothing else."""

    def __init__(self, worker_id: str, role: str) -> None:
        self.status = common_pb2.WorkerStatus(
            worker_id=worker_id,
            role=role,
            incarnation="a" * 32,
            model="m",
            num_blocks=100,
            num_free_blocks=100,
        )
        self.refusal: BatonError | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.asked: list[str] = []
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        def add(server: grpc.aio.Server) -> None:
            into: Any = worker_control_pb2_grpc.add_WorkerControlServicer_to_server
            into(self, server)

        self._server, self.status.address = await grpc_server.listen("127.0.0.1:0", [add])

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(None)

    @rpc.unary
    async def SetRole(self, request: Any, context: Any) -> worker_control_pb2.SetRoleReply:
        self.asked.append(request.role)
        await self.gate.wait()
        if self.refusal is not None:
            raise self.refusal
        self.status.role = request.role
        return worker_control_pb2.SetRoleReply(role=request.role)


class Cluster:
    """What an autoscaler sees, and it."""

    def __init__(
        self,
        redis: RedisServer,
        autoscaler: Autoscaler,
        scaler: FakeScaler | None = None,
        clock: Clock | None = None,
    ) -> None:
        """clock: the autoscaler's; None: it has a real one."""
        self.redis = redis
        self.clock = clock or Clock()
        self.autoscaler = autoscaler
        self.scaler = scaler or FakeScaler()
        self.workers: dict[str, Worker] = {}
        self.traffic = router_status_pb2.ModelTraffic(model="m")
        self.client: Any = redis.client()

    async def beat(self) -> None:
        """All entries, fresh."""
        router = router_status_pb2.RouterStatus(
            router_id="r", incarnation="b" * 32, models=[self.traffic]
        )
        await self._write("router", "r", router)
        for worker_id, worker in self.workers.items():
            await self._write("worker", worker_id, worker.status)

    async def add(self, role: str) -> Worker:
        worker_id = f"{role}-{sum(w.startswith(role) for w in self.workers)}"
        worker = self.workers[worker_id] = Worker(worker_id, role)
        await worker.start()
        return worker

    async def decide(self) -> Any:
        """0.05 s after the last time, by the test's clock."""
        self.clock.now_s += 0.05
        await self.beat()
        return await self.autoscaler.decide()

    async def _write(self, kind: str, entry_id: str, status: Any) -> None:
        text = json_format.MessageToJson(status, indent=None)
        await self.client.hset(registry.entries_key(kind), entry_id, text)
        key = registry.beat_key(kind, entry_id)
        # A minute: it is new for that long, however slow the test is.
        await self.client.set(key, status.incarnation, px=60_000)

    async def stop(self) -> None:
        await self.autoscaler.stop()
        for worker in self.workers.values():
            await worker.stop()
        await self.client.aclose()


def settings_for(redis: RedisServer, **changes: Any) -> AutoscalerSettings:
    least = changes.pop("least", 1)
    pool = PoolLimits(min_workers=least, max_workers=3)
    pace = changes.pop("pace", QUICK)
    plan = PlanSettings(limits=ScaleLimits(prefill=pool, decode=pool), pace=pace)
    base: dict[str, Any] = {
        "redis_url": redis.url,
        "scaler": "local",
        "local_address": "unix:/nobody",
        "interval_s": 3600.0,  # the tests decide when
        "look_timeout_s": 10.0,
        "act_timeout_s": 10.0,
        "metrics_listen": "127.0.0.1:0",
    }
    return AutoscalerSettings(plan=plan, **{**base, **changes})


@asynccontextmanager
async def running(prefill: int = 1, decode: int = 1, **changes: Any) -> AsyncIterator[Cluster]:
    redis = RedisServer()
    await redis.start()
    try:
        scaler, clock = FakeScaler(prefill, decode), Clock()
        autoscaler = Autoscaler(settings_for(redis, **changes), scaler, clock)
        cluster = Cluster(redis, autoscaler, scaler, clock)
        for _ in range(prefill):
            await cluster.add("prefill")
        for _ in range(decode):
            await cluster.add("decode")
        await cluster.beat()
        await autoscaler.start()
        await until(lambda: autoscaler.records.last is not None)
        try:
            yield cluster
        finally:
            autoscaler.check_integrity()
            await cluster.stop()
    finally:
        redis.remove()
