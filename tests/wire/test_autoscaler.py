"""One autoscaler as a whole: what it does, says, and does not do when something is missing; and
what a router does for it: it says what its traffic is, and holds requests while there are no
workers."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import grpc.aio
import pytest
from google.protobuf import json_format

from baton.client import Client
from process import registry, rpc
from process.rpc_errors import (
    BatonError,
    FailedPrecondition,
    InvalidArgument,
    PermissionDenied,
    Unavailable,
)
from protos import (
    autoscaler_pb2,
    autoscaler_pb2_grpc,
    common_pb2,
    externalscaler_pb2,
    externalscaler_pb2_grpc,
    inference_pb2,
    router_status_pb2,
)
from services.autoscaler import observer
from services.autoscaler.actuator import FORGET_S, ActionOutcome
from services.autoscaler.config import Pace
from services.autoscaler.decision import Decision, DecisionRecord, Direction, Flip, Reason
from services.autoscaler.grpc_services import MAX_REQUEST_BYTES
from services.autoscaler.metrics import SILENCE_S
from services.autoscaler.scaler import ScalerError, UnitState
from services.autoscaler.signals import ByRole, Role
from services.router.testing.fake_workers import FakeDecode, FakePrefill
from services.worker.provenance import status_to_json
from tests.harness import autoscaler_bench
from tests.harness.autoscaler_bench import Cluster, Worker
from tests.harness.redis_server import RedisServer
from tests.harness.router_bench import (
    BOUND_S,
    SHORT_WAITS,
    Bench,
    HttpBench,
    code_of,
    failure,
    fake_model,
    http_bench,
    running,
    settings_for,
)
from tests.harness.waiting import Clock, until


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    """One worker of each role."""
    async with autoscaler_bench.running() as made:
        yield made


async def ask(address: str, **fields: Any) -> autoscaler_pb2.GetDecisionsReply:
    async with rpc.channel(address) as channel:
        stub = autoscaler_pb2_grpc.AutoscalerStub(channel)
        reply: autoscaler_pb2.GetDecisionsReply = await stub.GetDecisions(
            autoscaler_pb2.GetDecisionsRequest(**fields), timeout=BOUND_S
        )
        return reply


@asynccontextmanager
async def keda(cluster: Cluster) -> AsyncIterator[Any]:
    """A stub, as KEDA asks."""
    async with rpc.channel(cluster.autoscaler.address) as channel:
        yield externalscaler_pb2_grpc.ExternalScalerStub(channel)


def ref(role: str, **fields: Any) -> externalscaler_pb2.ScaledObjectRef:
    return externalscaler_pb2.ScaledObjectRef(scalerMetadata={"role": role}, **fields)


async def burst(cluster: Cluster) -> DecisionRecord:
    """Load that one pair cannot serve, until more are asked for, or for a while."""
    for _ in range(4):
        cluster.traffic.num_arrived += 500
        cluster.traffic.num_finished += 10
        cluster.traffic.num_prompt_tokens += 10 * 4000
        cluster.traffic.num_output_tokens += 10 * 400
        cluster.traffic.num_queued = 400
        record: DecisionRecord = await cluster.decide()
        if record.decision.is_action:
            break
    return record


async def test_load_that_one_pair_cannot_serve_starts_workers(cluster: Cluster) -> None:
    record = await burst(cluster)
    cluster.scaler.settle()
    assert record.decision.direction is Direction.UP, record.decision.line()
    assert record.outcome is ActionOutcome.DONE
    scale = await cluster.scaler.get({})
    wanted = ByRole(scale.prefill.wanted, scale.decode.wanted)
    assert wanted == record.decision.wanted
    assert wanted.prefill + wanted.decode > 2
    # What was decided, and why, is told to who asks and to who watches the pools.
    reply = await ask(cluster.autoscaler.address, num_decisions=1, only_actions=True)
    (told,) = reply.decisions
    assert (told.direction, told.outcome) == ("up", "done")
    assert json.loads(told.why_json)["terms"] and told.summary == record.decision.line()
    assert reply.is_leader and not reply.problems
    ((announced, outcome, _),) = cluster.scaler.announced
    assert (announced, outcome) == (record.decision, "done")


async def test_no_worker_is_removed_while_another_of_its_pool_starts(cluster: Cluster) -> None:
    """A burst that is over before the workers that it brought serve."""

    async def told() -> autoscaler_pb2.ScalingDecision:
        await cluster.decide()
        (decision,) = (await ask(cluster.autoscaler.address, num_decisions=1)).decisions
        return decision

    async def is_start_waited_for() -> bool:
        decision = await told()
        assert decision.direction != "down", decision.summary
        return "a prefill worker starts" in decision.summary

    async def is_one_removed() -> bool:
        return (await told()).direction == "down"

    await burst(cluster)
    assert any(unit.state is UnitState.STARTING for unit in cluster.scaler.units)
    cluster.traffic.num_queued = 0
    await until(is_start_waited_for)
    assert not any(unit.state is UnitState.LEAVING for unit in cluster.scaler.units)
    for unit in cluster.scaler.units:
        if unit.worker_id not in cluster.workers:
            await cluster.add(unit.home.value)
    cluster.scaler.settle()
    await until(is_one_removed)
    assert any(unit.state is UnitState.LEAVING for unit in cluster.scaler.units)


async def test_nobody_asks_so_nobody_is_there_until_somebody_waits() -> None:
    async with autoscaler_bench.running(least=0) as cluster:

        async def is_nobody_wanted() -> bool:
            await cluster.decide()
            cluster.scaler.settle()
            scale = await cluster.scaler.get({})
            return scale.prefill.wanted == scale.decode.wanted == 0

        await until(is_nobody_wanted)
        for worker in cluster.workers.values():
            await worker.stop()
        cluster.workers.clear()
        await cluster.client.delete(registry.entries_key("worker"))
        cluster.traffic.num_arrived += 1
        cluster.traffic.num_held = 1
        record = await cluster.decide()
        assert record.decision.reason is Reason.WAKE, record.decision.line()
        scale = await cluster.scaler.get({})
        assert scale.prefill.wanted >= 1 and scale.decode.wanted >= 1


async def test_without_redis_it_changes_nothing_and_says_so() -> None:
    async with autoscaler_bench.running(least=0) as cluster:
        cluster.redis.kill()
        cluster.clock.now_s += 1.0  # longer than an idle cluster keeps its workers
        record = await cluster.autoscaler.decide()
        assert not record.decision.is_action
        assert cluster.scaler.num_changes == 0
        reply = await ask(cluster.autoscaler.address, num_decisions=1)
        assert any("Redis does not answer" in problem for problem in reply.problems)


async def test_workers_that_cannot_be_counted_are_left_alone() -> None:
    async with autoscaler_bench.running(least=0) as cluster:
        cluster.scaler.error = ScalerError("no rights")
        cluster.clock.now_s += 1.0
        for _ in range(3):
            record = await cluster.decide()
        assert not record.decision.is_action or record.outcome is ActionOutcome.FAILED
        cluster.scaler.error = None
        assert cluster.scaler.num_changes == 0
        reply = await ask(cluster.autoscaler.address)
        assert any("no rights" in problem for problem in reply.problems)


def decision(direction: Direction, wanted: ByRole[int], *flips: Flip) -> Decision:
    return Decision(
        at_s=1.0,
        direction=direction,
        reason=Reason.BALANCE,
        before=ByRole(1, 1),
        wanted=wanted,
        flips=flips,
    )


async def act(cluster: Cluster, decided: Decision) -> tuple[ActionOutcome, str]:
    acting, observing = cluster.autoscaler._acting, cluster.autoscaler._observing
    return await acting.act(
        decided,
        roles=observing.roles(cluster.autoscaler._flips.under_way),
        leave_first=observing.leave_first(),
        workers=cluster.autoscaler._workers(),
    )


async def test_a_flip_is_ordered_once_and_counted_where_it_goes() -> None:
    async with autoscaler_bench.running(decode=2, pace=Pace()) as cluster:
        worker = cluster.workers["decode-1"]
        worker.gate.clear()
        flip = decision(Direction.FLIP, ByRole(2, 1), Flip("decode-1", Role.PREFILL))
        assert await act(cluster, flip) == (ActionOutcome.ORDERED, "")
        await until(lambda: worker.asked == ["prefill"])
        assert await act(cluster, flip) == (ActionOutcome.ORDERED, "")
        await cluster.decide()
        seen = cluster.autoscaler._observations
        assert seen is not None and seen.num_flipping == 1
        assert (seen.pools.prefill.wanted, seen.pools.decode.wanted) == (2, 1)
        # It serves nobody while it changes.
        assert (seen.pools.prefill.num_ready, seen.pools.decode.num_ready) == (1, 1)
        worker.gate.set()
        await until(lambda: not cluster.autoscaler._flips.under_way)
        assert worker.asked == ["prefill"]
        await cluster.decide()
        seen = cluster.autoscaler._observations
        assert seen is not None and seen.num_flipping == 0
        assert (seen.pools.prefill.num_ready, seen.pools.decode.num_ready) == (2, 1)
        assert cluster.scaler.num_changes == 0


async def test_a_worker_that_refuses_is_not_asked_again_in_that_life() -> None:
    async with autoscaler_bench.running(decode=2) as cluster:
        worker = cluster.workers["decode-1"]
        worker.refusal = FailedPrecondition("its certificate names one role")
        flip = decision(Direction.FLIP, ByRole(2, 1), Flip("decode-1", Role.PREFILL))
        await act(cluster, flip)
        await until(lambda: cluster.autoscaler.records.outcomes["failed"] == 1)

        async def can_flip() -> dict[str, bool]:
            await cluster.decide()
            seen = cluster.autoscaler._observations
            assert seen is not None
            return {w.worker_id: w.can_flip for w in seen.pools.decode.workers}

        assert await can_flip() == {"decode-0": True, "decode-1": False}
        worker.status.incarnation = "c" * 32
        assert await can_flip() == {"decode-0": True, "decode-1": True}


@pytest.mark.parametrize(
    ("refusal", "forgotten_s"),
    [(FailedPrecondition, FORGET_S), (PermissionDenied, FORGET_S), (Unavailable, 0.0)],
)
async def test_a_refusal_is_forgotten_as_a_certificate_may_have_come_since(
    cluster: Cluster, refusal: type[BatonError], forgotten_s: float
) -> None:
    """One for being busy at once."""
    flips, worker, clock = cluster.autoscaler._flips, cluster.workers["decode-0"], Clock()
    flips._clock = clock
    for num_asked in (1, 2):
        worker.refusal = refusal("not now")
        flips.order(worker.status, Role.PREFILL)
        await until(lambda: not flips.under_way)
        assert len(worker.asked) == num_asked
        if forgotten_s:
            clock.now_s += forgotten_s - 0.5
            assert not flips.may_ask(worker.status)
            clock.now_s += 1.0
        assert flips.may_ask(worker.status)
    worker.refusal = None
    flips.order(worker.status, Role.PREFILL)
    await until(lambda: not flips.under_way)
    assert worker.status.role == "prefill" and flips.may_ask(worker.status)


class Older(Worker):
    """One whose version knows no flips."""

    async def SetRole(self, request: Any, context: Any) -> Any:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "what is that?")


async def test_a_worker_that_knows_no_flips_is_not_asked_again_in_that_life(
    cluster: Cluster,
) -> None:
    now_s = 1000.0
    flips, older = cluster.autoscaler._flips, Older("decode-9", "decode")
    flips._clock = lambda: now_s
    cluster.workers["decode-9"], status = older, older.status
    await older.start()
    flips.order(status, Role.PREFILL)
    await until(lambda: not flips.under_way)
    now_s += 1000 * FORGET_S
    assert not flips.may_ask(status)
    status.incarnation = "c" * 32
    assert flips.may_ask(status)


async def test_a_worker_that_is_gone_is_said(cluster: Cluster) -> None:
    gone = decision(Direction.FLIP, ByRole(2, 0), Flip("decode-9", Role.PREFILL))
    outcome, problem = await act(cluster, gone)
    assert outcome is ActionOutcome.FAILED and "decode-9" in problem


@dataclass
class Told:
    """Leadership as a test says it is; at first another's."""

    left_s: float = 0.0
    led_s: float = 0.0
    heard: str = ""
    problem: str = ""

    def start(self) -> None: ...
    async def stop(self) -> None: ...


