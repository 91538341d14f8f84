"""What strangers can hold of a router: nothing before they are known, a bounded part of its memory,
its connections and its workers after that."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from baton.cli import main
from process.rpc_errors import NoCapacity
from protos import inference_pb2, inference_pb2_grpc
from tests.harness.access import add_key
from tests.harness.router_bench import (
    BOUND_S,
    Bench,
    HttpBench,
    ReaderClock,
    abort_after,
    channel,
    code_of,
    error_from_rpc,
    failure,
    http_bench,
    ids_of,
    raw,
    request,
    rest_of,
    running,
)
from tests.harness.waiting import until

pytestmark = pytest.mark.oracle

GENERATE = "/baton.v1.Inference/Generate"
MIB = 1024 * 1024
SMALL = {"max_request_bytes": 1000, "hard_request_bytes": 2000, "max_intake_bytes": 8000}
"""Two of a host, or of a tenant, are read at the same time."""
NARROW = [("grpc.http2.lookahead_bytes", 64), ("grpc.http2.bdp_probe", 0)]
"""A client that grants almost no window: writes to it block as soon as it does not read."""


async def never() -> AsyncIterator[bytes]:
    """A message that does not come."""
    await asyncio.Event().wait()
    yield b""


def opened(bench: Bench, to: grpc.aio.Channel | None = None, **options: Any) -> Any:
    """A call of Generate whose message does not come."""
    return (to or bench.channel).stream_stream(GENERATE)(never(), **options)


async def refusal(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async with asyncio.timeout(BOUND_S):
            await call.read()
    return caught.value


def new_keys(tmp_path: Path, *tenants: str) -> tuple[Path, list[tuple[str, str]]]:
    """A file with a key of each, and the metadata that they send."""
    path = tmp_path / "keys.toml"
    return path, [("authorization", f"Bearer {add_key(path, tenant)}") for tenant in tenants]


def posted(path: str, body: bytes, num_bytes: int | None = None) -> bytes:
    """A request, or the part of it that comes."""
    return (
        f"POST {path} HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body) if num_bytes is None else num_bytes}\r\n\r\n"
    ).encode() + body


# -- before anybody is known


async def test_who_has_no_key_is_refused_before_its_message_comes(tmp_path: Path) -> None:
    path, _ = new_keys(tmp_path, "acme")
    async with running(api_keys_file=str(path)) as bench:
        for method in ("Generate", "ListModels", "GetClusterStatus", "Explain"):
            call = bench.channel.stream_stream(f"/baton.v1.Inference/{method}")(never())
            assert (await refusal(call)).code() is grpc.StatusCode.UNAUTHENTICATED, method
        # One that does come is not taken in.
        large = bench.channel.unary_stream(GENERATE)(b"x" * MIB)
        assert (await refusal(large)).code() is grpc.StatusCode.UNAUTHENTICATED
        assert not bench.prefill.requests


async def test_over_http_too(tmp_path: Path) -> None:
    path, _ = new_keys(tmp_path, "acme")
    async with http_bench(api_keys_file=str(path)) as bench:
        asked = posted("/v1/completions", b"{", 1_000_000)
        async with raw(bench.router.http_address, asked) as reader:
            assert (await reader.readline()).startswith(b"HTTP/1.1 401")
            assert bench.probe.intake.num_bytes == 0


# -- while messages are read


async def test_a_tenant_that_sends_slowly_leaves_room_for_others(tmp_path: Path) -> None:
    path, (noisy, quiet) = new_keys(tmp_path, "noisy", "quiet")
    async with running(api_keys_file=str(path), limits=SMALL) as bench:
        intake = bench.probe.intake
        slow = [opened(bench, metadata=[noisy]) for _ in range(2)]
        await until(lambda: intake.num_bytes == 2 * SMALL["hard_request_bytes"])
        asked = request(sampling={"max_tokens": 2})
        assert await bench.generate(asked, metadata=[quiet])
        assert not any(call.done() for call in slow)
        bench.router.check_integrity()
        # One of its own waits: what has been read for the longest gives way.
        assert await bench.generate(asked, metadata=[noisy])
        told = [asyncio.create_task(refusal(call)) for call in slow]
        done, _ = await asyncio.wait(told, return_when=asyncio.FIRST_COMPLETED)
        (error,) = (task.result() for task in done)
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert isinstance(found := error_from_rpc(error), NoCapacity)
        assert found.retry_after_s and "too slowly" in str(found)
        assert intake.num_recalled == 1
        bench.router.check_integrity()
        for call in slow:
            call.cancel()
        await asyncio.gather(*told, return_exceptions=True)
        await until(lambda: not intake.num_bytes)
        assert await bench.generate(asked, metadata=[noisy])


async def test_a_host_that_posts_slowly_leaves_room_for_others_behind_it() -> None:
    """An ingress is one host for all of its callers."""
    async with http_bench(limits=SMALL) as bench:
        intake = bench.probe.intake
        asked = posted("/v1/completions", b"{", 1000)
        async with contextlib.AsyncExitStack() as stack:
            address = bench.router.http_address
            slow = [await stack.enter_async_context(raw(address, asked)) for _ in range(4)]
            await until(lambda: intake.num_bytes == intake.max_owner_bytes)
            body = json.dumps({"model": "fake", "prompt": "hello", "max_tokens": 2}).encode()
            async with raw(address, posted("/v1/completions", body)) as reader:
                assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            assert intake.num_recalled == 1
            told = [asyncio.create_task(reader.readline()) for reader in slow]
            (first, *_), _ = await asyncio.wait(told, return_when=asyncio.FIRST_COMPLETED)
            assert first.result().startswith(b"HTTP/1.1 429")
            bench.router.check_integrity()
            for task in told:
                task.cancel()
        await until(lambda: not intake.num_bytes)


async def test_what_was_read_counts_with_what_it_has_until_its_end() -> None:
    async with running(limits=SMALL) as bench:
        bench.prefill.gate.close()
        asked = request(text="hello", sampling={"max_tokens": 1})
        calls = [bench.call(asked) for _ in range(20)]
        await until(lambda: bench.probe.num_requests == 20)
        assert bench.probe.intake.num_bytes == 20 * asked.ByteSize()
        bench.router.check_integrity()
        bench.prefill.gate.open()
        assert all([await rest_of(call) for call in calls])


async def test_a_message_that_does_not_come_is_not_waited_for() -> None:
    async with running(times={"read_s": 0.1}) as bench:
        error = await refusal(opened(bench))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_call_that_ends_without_a_message_is_told_so(bench: Bench) -> None:

    async def nothing() -> AsyncIterator[bytes]:
        return
        yield b""

    error = await refusal(bench.channel.stream_stream(GENERATE)(nothing()))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_nor_is_a_body() -> None:
    async with http_bench(times={"read_s": 0.1}) as bench:
        asked = posted("/v1/completions", b"{", 1000)
        async with raw(bench.router.http_address, asked) as reader:
            assert (await reader.readline()).startswith(b"HTTP/1.1 408")


# -- connections


async def test_one_connection_too_many_is_closed() -> None:
    asked = b"GET /health HTTP/1.1\r\nhost: h\r\n\r\n"
    async with http_bench(limits={"max_connections": 2}) as bench:
        connections, address = bench.probe.connections, bench.router.http_address
        async with raw(address, asked) as first:
            async with raw(address, asked) as second:
                for reader in (first, second):
                    assert (await reader.readline()).startswith(b"HTTP/1.1 200")
                async with raw(address, b"") as reader:
                    answer = await reader.read()
                assert answer.startswith(b"HTTP/1.1 503") and b"retry-after: 1" in answer
                body = json.loads(answer.partition(b"\r\n\r\n")[2])
                assert body["error"]["code"] == "no_capacity" and connections.num_refused == 1
            await until(lambda: bench.probe.num_connections == 1)
            async with raw(address, asked) as reader:
                assert (await reader.readline()).startswith(b"HTTP/1.1 200")


async def test_nor_one_of_grpc() -> None:
    check = "/grpc.health.v1.Health/Check"
    async with running(limits={"max_connections": 2}) as bench:
        await bench.channel.unary_unary(check)(b"")
        async with channel(bench.router.address) as second:
            await second.unary_unary(check)(b"")
            async with channel(bench.router.address) as third:
                assert (
                    await code_of(third.unary_unary(check)(b"", timeout=BOUND_S))
                    is grpc.StatusCode.UNAVAILABLE
                )
                await second.close()
                await third.unary_unary(check)(b"", timeout=BOUND_S, wait_for_ready=True)


async def test_a_connection_that_asks_for_nothing_is_closed() -> None:
    async with http_bench(times={"idle_s": 0.2}) as bench:
        for begun in (b"", b"GET /hea"):
            async with raw(bench.router.http_address, begun) as reader:
                assert await reader.read() == b""
        begun = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"
        async with raw(bench.router.address, begun) as reader:
            while await reader.read(1000):
                pass
        # A channel meets the router again by itself.
        assert await bench.generate(sampling={"max_tokens": 1})


# -- answers that nobody takes


async def test_who_takes_nothing_loses_its_request(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    abort_after(monkeypatch, 0.2)
    caplog.set_level(logging.INFO)
    async with running(times={"stall_s": 0.2}) as bench:
        async with grpc.aio.insecure_channel(bench.router.address, options=NARROW) as narrow:
            bench.decode.pause_at = 100
            fields = {"request_id": "idle", "sampling": {"max_tokens": 300}}
            call = inference_pb2_grpc.InferenceStub(narrow).Generate(request(**fields))
            # The decode worker waits for the test: whatever ends the request, it is not its end.
            await until(lambda: bench.probe.num_stalled == 1)
            await until(lambda: not bench.decode.num_open)
            await until(bench.is_idle)
            bench.router.check_integrity(is_idle=True)
            assert bench.decode.num_cancelled == 1
            bench.decode.token_gate.open()
            assert await code_of(rest_of(call)) is grpc.StatusCode.CANCELLED
    (line,) = [record for record in caplog.records if record.msg == "reader_stalled"]
    assert line.fields["request_id"] == "idle"  # type: ignore[attr-defined]


async def test_who_reads_slowly_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes twice as long over its answer as one message may, and has all of it."""
    clock = ReaderClock(monkeypatch)
    async with running(times={"stall_s": 1000.0}) as bench:
        async with grpc.aio.insecure_channel(bench.router.address, options=NARROW) as narrow:
            stub = inference_pb2_grpc.InferenceStub(narrow)
            call = stub.Generate(request(sampling={"max_tokens": 300}))
            num_tokens = 0
            for num_read in range(20):
                bench.decode.pause_at = num_read + 5  # else what waits becomes one message
                bench.decode.token_gate.open()
                message = await call.read()
                assert message is not grpc.aio.EOF
                num_tokens += len(message.token_ids)
                clock.now_s += 100.0  # a few messages lie between writer and reader
                bench.probe.look_at_readers()
            assert not bench.probe.num_stalled
            bench.decode.pause_at = None
            bench.decode.token_gate.open()
            num_tokens += len(ids_of(await rest_of(call)))
            assert num_tokens == 300


