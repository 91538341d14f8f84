"""A worker whose engine is inside a step that does not end, while its process beats and answers:
its requests go on at the other one, token for token. Real workers over a fake model, a whole
router, a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from process import rpc
from protos import inference_pb2, inference_pb2_grpc
from services.decode.role import DecodeRole
from services.prefill.role import PrefillRole
from services.router.app import Router
from services.router.worker_views import ServedModel
from services.worker.config import WorkerLimits, WorkerSettings
from services.worker.server import Worker, start
from tests.harness.gated_engine import GatedModel, fake_engine, prompt_of
from tests.harness.redis_server import RedisServer
from tests.harness.router_bench import BOUND_S, fake_model, model_for_router, settings_for
from tests.harness.waiting import until

MAX_STEP_S = 2.0
ROLES: dict[str, Any] = {"prefill": PrefillRole, "decode": DecodeRole}


@dataclass
class Site:
    """Two workers of each role."""

    router: Router
    stub: Any
    models: dict[str, list[GatedModel]]
    workers: list[Worker]

    async def tokens(self) -> list[int]:
        """Of one answer."""
        request = inference_pb2.GenerateRequest(
            token_ids={"ids": prompt_of(40)},
            sampling={"max_tokens": 24, "temperature": 0.0, "ignore_eos": True},
        )
        messages = [m async for m in self.stub.Generate(request, timeout=BOUND_S)]
        return [token for message in messages for token in message.token_ids]


@asynccontextmanager
async def site() -> AsyncIterator[Site]:
    redis = RedisServer()
    models: dict[str, list[GatedModel]] = {role: [] for role in ROLES}
    workers: list[Worker] = []
    async with AsyncExitStack() as stack:
        stack.callback(redis.remove)
        await redis.start()
        model = model_for_router(fake_model())
        model.served = ServedModel(("fake",), "")
        router = Router(settings_for(redis, times={"max_step_s": MAX_STEP_S}), model)
        await router.start()
        stack.push_async_callback(router.stop)
        for role, make_role in ROLES.items():
            for number in range(2):
                gated = GatedModel()
                settings = WorkerSettings(
                    redis_url=redis.url,
                    worker_id=f"{role}-{number}",
                    limits=WorkerLimits(drain_s=0.2, stop_grace_s=0.05),
                )
                engine = fake_engine(model=gated)
                worker = await start(engine, settings, role, make_role)
                stack.push_async_callback(worker.stop)
                stack.callback(gated.release)  # before that: a step that hangs ends only here
                models[role].append(gated)
                workers.append(worker)
        channel = await stack.enter_async_context(rpc.channel(router.address))
        await until(lambda: _knows(router, [worker.core.identity.worker_id for worker in workers]))
        yield Site(router, inference_pb2_grpc.InferenceStub(channel), models, workers)


def _knows(router: Router, worker_ids: list[str]) -> bool:
    candidates = router.desk.models.find("").candidates
    streams = (router._streams, router._prefills)
    return all(
        candidates.find(name) is not None and any(each.is_up(name) for each in streams)
        for name in worker_ids
    )


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_request_leaves_a_worker_whose_step_does_not_end(role: str) -> None:
    async with site() as here:
        right = await here.tokens()
        assert len(right) == 24
        for gated in here.models[role]:
            gated.hold()
        asked = asyncio.create_task(here.tokens())
        await until(lambda: any(gated.is_held.is_set() for gated in here.models[role]))
        _, other = sorted(here.models[role], key=lambda gated: not gated.is_held.is_set())
        other.release()
        assert await asked == right
        assert not other.is_held.is_set()
        # Nor does the next one go there.
        assert await here.tokens() == right