async def test_who_does_not_lead_or_only_advises_changes_nothing(cluster: Cluster) -> None:
    up = decision(Direction.UP, ByRole(2, 2))
    cluster.autoscaler._acting._leadership = Told()
    assert await act(cluster, up) == (ActionOutcome.NOT_LEADER, "")
    assert cluster.scaler.num_changes == 0
    async with autoscaler_bench.running(act=False) as cluster:
        assert await act(cluster, up) == (ActionOutcome.ADVISED, "")
        assert cluster.scaler.num_changes == 0


async def test_leadership_that_ends_in_the_middle_ends_the_action(cluster: Cluster) -> None:
    acting = cluster.autoscaler._acting
    change = cluster.scaler.set

    async def set_then_lose(role: Role, *given: Any, **named: Any) -> None:
        await change(role, *given, **named)
        acting._leadership = Told()

    cluster.scaler.set = set_then_lose  # type: ignore[method-assign]
    outcome, problem = await act(cluster, decision(Direction.UP, ByRole(2, 2)))
    assert outcome is ActionOutcome.FAILED and "another autoscaler may lead" in problem
    scale = await cluster.scaler.get({})
    assert (scale.prefill.wanted, scale.decode.wanted) == (2, 1)


async def test_keda_is_told_what_is_wanted() -> None:
    async with autoscaler_bench.running(decode=2) as cluster:
        await cluster.decide()
        wanted = cluster.autoscaler.records.last.decision.wanted  # type: ignore[union-attr]
        async with keda(cluster) as stub:
            for role in ("prefill", "decode"):
                asked = ref(role, name="x", namespace="y")
                assert (await stub.IsActive(asked, timeout=BOUND_S)).result
                (spec,) = (await stub.GetMetricSpec(asked, timeout=BOUND_S)).metricSpecs
                assert (spec.metricName, spec.targetSizeFloat) == (f"baton-{role}-workers", 1.0)
                request = externalscaler_pb2.GetMetricsRequest(
                    scaledObjectRef=asked, metricName=spec.metricName
                )
                (value,) = (await stub.GetMetrics(request, timeout=BOUND_S)).metricValues
                assert value.metricValueFloat == wanted.of(Role(role))
                stream = stub.StreamIsActive(asked, timeout=BOUND_S)
                assert (await stream.read()).result
                stream.cancel()
            _, error = await failure(stub.IsActive(ref("king"), timeout=BOUND_S))
            assert isinstance(error, InvalidArgument) and error.field == "scalerMetadata.role"


