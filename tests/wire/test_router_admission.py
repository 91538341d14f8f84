"""Keys, rates and the fair queue at a real router over real gRPC, with fake workers behind it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from baton import key_files
from process import api_keys, serving
from process.errors import NoCapacity
from protos import inference_pb2
from services.router.admission_settings import AdmissionSettings
from tests.unit.router.bench import BOUND_S, Bench, fake_model, request, rest_of, running, until


def bearer(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)


async def code_of(call: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rest_of(call)
    return caught.value.code()


async def hold(bench: Bench, **fields: Any) -> Any:
    """A request that is being prefilled, and stays so until the gate opens."""
    bench.prefill.gate.close()
    call = bench.stub.Generate(request(**fields), timeout=BOUND_S)
    async with asyncio.timeout(BOUND_S):
        await bench.prefill.gate.reached.wait()
    return call


async def test_keys_decide_who_asks_and_what_may_be_asked(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    user, user_id, user_entry = api_keys.new_key("acme", max_priority=2)
    admin, admin_id, admin_entry = api_keys.new_key("ops", is_admin=True)
    key_files.add(path, user_id, user_entry)
    key_files.add(path, admin_id, admin_entry)
    async with running(api_keys_file=str(path)) as bench:

        def ask(metadata: Any = (), **fields: Any) -> Any:
            sampling = {"max_tokens": 2}
            return bench.stub.Generate(
                request(sampling=sampling, **fields), timeout=BOUND_S, metadata=metadata
            )

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
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await method(message, timeout=BOUND_S, metadata=metadata)
                assert caught.value.code() is code
        models = inference_pb2.ListModelsRequest()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await bench.stub.ListModels(models, timeout=BOUND_S)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert await bench.stub.ListModels(models, timeout=BOUND_S, metadata=bearer(user))
        status = inference_pb2.GetClusterStatusRequest()
        assert await bench.stub.GetClusterStatus(status, timeout=BOUND_S, metadata=bearer(admin))
        # Whose KV it is follows the key, not what the request says.
        assert len({call.tenant_salt for call in bench.prefill.requests}) == 1


async def test_a_quiet_tenant_passes_a_noisy_one() -> None:
    model = fake_model(context_window=8192)
    async with running(model=model, admission=AdmissionSettings(max_active_requests=1)) as bench:
        calls = [await hold(bench, tenant="noisy", text="0" * 4000)]
        for number in range(1, 8):
            noisy = request(tenant="noisy", text=str(number) * 4000, sampling={"max_tokens": 1})
            calls.append(bench.stub.Generate(noisy, timeout=BOUND_S))
        await until(lambda: bench.router.desk.admission.num_waiting == 7)
        quiet = request(tenant="quiet", text="q" * 4000, sampling={"max_tokens": 1})
        calls.append(bench.stub.Generate(quiet, timeout=BOUND_S))
        await until(lambda: bench.router.desk.admission.num_waiting == 8)
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
    settings = AdmissionSettings(
        max_active_requests=1, max_queued_requests=1, max_queued_per_tenant=1
    )
    async with running(admission=settings) as bench:
        held = await hold(bench)
        waiting = bench.stub.Generate(request(), timeout=BOUND_S)
        await until(lambda: bench.router.desk.admission.num_waiting == 1)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rest_of(bench.stub.Generate(request(), timeout=BOUND_S))
        error = serving.error_from_rpc(caught.value)
        assert isinstance(error, NoCapacity) and error.retry_after_s == 1.0
        assert len(bench.prefill.requests) == 1
        # Who gives up while it waits leaves nothing behind.
        waiting.cancel()
        await until(lambda: bench.router.desk.admission.num_waiting == 0)
        bench.prefill.gate.open()
        assert await rest_of(held)
        status = await bench.stub.GetClusterStatus(
            inference_pb2.GetClusterStatusRequest(num_requests=8), timeout=BOUND_S
        )
        ends = [(info.outcome, info.code) for info in status.requests]
        assert ("failed", "resource_exhausted") in ends and ("finished", "") in ends


async def test_a_repeated_request_takes_its_place_over_while_it_waits() -> None:
    async with running(admission=AdmissionSettings(max_active_requests=1)) as bench:
        held = await hold(bench)
        first = bench.stub.Generate(request(request_id="same"), timeout=BOUND_S)
        await until(lambda: bench.router.desk.admission.num_waiting == 1)
        again = bench.stub.Generate(request(request_id="same"), timeout=BOUND_S)
        assert await code_of(first) is grpc.StatusCode.CANCELLED
        bench.prefill.gate.open()
        assert await rest_of(held) and await rest_of(again)


async def test_rates_hold_over_routers_and_go_on_without_redis() -> None:
    settings = AdmissionSettings(max_requests_per_min=3, rate_timeout_s=BOUND_S)
    async with running(admission=settings) as bench:
        for _ in range(3):
            assert await bench.generate(request(sampling={"max_tokens": 1}))
        call = bench.stub.Generate(request(), timeout=BOUND_S)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rest_of(call)
        error = serving.error_from_rpc(caught.value)
        assert isinstance(error, NoCapacity) and 10 < (error.retry_after_s or 0) <= 20
        assert "3 requests a minute" in str(error)
        bench.redis.kill()
        assert await bench.generate(request(sampling={"max_tokens": 1}))
        status = await bench.stub.GetClusterStatus(
            inference_pb2.GetClusterStatusRequest(), timeout=BOUND_S
        )
        assert any("rate limits are kept by each router alone" in said for said in status.problems)
