"""Routers before one real prefill and one real decode worker, which share no store."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from process import rpc
from protos import inference_pb2_grpc
from services.decode.role import DecodeRole
from services.prefill.role import PrefillRole
from services.router.app import Router
from services.router.worker_views import ServedModel
from services.worker.config import WorkerLimits, WorkerSettings
from services.worker.server import start
from tests.harness.gated_engine import GatedModel, fake_engine
from tests.harness.redis_server import RedisServer
from tests.harness.router_bench import fake_model, model_for_router, settings_for
from tests.harness.router_probe import RouterProbe
from tests.harness.waiting import until
from tests.harness.worker_probe import WorkerProbe


@dataclass
class Site:
    """Routers before a real prefill and a real decode worker."""

    routers: list[RouterProbe]
    stubs: list[Any]
    prefill_model: GatedModel
    decode: WorkerProbe

    @property
    def router(self) -> RouterProbe:
        return self.routers[0]

    @property
    def stub(self) -> Any:
        return self.stubs[0]


@asynccontextmanager
async def site(num_routers: int = 1, num_places: int = 8) -> AsyncIterator[Site]:
    redis = RedisServer()
    async with AsyncExitStack() as stack:
        stack.callback(redis.remove)
        await redis.start()
        routers = []
        for _ in range(num_routers):
            model = model_for_router(fake_model())
            model.served = ServedModel(("fake",), "")
            routers.append(RouterProbe(Router(settings_for(redis), model)))
            await routers[-1].router.start()
            stack.push_async_callback(routers[-1].router.stop)
        workers, prefill_model = [], GatedModel()
        for role, make_role in (("prefill", PrefillRole), ("decode", DecodeRole)):
            if role == "prefill":
                engine = fake_engine(num_blocks=4096, model=prefill_model)
            else:
                engine = fake_engine(num_blocks=4096, chunk=num_places)
            settings = WorkerSettings(
                redis_url=redis.url,
                worker_id=role,
                engine=engine.config,
                limits=WorkerLimits(stop_grace_s=0.05),
            )
            workers.append(await start(engine, settings, role, make_role))
            stack.push_async_callback(workers[-1].stop)
        stubs = []
        for router in routers:
            await until(lambda router=router: router.is_up("prefill") and router.is_up("decode"))
            channel = await stack.enter_async_context(rpc.channel(router.router.address))
            stubs.append(inference_pb2_grpc.InferenceStub(channel))
        try:
            yield Site(routers, stubs, prefill_model, WorkerProbe(workers[1]))
        finally:
            prefill_model.release()