async def test_anybody_may_call_and_nobody_sends_much(cluster: Cluster) -> None:
    """KEDA's port is open to others than our own processes; long replies are ours to send."""
    async with keda(cluster) as stub:
        asked = ref("decode")
        room = MAX_REQUEST_BYTES - asked.ByteSize() - 4  # a name's tag and length
        asked.name = "x" * room
        assert asked.ByteSize() == MAX_REQUEST_BYTES == 65536
        assert (await stub.IsActive(asked, timeout=BOUND_S)).result
        asked.name += "x"
        assert (
            await code_of(stub.IsActive(asked, timeout=BOUND_S))
            is grpc.StatusCode.RESOURCE_EXHAUSTED
        )
    records = cluster.autoscaler.records
    record = await cluster.decide()
    assert record.decision.terms
    for _ in range(500):  # all that are kept
        records.add(record)
    reply = await ask(cluster.autoscaler.address)
    assert len(reply.decisions) == 500 and reply.ByteSize() > 4 * MAX_REQUEST_BYTES


async def test_only_what_serves_is_told_to_flip_when_another_is_left() -> None:
    """decode-1 never comes; decode-0 is all that decodes, and prefill lacks one."""
    async with autoscaler_bench.running(decode=2) as cluster:
        await cluster.workers.pop("decode-1").stop()
        await cluster.client.hdel("baton:workers", "decode-1")
        cluster.scaler.units = [
            replace(unit, state=UnitState.STARTING) if unit.worker_id == "decode-1" else unit
            for unit in cluster.scaler.units
        ]
        directions = set()
        for _ in range(5):
            cluster.traffic.num_arrived += 20
            cluster.traffic.num_finished += 1
            cluster.traffic.num_prompt_tokens += 8000
            cluster.traffic.num_output_tokens += 2
            cluster.traffic.num_queued = 20
            directions.add((await cluster.decide()).decision.direction)
        assert Direction.FLIP not in directions and directions != {Direction.HOLD}


