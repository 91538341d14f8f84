"""A whole local cluster: what of the KV's way is left to see, what tracing costs, and how long a
quiet tenant waits beside a noisy one.

    python -m benchmarks.cluster handover --requests 5 --prompt-tokens 1024,8192
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from process import entrypoint  # before gRPC: the client reads and writes as the processes do

# isort: split
import click
import grpc
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace.export import SpanExportResult
from rich.progress import track

import checkpoints
from baton import ClusterConfig, LocalCluster
from baton.cli import plots
from baton.client import Client, SyncClient
from baton.cluster import plan as cluster_plan
from baton.cluster.supervisor import Supervisor
from baton.errors import BatonError
from baton.messages import Chunk, End, completions_from
from benchmarks import harness, random_checkpoint
from benchmarks.harness import Several
from benchmarks.random_checkpoint import SHAPES
from engine.config import EngineConfig
from engine.loop import Engine, load_engine
from engine.request import Request, Sampling
from kvstore import block_hash
from process.spans import RecordingSpan, TraceContext, current_span
from process.tracing import OtlpExporter, Tracing, TracingSettings
from protos import inference_pb2, inference_pb2_grpc
from services.router.admission_settings import AdmissionSettings
from services.router.request_trace import STAGE, TO_FIRST_TOKEN, Call, RequestTrace
from services.router.times import StageTimes

# -- the handover of a prompt's KV from prefill to decode

TRANSPORTS = ("shm", "nixl", "grpc")
PATHS = ("store", "direct")
TRANSFER_STAGES = ("prefill_store", "decode_fetch")
"""Of the account of a request: the waits for its KV that no prefill hides."""
OUTPUT_TOKENS = 16
_START_S = 60.0
_SETTLE_S = 0.5
_NUM_WARM_UPS = 2


@contextlib.contextmanager
def with_window(model: str, num_tokens: int) -> Iterator[str]:
    """The model, if its window suffices; else a copy whose configuration says a longer one."""
    source = checkpoints.resolve(model, files="all").path
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    if config["max_position_embeddings"] >= num_tokens:
        yield model
        return
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
        for path in source.iterdir():
            if path.name != "config.json":
                (Path(folder) / path.name).symlink_to(path.resolve())
        config["max_position_embeddings"] = num_tokens
        (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        yield folder


def ask(client: SyncClient, prompt: Sequence[int], num_tokens: int) -> tuple[list[float], End]:
    """Returns: when the request began and each token came, and its end."""
    times = [time.perf_counter()]
    end: End | None = None
    for chunk in client.generate(
        list(prompt), max_tokens=num_tokens, ignore_eos=True, temperature=0.0, timeout_s=600.0
    ):
        times += [time.perf_counter()] * len(chunk.token_ids)
        end = chunk.end or end
    if end is None or end.provenance is None:
        raise RuntimeError("the answer has no end")
    return times, end


def through_engine(engine: Engine, prompt: Sequence[int], num_tokens: int) -> list[float]:
    """One request through the in-process engine, with a prefix cache of its own. Returns: when it
    began and each token came."""
    times = [time.perf_counter()]
    root = block_hash.root_key(os.urandom(16), engine.model_info.fingerprint)
    request = Request(
        request_id="0",
        prompt_token_ids=tuple(prompt),
        sampling=Sampling(max_tokens=num_tokens, ignore_eos=True),
        block_hasher=partial(block_hash.extend, root),
        cache_root=root,
    )
    engine.reserve(request)
    engine.start("0")
    while engine.has_work():
        for event in engine.step().events:
            times += [time.perf_counter()] * len(event.token_ids)
    return times


@dataclass
class Series:
    """One way's requests, in seconds, and the bytes that decode read of each."""

    ttft_s: list[float] = field(default_factory=list)
    exposed_s: list[float] = field(default_factory=list)
    stages: list[Mapping[str, float]] = field(default_factory=list)
    num_bytes: list[int] = field(default_factory=list)

    def add(self, times_s: Sequence[float]) -> None:
        """Of one request: when it began and each token came."""
        gaps = [after - before for before, after in itertools.pairwise(times_s[1:])]
        self.ttft_s.append(times_s[1] - times_s[0])
        self.exposed_s.append(max(0.0, gaps[0] - statistics.median(gaps[1:])))

    @property
    def transfer_s(self) -> list[float]:
        """Of each request with an account: what it waited for its KV behind the first token."""
        return [sum(stages.get(name, 0.0) for name in TRANSFER_STAGES) for stages in self.stages]

    def figures(self) -> dict[str, Any]:
        """Medians; of the waits for KV where the requests have accounts."""
        ttft_s, exposed_s = statistics.median(self.ttft_s), statistics.median(self.exposed_s)
        names = sorted({name for stages in self.stages for name in stages})
        transfer = {}
        if self.stages:
            transfer_s = statistics.median(self.transfer_s)
            transfer = {
                "exposed_transfer_p50_ms": round(transfer_s * 1e3, 2),
                "exposed_transfer_share_of_ttft": round(transfer_s / ttft_s, 4),
            }
        return {
            "ttft_p50_ms": round(ttft_s * 1e3, 2),
            "exposed_p50_ms": round(exposed_s * 1e3, 2),
            "exposed_share_of_ttft": round(exposed_s / ttft_s, 4),
            **transfer,
            "stage_p50_ms": {
                name: round(
                    statistics.median(stages.get(name, 0.0) for stages in self.stages) * 1e3, 3
                )
                for name in names
            },
        }


