"""What tracing costs, and how much of the time to the first token its stages explain.

A local cluster that traces whoever asks for it, and requests in turn that do and that do not: CPU
time of all of its processes, as the kernel counts it, with and without. What is far below that
count's grain is timed by itself: a request that is not traced (reading its headers, deciding, every
call on a span that is none), and the two halves of a span's price, on its request's thread and on
the one that sends. Cost at 1 %: what a request pays that is not traced, and a hundredth of what one
pays that is; by these parts, and at most by what the kernel counted, two standard errors above it.

The residue is what lies between the first token as a client sees it and the sum of the request's
stages up to it: gRPC on both sides of the router, and the way to it. Within the router the stages
leave nothing open; tests see to that.

The collector runs in this process, whose CPU is not counted. The last line printed is one JSON
object.

    python -m benchmarks.tracing_cost --rounds 10 --out benchmarks/results/<date>-tracing-cost.json
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from process import entrypoint  # before gRPC: the client reads and writes as the processes do

# isort: split
import grpc
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace.export import SpanExportResult
from rich.console import Console
from rich.progress import track
from rich.table import Table

from baton import ClusterConfig, LocalCluster
from benchmarks.context import context, publish
from process.spans import RecordingSpan, TraceContext, current_span
from process.tracing import OtlpExporter, Tracing, TracingSettings
from protos import inference_pb2, inference_pb2_grpc
from services.router.request_trace import STAGE, TO_FIRST_TOKEN, RequestTrace
from services.router.times import StageTimes

RATIO = 0.01
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_SENT_S = 1.5
"""Above `tracing.send_interval_s`: by then the spans of a round are sent."""
_CALLS_ON_NOBODY = 64
"""Of one request in all processes, counted from above: spans that a traced one would have."""


class Sink(trace_service_pb2_grpc.TraceServiceServicer):
    """A collector that keeps what is needed here. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.num_spans = 0
        self.stages_ns: dict[bytes, dict[str, int]] = {}
        """Up to the first token, by trace and stage."""

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:
        scopes = [scope for each in request.resource_spans for scope in each.scope_spans]
        with self._lock:
            for span in itertools.chain.from_iterable(scope.spans for scope in scopes):
                self.num_spans += 1
                known = {pair.key: pair.value for pair in span.attributes}
                if TO_FIRST_TOKEN in known and known[TO_FIRST_TOKEN].bool_value:
                    stages = self.stages_ns.setdefault(span.trace_id, {})
                    stage = known[STAGE].string_value
                    took_ns = span.end_time_unix_nano - span.start_time_unix_nano
                    stages[stage] = stages.get(stage, 0) + took_ns
        return trace_service_pb2.ExportTraceServiceResponse()


@contextmanager
def collecting() -> Iterator[tuple[Sink, str]]:
    """A sink and its address, until the body ends."""
    sink, server = Sink(), grpc.server(futures.ThreadPoolExecutor(max_workers=4))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(sink, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield sink, f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait(5)


@dataclass(frozen=True)
class Load:
    """What a request is."""

    num_prompt_tokens: int
    num_output_tokens: int
    num_at_once: int
    vocab_size: int


class Cluster:
    """A cluster as a client sees it, and the CPU time of its processes."""

    def __init__(self, cluster: LocalCluster, load: Load, seed: int) -> None:
        self._pids = [part.pid for part in cluster.processes.values() if part.kind != "redis"]
        self._load = load
        self._random = random.Random(seed)
        self._channel = grpc.insecure_channel(cluster.address)
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)
        self._ids = itertools.count(1)

    def close(self) -> None:
        self._channel.close()

    def cpu_s(self) -> float:
        """User and system time of all processes so far."""
        total = 0
        for pid in self._pids:
            fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2]
            total += sum(map(int, fields.split()[11:13]))
        return total * _TICK_S

    def serve(self, *, is_traced: bool) -> tuple[float, bytes]:
        """One request. Returns: seconds to its first token, and its trace."""
        load = self._load
        trace = TraceContext(self._random.getrandbits(127) + next(self._ids), 1, is_traced)
        ids = self._random.choices(range(10, load.vocab_size), k=load.num_prompt_tokens)
        request = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=ids))
        request.sampling.max_tokens = load.num_output_tokens
        request.sampling.ignore_eos = True
        began, first = time.perf_counter(), 0.0
        for message in self._stub.Generate(request, timeout=120, metadata=trace.headers):
            if message.token_ids and not first:
                first = time.perf_counter()
        return first - began, trace.trace_id.to_bytes(16, "big")

    def round(self, num_requests: int, *, is_traced: bool) -> float:
        """CPU seconds per request of a round, spans sent and all."""
        before = self.cpu_s()
        with futures.ThreadPoolExecutor(self._load.num_at_once) as pool:
            list(pool.map(lambda _: self.serve(is_traced=is_traced), range(num_requests)))
        time.sleep(_SENT_S)
        return (self.cpu_s() - before) / num_requests