async def test_a_stream_hears_that_the_last_worker_is_not_wanted() -> None:
    async with autoscaler_bench.running(least=0) as cluster:
        async with keda(cluster) as stub:
            asked = ref("decode")
            stream = stub.StreamIsActive(asked, timeout=BOUND_S)
            assert (await stream.read()).result
            async with asyncio.timeout(BOUND_S):
                while (await cluster.scaler.get({})).decode.wanted:
                    await cluster.decide()
                    cluster.scaler.settle()
            await cluster.decide()
            assert not (await stream.read()).result
            stream.cancel()


async def test_probes(cluster: Cluster) -> None:
    def get(path: str) -> int:
        url = f"http://{cluster.autoscaler.metrics_address}{path}"
        with urllib.request.urlopen(url, timeout=BOUND_S) as answer:
            return int(answer.status)

    for path in ("/readyz", "/livez"):
        assert await asyncio.to_thread(get, path) == 200


async def test_a_failure_that_goes_on_is_announced_once(cluster: Cluster) -> None:
    up = decision(Direction.UP, ByRole(2, 2))
    cluster.scaler.error = ScalerError("no rights")
    for _ in range(3):
        assert await act(cluster, up) == (ActionOutcome.FAILED, "no rights")
    assert [problem for _, _, problem in cluster.scaler.announced] == ["no rights"]
    cluster.scaler.error = None
    assert await act(cluster, up) == (ActionOutcome.DONE, "")
    cluster.scaler.error = ScalerError("no rights")
    await act(cluster, up)
    assert [problem for _, _, problem in cluster.scaler.announced] == ["no rights", "", "no rights"]