@contextlib.contextmanager
def routers(cluster: LocalCluster) -> Iterator[dict[str, SyncClient]]:
    """A client by path: of the cluster's own router, which hands over through the store, and of a
    second one over the same workers, which hands over directly."""
    config = replace(cluster.config, handover="direct")
    spec = cluster_plan.router(config, redis_url=cluster.redis_url, listen="127.0.0.1:0")
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as logs:
        supervisor = Supervisor(Path(logs), lambda event: None)
        try:
            supervisor.launch([spec])
            supervisor.wait_ready([spec.name], time.monotonic() + _START_S)
            address = supervisor.processes()[spec.name].address
            with SyncClient(cluster.address) as store, SyncClient(address) as direct:
                yield dict(zip(PATHS, (store, direct), strict=True))
        finally:
            supervisor.stop([["router"]])


def through_cluster(client: SyncClient, path: str, prompt: list[int], into: Series) -> None:
    """One request. Raises: RuntimeError when it went another way than meant."""
    times_s, end = ask(client, prompt, OUTPUT_TOKENS)
    assert end.provenance is not None
    legs = {leg.role: leg for leg in end.provenance.legs}
    num_direct = len(prompt) if path == "direct" else 0
    if legs["prefill"].handover != path or legs["decode"].num_tokens_direct != num_direct:
        raise RuntimeError(f"{path} was meant: {legs}")
    into.add(times_s)
    into.stages.append(end.times)
    into.num_bytes.append(legs["decode"].num_bytes_read)


def watch_one(client: SyncClient, prompt: list[int]) -> Callable[[Path], None]:
    """One request. Returns: what draws it."""
    began_s = time.perf_counter()
    arrivals_s: list[float] = []
    ended_s = 0.0

    def noted() -> Iterator[Chunk]:
        nonlocal ended_s
        for chunk in client.generate(
            prompt, max_tokens=OUTPUT_TOKENS, ignore_eos=True, temperature=0.0
        ):
            ended_s = time.perf_counter() - began_s
            arrivals_s.extend([ended_s] * bool(chunk.token_ids))
            yield chunk

    (completion,) = completions_from(noted())
    return partial(plots.draw_timeline, completion, arrivals_s, ended_s)


def measured(
    clients: Mapping[str, SyncClient],
    engine: Engine | None,
    rng: random.Random,
    num_tokens: int,
    count: int,
) -> dict[str, Series]:
    """`count` prompts of so many tokens each way, in turns; no two share a prefix."""
    found = {name: Series() for name in (*(("engine",) if engine else ()), *clients)}
    indices = range(-_NUM_WARM_UPS, count)
    for index in track(indices, f"{num_tokens} tokens", console=harness.CONSOLE):
        for name, series in found.items():
            prompt = [rng.randrange(100, 2000) for _ in range(num_tokens)]
            into = series if index >= 0 else Series()
            if name in clients:
                through_cluster(clients[name], name, prompt, into)
            elif engine is not None:
                into.add(through_engine(engine, prompt, OUTPUT_TOKENS))
            time.sleep(_SETTLE_S)  # what the last one stores and frees in the background
    return found


