"""Routers before real prefill and decode workers, which share no store."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from process import rpc
from protos import inference_pb2_grpc
from services.router.app import Router
from services.router.worker_views import ServedModel
from services.worker.config import WorkerLimits
from tests.harness.gated_engine import GatedModel, fake_engine
from tests.harness.prefill_decode_pair import ROLES, started
from tests.harness.redis_server import RedisServer
from tests.harness.router_bench import fake_model, model_for_router, settings_for
from tests.harness.router_probe import RouterProbe
from tests.harness.waiting import until
from tests.harness.worker_probe import WorkerProbe


@dataclass
class Site:
    """Of one test. `models`: of each role's workers, which a test may hold."""

    routers: list[RouterProbe]
    stubs: list[Any]
    models: dict[str, list[GatedModel]]
    decode: WorkerProbe
    """The last decode worker."""

    @property
    def router(self) -> RouterProbe:
        return self.routers[0]

    @property
    def stub(self) -> Any:
        return self.stubs[0]

    @property
    def prefill_model(self) -> GatedModel:
        return self.models["prefill"][0]


@asynccontextmanager
async def site(
    num_routers: int = 1, num_places: int = 8, *, num_workers: int = 1, **settings: Any
) -> AsyncIterator[Site]:
    """num_places: in a decode worker's steps. num_workers: of each role. settings: the routers'."""
    redis, models = RedisServer(), {role: list[GatedModel]() for role in ROLES}
    async with AsyncExitStack() as stack:
        stack.callback(redis.remove)
        await redis.start()
        routers, stubs, workers = [], [], []
        for _ in range(num_routers):
            model = model_for_router(fake_model())
            model.served = ServedModel(("fake",), "")
            routers.append(RouterProbe(Router(settings_for(redis, **settings), model)))
            await routers[-1].router.start()
            stack.push_async_callback(routers[-1].router.stop)
        for role in ROLES:
            for number in range(num_workers):
                models[role].append(gated := GatedModel())
                chunk = 16 if role == "prefill" else num_places
                engine = fake_engine(num_blocks=4096, chunk=chunk, model=gated)
                own = started(
                    role,
                    engine,
                    redis_url=redis.url,
                    worker_id=f"{role}-{number}",
                    limits=WorkerLimits(drain_s=0.2, stop_grace_s=0.05),
                )
                workers.append(await stack.enter_async_context(own))
                stack.callback(gated.release)  # before that: a step that is held ends only here
        for router in routers:
            for worker in workers:
                name = worker.core.identity.worker_id
                await until(lambda r=router, name=name: r.is_up(name) and name in r.loads())
            channel = await stack.enter_async_context(rpc.channel(router.router.address))
            stubs.append(inference_pb2_grpc.InferenceStub(channel))
        yield Site(routers, stubs, models, WorkerProbe(workers[-1]))
