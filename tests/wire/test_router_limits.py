"""What a tenant may use of a router, and what a router says of requests that it refused: over real
gRPC, with fake workers behind it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from baton.cli import main
from process.errors import NoCapacity
from protos import inference_pb2
from tests.harness.router_bench import (
    BOUND_S,
    error_from_rpc,
    request,
    rest_of,
    running,
)
from tests.harness.waiting import until

pytestmark = pytest.mark.oracle

ONE_TOKEN = {"max_tokens": 1}


async def test_a_tenant_has_no_more_active_requests_than_its_limit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "keys.toml"
    keys = {}
    for tenant in ("acme", "quiet"):
        assert main(["api-key", "add", "--file", str(path), "--tenant", tenant, "--admin"]) == 0
        keys[tenant] = (("authorization", f"Bearer {capsys.readouterr().out.strip()}"),)
    with path.open("a") as file:
        file.write("\n[tenants.acme]\nmax_active_requests = 2\n")
    async with running(api_keys_file=str(path)) as bench:

        def ask(tenant: str, request_id: str) -> Any:
            message = request(request_id=request_id, sampling=ONE_TOKEN)
            return bench.stub.Generate(message, timeout=BOUND_S, metadata=keys[tenant])

        async def is_known(request_id: str) -> bool:
            asked = inference_pb2.GetClusterStatusRequest(num_requests=8)
            status = await bench.stub.GetClusterStatus(
                asked, timeout=BOUND_S, metadata=keys["quiet"]
            )
            return request_id in {info.request_id for info in status.requests}

        bench.prefill.gate.close()
        calls = [ask("acme", "first"), ask("acme", "second")]
        await until(lambda: len(bench.prefill.requests) == 2)
        calls.append(ask("acme", "third"))
        await until(lambda: is_known("third"))
        calls.append(ask("quiet", "fourth"))
        await until(lambda: len(bench.prefill.requests) == 3)
        assert [one.tenant for one in bench.prefill.requests] == ["acme", "acme", "quiet"]
        bench.prefill.gate.open()
        for call in calls:
            assert await rest_of(call)
        assert [one.tenant for one in bench.prefill.requests] == [
            *("acme", "acme", "quiet"),
            "acme",
        ]


async def test_what_is_refused_is_not_counted_as_served() -> None:
    async with running(admission={"max_requests_per_min": 2}) as bench:
        refused = [grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED]
        unknown_token = request(sampling={"stop_token_ids": [999_999]})
        assert await bench.generate(request(sampling=ONE_TOKEN))
        for message, code in zip((unknown_token, request()), refused, strict=True):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await bench.generate(message)
            assert caught.value.code() is code
        status = await bench.stub.GetClusterStatus(
            inference_pb2.GetClusterStatusRequest(num_requests=8), timeout=BOUND_S
        )
        assert status.num_requests_finished == 1
        ends = [(info.outcome, info.code) for info in status.requests]
        assert ends == [
            ("failed", "resource_exhausted"),
            ("refused", "invalid_argument"),
            ("finished", ""),
        ]


async def test_rates_hold_over_routers_and_go_on_without_redis() -> None:
    async with running(admission={"max_requests_per_min": 3}) as bench:
        for _ in range(3):
            assert await bench.generate(request(sampling={"max_tokens": 1}))
        call = bench.stub.Generate(request(), timeout=BOUND_S)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rest_of(call)
        error = error_from_rpc(caught.value)
        assert isinstance(error, NoCapacity) and 10 < (error.retry_after_s or 0) <= 20
        assert "3 requests a minute" in str(error)
        bench.redis.kill()
        assert await bench.generate(request(sampling={"max_tokens": 1}))
        status = await bench.stub.GetClusterStatus(
            inference_pb2.GetClusterStatusRequest(), timeout=BOUND_S
        )
        assert any("rate limits are kept by each router alone" in said for said in status.problems)
