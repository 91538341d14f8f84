"""One autoscaler as a whole: what it does, says, and does not do when something is missing."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from dataclasses import dataclass, replace
from typing import Any

import grpc.aio
import pytest

from process import registry, rpc
from process.errors import (
    BatonError,
    FailedPrecondition,
    InvalidArgument,
    PermissionDenied,
    Unavailable,
)
from protos import (
    autoscaler_pb2,
    autoscaler_pb2_grpc,
    externalscaler_pb2,
    externalscaler_pb2_grpc,
)
from services.autoscaler.actuator import FORGET_S
from services.autoscaler.config import Pace
from services.autoscaler.decision import (
    ActionOutcome,
    Decision,
    DecisionRecord,
    Direction,
    Flip,
    Reason,
)
from services.autoscaler.grpc_services import MAX_REQUEST_BYTES
from services.autoscaler.metrics import SILENCE_S
from services.autoscaler.scaler import ScalerError, UnitState
from services.autoscaler.signals import ByRole, Role
from tests.harness.autoscaler_bench import Cluster, Worker, running
from tests.harness.router_bench import BOUND_S
from tests.harness.waiting import until


async def ask(address: str, **fields: Any) -> autoscaler_pb2.GetDecisionsReply:
    async with rpc.channel(address) as channel:
        stub = autoscaler_pb2_grpc.AutoscalerStub(channel)
        reply: autoscaler_pb2.GetDecisionsReply = await stub.GetDecisions(
            autoscaler_pb2.GetDecisionsRequest(**fields), timeout=BOUND_S
        )
        return reply


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


async def test_load_that_one_pair_cannot_serve_starts_workers() -> None:
    async with running() as cluster:
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


async def test_no_worker_is_removed_while_another_of_its_pool_starts() -> None:
    """A burst that is over before the workers that it brought serve."""
    async with running() as cluster:

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
    async with running(least=0) as cluster:

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
    async with running(least=0) as cluster:
        cluster.redis.kill()
        cluster.clock.now_s += 1.0  # longer than an idle cluster keeps its workers
        record = await cluster.autoscaler.decide()
        assert not record.decision.is_action
        assert cluster.scaler.num_changes == 0
        reply = await ask(cluster.autoscaler.address, num_decisions=1)
        assert any("Redis does not answer" in problem for problem in reply.problems)


async def test_workers_that_cannot_be_counted_are_left_alone() -> None:
    async with running(least=0) as cluster:
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
    async with running(decode=2, pace=Pace()) as cluster:
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
    async with running(decode=2) as cluster:
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


@pytest.mark.parametrize("refusal", [FailedPrecondition, PermissionDenied])
async def test_a_refusal_for_a_certificate_is_forgotten_as_it_may_have_come_since(
    refusal: type[BatonError],
) -> None:
    async with running(decode=2) as cluster:
        now_s = 1000.0
        flips, worker = cluster.autoscaler._flips, cluster.workers["decode-1"]
        flips._clock = lambda: now_s
        for num_asked in (1, 2):
            worker.refusal = refusal("its certificate names one role")
            flips.order(worker.status, Role.PREFILL)
            await until(lambda: not flips.under_way)
            assert len(worker.asked) == num_asked
            now_s += FORGET_S - 0.5
            assert not flips.may_ask(worker.status)
            now_s += 1.0
            assert flips.may_ask(worker.status)
        worker.refusal = None
        flips.order(worker.status, Role.PREFILL)
        await until(lambda: not flips.under_way)
        assert worker.status.role == "prefill" and flips.may_ask(worker.status)


class Older(Worker):
    """One whose version knows no flips."""

    async def SetRole(self, request: Any, context: Any) -> Any:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "what is that?")


async def test_a_worker_that_knows_no_flips_is_not_asked_again_in_that_life() -> None:
    async with running() as cluster:
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


async def test_a_worker_that_is_busy_may_be_asked_again() -> None:
    async with running(decode=2) as cluster:
        cluster.workers["decode-1"].refusal = Unavailable("draining")
        flip = decision(Direction.FLIP, ByRole(2, 1), Flip("decode-1", Role.PREFILL))
        await act(cluster, flip)
        await until(lambda: not cluster.autoscaler._flips.under_way)
        await cluster.decide()
        assert cluster.autoscaler._flips.may_ask(cluster.workers["decode-1"].status)


async def test_a_worker_that_is_gone_is_said() -> None:
    async with running() as cluster:
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


async def test_who_does_not_lead_or_only_advises_changes_nothing() -> None:
    up = decision(Direction.UP, ByRole(2, 2))
    async with running() as cluster:
        cluster.autoscaler._acting._leadership = Told()
        assert await act(cluster, up) == (ActionOutcome.NOT_LEADER, "")
        assert cluster.scaler.num_changes == 0
    async with running(act=False) as cluster:
        assert await act(cluster, up) == (ActionOutcome.ADVISED, "")
        assert cluster.scaler.num_changes == 0


async def test_leadership_that_ends_in_the_middle_ends_the_action() -> None:
    async with running() as cluster:
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
    async with running(decode=2) as cluster:
        await cluster.decide()
        wanted = cluster.autoscaler.records.last.decision.wanted  # type: ignore[union-attr]
        async with rpc.channel(cluster.autoscaler.address) as channel:
            stub: Any = externalscaler_pb2_grpc.ExternalScalerStub(channel)
            for role in ("prefill", "decode"):
                ref = externalscaler_pb2.ScaledObjectRef(
                    name="x", namespace="y", scalerMetadata={"role": role}
                )
                assert (await stub.IsActive(ref, timeout=BOUND_S)).result
                (spec,) = (await stub.GetMetricSpec(ref, timeout=BOUND_S)).metricSpecs
                assert (spec.metricName, spec.targetSizeFloat) == (f"baton-{role}-workers", 1.0)
                request = externalscaler_pb2.GetMetricsRequest(
                    scaledObjectRef=ref, metricName=spec.metricName
                )
                (value,) = (await stub.GetMetrics(request, timeout=BOUND_S)).metricValues
                assert value.metricValueFloat == wanted.of(Role(role))
                stream = stub.StreamIsActive(ref, timeout=BOUND_S)
                assert (await stream.read()).result
                stream.cancel()
            wrong = externalscaler_pb2.ScaledObjectRef(scalerMetadata={"role": "king"})
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.IsActive(wrong, timeout=BOUND_S)
            error = rpc.error_from_rpc(caught.value)
            assert isinstance(error, InvalidArgument)
            assert error.field == "scalerMetadata.role"


async def test_anybody_may_call_and_nobody_sends_much() -> None:
    """KEDA's port is open to others than our own processes; long replies are ours to send."""
    async with running() as cluster:
        async with rpc.channel(cluster.autoscaler.address) as channel:
            stub: Any = externalscaler_pb2_grpc.ExternalScalerStub(channel)
            ref = externalscaler_pb2.ScaledObjectRef(scalerMetadata={"role": "decode"})
            room = MAX_REQUEST_BYTES - ref.ByteSize() - 4  # a name's tag and length
            ref.name = "x" * room
            assert ref.ByteSize() == MAX_REQUEST_BYTES == 65536
            assert (await stub.IsActive(ref, timeout=BOUND_S)).result
            ref.name += "x"
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.IsActive(ref, timeout=BOUND_S)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        records = cluster.autoscaler.records
        record = await cluster.decide()
        assert record.decision.terms
        for _ in range(500):  # all that are kept
            records.add(record)
        reply = await ask(cluster.autoscaler.address)
        assert len(reply.decisions) == 500 and reply.ByteSize() > 4 * MAX_REQUEST_BYTES