def untraced_s(num_laps: int = 20_000) -> float:
    """Seconds that one request which is not traced spends on tracing, in all processes: with
    headers to read, which is the dearer case."""
    exporter: Any = _Nowhere()
    tracing = Tracing(TracingSettings(endpoint="127.0.0.1:1"), exporter)
    headers = dict(TraceContext(1, 2, False, "vendor=1").headers)
    request = inference_pb2.GenerateRequest(text="x")
    began = time.perf_counter()
    for _ in range(num_laps):
        with RequestTrace(tracing, headers, request, StageTimes(), "m") as trace:
            for _ in range(_CALLS_ON_NOBODY):
                with current_span().child("x") as span:
                    if span.is_recording:
                        raise AssertionError("nobody is traced here")
        trace.on_end("finished", "")
    return (time.perf_counter() - began) / num_laps


def span_s(num_spans: int = 4096) -> tuple[float, float]:
    """Seconds of CPU that one span costs its request, and the thread that sends it (to where
    nothing is read)."""
    settings = TracingSettings(endpoint="127.0.0.1:1", max_waiting_spans=num_spans)
    exporter = OtlpExporter(settings, "benchmark", "b", _Encoding())
    root = Tracing(settings, exporter).begin("request", {})
    began = time.thread_time()
    for _ in range(num_spans):
        root.add_child("stage", 1.0, 2.0, {"baton.stage": "stage", "baton.num_tokens": 7})
    ended = time.thread_time()
    before = time.process_time()
    exporter.start()
    exporter.stop(60.0)
    if exporter.counters.num_exported != num_spans:
        raise AssertionError("not all spans were sent")
    return (ended - began) / num_spans, (time.process_time() - before) / num_spans


class _Encoding:
    """Makes the bytes that would be sent."""

    def export(self, batch: Any) -> SpanExportResult:
        encode_spans(batch).SerializeToString()
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None: ...


class _Nowhere:
    """An exporter that gets nothing."""

    def take(self, span: RecordingSpan) -> None:
        raise AssertionError("nobody is traced here")


def residues(
    cluster: Cluster, sink: Sink, num_requests: int
) -> tuple[list[tuple[float, float]], dict[str, float]]:
    """Of requests one after the other: how much of the client's time to the first token the stages
    leave open, as a share and in seconds; and the mean share of each stage."""
    asked = [cluster.serve(is_traced=True) for _ in range(num_requests)]
    time.sleep(_SENT_S)
    left: list[tuple[float, float]] = []
    shares: dict[str, float] = {}
    for ttft_s, trace_id in asked:
        stages = sink.stages_ns[trace_id]
        open_s = ttft_s - sum(stages.values()) / 1e9
        left.append((open_s / ttft_s, open_s))
        for stage, took_ns in stages.items():
            shares[stage] = shares.get(stage, 0.0) + took_ns / 1e9 / ttft_s / num_requests
    return left, shares


