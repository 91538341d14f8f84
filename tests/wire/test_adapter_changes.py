"""Adapters of a running cluster: every worker of the model has a content before new requests get
it, requests end on what they began with, and whatever fails leaves all as it was."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any

import aiohttp
import grpc.aio
import pytest

from process.rpc_errors import (
    BatonError,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    Unavailable,
)
from protos import common_pb2, inference_pb2
from tests.harness.router_bench import (
    BOUND_S,
    Bench,
    FakeDecode,
    HttpBench,
    error_from_rpc,
    fake_model,
    request,
    rest_of,
)
from tests.harness.waiting import until
from tests.harness.wished_adapters import (
    follow,
    following,
    put_wish,
    redis_dies_with_a_change,
    telling_bench,
    unloaded,
    wishes,
    workers_of,
)

OLD, NEW = "11" * 32, "22" * 32
SHORT: dict[str, Any] = {"max_tokens": 3}


@pytest.fixture
async def bench() -> AsyncIterator[HttpBench]:
    async with telling_bench() as made:
        yield made


@asynccontextmanager
async def _second_router(bench: Bench) -> AsyncIterator[Any]:
    async with bench.another_router() as (router, stub):
        await until(lambda: router.is_registered)
        yield stub


@contextmanager
def _as_clients_read() -> Iterator[None]:
    """Errors."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise error_from_rpc(error) from None


async def _load(stub: Any, digest: str, name: str = "tales", **fields: Any) -> Any:
    asked = inference_pb2.LoadClusterAdapterRequest(name=name, folder=f"/x/{digest}", **fields)
    with _as_clients_read():
        return await stub.LoadAdapter(asked, timeout=BOUND_S)


async def _unload(stub: Any, name: str = "tales", *, wait: bool = False) -> Any:
    asked = inference_pb2.UnloadClusterAdapterRequest(name=name, wait=wait)
    with _as_clients_read():
        return await stub.UnloadAdapter(asked, timeout=BOUND_S)


async def _served(stub: Any) -> None:
    """A request is answered now."""
    asked = request(adapter="tales", sampling=SHORT)
    with _as_clients_read():
        messages = await rest_of(stub.Generate(asked, timeout=BOUND_S))
    assert messages[-1].finish_reason


async def _held(bench: Bench, stub: Any) -> asyncio.Task[None]:
    """A request that is under way until the gate of its prefill worker opens."""
    bench.prefill.gate.close()
    serving = asyncio.create_task(_served(stub))
    await bench.prefill.gate.reached.wait()
    return serving


async def _content(bench: Bench, stub: Any = None) -> str:
    """As the workers are asked for it."""
    await _served(stub or bench.stub)
    asked = max((p.requests for p in bench.prefills if p.requests), key=len)[-1]
    return str(asked.adapter_digest)


async def test_loaded_means_that_every_router_serves_it_on_every_worker() -> None:
    async with telling_bench(num_decode=2) as bench, _second_router(bench) as other:
        reply = await _load(bench.stub, OLD)
        assert reply.digest == OLD and list(reply.worker_ids) == ["d0", "d1", "p0"]
        assert await _content(bench) == await _content(bench, other) == OLD
        assert all(worker.loaded == {("tales", OLD)} for worker in workers_of(bench))
        await _load(other, NEW)
        assert await _content(bench) == await _content(bench, other) == NEW


async def test_new_requests_get_the_new_content_and_running_ones_end_on_the_old() -> None:
    async with telling_bench(num_decode=2) as bench, following(bench):
        await _load(bench.stub, OLD)
        first = await _held(bench, bench.stub)
        await _load(bench.stub, NEW)
        bench.prefill.gate.let_pass(1)
        await _served(bench.stub)
        assert [r.adapter_digest for r in bench.prefill.requests] == [OLD, NEW]
        both = {("tales", OLD), ("tales", NEW)}
        assert all(worker.loaded == both for worker in workers_of(bench))  # OLD is in use
        bench.prefill.gate.open()
        await first
        await until(lambda: all(w.loaded == {("tales", NEW)} for w in workers_of(bench)))


async def test_old_content_stays_as_long_as_any_router_uses_it(bench: HttpBench) -> None:
    async with _second_router(bench) as other, following(bench):
        await _load(bench.stub, OLD)
        first = await _held(bench, other)
        await _load(bench.stub, NEW)
        (wish,) = (await wishes(bench)).values()
        assert [version.digest for version in wish.old] == [OLD]
        assert ("tales", OLD) in bench.prefill.loaded
        bench.prefill.gate.open()
        await first
        await until(lambda: bench.prefill.loaded == {("tales", NEW)})


async def test_a_worker_that_refuses_is_named_and_nothing_changed() -> None:
    async with telling_bench(num_decode=2) as bench:
        await _load(bench.stub, OLD)
        bench.decodes[1].load_error = InvalidArgument("r", "is above lora.max_rank")
        with pytest.raises(InvalidArgument, match=r"d1: r: is above lora\.max_rank; nothing"):
            await _load(bench.stub, NEW)
        assert await _content(bench) == OLD
        assert all(worker.loaded == {("tales", OLD)} for worker in workers_of(bench))


