"""Several routers on one set of workers, several models in one router, and workers that failed and
come back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from process.rpc_errors import Unavailable
from protos import inference_pb2
from tests.harness.router_bench import (
    BOUND_S,
    Bench,
    FakeDecode,
    FakePrefill,
    FakeServedModel,
    SettingsError,
    fake_model,
    request,
    rest_of,
    running,
)
from tests.harness.waiting import until

pytestmark = pytest.mark.oracle

SHORT: dict[str, Any] = {"max_tokens": 4, "seed": 5}


def _ask(number: int = 0, **fields: Any) -> Any:
    sampling = {**SHORT, **fields.pop("sampling", {})}
    return request(token_ids={"ids": [number + 5] * 60}, sampling=sampling, **fields)


# ---- several routers


async def test_each_router_sees_what_the_other_has_taken() -> None:
    """A worker that one router has filled is left alone by the other, without a refusal."""
    async with (
        running(num_decode=2, times={"poll_interval_s": 0.05}) as bench,
        bench.another_router(times={"poll_interval_s": 0.05}) as (other, stub),
    ):
        first, second = bench.decodes
        for worker in bench.decodes:
            worker.num_blocks = 8  # of two requests
            worker.token_gate.close()
            await bench.publish(worker)
        second.is_draining = True
        await bench.publish(second)
        held = [bench.call(_ask(n)) for n in range(2)]
        for call in held:
            await call.read()
        assert first.num_free_blocks == 0 and first.num_open == 2
        second.is_draining = False
        for worker in bench.decodes:
            await bench.publish(worker)
        await until(lambda: other.loads()["d0"].num_free_blocks == 0)
        await until(lambda: "d1" in other.loads())
        more = [stub.Generate(_ask(n), timeout=BOUND_S) for n in range(2)]
        for call in more:
            await call.read()
        assert second.num_open == 2
        assert first.num_refused == second.num_refused == 0
        for worker in bench.decodes:
            worker.token_gate.open()
        for call in (*held, *more):
            await rest_of(call)


async def test_two_routers_at_once_never_take_more_than_there_is() -> None:
    """The worker's word counts, and all counts go back to none."""
    times = {"poll_interval_s": 0.05}
    async with (
        running(num_prefill=2, num_decode=2, times=times) as bench,
        bench.another_router(times=times) as (other, stub),
    ):
        for worker in bench.decodes:
            worker.num_blocks = 20  # of five requests
            await bench.publish(worker)
        stubs = (stub, bench.stub)
        calls = [stubs[n % 2].Generate(_ask(n), timeout=BOUND_S) for n in range(60)]
        ended = await asyncio.gather(*(rest_of(call) for call in calls))
        for messages in ended:
            assert messages[-1].usage.num_output_tokens == 4
        for worker in bench.decodes:
            assert worker.most_taken <= worker.num_blocks
            assert worker.num_blocks_taken == 0
        both = (bench.probe, other)
        await until(lambda: all(router.is_idle() for router in both))
        for worker in (*bench.prefills, *bench.decodes):
            await bench.publish(worker)
        await other.look()
        for router in both:
            for load in router.loads().values():
                assert (load.num_requests, load.num_queued_tokens) == (0, 0)


async def test_a_prompt_queue_of_another_router_is_seen_and_ones_own_not_twice() -> None:
    async with running(num_prefill=2) as bench:
        bench.prefills[0].num_queued_tokens = 50_000
        await bench.publish(bench.prefills[0])
        for number in range(4):
            await bench.generate(_ask(number))
        assert not bench.prefills[0].requests
        worker = bench.prefills[1]
        worker.gate.close()
        call = bench.call(_ask())
        await worker.gate.reached.wait()
        assert bench.probe.loads()["p1"].num_queued_tokens == 60
        worker.num_queued_tokens = 60  # it says what we know
        await bench.publish(worker)
        assert bench.probe.loads()["p1"].num_queued_tokens == 60
        worker.num_queued_tokens = 1060
        await bench.publish(worker)
        assert bench.probe.loads()["p1"].num_queued_tokens == 1060
        worker.gate.open()
        await rest_of(call)
        assert bench.probe.loads()["p1"].num_queued_tokens == 1000


# ---- workers that failed


async def test_a_worker_that_failed_is_probed_and_tried_by_one_request() -> None:
    async with running(num_prefill=2, times={"suspect_s": 0.1}) as bench:
        await bench.generate(_ask())
        (failing,) = (worker for worker in bench.prefills if worker.requests)
        failing.error = Unavailable("not today")
        failing.status_gate.close()
        await bench.generate(_ask())
        assert bench.probe.standing(failing) in ("paused", "being probed")
        failing.error = None
        failing.status_gate.open()
        num_requests = len(failing.requests)
        await until(lambda: bench.probe.standing(failing) == "may be tried")
        failing.gate.close()
        call = bench.call(_ask())
        await failing.gate.reached.wait()
        assert bench.probe.standing(failing) == "being tried"
        # While one tries, all others go elsewhere.
        for _ in range(3):
            await bench.generate(_ask())
        assert len(failing.requests) == num_requests + 1
        failing.gate.open()
        await rest_of(call)
        assert bench.probe.standing(failing) == "trusted"


