"""Keys, rates, the fair queue and decode workers' places at a real router over real gRPC, with fake
workers behind it, and with real ones where the two must agree."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from baton.cli import explain
from process.errors import NoCapacity
from protos import inference_pb2
from tests.harness.access import add_key
from tests.harness.gated_engine import prompt_of
from tests.harness.router_bench import (
    BOUND_S,
    Bench,
    failure,
    fake_model,
    request,
    rest_of,
    running,
)
from tests.harness.router_site import site
from tests.harness.waiting import until


def bearer(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)


async def hold(bench: Bench, **fields: Any) -> Any:
    """A request that is being prefilled, and stays so until the gate opens."""
    bench.prefill.gate.close()
    call = bench.stub.Generate(request(**fields), timeout=BOUND_S)
    async with asyncio.timeout(BOUND_S):
        await bench.prefill.gate.reached.wait()
    return call


async def test_keys_decide_who_asks_and_what_may_be_asked(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    user, admin = add_key(path, "acme", max_priority=2), add_key(path, "ops", is_admin=True)
    async with running(api_keys_file=str(path)) as bench:

        def ask(metadata: Any = (), **fields: Any) -> Any:
            sampling = {"max_tokens": 2}
            return bench.stub.Generate(
                request(sampling=sampling, **fields), timeout=BOUND_S, metadata=metadata
            )

        unknown = bearer(user[:-1] + ("A" if user[-1] != "A" else "B"))
        for metadata in ((), unknown, (("authorization", user),)):
            assert (await failure(ask(metadata)))[0] is grpc.StatusCode.UNAUTHENTICATED
        assert bench.prefill.requests == []
        assert await rest_of(ask(bearer(user)))
        assert await rest_of(ask(bearer(user), tenant="acme", priority=2))
        denied = grpc.StatusCode.PERMISSION_DENIED
        assert (await failure(ask(bearer(user), tenant="ops")))[0] is denied
        assert (await failure(ask(bearer(user), priority=3)))[0] is denied
        for method, message in (
            (bench.stub.GetClusterStatus, inference_pb2.GetClusterStatusRequest()),
            (bench.stub.Explain, inference_pb2.ExplainRequest(request_id="x")),
        ):
            for metadata, code in ((bearer(user), denied), ((), grpc.StatusCode.UNAUTHENTICATED)):
                assert (await failure(method(message, timeout=BOUND_S, metadata=metadata)))[
                    0
                ] is code
        models = inference_pb2.ListModelsRequest()
        assert (await failure(bench.stub.ListModels(models, timeout=BOUND_S)))[
            0
        ] is grpc.StatusCode.UNAUTHENTICATED
        assert await bench.stub.ListModels(models, timeout=BOUND_S, metadata=bearer(user))
        status = inference_pb2.GetClusterStatusRequest()
        assert await bench.stub.GetClusterStatus(status, timeout=BOUND_S, metadata=bearer(admin))
        # Whose KV it is follows the key, not what the request says.
        assert len({call.tenant_salt for call in bench.prefill.requests}) == 1


async def test_a_quiet_tenant_passes_a_noisy_one() -> None:
    model = fake_model(context_window=8192)
    async with running(model=model, admission={"max_active_requests": 1}) as bench:
        calls = [await hold(bench, tenant="noisy", text="0" * 4000)]
        for number in range(1, 8):
            noisy = request(tenant="noisy", text=str(number) * 4000, sampling={"max_tokens": 1})
            calls.append(bench.stub.Generate(noisy, timeout=BOUND_S))
        await until(lambda: bench.probe.num_waiting == 7)
        quiet = request(tenant="quiet", text="q" * 4000, sampling={"max_tokens": 1})
        calls.append(bench.stub.Generate(quiet, timeout=BOUND_S))
        await until(lambda: bench.probe.num_waiting == 8)
        bench.prefill.gate.open()
        done = await asyncio.gather(*(rest_of(call) for call in calls))
        assert all(messages for messages in done)
        order = [prefilled.tenant for prefilled in bench.prefill.requests]
        assert order.index("quiet") <= 3 and order.count("noisy") == 8
        last = done[-1][-1]
        stages = {entry.stage: entry.seconds for entry in last.times}
        assert stages["queue"] > 0
        assert abs(sum(stages.values()) - sum(entry.seconds for entry in last.times)) < 1e-9


async def test_a_full_queue_is_refused_with_a_time_before_any_work() -> None:
    settings = {"max_active_requests": 1, "max_queued_requests": 1, "max_queued_per_tenant": 1}
    async with running(admission=settings) as bench:
        held = await hold(bench)
        waiting = bench.stub.Generate(request(), timeout=BOUND_S)
        await until(lambda: bench.probe.num_waiting == 1)
        _, error = await failure(bench.stub.Generate(request(), timeout=BOUND_S))
        assert isinstance(error, NoCapacity) and error.retry_after_s == 1.0
        assert len(bench.prefill.requests) == 1
        # Who gives up while it waits leaves nothing behind.
        waiting.cancel()
        await until(lambda: bench.probe.num_waiting == 0)
        bench.prefill.gate.open()
        assert await rest_of(held)
        status = await bench.status(num_requests=8)
        ends = [(info.outcome, info.code) for info in status.requests]
        assert ("failed", "resource_exhausted") in ends and ("finished", "") in ends


async def test_a_repeated_request_takes_its_place_over_while_it_waits() -> None:
    async with running(admission={"max_active_requests": 1}) as bench:
        held = await hold(bench)
        first = bench.stub.Generate(request(request_id="same"), timeout=BOUND_S)
        await until(lambda: bench.probe.num_waiting == 1)
        again = bench.stub.Generate(request(request_id="same"), timeout=BOUND_S)
        assert (await failure(first))[0] is grpc.StatusCode.CANCELLED
        bench.prefill.gate.open()
        assert await rest_of(held) and await rest_of(again)


@pytest.mark.parametrize(
    ("sampling", "most"),
    [({}, 8), ({"n": 3}, 2), ({"beam": {"num_beams": 3}}, 2)],
    ids=["one sample", "three samples", "three beams"],
)
async def test_requests_wait_in_the_queue_instead_of_the_decode_engine(
    sampling: dict[str, Any], most: int
) -> None:
    """most: requests that may have begun: 8 samples run at once, so that none of them waits for
    another."""
    async with site() as here:
        order: list[int] = []

        async def ask(number: int) -> int:
            message = request(
                token_ids={"ids": prompt_of(20, start=number)},
                sampling={"max_tokens": 6, "ignore_eos": True, **sampling},
            )
            call, num_tokens = here.stub.Generate(message, timeout=BOUND_S), 0
            while (answer := await call.read()) is not grpc.aio.EOF:
                if not num_tokens:
                    order.append(number)
                assert here.decode.num_in_steps <= most
                assert here.decode.num_in_line <= 1
                num_tokens += len(answer.token_ids)
            return num_tokens

        tasks: list[asyncio.Task[int]] = []
        here.prefill_model.hold()  # none ends before all have come
        for number in range(16):
            tasks.append(asyncio.create_task(ask(number)))
            await until(lambda: here.router.num_asked == len(tasks))
        here.prefill_model.release()
        done = await asyncio.gather(*tasks)
        # None is lost, and none overtakes more than those that were under way with it.
        assert all(num_tokens >= 6 for num_tokens in done)
        assert all(number <= place + 8 for place, number in enumerate(order))
        assert here.router.num_waited
        await until(lambda: here.decode.num_free_places == 8 and here.router.is_idle())


async def test_a_full_model_holds_up_neither_others_nor_what_runs() -> None:
    async with running(num_decode=2, others=[fake_model(name="other")]) as bench:
        first, second = bench.decodes
        first.pause_at = second.pause_at = 2
        message = request(model="fake", sampling={"max_tokens": 8, "ignore_eos": True})
        running_call = bench.stub.Generate(message, timeout=BOUND_S)
        await until(lambda: first.num_generating + second.num_generating == 1)
        home, twin = (first, second) if first.num_generating else (second, first)
        first.num_free_places = second.num_free_places = 0
        for worker in bench.decodes:
            await bench.publish(worker)
        home.pause_at = 3
        home.token_gate.open()  # its next token says so on the stream, too
        await until(lambda: not bench.probe.has_decode_place("fake"))
        held = bench.stub.Generate(request(model="fake"), timeout=BOUND_S)
        await until(lambda: bench.probe.num_waiting == 1)
        # A request of one token needs no decode worker; another model has none that is full.
        assert await bench.generate(request(model="fake", sampling={"max_tokens": 1}))
        assert (await failure(bench.stub.Generate(request(model="other"), timeout=BOUND_S)))[
            0
        ] is grpc.StatusCode.UNAVAILABLE
        # What runs is moved to a worker that is full: it has begun.
        twin.pause_at = 4
        home.move_all()
        await bench.publish(home)
        await until(lambda: twin.num_generating == 1)
        assert bench.probe.num_waiting == 1
        twin.pause_at = None
        twin.token_gate.open()
        assert await rest_of(running_call)
        assert bench.probe.num_waiting == 1
        # The worker says that there is a place.
        twin.num_free_places = 1
        await bench.publish(twin)
        assert await rest_of(held)


async def test_two_routers_start_no_more_streams_than_there_are_places() -> None:
    """Neither knows what the other has sent: who comes too late waits for its place at the worker,
    before its first token."""
    async with site(num_routers=2) as here:

        async def ask(number: int) -> int:
            message = request(
                token_ids={"ids": prompt_of(20, start=number)},
                sampling={"max_tokens": 20, "ignore_eos": True},
            )
            call, num_tokens = here.stubs[number % 2].Generate(message, timeout=BOUND_S), 0
            while (answer := await call.read()) is not grpc.aio.EOF:
                num_tokens += len(answer.token_ids)
                assert here.decode.num_in_steps <= 8
            return num_tokens

        assert set(await asyncio.gather(*map(ask, range(24)))) == {20}
        await until(lambda: here.decode.num_free_places == 8)
        for router in here.routers:
            await until(router.is_idle)


async def test_no_prompt_is_computed_before_the_decode_worker_has_a_place() -> None:
    async with running() as bench:
        bench.decode.place_gate.close()
        call = bench.stub.Generate(request(request_id="r"), timeout=BOUND_S)

        await until(lambda: bench.probe.states == ["waiting for a decode place"])
        assert bench.prefill.requests == []
        gone = bench.stub.Generate(request(), timeout=BOUND_S)
        await until(lambda: bench.decode.num_reserved == 2)
        gone.cancel()
        await until(lambda: bench.decode.num_cancelled == 1)
        bench.decode.place_gate.open()
        assert await rest_of(call)
        assert len(bench.prefill.requests) == 1


async def test_a_request_in_line_at_a_worker_that_goes_is_served_by_another() -> None:
    async with running(num_decode=2) as bench:
        for worker in bench.decodes:
            worker.place_gate.close()
        call = bench.stub.Generate(request(), timeout=BOUND_S)
        await until(lambda: sum(worker.num_reserved for worker in bench.decodes) == 1)
        home, twin = sorted(bench.decodes, key=lambda worker: -worker.num_reserved)
        twin.place_gate.open()
        home.move_all()
        assert await rest_of(call)
        assert (twin.num_reserved, len(bench.prefill.requests)) == (1, 1)


async def test_what_a_request_waits_for_and_its_turn_are_explained() -> None:
    async with running(admission={"max_active_requests": 1}) as bench:
        held = await hold(bench, request_id="held")
        calls = []
        for request_id, budget_ms in (("old", 0), ("new", 0), ("hurried", int(BOUND_S * 1000))):
            message = request(request_id=request_id, budget_ms=budget_ms)
            calls.append(bench.stub.Generate(message, timeout=2 * BOUND_S))
            await until(lambda: bench.probe.num_waiting == len(calls))
        seen = [await bench.explain(request_id) for request_id in ("hurried", "ol", "new")]
        assert [one.request_id for one in seen] == ["hurried", "old", "new"]
        standing = [one.admission.standing for one in seen]
        assert [(one.position, one.num_in_line) for one in standing] == [(1, 3), (2, 3), (3, 3)]
        assert {one.waits_for for one in standing} == {
            "the end of a request (router.admission.max_active_requests)"
        }
        # The times of the others differ by less than an answer takes.
        assert all(standing[0].due_in_s < each.due_in_s for each in standing[1:])
        assert not any(one.decisions or one.admission.turn for one in seen)
        shown = "\n".join(explain.standing(seen[1].request, seen[1].admission))
        assert "number 2 of 3 in its line" in shown and "it waits for the end of" in shown
        bench.prefill.gate.open()
        for call in (held, *calls):
            assert await rest_of(call)
        ends = {name: await bench.explain(name) for name in ("held", "hurried", "old", "new")}
        assert [one.admission.turn for one in ends.values()] == [1, 2, 3, 4]
        assert [one.admission.arrival for one in ends.values()] == [1, 4, 2, 3]
        assert all(
            one.decisions and not one.admission.HasField("standing") for one in ends.values()
        )
        shown = "\n".join(explain.standing(ends["old"].request, ends["old"].admission))
        assert "came as number 2, admitted as number 3" in shown


async def test_first_tokens_come_in_the_order_of_arrival() -> None:
    """At a decode worker with one place: the next one begins where one has ended."""
    async with site(num_places=1) as here:
        order: list[int] = []

        async def ask(number: int) -> None:
            message = request(
                token_ids={"ids": prompt_of(20, start=number)},
                sampling={"max_tokens": 4, "ignore_eos": True},
            )
            call, is_first = here.stub.Generate(message, timeout=BOUND_S), True
            while await call.read() is not grpc.aio.EOF:
                if is_first:
                    order.append(number)
                is_first = False
                assert here.decode.num_in_steps <= 1

        tasks = []
        here.prefill_model.hold()
        for number in range(20):
            tasks.append(asyncio.create_task(ask(number)))
            await until(lambda: here.router.num_asked == len(tasks))
        here.prefill_model.release()
        await asyncio.gather(*tasks)
        assert order == list(range(20))
        assert here.router.num_waited
