"""Adapters of a running cluster: every worker of the model has a content before new requests get
it, requests end on what they began with, and whatever fails leaves all as it was."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import aiohttp
import grpc.aio
import pytest

from process import adapter_wishes, serving
from process.errors import (
    BatonError,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    Unavailable,
)
from process.tasks import end_tasks, start_task
from protos import common_pb2, inference_pb2, inference_pb2_grpc
from services.router.app import Router
from services.router.fakes.decode import FakeDecode
from services.router.fakes.worker import FakeWorker
from tests.harness.router_bench import (
    BOUND_S,
    Bench,
    fake_model,
    http_bench,
    request,
    running,
    settings_for,
)
from tests.harness.waiting import Gate, until

OLD, NEW = "11" * 32, "22" * 32
SHORT: dict[str, Any] = {"max_tokens": 3}


def _workers(bench: Bench) -> list[FakeWorker]:
    return [*bench.prefills, *bench.decodes]


async def _wishes(bench: Bench) -> dict[str, common_pb2.AdapterWish]:
    client = bench.redis.client()
    try:
        return adapter_wishes.parse(await client.hgetall(adapter_wishes.KEY), [])
    finally:
        await client.aclose()


async def _follow(bench: Bench, worker: FakeWorker) -> None:
    """As a worker does with each beat."""
    for name, wish in (await _wishes(bench)).items():
        kept = {version.digest for version in adapter_wishes.versions(wish)}
        wanted = {v.digest for v in adapter_wishes.versions(wish) if v.folder}
        kept |= {d for (n, d), v in worker.held.items() if n == name and v >= wish.version}
        worker.loaded = {(n, d) for n, d in worker.loaded if n != name or d in kept}
        worker.loaded |= {(name, digest) for digest in wanted}
    await bench.publish(worker)


@asynccontextmanager
async def _following(bench: Bench) -> AsyncIterator[None]:
    """The workers follow what is wished, beat by beat."""

    async def follow() -> None:
        while True:
            for worker in _workers(bench):
                await _follow(bench, worker)
            await asyncio.sleep(0.05)

    task = start_task(follow(), "following")
    try:
        yield
    finally:
        await end_tasks([task])


@asynccontextmanager
async def _bench(**options: Any) -> AsyncIterator[Bench]:
    async with running(**options) as bench:
        for worker in _workers(bench):
            worker.on_loaded = partial(bench.publish, worker)
        yield bench


@asynccontextmanager
async def _second_router(bench: Bench) -> AsyncIterator[Any]:
    router = Router(settings_for(bench.redis), bench.model_for_router)
    await router.start()
    try:
        async with serving.channel(router.address) as channel:
            await until(lambda: all(router._streams.is_up(d.worker_id) for d in bench.decodes))
            await until(lambda: router._beat.is_registered)
            yield inference_pb2_grpc.InferenceStub(channel)
    finally:
        await router.stop()


async def _load(stub: Any, digest: str, name: str = "tales", **fields: Any) -> Any:
    asked = inference_pb2.LoadClusterAdapterRequest(name=name, folder=f"/x/{digest}", **fields)
    try:
        return await stub.LoadAdapter(asked, timeout=BOUND_S)
    except grpc.aio.AioRpcError as error:
        raise serving.error_from_rpc(error) from None


async def _unload(stub: Any, name: str = "tales", *, wait: bool = False) -> Any:
    asked = inference_pb2.UnloadClusterAdapterRequest(name=name, wait=wait)
    try:
        return await stub.UnloadAdapter(asked, timeout=BOUND_S)
    except grpc.aio.AioRpcError as error:
        raise serving.error_from_rpc(error) from None


async def _served(stub: Any) -> str:
    """Digest of the content that answers a request now."""
    try:
        asked = request(adapter="tales", sampling=SHORT)
        messages = [message async for message in stub.Generate(asked, timeout=BOUND_S)]
    except grpc.aio.AioRpcError as error:
        raise serving.error_from_rpc(error) from None
    assert messages[-1].finish_reason
    return ""


async def _content(bench: Bench, stub: Any = None) -> str:
    """As the workers are asked for it."""
    await _served(stub or bench.stub)
    asked = max((p.requests for p in bench.prefills if p.requests), key=len)[-1]
    return str(asked.adapter_digest)


async def test_loaded_means_that_every_router_serves_it_on_every_worker() -> None:
    async with _bench(num_decode=2) as bench, _second_router(bench) as other:
        reply = await _load(bench.stub, OLD)
        assert reply.digest == OLD and list(reply.worker_ids) == ["d0", "d1", "p0"]
        assert await _content(bench) == await _content(bench, other) == OLD
        assert all(worker.loaded == {("tales", OLD)} for worker in _workers(bench))
        await _load(other, NEW)
        assert await _content(bench) == await _content(bench, other) == NEW


async def test_new_requests_get_the_new_content_and_running_ones_end_on_the_old() -> None:
    async with _bench(num_decode=2) as bench, _following(bench):
        await _load(bench.stub, OLD)
        bench.prefill.gate.close()
        first = asyncio.create_task(_served(bench.stub))
        await bench.prefill.gate.reached.wait()
        await _load(bench.stub, NEW)
        bench.prefill.gate.let_pass(1)
        await _served(bench.stub)
        assert [r.adapter_digest for r in bench.prefill.requests] == [OLD, NEW]
        both = {("tales", OLD), ("tales", NEW)}
        assert all(worker.loaded == both for worker in _workers(bench))  # OLD is in use
        bench.prefill.gate.open()
        await first
        await until(lambda: all(w.loaded == {("tales", NEW)} for w in _workers(bench)))


async def test_old_content_stays_as_long_as_any_router_uses_it() -> None:
    async with _bench() as bench, _second_router(bench) as other, _following(bench):
        await _load(bench.stub, OLD)
        bench.prefill.gate.close()
        first = asyncio.create_task(_served(other))
        await bench.prefill.gate.reached.wait()
        await _load(bench.stub, NEW)
        (wish,) = (await _wishes(bench)).values()
        assert [version.digest for version in wish.old] == [OLD]
        assert ("tales", OLD) in bench.prefill.loaded
        bench.prefill.gate.open()
        await first
        await until(lambda: bench.prefill.loaded == {("tales", NEW)})


async def test_a_worker_that_refuses_is_named_and_nothing_changed() -> None:
    async with _bench(num_decode=2) as bench:
        await _load(bench.stub, OLD)
        bench.decodes[1].load_error = InvalidArgument("r", "is above lora.max_rank")
        with pytest.raises(InvalidArgument, match=r"d1: r: is above lora\.max_rank; nothing"):
            await _load(bench.stub, NEW)
        assert await _content(bench) == OLD
        assert all(worker.loaded == {("tales", OLD)} for worker in _workers(bench))


async def test_a_worker_that_does_not_answer_is_named_and_nothing_changed() -> None:
    async with _bench(num_decode=2) as bench:
        await _load(bench.stub, OLD)
        _hurry(bench)
        bench.decodes[1].load_gate.close()
        with pytest.raises(Unavailable, match=r"within 0\.5 s .* by d1 .*nothing changed"):
            await _load(bench.stub, NEW)
        bench.decodes[1].load_gate.open()
        assert await _content(bench) == OLD
        (wish,) = (await _wishes(bench)).values()
        assert wish.current.digest == OLD and not wish.old


async def test_a_worker_that_dies_meanwhile_is_not_waited_for() -> None:
    async with _bench(num_decode=2) as bench:
        gone = bench.decodes.pop()
        gone.load_gate.close()
        loading = asyncio.create_task(_load(bench.stub, OLD))
        await gone.load_gate.reached.wait()
        await gone.stop()
        await bench.lapse(gone)
        assert list((await loading).worker_ids) == ["d0", "p0"]


async def test_a_worker_that_comes_meanwhile_has_it_before_it_counts() -> None:
    async with _bench() as bench:
        bench.prefill.load_gate.close()
        loading = asyncio.create_task(_load(bench.stub, OLD))
        await bench.prefill.load_gate.reached.wait()
        late = FakeDecode("d1", bench.model)
        late.on_loaded = partial(bench.publish, late)
        await bench.add(late)
        bench.prefill.load_gate.open()
        assert "d1" in (await loading).worker_ids
        assert late.loaded == {("tales", OLD)}


async def test_workers_that_read_different_contents_are_told_apart() -> None:
    async with _bench() as bench:
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
        assert not await _wishes(bench)


async def test_an_unload_that_is_refused_changed_nothing() -> None:
    async with _bench(num_decode=2) as bench, _following(bench):
        await _load(bench.stub, OLD)
        bench.prefill.gate.close()
        first = asyncio.create_task(_served(bench.stub))
        await bench.prefill.gate.reached.wait()
        with pytest.raises(FailedPrecondition, match="'tales' is in use by 1 requests"):
            await _unload(bench.stub)
        bench.prefill.gate.open()
        await first
        assert all(worker.loaded == {("tales", OLD)} for worker in _workers(bench))
        assert await _content(bench) == OLD
        assert list((await _unload(bench.stub)).worker_ids) == ["d0", "d1", "p0"]
        assert not any(worker.loaded for worker in _workers(bench))
        with pytest.raises(NotFound, match="no adapter 'tales' is loaded; loaded are: none"):
            await _unload(bench.stub)


async def test_an_unload_that_waits_lets_requests_end_and_takes_no_new_ones() -> None:
    async with _bench() as bench, _second_router(bench) as other, _following(bench):
        await _load(bench.stub, OLD)
        bench.prefill.gate.close()
        first = asyncio.create_task(_served(other))
        await bench.prefill.gate.reached.wait()
        unloading = asyncio.create_task(_unload(bench.stub, wait=True))
        await until(lambda: not _is_known(bench))
        with pytest.raises(InvalidArgument, match="'tales' is not loaded"):
            await _served(bench.stub)
        assert not unloading.done() and bench.prefill.loaded
        bench.prefill.gate.open()
        await first
        await unloading
        assert not any(worker.loaded for worker in _workers(bench))


async def test_an_unload_says_who_has_it_still() -> None:
    async with _bench() as bench:  # where no worker follows
        await _load(bench.stub, OLD)
        _hurry(bench)
        with pytest.raises(DeadlineExceeded, match="takes no new requests, and is on d0, p0"):
            await _unload(bench.stub)
        with pytest.raises(InvalidArgument, match="'tales' is not loaded"):
            await _served(bench.stub)


async def test_names_of_models_are_refused() -> None:
    async with _bench(others=[fake_model(name="other")]) as bench:
        for name in ("fake", "other"):
            with pytest.raises(InvalidArgument, match=f"'{name}' is the name of a served model"):
                await _load(bench.stub, OLD, name=name, model="fake")
        with pytest.raises(InvalidArgument, match="there are several: fake, other"):
            await _load(bench.stub, OLD)
        with pytest.raises(Unavailable, match="no prefill worker"):
            await _load(bench.stub, OLD, model="other")
        assert not await _wishes(bench)


async def test_of_two_loads_at_once_one_is_told() -> None:
    async with _bench() as bench, _second_router(bench) as other:
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
    monkeypatch: pytest.MonkeyPatch, is_behind: bool
) -> None:
    """Just before, or just behind it: then the answer is lost, and what it held with it."""
    async with _bench() as bench:
        await _load(bench.stub, OLD)
        swap = adapter_wishes.swap
        calls: list[str] = []

        async def dying(client: Any, name: str, before: bytes, after: str) -> bool:
            calls.append(name)
            if len(calls) > 1:
                return await swap(client, name, before, after)
            if is_behind:
                await swap(client, name, before, after)
            bench.redis.kill()
            await bench.redis.start()
            raise ConnectionError("gone")

        monkeypatch.setattr(adapter_wishes, "swap", dying)
        loading = asyncio.create_task(_load(bench.stub, NEW))
        await until(lambda: len(calls) > 1)
        for worker in _workers(bench):
            await bench.publish(worker)
        await loading
        assert await _content(bench) == NEW
        assert (await _wishes(bench))["tales"].current.digest == NEW


async def test_what_redis_lost_is_written_back() -> None:
    async with _bench() as bench:
        await _load(bench.stub, OLD)
        bench.redis.kill()
        await bench.redis.start()
        for worker in _workers(bench):
            worker.loaded = set()
            await bench.publish(worker)

        async def is_back() -> bool:
            await bench.probe.look()
            return "tales" in await _wishes(bench)

        await until(is_back)
        assert (await _wishes(bench))["tales"].current.digest == OLD


async def test_a_wished_adapter_is_listed_and_waited_for_while_workers_are_away() -> None:
    async with http_bench() as bench:
        for worker in _workers(bench):
            worker.on_loaded = partial(bench.publish, worker)
        await _load(bench.stub, OLD)
        for worker in _workers(bench):
            await bench.lapse(worker)
        async with aiohttp.ClientSession(bench.url) as session:
            async with session.get("/v1/models") as answer:
                ids = [entry["id"] for entry in (await answer.json())["data"]]
        assert ids == ["fake", "tales"]
        waiting = asyncio.create_task(_served(bench.stub))
        await until(lambda: bench.probe.num_held)
        for worker in _workers(bench):  # back, without it
            worker.loaded = set()
            await bench.publish(worker)
        await until(lambda: all(bench.probe.has_met(worker) for worker in _workers(bench)))
        assert bench.probe.num_held and not waiting.done()
        for worker in _workers(bench):
            await _follow(bench, worker)
        await waiting


async def test_a_worker_without_what_is_wished_is_told_in_the_status() -> None:
    async with _bench() as bench:
        await _load(bench.stub, OLD)
        bench.decode.loaded = set()
        await bench.publish(bench.decode)
        status = await bench.router.desk.status.as_heard()
        (problem,) = [p for p in status.problems if "adapter" in p]
        assert problem.startswith("worker d0 has not loaded adapter 'tales' as it is wished")


async def test_who_was_unloaded_long_ago_is_forgotten() -> None:
    async with _bench() as bench, _following(bench):
        await _load(bench.stub, OLD)
        await _unload(bench.stub)
        wish = (await _wishes(bench))["tales"]
        wish.changed_unix_ms = int(1000 * (time.time() - adapter_wishes.FORGET_S - 1))
        wish.version += 1
        client = bench.redis.client()
        try:
            await client.hset(adapter_wishes.KEY, "tales", adapter_wishes.to_json(wish))
        finally:
            await client.aclose()

        async def is_forgotten() -> bool:
            await bench.probe.look()
            return not await _wishes(bench)

        await until(is_forgotten)


@pytest.mark.parametrize("is_forgotten", [True, False])
async def test_a_router_drops_only_what_it_has_seen(is_forgotten: bool) -> None:
    """A wish changed between its look at the registry and its tidying: it follows the one before
    still, with requests, and would write that one back."""
    async with _bench(times={"poll_interval_s": 3600.0}) as bench:
        await _load(bench.stub, OLD)
        before = (await _wishes(bench))["tales"]
        changed_s = time.time() - (adapter_wishes.FORGET_S + 1 if is_forgotten else 0)
        wish = adapter_wishes.changed(
            before,
            name="tales",
            model="fake",
            current=None,
            loaded=() if is_forgotten else {OLD},
            now_unix_s=changed_s,
        )
        if is_forgotten:
            del wish.old[:]
            for worker in _workers(bench):  # where one has it still, it is not forgotten
                worker.loaded = set()
                await bench.publish(worker)
        changes = bench.router._changes
        await until(lambda: changes._tidying is None or changes._tidying.done())
        gate = Gate(changes, "_entries")
        await bench.probe.look()
        await gate.wait_entered()
        client = bench.redis.client()
        try:
            await client.hset(adapter_wishes.KEY, "tales", adapter_wishes.to_json(wish))
        finally:
            await client.aclose()
        gate.open()
        await until(lambda: changes._tidying.done())
        assert (await _wishes(bench))["tales"] == wish

        async def is_dropped() -> bool:
            await bench.probe.look()
            there = (await _wishes(bench)).get("tales")
            return there is None if is_forgotten else there is not None and not there.old

        await until(is_dropped)


def _hurry(bench: Bench) -> None:
    """The next change has half a second."""
    changes = bench.router._changes
    changes._times = replace(changes._times, adapter_s=0.5)


def _is_known(bench: Bench) -> bool:
    (model,) = bench.router.desk.models
    return "tales" in model.candidates.adapter_names()