def shown(cluster: Cluster) -> dict[str, float]:
    """The gauge that an HPA adds up, by role."""
    return {
        sample.labels["role"]: sample.value
        for metric in cluster.autoscaler._read_metrics()
        for sample in metric.samples
        if sample.name == "baton_autoscaler_wanted_workers"
    }


async def keda_says(cluster: Cluster) -> dict[str, float] | str:
    """By role; or why not."""
    found: dict[str, float] = {}
    async with keda(cluster) as stub:
        for role in ("prefill", "decode"):
            asked = ref(role)
            request = externalscaler_pb2.GetMetricsRequest(scaledObjectRef=asked)
            try:
                reply = await stub.GetMetrics(request, timeout=BOUND_S)
            except grpc.aio.AioRpcError as error:
                assert error.code() is grpc.StatusCode.UNAVAILABLE
                with pytest.raises(grpc.aio.AioRpcError):
                    await stub.IsActive(asked, timeout=BOUND_S)
                return error.details() or ""
            found[role] = reply.metricValues[0].metricValueFloat
    return found


@pytest.mark.parametrize("act", [True, False])
async def test_only_who_leads_shows_what_is_wanted_and_anybody_tells_keda(act: bool) -> None:
    """An HPA adds up all that it finds, KEDA asks whichever replica its connection has."""
    async with autoscaler_bench.running(act=act) as cluster:
        one = {"prefill": 1.0, "decode": 1.0}
        assert shown(cluster) == await keda_says(cluster) == one  # it is alone
        led = cluster.autoscaler._leadership = cluster.autoscaler._acting._leadership = Told()
        assert shown(cluster) == {}
        assert "does not lead, and no other" in str(await keda_says(cluster))
        led.problem = "reading the lease: 403"
        assert str(await keda_says(cluster)).endswith("not known: reading the lease: 403")
        led.problem, led.heard = "", '{"prefill": 3, "decode": 2}'
        assert await keda_says(cluster) == {"prefill": 3.0, "decode": 2.0}
        await cluster.decide()
        assert shown(cluster) == {}
        for spoiled in ('{"prefill": 3}', '{"prefill": -1, "decode": 2}', "[1]", "{", "null"):
            led.heard = spoiled
            assert "no other has said" in str(await keda_says(cluster))
        # It comes to lead: what it had decided as one of many is not what is wanted.
        led.heard, led.left_s = "", 10.0
        cluster.autoscaler._on_leadership(True)
        assert "has not decided yet" in str(await keda_says(cluster))
        wanted = (await cluster.decide()).decision.wanted
        one = {role.value: float(wanted.of(role)) for role in Role}
        assert await keda_says(cluster) == one
        led.led_s = SILENCE_S - 1  # who led before may still be seen in a scrape
        assert shown(cluster) == {}
        led.led_s = SILENCE_S
        assert shown(cluster) == one
        led.left_s = led.led_s = 0.0  # not told yet that it is over
        assert shown(cluster) == {}
        assert "does not lead" in str(await keda_says(cluster))