async def test_only_what_serves_is_told_to_flip_when_another_is_left() -> None:
    """decode-1 never comes; decode-0 is all that decodes, and prefill lacks one."""
    async with running(decode=2) as cluster:
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
    async with running(least=0) as cluster:
        async with rpc.channel(cluster.autoscaler.address) as channel:
            stub: Any = externalscaler_pb2_grpc.ExternalScalerStub(channel)
            ref = externalscaler_pb2.ScaledObjectRef(scalerMetadata={"role": "decode"})
            stream = stub.StreamIsActive(ref, timeout=BOUND_S)
            assert (await stream.read()).result
            async with asyncio.timeout(BOUND_S):
                while (await cluster.scaler.get({})).decode.wanted:
                    await cluster.decide()
                    cluster.scaler.settle()
            await cluster.decide()
            assert not (await stream.read()).result
            stream.cancel()


async def test_metrics_and_probes() -> None:
    async with running() as cluster:
        await cluster.decide()

        def get(path: str) -> str:
            url = f"http://{cluster.autoscaler.metrics_address}{path}"
            with urllib.request.urlopen(url, timeout=BOUND_S) as answer:
                return str(answer.read().decode())

        text = await asyncio.to_thread(get, "/metrics")
        name = cluster.autoscaler.autoscaler_id
        for line in (
            f'baton_autoscaler_leader{{autoscaler_id="{name}"}} 1.0',
            f'baton_autoscaler_wanted_workers{{autoscaler_id="{name}",role="decode"}} 1.0',
            f'baton_autoscaler_ready_workers{{autoscaler_id="{name}",role="prefill"}} 1.0',
            f'baton_autoscaler_signal_age_seconds{{autoscaler_id="{name}",signal="routers"}}',
        ):
            assert line in text, text
        assert "baton_autoscaler_decisions_total" in text
        await asyncio.to_thread(get, "/readyz")
        await asyncio.to_thread(get, "/livez")