async def test_a_dead_worker_stays_mistrusted_at_growing_pauses() -> None:
    """A fixed time of suspicion would send it a request again and again."""
    async with running(num_prefill=2, times={"suspect_s": 0.05}) as bench:
        await bench.generate(_ask())
        (dead,) = (worker for worker in bench.prefills if worker.requests)
        dead.gate.close()
        call = bench.call(_ask())
        await dead.gate.reached.wait()
        await dead.stop()
        await rest_of(call)
        await until(lambda: bench.probe.num_failures(dead) >= 3)
        assert (await bench.generate(_ask()))[-1].usage.num_output_tokens == 4
        (alive,) = (worker for worker in bench.prefills if worker is not dead)
        assert len(alive.requests) == 2


async def test_a_decode_worker_that_does_not_answer_is_tried_again_later() -> None:
    times = {"reserve_answer_s": 2.0, "suspect_s": 0.1}  # the others must answer in that, too
    async with running(num_decode=2, times=times) as bench:
        await bench.generate(_ask())
        (silent,) = (worker for worker in bench.decodes if worker.num_reserved)
        silent.reserve_gate.close()
        assert (await bench.generate(_ask()))[-1].usage.num_output_tokens == 4
        assert bench.probe.standing(silent) != "trusted"
        silent.reserve_gate.open()
        await until(lambda: bench.probe.standing(silent) == "may be tried")
        await bench.generate(_ask())
        assert bench.probe.standing(silent) == "trusted"


async def test_the_third_prefill_worker_serves_when_two_fail() -> None:
    async with running(num_prefill=3) as bench:
        await bench.generate(_ask())
        (first,) = (worker for worker in bench.prefills if worker.requests)
        others = [worker for worker in bench.prefills if worker is not first]
        first.error = others[0].error = Unavailable("not today")
        # The second try goes to the one that has no queue.
        others[1].num_queued_tokens = 1000
        await bench.publish(others[1])
        messages = await bench.generate(_ask(request_id="r1"))
        assert messages[-1].usage.num_output_tokens == 4
        explained = await bench.explain()
        assert [d.occasion for d in explained.decisions] == [
            "first",
            "prefill failed",
            "prefill failed",
        ]
        assert len({d.decode_id for d in explained.decisions}) == 1


async def test_a_prefill_worker_that_hangs_without_heartbeat_loses_its_calls() -> None:
    """A stopped process keeps its connection: the client must not wait for all of its time."""
    times = {"poll_interval_s": 0.1, "lapse_grace_s": 0.5}
    async with running(num_prefill=2, times=times) as bench:
        for worker in bench.prefills:
            worker.gate.close()
        call = bench.call(_ask())
        reading = asyncio.create_task(call.read())
        hung, other = await bench.busy_prefill()
        other.gate.open()
        await bench.silence(hung)
        assert (await asyncio.wait_for(reading, BOUND_S)).token_ids
        await rest_of(call)
        assert len(other.requests) == 1
        await until(lambda: hung.num_cancelled == 1)


async def test_without_redis_nobody_s_calls_are_given_up() -> None:
    async with running(times={"lapse_grace_s": 0.001}) as bench:
        bench.prefill.gate.close()
        call = bench.call(_ask())
        await bench.prefill.gate.reached.wait()
        bench.redis.kill()
        for _ in range(3):  # the first begins a grace, the next one would end it
            await bench.probe.look()
            assert not bench.probe.is_redis_reachable
            await asyncio.sleep(0.002)
        bench.prefill.gate.open()
        assert (await rest_of(call))[-1].usage.num_output_tokens == 4


# ---- several models


OTHER = {"name": "other", "fingerprint": "cd" * 32, "tokenizer_digest": "22" * 32}


@asynccontextmanager
async def _two_models(*, with_other: bool = True) -> AsyncIterator[Bench]:
    other: FakeServedModel = fake_model(**OTHER)
    async with running(others=[other]) as bench:
        if with_other:
            await bench.add(FakePrefill("px", other))
            await bench.add(FakeDecode("dx", other))
        yield bench


async def test_each_model_has_its_own_workers() -> None:
    async with _two_models() as bench:
        for model, workers in (("fake", {"p0", "d0"}), ("other", {"px", "dx"})):
            for number in range(3):
                messages = await bench.generate(_ask(number, model=model))
                last = messages[-1].provenance
                assert {leg.worker_id for leg in last.legs} == workers
                assert last.model == model
        problems = (await bench.status()).problems
        assert not [p for p in problems if "model" in p or "tokenizer" in p]
        reply = await bench.stub.ListModels(inference_pb2.ListModelsRequest(), timeout=BOUND_S)
        assert {(m.model, m.model_fingerprint) for m in reply.models} == {
            ("fake", "ab" * 32),
            ("other", "cd" * 32),
        }


@pytest.mark.parametrize(
    ("model", "words"),
    [("", "is needed, there are several: fake, other"), ("third", "served: fake, other")],
)
async def test_a_request_says_which_of_several_models(model: str, words: str) -> None:
    async with _two_models() as bench:
        code, error = await bench.failure(_ask(model=model))
        assert code is grpc.StatusCode.INVALID_ARGUMENT and words in str(error)


async def test_a_model_without_workers_does_not_keep_the_other_from_serving() -> None:
    async with _two_models(with_other=False) as bench:
        assert await bench.code_of(_ask(model="other")) is grpc.StatusCode.UNAVAILABLE
        assert await bench.generate(_ask(model="fake"))


async def test_two_models_of_one_name_are_refused() -> None:
    with pytest.raises(SettingsError, match="'fake' names two of the models"):
        async with running(others=[fake_model()]):
            pass