async def test_a_worker_that_does_not_answer_is_named_and_nothing_changed() -> None:
    async with telling_bench(num_decode=2) as bench:
        await _load(bench.stub, OLD)
        bench.probe.hurry_adapters(0.5)
        bench.decodes[1].load_gate.close()
        with pytest.raises(Unavailable, match=r"within 0\.5 s .* by d1 .*nothing changed"):
            await _load(bench.stub, NEW)
        bench.decodes[1].load_gate.open()
        assert await _content(bench) == OLD
        (wish,) = (await wishes(bench)).values()
        assert wish.current.digest == OLD and not wish.old


async def test_a_worker_that_dies_meanwhile_is_not_waited_for() -> None:
    async with telling_bench(num_decode=2) as bench:
        gone = bench.decodes.pop()
        gone.load_gate.close()
        loading = asyncio.create_task(_load(bench.stub, OLD))
        await gone.load_gate.reached.wait()
        await gone.stop()
        await bench.lapse(gone)
        assert list((await loading).worker_ids) == ["d0", "p0"]


async def test_a_worker_that_comes_meanwhile_has_it_before_it_counts(bench: HttpBench) -> None:
    bench.prefill.load_gate.close()
    loading = asyncio.create_task(_load(bench.stub, OLD))
    await bench.prefill.load_gate.reached.wait()
    late = FakeDecode("d1", bench.model)
    late.on_loaded = partial(bench.publish, late)
    await bench.add(late)
    bench.prefill.load_gate.open()
    assert "d1" in (await loading).worker_ids
    assert late.loaded == {("tales", OLD)}


async def test_workers_that_read_different_contents_are_told_apart(bench: HttpBench) -> None:
    bench.decode.loaded = {("tales", NEW)}
    await bench.publish(bench.decode)

    async def other(asked: Any, context: Any) -> Any:
        status = common_pb2.AdapterStatus(name="tales", digest=NEW)
        return common_pb2.LoadAdapterReply(adapter=status)

    bench.decode.LoadAdapter = other  # type: ignore[method-assign]
    await bench.decode.stop()
    await bench.decode.start()
    await bench.publish(bench.decode)
    await until(lambda: bench.probe.has_met(bench.decode))
    with pytest.raises(FailedPrecondition, match="different contents in /x/1111"):
        await _load(bench.stub, OLD)
    assert not await wishes(bench)


async def test_an_unload_that_is_refused_changed_nothing() -> None:
    async with telling_bench(num_decode=2) as bench, following(bench):
        await _load(bench.stub, OLD)
        first = await _held(bench, bench.stub)
        with pytest.raises(FailedPrecondition, match="'tales' is in use by 1 requests"):
            await _unload(bench.stub)
        bench.prefill.gate.open()
        await first
        assert all(worker.loaded == {("tales", OLD)} for worker in workers_of(bench))
        assert await _content(bench) == OLD
        assert list((await _unload(bench.stub)).worker_ids) == ["d0", "d1", "p0"]
        assert not any(worker.loaded for worker in workers_of(bench))
        with pytest.raises(NotFound, match="no adapter 'tales' is loaded; loaded are: none"):
            await _unload(bench.stub)


async def test_an_unload_that_waits_lets_requests_end_and_takes_no_new_ones(
    bench: HttpBench,
) -> None:
    async with _second_router(bench) as other, following(bench):
        await _load(bench.stub, OLD)
        first = await _held(bench, other)
        unloading = asyncio.create_task(_unload(bench.stub, wait=True))
        await until(lambda: not bench.probe.knows_adapter("tales"))
        with pytest.raises(InvalidArgument, match="'tales' is not loaded"):
            await _served(bench.stub)
        assert not unloading.done() and bench.prefill.loaded
        bench.prefill.gate.open()
        await first
        await unloading
        assert not any(worker.loaded for worker in workers_of(bench))


async def test_an_unload_says_who_has_it_still(bench: HttpBench) -> None:
    """Where no worker follows."""
    await _load(bench.stub, OLD)
    bench.probe.hurry_adapters(0.5)
    with pytest.raises(DeadlineExceeded, match="takes no new requests, and is on d0, p0"):
        await _unload(bench.stub)
    with pytest.raises(InvalidArgument, match="'tales' is not loaded"):
        await _served(bench.stub)


async def test_names_of_models_are_refused() -> None:
    async with telling_bench(others=[fake_model(name="other")]) as bench:
        for name in ("fake", "other"):
            with pytest.raises(InvalidArgument, match=f"'{name}' is the name of a served model"):
                await _load(bench.stub, OLD, name=name, model="fake")
        with pytest.raises(InvalidArgument, match="there are several: fake, other"):
            await _load(bench.stub, OLD)
        with pytest.raises(Unavailable, match="no prefill worker"):
            await _load(bench.stub, OLD, model="other")
        assert not await wishes(bench)