@asynccontextmanager
async def deaf(bench: HttpBench, asked: bytes) -> AsyncIterator[None]:
    """A client that asks and reads nothing of the answer; the system keeps little of it either."""
    host, _, port = bench.router.http_address.rpartition(":")
    with socket.socket() as peer:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        peer.connect((host, int(port)))
        await until(lambda: bench.probe.num_connections)
        bench.probe.narrow_connection()
        peer.sendall(asked)
        yield
    await until(lambda: not bench.probe.num_connections)


async def test_nor_over_http(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with http_bench(times={"stall_s": 0.2}) as bench:
        bench.decode.pause_at = 60  # far more than anything on the way keeps
        sampling = {"max_tokens": 500, "n": 16, "logprobs": 5, "stream": True}
        body = json.dumps({"prompt": "x", **sampling}).encode()
        async with deaf(bench, posted("/v1/completions", body)):
            await until(lambda: bench.probe.connections.num_stalled == 1)
            await until(bench.is_idle)
            assert bench.decode.num_cancelled == 1
        # An answer in one piece, whose handler is over: its connection is all that is left.
        asked = b"GET /openapi.json HTTP/1.1\r\nhost: h\r\n\r\n"
        async with deaf(bench, asked * 5):
            await until(lambda: bench.probe.connections.num_stalled == 2)
    assert [record for record in caplog.records if record.msg == "http_reader_stalled"]


# ---- what a tenant may use, and what is said of requests that are refused


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
            return bench.call(message, metadata=keys[tenant])

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
        assert await bench.generate(sampling=ONE_TOKEN)
        for message, code in zip((unknown_token, request()), refused, strict=True):
            assert await bench.code_of(message) is code
        status = await bench.status(num_requests=8)
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
            assert await bench.generate(sampling={"max_tokens": 1})
        call = bench.call()
        _, error = await failure(call)
        assert isinstance(error, NoCapacity) and 10 < (error.retry_after_s or 0) <= 20
        assert "3 requests a minute" in str(error)
        bench.redis.kill()
        assert await bench.generate(sampling={"max_tokens": 1})
        status = await bench.status()
        assert any("rate limits are kept by each router alone" in said for said in status.problems)