async def test_who_follows_goes_on_from_what_was_advised() -> None:
    """Else a new leader would take back at once what the one before it wanted."""
    async with autoscaler_bench.running(prefill=2, decode=1, act=False) as cluster:
        led = cluster.autoscaler._leadership = Told(heard='{"prefill": 2, "decode": 3}')
        record = await cluster.decide()
        assert record.decision.before == ByRole(2, 3)
        led.heard, led.left_s = "", 10.0
        cluster.autoscaler._on_leadership(True)
        record = await cluster.decide()
        assert record.decision.before == cluster.autoscaler.records.newest(2)[1].decision.wanted


async def test_a_while_without_a_leader_ends_no_stream() -> None:
    async with autoscaler_bench.running(act=False) as cluster:
        led = cluster.autoscaler._leadership = Told(heard='{"prefill": 1, "decode": 0}')
        async with keda(cluster) as stub:
            asked = ref("decode")
            stream = stub.StreamIsActive(asked, timeout=30)
            assert not (await stream.read()).result
            led.heard = ""
            await cluster.decide()
            late = stub.StreamIsActive(asked, timeout=30)
            with pytest.raises(grpc.aio.AioRpcError) as caught:  # who comes now hears why
                await late.read()
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            led.heard = '{"prefill": 1, "decode": 1}'
            await cluster.decide()
            assert (await stream.read()).result
            stream.cancel()


# ---- the router's part


HOLDING = {"num_prefill": 0, "num_decode": 0, "hold_without_workers_s": BOUND_S}
"""There are no workers, and requests are held for the first."""


async def entry(bench: Bench) -> router_status_pb2.RouterStatus:
    raw = await bench.redis_client.hget(registry.entries_key("router"), bench.router.router_id)
    beat = await bench.redis_client.get(registry.beat_key("router", bench.router.router_id))
    status = router_status_pb2.RouterStatus()
    if raw is not None and beat is not None:
        json_format.Parse(raw, status)
        assert status.incarnation.encode() == beat
    return status


async def model(bench: Bench) -> router_status_pb2.ModelTraffic:
    bench.router._beat.beat_now()
    status = await entry(bench)
    return status.models[0] if status.models else router_status_pb2.ModelTraffic()