async def test_of_two_loads_at_once_one_is_told(bench: HttpBench) -> None:
    async with _second_router(bench) as other:
        bench.prefill.load_gate.close()
        loads = [asyncio.create_task(_load(s, d)) for s, d in ((bench.stub, OLD), (other, NEW))]
        await bench.prefill.load_gate.reached.wait()
        bench.prefill.load_gate.open()
        found = await asyncio.gather(*loads, return_exceptions=True)
        (refused,) = [result for result in found if isinstance(result, BatonError)]
        assert "was changed by another command meanwhile" in str(refused)
        (loaded,) = [result for result in found if not isinstance(result, BaseException)]
        assert await _content(bench) == await _content(bench, other) == loaded.digest


@pytest.mark.parametrize("is_behind", [False, True])
async def test_a_redis_that_dies_with_the_change_is_asked_again(
    bench: HttpBench, monkeypatch: pytest.MonkeyPatch, is_behind: bool
) -> None:
    """Just before, or just behind it: then the answer is lost, and what it held with it."""
    await _load(bench.stub, OLD)
    calls = redis_dies_with_a_change(monkeypatch, bench, is_behind=is_behind)
    loading = asyncio.create_task(_load(bench.stub, NEW))
    await until(lambda: len(calls) > 1)
    for worker in workers_of(bench):
        await bench.publish(worker)
    await loading
    assert await _content(bench) == NEW
    assert (await wishes(bench))["tales"].current.digest == NEW


async def test_what_redis_lost_is_written_back(bench: HttpBench) -> None:
    await _load(bench.stub, OLD)
    bench.redis.kill()
    await bench.redis.start()
    for worker in workers_of(bench):
        worker.loaded = set()
        await bench.publish(worker)

    async def is_back() -> bool:
        await bench.probe.look()
        return "tales" in await wishes(bench)

    await until(is_back)
    assert (await wishes(bench))["tales"].current.digest == OLD


async def test_a_wished_adapter_is_listed_and_waited_for_while_workers_are_away(
    bench: HttpBench,
) -> None:
    await _load(bench.stub, OLD)
    for worker in workers_of(bench):
        await bench.lapse(worker)
    async with aiohttp.ClientSession(bench.url) as session:
        async with session.get("/v1/models") as answer:
            ids = [entry["id"] for entry in (await answer.json())["data"]]
    assert ids == ["fake", "tales"]
    waiting = asyncio.create_task(_served(bench.stub))
    await until(lambda: bench.probe.num_held)
    for worker in workers_of(bench):  # back, without it
        worker.loaded = set()
        await bench.publish(worker)
    await until(lambda: all(bench.probe.has_met(worker) for worker in workers_of(bench)))
    assert bench.probe.num_held and not waiting.done()
    for worker in workers_of(bench):
        await follow(bench, worker)
    await waiting


async def test_a_worker_without_what_is_wished_is_told_in_the_status(bench: HttpBench) -> None:
    await _load(bench.stub, OLD)
    bench.decode.loaded = set()
    await bench.publish(bench.decode)
    status = await bench.status(as_heard=True)
    (problem,) = [p for p in status.problems if "adapter" in p]
    assert problem.startswith("worker d0 has not loaded adapter 'tales' as it is wished")


async def test_who_was_unloaded_long_ago_is_forgotten(bench: HttpBench) -> None:
    async with following(bench):
        await _load(bench.stub, OLD)
        await _unload(bench.stub)
        wish = (await wishes(bench))["tales"]
        await put_wish(bench, "tales", unloaded(wish, is_long_ago=True))

        async def is_forgotten() -> bool:
            await bench.probe.look()
            return not await wishes(bench)

        await until(is_forgotten)


@pytest.mark.parametrize("is_forgotten", [True, False])
async def test_a_router_drops_only_what_it_has_seen(is_forgotten: bool) -> None:
    """A wish that was changed between its look and its tidying, which it does not know."""
    async with telling_bench(times={"poll_interval_s": 3600.0}) as bench:
        await _load(bench.stub, OLD)
        before = (await wishes(bench))["tales"]
        loaded = () if is_forgotten else {OLD}
        wish = unloaded(before, loaded=loaded, is_long_ago=is_forgotten)
        if is_forgotten:
            del wish.old[:]
            for worker in workers_of(bench):  # where one has it still, it is not forgotten
                worker.loaded = set()
                await bench.publish(worker)
        await until(lambda: not bench.probe.is_tidying)
        gate = bench.probe.hold_tidying()
        await bench.probe.look()
        await gate.wait_entered()
        await put_wish(bench, "tales", wish)
        gate.open()
        await until(lambda: not bench.probe.is_tidying)
        assert (await wishes(bench))["tales"] == wish

        async def is_dropped() -> bool:
            await bench.probe.look()
            there = (await wishes(bench)).get("tales")
            return there is None if is_forgotten else there is not None and not there.old

        await until(is_dropped)