def measure(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    """All figures."""
    load = Load(
        arguments.prompt_tokens, arguments.output_tokens, arguments.at_once, arguments.vocab
    )
    with collecting() as (sink, address):
        config = ClusterConfig(
            port=0,
            model=arguments.model,
            trace_to=address,
            # Every request that asks to be traced is, however many come in a second.
            overrides=("router.tracing.max_followed_per_s=1e6",),
        )
        with LocalCluster(config) as running:
            cluster = Cluster(running, load, arguments.seed)
            cluster.round(arguments.requests, is_traced=True)
            sink.num_spans = 0
            cpu_s: dict[bool, list[float]] = {False: [], True: []}
            for number in track(range(2 * arguments.rounds), "rounds", console=console):
                is_traced = number % 4 in (1, 2)  # drift of the machine hits both alike
                cpu_s[is_traced].append(cluster.round(arguments.requests, is_traced=is_traced))
            num_spans = sink.num_spans / (arguments.rounds * arguments.requests)
            left, shares = residues(cluster, sink, arguments.requests)
            cluster.close()
    return _figures(cpu_s, num_spans, untraced_s(), left, shares)


def _figures(
    cpu_s: dict[bool, list[float]],
    num_spans: float,
    nobody_s: float,
    left: Sequence[tuple[float, float]],
    shares: dict[str, float],
) -> dict[str, Any]:
    plain_s, traced_s = statistics.mean(cpu_s[False]), statistics.mean(cpu_s[True])
    extra = [traced - plain for plain, traced in zip(cpu_s[False], cpu_s[True], strict=True)]
    spread_s = statistics.stdev(extra) / len(extra) ** 0.5 if len(extra) > 1 else 0.0
    on_request_s, sending_s = span_s()
    by_parts_s = nobody_s + RATIO * num_spans * (on_request_s + sending_s)
    at_most_s = nobody_s + RATIO * (traced_s - plain_s + 2 * spread_s)
    return {
        "cpu_ms_per_request": round(plain_s * 1e3, 3),
        "cpu_ms_per_traced_request": round(traced_s * 1e3, 3),
        "cpu_ms_of_tracing_one": round((traced_s - plain_s) * 1e3, 3),
        "cpu_ms_of_tracing_one_stderr": round(spread_s * 1e3, 3),
        "spans_per_request": round(num_spans, 1),
        "cpu_us_of_a_span": round(on_request_s * 1e6, 2),
        "cpu_us_of_sending_a_span": round(sending_s * 1e6, 2),
        "cpu_us_of_not_tracing_one": round(nobody_s * 1e6, 2),
        "ratio": RATIO,
        "cost_at_ratio_percent_by_parts": round(100 * by_parts_s / plain_s, 4),
        "cost_at_ratio_percent_at_most": round(100 * at_most_s / plain_s, 4),
        "cost_when_all_are_traced_percent": round(100 * (traced_s - plain_s) / plain_s, 2),
        "residue_percent_p50": round(100 * statistics.median(share for share, _ in left), 3),
        "residue_ms_p50": round(1e3 * statistics.median(left_s for _, left_s in left), 3),
        "ttft_ms_p50": round(
            1e3 * statistics.median(left_s / share for share, left_s in left if share), 3
        ),
        "share_of_ttft_percent": {stage: round(100 * share, 2) for stage, share in shares.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default="baton-5m")
    parser.add_argument("--vocab", type=int, default=2000, help="prompts are of ids below it")
    parser.add_argument("--rounds", type=int, default=10, help="with tracing, and as many without")
    parser.add_argument("--requests", type=int, default=40, help="of a round")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    console = Console(stderr=True)
    figures = measure(arguments, console)
    table = Table("figure", "value")
    for name, value in figures.items():
        table.add_row(name, str(value))
    console.print(table)
    about = {"benchmark": "tracing_cost", **context(), "grpc": entrypoint.grpc_experiments()}
    publish({**about, **figures}, arguments.out)


if __name__ == "__main__":
    main()