async def test_traffic_is_told_in_the_registry(bench: Bench) -> None:
    for index in range(3):
        await bench.generate(text=f"hello {index}", sampling={"max_tokens": 5, "ignore_eos": True})

    async def is_told() -> bool:
        return (await model(bench)).num_finished == 3

    await until(is_told)
    told = await model(bench)
    assert (told.model, told.num_arrived) == (bench.model.name, 3)
    assert told.num_output_tokens == 15
    assert told.num_prompt_tokens > 0
    assert sum(told.first_token.counts) == 3
    assert sum(told.per_token.counts) == 3
    assert (told.num_held, told.num_queued, told.num_running) == (0, 0, 0)
    status = await entry(bench)
    assert (status.router_id, status.address) == (bench.router.router_id, bench.router.address)


async def test_a_router_that_stops_is_no_longer_there(bench: Bench) -> None:
    await until(lambda: bench.router._beat.is_registered)
    await bench.router._beat.stop()
    assert not (await entry(bench)).router_id


async def test_the_first_requests_wait_for_the_first_workers() -> None:
    async with running(**HOLDING) as bench:
        bench.router.desk.ready()  # a balancer must send it something
        asked = [
            asyncio.create_task(bench.generate(text="hi", sampling={"max_tokens": 3}))
            for _ in range(3)
        ]

        async def are_told() -> bool:
            return (await model(bench)).num_held == 3

        await until(are_told)
        await bench.add(FakePrefill("p0", bench.model))
        assert not any(task.done() for task in asked)
        await bench.add(FakeDecode("d0", bench.model))
        for messages in await asyncio.gather(*asked):
            last = messages[-1]
            assert last.finish_reason
            assert sum(stage.seconds for stage in last.times if stage.stage == "hold") > 0

        async def is_told_too() -> bool:
            told = await model(bench)
            return (told.num_finished, told.num_held) == (3, 0)

        await until(is_told_too)


@pytest.mark.parametrize("waits", [{"hold_without_workers_s": BOUND_S, "times": SHORT_WAITS}, {}])
async def test_a_model_that_requests_wait_for_is_listed_as_its_last_workers_had_it(
    waits: dict[str, Any],
) -> None:
    ask = inference_pb2.ListModelsRequest()
    async with running(**waits) as bench:
        before = await bench.stub.ListModels(ask, timeout=BOUND_S)
        assert before.models
        await bench.redis_client.delete(registry.entries_key("worker"))
        assert not await bench.probe.look()
        assert await bench.stub.ListModels(ask, timeout=BOUND_S) == before
    # Its workers are expected back for `failover_wait_s`.
    async with running(times=SHORT_WAITS) as bench:
        await bench.redis_client.delete(registry.entries_key("worker"))
        await bench.probe.look()

        async def is_gone() -> bool:
            return not (await bench.stub.ListModels(ask, timeout=BOUND_S)).models

        await until(is_gone)


async def test_too_many_are_refused() -> None:
    async with running(**HOLDING, limits={"max_held_requests": 1}) as bench:
        first = bench.call()
        await until(lambda: bench.probe.num_held == 1)
        assert await bench.code_of() is grpc.StatusCode.RESOURCE_EXHAUSTED
        first.cancel()


async def test_too_long_is_refused() -> None:
    async with running(num_prefill=0, num_decode=0, hold_without_workers_s=0.3) as bench:
        _, error = await bench.failure()
        assert isinstance(error, Unavailable) and "none started within 0.3 s" in str(error)
        assert error.retry_after_s is not None


async def test_a_client_that_leaves_is_held_no_more() -> None:
    async with running(**HOLDING) as bench:
        call = bench.call()
        await until(lambda: bench.probe.num_held == 1)
        call.cancel()
        await until(lambda: bench.probe.num_held == 0)


async def test_without_holding_it_is_refused_at_once() -> None:
    async with running(num_prefill=0, num_decode=0) as bench:
        assert await bench.code_of(text="hello") is grpc.StatusCode.UNAVAILABLE


