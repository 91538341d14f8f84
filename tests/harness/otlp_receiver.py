"""A receiver of traces as a collector has one: OTLP's own service over gRPC, and what came in."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

from process.trace_spans import TraceContext as TraceContext
from process.tracing import TracingSettings as TracingSettings

WAIT_S = 20.0


@dataclass(frozen=True)
class Received:
    """A span, and the process that it is of."""

    span: trace_pb2.Span
    service: str
    resource: dict[str, Any]
    schema_url: str
    """Of the conventions that its attributes follow."""

    @property
    def name(self) -> str:
        return str(self.span.name)

    @property
    def trace_id(self) -> str:
        return str(self.span.trace_id.hex())

    @property
    def span_id(self) -> str:
        return str(self.span.span_id.hex())

    @property
    def parent_id(self) -> str:
        return str(self.span.parent_span_id.hex())

    @property
    def begin_ns(self) -> int:
        return int(self.span.start_time_unix_nano)

    @property
    def end_ns(self) -> int:
        return int(self.span.end_time_unix_nano)

    @property
    def attributes(self) -> dict[str, Any]:
        return values_of(self.span.attributes)


def values_of(pairs: Any) -> dict[str, Any]:
    """Attributes as Python has them."""
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: common_pb2.AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind) if kind else None


class OtlpReceiver(trace_service_pb2_grpc.TraceServiceServicer):
    """See the module."""

    def __init__(self) -> None:
        self.address = ""
        self.num_calls = 0
        self._spans: list[Received] = []
        self._changed = threading.Condition()

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:
        found = []
        for of_resource in request.resource_spans:
            resource = values_of(of_resource.resource.attributes)
            for scope in of_resource.scope_spans:
                assert scope.scope.name == "baton"
                assert scope.schema_url == of_resource.schema_url
                found += [
                    Received(span, resource["service.name"], resource, scope.schema_url)
                    for span in scope.spans
                ]
        with self._changed:
            self.num_calls += 1
            self._spans += found
            self._changed.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    @property
    def spans(self) -> list[Received]:
        with self._changed:
            return list(self._spans)

    def wait(self, is_there: Callable[[list[Received]], bool]) -> list[Received]:
        """Until what came satisfies `is_there`. Blocking; bounded."""
        deadline = time.monotonic() + WAIT_S
        with self._changed:
            while not is_there(self._spans):
                left_s = deadline - time.monotonic()
                assert left_s > 0, sorted(f"{each.service} {each.name}" for each in self._spans)
                self._changed.wait(left_s)
            return list(self._spans)


@contextmanager
def receiving(
    address: str = "127.0.0.1:0", credentials: grpc.ServerCredentials | None = None
) -> Iterator[OtlpReceiver]:
    """A receiver, until the body ends; over TLS with `credentials`."""
    receiver = OtlpReceiver()
    server = grpc.server(
        futures.ThreadPoolExecutor(max_workers=4), options=[("grpc.so_reuseport", 0)]
    )
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(receiver, server)
    if credentials is None:
        port = server.add_insecure_port(address)
    else:
        port = server.add_secure_port(address, credentials)
    receiver.address = f"127.0.0.1:{port}"
    server.start()
    try:
        yield receiver
    finally:
        server.stop(0).wait(5)


def root_of(spans: Sequence[Received], service: str = "baton-router") -> Received:
    (root,) = [each for each in spans if each.service == service and each.span.kind == 2]
    return root


def stages_of(spans: Sequence[Received], root: Received) -> list[Received]:
    """The stages of a request, in order."""
    stages = [
        each
        for each in spans
        if each.parent_id == root.span_id and "baton.to_first_token" in each.attributes
    ]
    return sorted(stages, key=lambda each: each.begin_ns)


def assert_sums(spans: Sequence[Received], root: Received) -> list[str]:
    """No gap and no overlap, from the first moment to the last; those to the first token sum to the
    time that it took, to the nanosecond. Returns: the stages' names."""
    stages = stages_of(spans, root)
    bounds = [root.begin_ns, *(each.end_ns for each in stages)]
    assert [each.begin_ns for each in stages] == bounds[:-1]
    assert bounds[-1] == root.end_ns
    critical = [each for each in stages if each.attributes["baton.to_first_token"]]
    assert critical == stages[: len(critical)]
    firsts = [event for event in root.span.events if event.name == "first_token"]
    if firsts:
        ttft_ns = firsts[0].time_unix_nano - root.begin_ns
        assert sum(each.end_ns - each.begin_ns for each in critical) == ttft_ns
        told_s = root.attributes["gen_ai.response.time_to_first_chunk"]
        assert told_s == pytest.approx(ttft_ns / 1e9, abs=1e-8)
    else:
        assert not critical
    return [each.name for each in stages]