def figures_of(transport: str, num_tokens: int, found: Mapping[str, Series]) -> dict[str, Any]:
    """All medians of one transport and length, and what the bytes alone cost."""
    paths = [path for path in PATHS if path in found]
    num_bytes = int(statistics.median(found[paths[0]].num_bytes))
    exposed = {path: statistics.median(found[path].exposed_s) for path in paths}
    share = {}
    if all(exposed.get(path) for path in PATHS):
        share = {"exposed_direct_of_store": round(exposed["direct"] / exposed["store"], 3)}
    return {
        "transport": transport,
        "num_prompt_tokens": num_tokens,
        "num_kv_bytes": num_bytes,
        "copy_ms": round(harness.host_copy_s(num_bytes) * 1e3, 3),
        **share,
        **{name: series.figures() for name, series in found.items()},
    }


def rows_of(figures: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """A row for each length and way."""
    for figure in figures:
        for name in [name for name in ("engine", *PATHS) if name in figure]:
            row = figure[name]
            over = figure["direct_transport"] if name == "direct" else figure["transport"]
            yield {
                "KV over": over,
                "prompt": figure["num_prompt_tokens"],
                "": "engine (ceiling)" if name == "engine" else name,
                "TTFT ms": f"{row['ttft_p50_ms']:.1f}",
                **_with_share(row, "exposed", "exposed"),
                **_with_share(row, "KV", "exposed_transfer"),
                "copy ms": f"{figure['copy_ms']:.2f}",
            }


def _with_share(row: Mapping[str, Any], title: str, name: str) -> dict[str, str]:
    """Milliseconds, and what part of the time to the first token that is; where it was measured."""
    if f"{name}_p50_ms" not in row:
        return {f"{title} ms": "", f"{title} of TTFT": ""}
    share = f"{100 * row[f'{name}_share_of_ttft']:.1f} %"
    return {f"{title} ms": f"{row[f'{name}_p50_ms']:.2f}", f"{title} of TTFT": share}


@contextlib.contextmanager
def model_of(model: str, shape: str | None, device: str, num_tokens: int) -> Iterator[str]:
    """A checkpoint whose window holds the prompts."""
    if not shape:
        with with_window(model, num_tokens) as lengthened:
            yield lengthened
        return
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
        random_checkpoint.save(Path(folder), shape, device=device.partition(":")[0])
        yield folder


@harness.case
@click.option("--requests", default=5, help="of each length and way")
@click.option("--prompt-tokens", type=Several(int), default="1024,8192")
@click.option("--transports", type=Several(click.Choice(TRANSPORTS)), default=",".join(TRANSPORTS))
@click.option("--paths", type=Several(click.Choice(PATHS)), default=",".join(PATHS))
@click.option("--model", default=ClusterConfig().model)
@click.option("--shape", type=click.Choice(list(SHAPES)), help="random weights, for --model")
@click.option("--device", default=ClusterConfig().device, help="as of `baton up`")
@click.option("--direct-transport", "directs", type=Several(str), help="a cluster for each")
@click.option("--set", "overrides", multiple=True, help="as of `baton up`")
@click.option("--seed", default=0)
@click.option("--timeline", "drawing", type=click.Path(path_type=Path), help="*.svg, *.png, *.pdf")
def handover(
    requests: int,
    prompt_tokens: Sequence[int],
    transports: Sequence[str],
    paths: Sequence[str],
    model: str,
    shape: str | None,
    device: str,
    directs: Sequence[str] | None,
    overrides: Sequence[str],
    seed: int,
    drawing: Path | None,
) -> dict[str, Any]:
    """What of a prompt's KV on its way from prefill to decode is left to see, milliseconds: through
    the store, and directly out of the prefill worker's own cache.

    One cluster for each transport, with two routers over the same workers. The same number of fresh
    prompts goes through each, in turns, and through one engine in this process that does both
    roles: the ceiling, for which nothing moves. `exposed` is the time between the first and the
    second token beyond what later tokens take; `exposed_transfer` the part of it in which the
    request waits for its KV (`prefill_store` and `decode_fetch`). As what the bytes alone would
    cost, a plain copy of as many in memory stands beside them. Each answer's provenance is checked
    for the way that it went. --timeline draws one more request of each way, the way's name behind
    the file's. With --shape there is no engine beside the cluster: a GPU has no room for it. The
    bundled model's window is lengthened where it is shorter than the prompts.
    """
    if drawing:
        plots.check("--timeline", drawing)
    rng = random.Random(seed)
    figures = []
    drawings: dict[str, Callable[[Path], None]] = {}
    with model_of(model, shape, device, max(prompt_tokens) + OUTPUT_TOKENS) as path_of_model:
        engine = None
        if not shape:
            first = device.split(",")[0]
            engine = load_engine(EngineConfig(model=path_of_model, device=first, num_threads=1))
        entrypoint.begin_serving()  # a look at all that is loaded here would count as exposed
        for transport, direct in itertools.product(transports, directs or ("",)):
            config = ClusterConfig(
                model=path_of_model,
                port=0,
                transport=transport,
                handover="store",
                device=device,
                direct_transport=direct,
                overrides=tuple(overrides),
            )
            with LocalCluster(config) as cluster, routers(cluster) as every:
                clients = {path: every[path] for path in paths}
                for num_tokens in prompt_tokens:
                    found = measured(clients, engine, rng, num_tokens, requests)
                    figures.append(
                        {"direct_transport": direct, **figures_of(transport, num_tokens, found)}
                    )
                    for path, client in clients.items() if drawing else ():
                        name = "-".join(filter(None, (transport, direct, path, str(num_tokens))))
                        prompt = [rng.randrange(100, 2000) for _ in range(num_tokens)]
                        drawings[name] = watch_one(client, prompt)
    harness.show("medians", list(rows_of(figures)))
    for name, draw in drawings.items():
        assert drawing is not None
        draw(drawing.with_stem(f"{drawing.stem}-{name}"))
    return {
        "model": shape or model,
        "device": device,
        "num_requests": requests,
        "num_output_tokens": OUTPUT_TOKENS,
        "figures": figures,
    }


# -- what tracing costs

RATIO = 0.01
_SENT_S = 1.5
"""Above `tracing.send_interval_s`: by then the spans of a round are sent."""
_CALLS_UNTRACED = 64
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


class TracedCluster:
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
        return sum(map(harness.cpu_s, self._pids))

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
    call = Call()
    call.headers = dict(TraceContext(1, 2, False, "vendor=1").headers)
    request = inference_pb2.GenerateRequest(text="x")
    began = time.perf_counter()
    for _ in range(num_laps):
        with RequestTrace(tracing, call, request, StageTimes(), "m") as trace:
            for _ in range(_CALLS_UNTRACED):
                with current_span().child("x") as span:
                    if span.is_recording:
                        raise AssertionError("a request is traced")
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
        raise AssertionError("a request is traced")


def residues(
    cluster: TracedCluster, sink: Sink, num_requests: int
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


def _tracing_figures(
    cpu_s: dict[bool, list[float]],
    num_spans: float,
    not_traced_s: float,
    left: Sequence[tuple[float, float]],
    shares: dict[str, float],
) -> dict[str, Any]:
    plain_s, traced_s = statistics.mean(cpu_s[False]), statistics.mean(cpu_s[True])
    extra = [traced - plain for plain, traced in zip(cpu_s[False], cpu_s[True], strict=True)]
    spread_s = statistics.stdev(extra) / len(extra) ** 0.5 if len(extra) > 1 else 0.0
    on_request_s, sending_s = span_s()
    by_parts_s = not_traced_s + RATIO * num_spans * (on_request_s + sending_s)
    at_most_s = not_traced_s + RATIO * (traced_s - plain_s + 2 * spread_s)
    return {
        "cpu_ms_per_request": round(plain_s * 1e3, 3),
        "cpu_ms_per_traced_request": round(traced_s * 1e3, 3),
        "cpu_ms_of_tracing_one": round((traced_s - plain_s) * 1e3, 3),
        "cpu_ms_of_tracing_one_stderr": round(spread_s * 1e3, 3),
        "spans_per_request": round(num_spans, 1),
        "cpu_us_of_a_span": round(on_request_s * 1e6, 2),
        "cpu_us_of_sending_a_span": round(sending_s * 1e6, 2),
        "cpu_us_of_not_tracing_one": round(not_traced_s * 1e6, 2),
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


@harness.case
@click.option("--model", default="baton-5m")
@click.option("--vocab", default=2000, help="prompts are of ids below it")
@click.option("--rounds", default=10, help="with tracing, and as many without")
@click.option("--requests", default=40, help="of a round")
@click.option("--prompt-tokens", default=256)
@click.option("--output-tokens", default=32)
@click.option("--at-once", default=4)
@click.option("--seed", default=1)
def tracing(
    model: str,
    vocab: int,
    rounds: int,
    requests: int,
    prompt_tokens: int,
    output_tokens: int,
    at_once: int,
    seed: int,
) -> dict[str, Any]:
    """What tracing costs in CPU time of all processes, and how much of the time to the first token
    its stages explain.

    Rounds of requests that are traced and that are not, in turns. What is far below the kernel's
    grain is timed by itself: a request that is not traced, and the two halves of a span's price, on
    its request's thread and on the one that sends. Cost at 1 %: what a request pays that is not
    traced, and a hundredth of what one pays that is; by these parts, and at most by what the kernel
    counted, two standard errors above it. The residue lies between the first token as a client
    sees it and the sum of the request's stages up to it: gRPC on both sides of the router. The
    collector runs in this process, whose CPU is not counted.
    """
    load = Load(prompt_tokens, output_tokens, at_once, vocab)
    with collecting() as (sink, address):
        config = ClusterConfig(
            port=0,
            model=model,
            trace_to=address,
            # Every request that asks to be traced is, however many come in a second.
            overrides=("router.tracing.max_followed_per_s=1e6",),
        )
        with LocalCluster(config) as running:
            cluster = TracedCluster(running, load, seed)
            cluster.round(requests, is_traced=True)
            sink.num_spans = 0
            ways = {
                is_traced: partial(cluster.round, requests, is_traced=is_traced)
                for is_traced in (False, True)
            }
            by_name = harness.interleaved({str(way): run for way, run in ways.items()}, rounds)
            num_spans = sink.num_spans / (rounds * requests)
            left, shares = residues(cluster, sink, requests)
            cluster.close()
    cpu_s = {way: by_name[str(way)] for way in ways}
    figures = _tracing_figures(cpu_s, num_spans, untraced_s(), left, shares)
    harness.show("tracing", [{"figure": name, "": value} for name, value in figures.items()])
    return {"grpc": entrypoint.grpc_experiments(), **figures}


# -- a noisy tenant against a quiet one

EVERYTHING = (
    "router.admission.num_steps_ahead=1000000",
    "router.admission.max_active_requests=1000000",
)
"""Without a queue of the router's own."""

_WARM_UP_S = 4.0
"""Until the workers have what they take."""


@dataclass(frozen=True)
class FairnessOptions:
    """Of `fairness`."""

    rounds: int
    seconds: float
    noisy: int
    quiet_per_s: float
    prompt_tokens: int
    output_tokens: int
    steps_ahead: int
    model: str
    seed: int


@dataclass
class Seen:
    """One tenant in one kind of phase, over all of its rounds. Seconds."""

    ttft_s: list[float] = field(default_factory=list)
    num_failed: int = 0
    seconds: float = 0.0
    """That were measured."""

    def summary(self) -> dict[str, Any]:
        return {
            "num_requests": len(self.ttft_s),
            "num_failed": self.num_failed,
            "requests_per_s": round(len(self.ttft_s) / self.seconds, 2),
            **_quantiles(self.ttft_s),
        }


class Tenants:
    """Two tenants' requests at one cluster."""

    def __init__(self, client: Client, options: FairnessOptions) -> None:
        self._client = client
        self._options = options
        self._rng = random.Random(options.seed)

    async def one(self, tenant: str, into: Seen) -> None:
        """A request with a prompt of its own."""
        prompt = [self._rng.randrange(100, 2000) for _ in range(self._options.prompt_tokens)]
        began_s, first_s = time.perf_counter(), 0.0
        try:
            async for _ in self._client.generate(
                prompt,
                tenant=tenant,
                max_tokens=self._options.output_tokens,
                ignore_eos=True,
                timeout_s=300.0,
            ):
                first_s = first_s or time.perf_counter() - began_s
        except BatonError:
            into.num_failed += 1
            return
        into.ttft_s.append(first_s)

    async def quiet(self, into: Seen) -> list[asyncio.Task[None]]:
        """The quiet tenant for a while. Returns: its requests, of which some are still to end."""
        end_s, calls = time.perf_counter() + self._options.seconds, list[asyncio.Task[None]]()
        while time.perf_counter() < end_s:
            calls.append(asyncio.create_task(self.one("quiet", into)))
            await asyncio.sleep(self._rng.expovariate(self._options.quiet_per_s))
        into.seconds += self._options.seconds
        return calls

    async def beside_noise(self, quiet: Seen, noisy: Seen) -> None:
        """Both tenants; the noisy one's first requests have arrived before."""
        now = Seen()

        async def keep_on() -> None:
            while True:
                await self.one("noisy", now)

        crowd = [asyncio.create_task(keep_on()) for _ in range(self._options.noisy)]
        await asyncio.sleep(_WARM_UP_S)
        num_before = len(now.ttft_s)
        calls = await self.quiet(quiet)
        # Those that ended within the phase, whenever they began.
        noisy.ttft_s += now.ttft_s[num_before:]
        noisy.num_failed += now.num_failed
        noisy.seconds += self._options.seconds
        await asyncio.gather(*calls)
        for task in crowd:
            task.cancel()
        await asyncio.gather(*crowd, return_exceptions=True)


class Side:
    """One cluster and what was seen of it."""

    def __init__(self, client: Client, options: FairnessOptions) -> None:
        self.load = Tenants(client, options)
        self.alone, self.quiet, self.noisy = Seen(), Seen(), Seen()

    def summary(self) -> dict[str, Any]:
        quiet, alone = self.quiet.summary(), self.alone.summary()
        quiet["waited_p99_ms"] = round(quiet["ttft_p99_ms"] - alone["ttft_p50_ms"], 1)
        return {"alone": alone, "quiet": quiet, "noisy": self.noisy.summary()}


async def rounds(addresses: Sequence[str], options: FairnessOptions) -> list[dict[str, Any]]:
    """Each cluster in its turn, again and again, so that drift of the machine hits both."""
    async with contextlib.AsyncExitStack() as stack:
        sides = [
            Side(await stack.enter_async_context(Client(address)), options) for address in addresses
        ]
        for side in sides:
            for _ in range(3):
                await side.load.one("warm-up", Seen())
        for _ in track(range(options.rounds), "rounds", console=harness.CONSOLE):
            for side in sides:
                await asyncio.gather(*await side.load.quiet(side.alone))
                await side.load.beside_noise(side.quiet, side.noisy)
        return [side.summary() for side in sides]


def _fairness_config(options: FairnessOptions, *overrides: str) -> ClusterConfig:
    overrides = (*overrides, "worker.limits.max_waiting_requests=1024")
    return ClusterConfig(port=0, model=options.model, overrides=overrides)


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    found = harness.cuts(values)
    return {f"ttft_{name}": found[name] for name in ("p50_ms", "p99_ms") if name in found}


@harness.case
@click.option("--rounds", default=3)
@click.option("--seconds", default=8.0, help="of each phase")
@click.option("--noisy", default=64, help="requests under way")
@click.option("--quiet-per-s", default=2.0)
@click.option("--prompt-tokens", default=256)
@click.option("--output-tokens", default=8)
@click.option("--steps-ahead", default=AdmissionSettings().num_steps_ahead)
@click.option("--model", default=ClusterConfig().model)
@click.option("--seed", default=0)
def fairness(**given: Any) -> dict[str, Any]:
    """Milliseconds to the first token of a quiet tenant: alone, beside a noisy one with the
    router's fair queue, and without it.

    Two whole clusters, in turns. The noisy tenant keeps --noisy requests under way all the time,
    the quiet one sends one now and then (Poisson). "Without" lets every request through to the
    workers at once, whose own queues know no tenants. `waited` is how far the time to the first
    token is above the median of the quiet tenant alone.
    """
    options = FairnessOptions(**given)
    ahead = f"router.admission.num_steps_ahead={options.steps_ahead}"
    with (
        LocalCluster(_fairness_config(options, ahead)) as fair,
        LocalCluster(_fairness_config(options, *EVERYTHING)) as open_to_all,
    ):
        addresses = (fair.address, open_to_all.address)
        with_queue, without = asyncio.run(rounds(addresses, options))
    rows = []
    for what in ("ttft_p50_ms", "ttft_p99_ms", "waited_p99_ms", "requests_per_s"):
        found = (with_queue["alone"], with_queue["quiet"], without["quiet"])
        columns = ("quiet alone", "quiet, fair queue", "quiet, without")
        values = [each.get(what, "-") for each in found]
        rows.append({"": what, **dict(zip(columns, values, strict=True))})
    noisy = (with_queue["noisy"], without["noisy"])
    rows.append({"": "noisy requests/s"})
    rows[-1] |= dict(zip(columns[1:], [each["requests_per_s"] for each in noisy], strict=True))
    harness.show("fairness", rows)
    return {**given, "with_fair_queue": with_queue, "without": without}


main = harness.program(__doc__, handover, tracing, fairness)

if __name__ == "__main__":
    main()