async def test_a_router_is_ready_when_each_role_has_a_worker() -> None:
    """Though requests are held for the first workers, and one of them has said that it starts."""
    async with running(**HOLDING) as bench:
        async with bench.starting_decode("d0"):
            with pytest.raises(Unavailable, match="no prefill worker serves"):
                bench.router.desk.ready()
            await bench.add(FakePrefill("p0", bench.model))
            await until(lambda: bench.probe.is_up("p0"))
            with pytest.raises(Unavailable, match="no decode worker serves"):
                bench.router.desk.ready()
            await bench.add(FakeDecode("d0", bench.model))
        async with Client(bench.router.address) as client:
            await until(client.is_ready)


async def test_a_router_that_never_met_redis_is_not_at_zero() -> None:
    """Whether workers are there is what it cannot know yet."""
    server = RedisServer()
    try:
        await server.start()
        server.kill()
        bench = HttpBench(server, fake_model())
        settings = settings_for(server, hold_without_workers_s=BOUND_S, http_listen="127.0.0.1:0")
        await bench.start_router(settings)
        try:
            async with aiohttp.ClientSession() as session, Client(bench.router.address) as client:
                async with session.get(f"{bench.url}/ready") as response:
                    assert response.status == 503
                assert not await client.is_ready()
                await server.start()
                await until(client.is_ready)
                async with session.get(f"{bench.url}/ready") as response:
                    assert response.status == 200
                server.kill()
                await until(lambda: not bench.probe.is_redis_reachable)
                assert await client.is_ready(), "a Redis that went away is no reason"
                await server.start()
        finally:
            await bench.stop(expect_idle=True)
    finally:
        server.remove()


async def test_a_router_that_only_expects_a_worker_is_not_ready() -> None:
    async with http_bench(num_decode=0) as bench, aiohttp.ClientSession() as session:
        async with bench.starting_decode("d0"):
            async with session.get(f"{bench.url}/ready") as response:
                assert response.status == 503 and "decode" in await response.text()


# ---- one look at the registry


@pytest.fixture
async def server() -> AsyncIterator[RedisServer]:
    made = RedisServer()
    await made.start()
    yield made
    made.remove()


TTL_MS = 600_000
"""Long enough that nothing lapses while a test is slow."""


async def write(client: Any, worker_id: str, *, life: str = "1", left_ms: int = TTL_MS) -> None:
    status = common_pb2.WorkerStatus(worker_id=worker_id, incarnation="1", num_running=3)
    await client.hset(registry.entries_key("worker"), worker_id, status_to_json(status))
    await client.set(registry.beat_key("worker", worker_id), life, px=left_ms)


async def test_only_those_that_live_are_seen_each_as_old_as_its_beat(server: RedisServer) -> None:
    client: Any = server.client()
    try:
        await write(client, "fresh")
        await write(client, "late", left_ms=TTL_MS // 2)
        await write(client, "another life", life="2")
        await write(client, "dead")
        await client.delete(registry.beat_key("worker", "dead"))
        key = registry.entries_key("router")
        await client.hset(key, mapping={"r": "{no json", "s": '{"models": 3}'})
        for router in ("r", "s"):
            await client.set(registry.beat_key("router", router), "1", px=TTL_MS)
        found = await observer.look_at_registry(client, 5.0, beat_ttl_ms=TTL_MS)
    finally:
        await client.aclose()
    ages = {beaten.entry_id: beaten.age_s for beaten in found.workers}
    assert set(ages) == {"fresh", "late"}
    # No more than what passed since can be added to what was left of each beat.
    assert 0 <= ages["fresh"] < 200 < 300 <= ages["late"] < 500
    assert {beaten.status.num_running for beaten in found.workers} == {3}
    assert not found.routers and len(found.problems) == 2
    assert "entry of router b'r' cannot be read" in found.problems[0]


async def test_redis_away_is_one_line(server: RedisServer) -> None:
    client: Any = server.client()
    server.kill()
    try:
        with pytest.raises(Unavailable, match="Redis does not answer") as caught:
            await observer.look_at_registry(client, 1.0)
        assert "\n" not in str(caught.value)
    finally:
        await client.aclose()
