"""gRPC's health and reflection services at a router's port, as tools ask for them."""

from __future__ import annotations

import asyncio

import grpc.aio
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from tests.harness.router_bench import BOUND_S, Bench, code_of
from tests.harness.waiting import until

pytestmark = pytest.mark.oracle

SERVICE = "baton.v1.Inference"


async def test_health_says_whether_a_request_would_find_workers(bench: Bench) -> None:
    bench.probe.remember(for_s=0.2)
    stub = health_pb2_grpc.HealthStub(bench.channel)

    async def status(service: str) -> int:
        request = health_pb2.HealthCheckRequest(service=service)
        return (await stub.Check(request, timeout=BOUND_S)).status

    serving, not_serving = (
        health_pb2.HealthCheckResponse.SERVING,
        health_pb2.HealthCheckResponse.NOT_SERVING,
    )
    assert await status("") == serving
    while await status(SERVICE) != serving:  # the streams to the workers come up
        await asyncio.sleep(0.01)
    watch = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE), timeout=BOUND_S)
    assert (await watch.read()).status == serving
    await bench.redis_client.flushall()
    assert (await watch.read()).status == not_serving
    watch.cancel()
    assert await status("") == serving and await status(SERVICE) == not_serving
    listed = await stub.List(health_pb2.HealthListRequest(), timeout=BOUND_S)
    assert {name: s.status for name, s in listed.statuses.items()} == {
        "": serving,
        SERVICE: not_serving,
    }
    assert await code_of(status("other")) is grpc.StatusCode.NOT_FOUND
    unknown = stub.Watch(health_pb2.HealthCheckRequest(service="other"), timeout=BOUND_S)
    assert (await unknown.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    unknown.cancel()
    await until(bench.is_idle)


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_tells_all_that_is_needed_to_call(bench: Bench, version: str) -> None:
    ask = bench.channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    call = ask(timeout=BOUND_S)
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    listed = await call.read()
    assert SERVICE in {entry.name for entry in listed.list_services_response.service}
    await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE))
    found = await call.read()
    files = [
        descriptor_pb2.FileDescriptorProto.FromString(data)
        for data in found.file_descriptor_response.file_descriptor_proto
    ]
    methods = {m.name for f in files for s in f.service for m in s.method}
    assert "Generate" in methods
    await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol="no.Such"))
    assert (await call.read()).error_response.error_code == 5
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
