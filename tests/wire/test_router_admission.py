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
from process.rpc_errors import NoCapacity
from protos import inference_pb2
from tests.harness.access import add_key
from tests.harness.gated_engine import prompt_of
from tests.harness.router_bench import (
    BOUND_S,
    Bench,
    code_of,
    fake_model,
    request,
    rest_of,
    running,
)
from tests.harness.router_site import Site, site
from tests.harness.waiting import until


def bearer(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)


async def hold(bench: Bench, **fields: Any) -> Any:
    """A request that is being prefilled, and stays so until the gate opens."""
    bench.prefill.gate.close()
    call = bench.call(**fields)
    async with asyncio.timeout(BOUND_S):
        await bench.prefill.gate.reached.wait()
    return call


async def test_keys_decide_who_asks_and_what_may_be_asked(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    user, admin = add_key(path, "acme", max_priority=2), add_key(path, "ops", is_admin=True)
    async with running(api_keys_file=str(path)) as bench:

        def ask(metadata: Any = (), **fields: Any) -> Any:
            sampling = {"max_tokens": 2}
            return bench.call(sampling=sampling, **fields, metadata=metadata)

        unknown = bearer(user[:-1] + ("A" if user[-1] != "A" else "B"))
        for metadata in ((), unknown, (("authorization", user),)):
            assert await code_of(ask(metadata)) is grpc.StatusCode.UNAUTHENTICATED
        assert bench.prefill.requests == []
        assert await rest_of(ask(bearer(user)))
        assert await rest_of(ask(bearer(user), tenant="acme", priority=2))
        denied = grpc.StatusCode.PERMISSION_DENIED
        assert await code_of(ask(bearer(user), tenant="ops")) is denied
        assert await code_of(ask(bearer(user), priority=3)) is denied
        for method, message in (
            (bench.stub.GetClusterStatus, inference_pb2.GetClusterStatusRequest()),
            (bench.stub.Explain, inference_pb2.ExplainRequest(request_id="x")),
        ):
            for metadata, code in ((bearer(user), denied), ((), grpc.StatusCode.UNAUTHENTICATED)):
                assert await code_of(method(message, timeout=BOUND_S, metadata=metadata)) is code
        models = inference_pb2.ListModelsRequest()
        assert (
            await code_of(bench.stub.ListModels(models, timeout=BOUND_S))
            is grpc.StatusCode.UNAUTHENTICATED
        )
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
            calls.append(bench.call(noisy))
        await until(lambda: bench.probe.num_waiting == 7)
        quiet = request(tenant="quiet", text="q" * 4000, sampling={"max_tokens": 1})
        calls.append(bench.call(quiet))
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
        waiting = bench.call()
        await until(lambda: bench.probe.num_waiting == 1)
        _, error = await bench.failure()
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
        first = bench.call(request_id="same")
        await until(lambda: bench.probe.num_waiting == 1)
        again = bench.call(request_id="same")
        assert await code_of(first) is grpc.StatusCode.CANCELLED
        bench.prefill.gate.open()
        assert await rest_of(held) and await rest_of(again)


async def ask(
    here: Site,
    number: int,
    begun: list[int],
    most: int = 8,
    most_in_line: int = 24,
    **sampling: Any,
) -> int:
    """Tokens of one answer, while no more requests than these are in decode's steps and in line for
    them. `begun`: who has its first one, in order."""
    message = request(
        token_ids={"ids": prompt_of(20, start=number)}, sampling={"ignore_eos": True, **sampling}
    )
    stub, num_tokens = here.stubs[number % len(here.stubs)], 0
    call = stub.Generate(message, timeout=BOUND_S)
    while (answer := await call.read()) is not grpc.aio.EOF:
        if number not in begun:
            begun.append(number)
        assert here.decode.num_in_steps <= most and here.decode.num_in_line <= most_in_line
        num_tokens += len(answer.token_ids)
    return num_tokens


async def ask_in_turn(here: Site, num: int, begun: list[int], most: int, **options: Any) -> Any:
    """So many, one behind the other; none ends before all have come."""
    tasks: list[asyncio.Task[int]] = []
    here.prefill_model.hold()
    for number in range(num):
        tasks.append(asyncio.create_task(ask(here, number, begun, most, **options)))
        await until(lambda: here.router.num_asked == len(tasks))
    here.prefill_model.release()
    return await asyncio.gather(*tasks)


@pytest.mark.parametrize(
    ("sampling", "most"),
    [({}, 8), ({"n": 3}, 2), ({"beam": {"num_beams": 3}}, 2)],
    ids=["one sample", "three samples", "three beams"],
)
async def test_requests_wait_in_the_queue_instead_of_the_decode_engine(
    sampling: dict[str, Any], most: int
) -> None:
    """most: requests that may have begun, of 8 samples that run at once."""
    async with site() as here:
        begun: list[int] = []
        done = await ask_in_turn(here, 16, begun, most, most_in_line=1, max_tokens=6, **sampling)
        # None is lost, and none overtakes more than those that were under way with it.
        assert all(num_tokens >= 6 for num_tokens in done)
        assert all(number <= place + 8 for place, number in enumerate(begun))
        assert here.router.num_waited
        await until(lambda: here.decode.num_free_places == 8 and here.router.is_idle())


async def test_a_full_model_holds_up_neither_others_nor_what_runs() -> None:
    async with running(num_decode=2, others=[fake_model(name="other")]) as bench:
        first, second = bench.decodes
        first.pause_at = second.pause_at = 2
        message = request(model="fake", sampling={"max_tokens": 8, "ignore_eos": True})
        running_call = bench.call(message)
        await until(lambda: first.num_generating + second.num_generating == 1)
        home, twin = (first, second) if first.num_generating else (second, first)
        first.num_free_places = second.num_free_places = 0
        for worker in bench.decodes:
            await bench.publish(worker)
        home.pause_at = 3
        home.token_gate.open()  # its next token says so on the stream, too
        await until(lambda: not bench.probe.has_decode_place("fake"))
        held = bench.call(model="fake")
        await until(lambda: bench.probe.num_waiting == 1)
        # A request of one token needs no decode worker; another model has none that is full.
        assert await bench.generate(model="fake", sampling={"max_tokens": 1})
        assert await bench.code_of(model="other") is grpc.StatusCode.UNAVAILABLE
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
    """Who comes too late waits for its place at the worker, before its first token."""
    async with site(num_routers=2) as here:
        asked = (ask(here, number, [], max_tokens=20) for number in range(24))
        assert set(await asyncio.gather(*asked)) == {20}
        await until(lambda: here.decode.num_free_places == 8)
        for router in here.routers:
            await until(router.is_idle)


async def test_no_prompt_is_computed_before_the_decode_worker_has_a_place(bench: Bench) -> None:
    bench.decode.place_gate.close()
    call = bench.call(request_id="r")

    await until(lambda: bench.probe.states == ["waiting for a decode place"])
    assert bench.prefill.requests == []
    gone = bench.call()
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
        call = bench.call()
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
        begun: list[int] = []
        await ask_in_turn(here, 20, begun, most=1, max_tokens=4)
        assert begun == list(range(20))
        assert here.router.num_waited