async def test_a_failure_that_goes_on_is_announced_once() -> None:
    async with running() as cluster:
        up = decision(Direction.UP, ByRole(2, 2))
        cluster.scaler.error = ScalerError("no rights")
        for _ in range(3):
            assert await act(cluster, up) == (ActionOutcome.FAILED, "no rights")
        assert [problem for _, _, problem in cluster.scaler.announced] == ["no rights"]
        cluster.scaler.error = None
        assert await act(cluster, up) == (ActionOutcome.DONE, "")
        cluster.scaler.error = ScalerError("no rights")
        await act(cluster, up)
        assert [problem for _, _, problem in cluster.scaler.announced] == [
            "no rights",
            "",
            "no rights",
        ]


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
    async with rpc.channel(cluster.autoscaler.address) as channel:
        stub: Any = externalscaler_pb2_grpc.ExternalScalerStub(channel)
        for role in ("prefill", "decode"):
            ref = externalscaler_pb2.ScaledObjectRef(scalerMetadata={"role": role})
            request = externalscaler_pb2.GetMetricsRequest(scaledObjectRef=ref)
            try:
                reply = await stub.GetMetrics(request, timeout=BOUND_S)
            except grpc.aio.AioRpcError as error:
                assert error.code() is grpc.StatusCode.UNAVAILABLE
                with pytest.raises(grpc.aio.AioRpcError):
                    await stub.IsActive(ref, timeout=BOUND_S)
                return error.details() or ""
            found[role] = reply.metricValues[0].metricValueFloat
    return found


@pytest.mark.parametrize("act", [True, False])
async def test_only_who_leads_shows_what_is_wanted_and_anybody_tells_keda(act: bool) -> None:
    """An HPA adds up all that it finds, KEDA asks whichever replica its connection has."""
    async with running(act=act) as cluster:
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
    async with running(prefill=2, decode=1, act=False) as cluster:
        led = cluster.autoscaler._leadership = Told(heard='{"prefill": 2, "decode": 3}')
        record = await cluster.decide()
        assert record.decision.before == ByRole(2, 3)
        led.heard, led.left_s = "", 10.0
        cluster.autoscaler._on_leadership(True)
        record = await cluster.decide()
        assert record.decision.before == cluster.autoscaler.records.newest(2)[1].decision.wanted


async def test_a_while_without_a_leader_ends_no_stream() -> None:
    async with running(act=False) as cluster:
        led = cluster.autoscaler._leadership = Told(heard='{"prefill": 1, "decode": 0}')
        async with rpc.channel(cluster.autoscaler.address) as channel:
            stub: Any = externalscaler_pb2_grpc.ExternalScalerStub(channel)
            ref = externalscaler_pb2.ScaledObjectRef(scalerMetadata={"role": "decode"})
            stream = stub.StreamIsActive(ref, timeout=30)
            assert not (await stream.read()).result
            led.heard = ""
            await cluster.decide()
            late = stub.StreamIsActive(ref, timeout=30)
            with pytest.raises(grpc.aio.AioRpcError) as caught:  # who comes now hears why
                await late.read()
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            led.heard = '{"prefill": 1, "decode": 1}'
            await cluster.decide()
            assert (await stream.read()).result
            stream.cancel()
