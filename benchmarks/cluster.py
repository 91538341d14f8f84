"""A whole local cluster: what of the KV's way is left to see, what a prefix hit is worth, and what
tracing costs.

    python -m benchmarks.cluster handover --requests 5 --prompt-tokens 1024,8192
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
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
from baton.answers import Chunk, End, completions_from
from baton.cli import plots
from baton.client import SyncClient
from baton.cluster import command_lines as cluster_plan
from baton.cluster.supervisor import Supervisor
from benchmarks import harness, random_checkpoint
from benchmarks.harness import Several
from benchmarks.random_checkpoint import SHAPES
from process.trace_spans import RecordingSpan, TraceContext, current_span
from process.tracing import OtlpExporter, Tracing, TracingSettings
from protos import inference_pb2, inference_pb2_grpc
from services.router.request_stats import StageTimes
from services.router.tracing import STAGE, TO_FIRST_TOKEN, RequestTrace, TracedCall

# -- the handover of a prompt's KV from prefill to decode

TRANSPORTS = ("shm", "nixl", "grpc")
PATHS = ("store", "direct")
TRANSFER_STAGES = ("prefill_store", "decode_fetch")
"""Stages of a request in which it waits for its KV and that no prefill hides."""
OUTPUT_TOKENS = 16
_START_S = 60.0
_SETTLE_S = 0.5
_NUM_WARM_UPS = 2


@contextlib.contextmanager
def with_window(model: str, num_tokens: int) -> Iterator[str]:
    """Find the model's folder if its context window suffices; else make a copy whose configuration
    says a longer one."""
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
    """Send one request. Returns: when it began and each token came, and its end."""
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


@dataclass
class Series:
    """The requests of one way, with their times in seconds and the bytes that decode read of
    each."""

    ttft_s: list[float] = field(default_factory=list)
    exposed_s: list[float] = field(default_factory=list)
    stages: list[Mapping[str, float]] = field(default_factory=list)
    num_bytes: list[int] = field(default_factory=list)

    def add(self, times_s: Sequence[float]) -> None:
        """Enter one request, by when it began and each token came."""
        gaps = [after - before for before, after in itertools.pairwise(times_s[1:])]
        self.ttft_s.append(times_s[1] - times_s[0])
        self.exposed_s.append(max(0.0, gaps[0] - statistics.median(gaps[1:])))

    @property
    def transfer_s(self) -> list[float]:
        """Seconds that each request with stages waited for its KV after the first token."""
        return [sum(stages.get(name, 0.0) for name in TRANSFER_STAGES) for stages in self.stages]

    def figures(self) -> dict[str, Any]:
        """Medians over the requests; of the waits for KV where the requests have accounts."""
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
    """Two clients of a cluster, by path: of the cluster's own router, which hands over through the
    store, and of a second one over the same workers, which hands over directly."""
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
    """Send one request through a router. Raises: RuntimeError when its KV went another way than
    meant."""
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
    """Send one request. Returns: what draws its timeline."""
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
    rng: random.Random,
    num_tokens: int,
    count: int,
) -> dict[str, Series]:
    """Send `count` prompts of so many tokens each way, in turns; no two share a prefix."""
    found = {name: Series() for name in clients}
    indices = range(-_NUM_WARM_UPS, count)
    for index in track(indices, f"{num_tokens} tokens", console=harness.CONSOLE):
        for name, series in found.items():
            prompt = [rng.randrange(100, 2000) for _ in range(num_tokens)]
            into = series if index >= 0 else Series()
            through_cluster(clients[name], name, prompt, into)
            time.sleep(_SETTLE_S)  # what the last one stores and frees in the background
    return found


def figures_of(transport: str, num_tokens: int, found: Mapping[str, Series]) -> dict[str, Any]:
    """All medians of one transport and prompt length."""
    paths = [path for path in PATHS if path in found]
    return {
        "transport": transport,
        "num_prompt_tokens": num_tokens,
        "num_kv_bytes": int(statistics.median(found[paths[0]].num_bytes)),
        **{name: series.figures() for name, series in found.items()},
    }


def rows_of(figures: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """A row of the table for each length and way."""
    for figure in figures:
        for name in [name for name in PATHS if name in figure]:
            row = figure[name]
            over = figure["direct_transport"] if name == "direct" else figure["transport"]
            yield {
                "KV over": over,
                "prompt": figure["num_prompt_tokens"],
                "": name,
                "TTFT ms": f"{row['ttft_p50_ms']:.1f}",
                **_with_share(row, "exposed", "exposed"),
                **_with_share(row, "KV", "exposed_transfer"),
            }


def _with_share(row: Mapping[str, Any], title: str, name: str) -> dict[str, str]:
    """Milliseconds, and what part of the time to the first token that is; where it was measured."""
    if f"{name}_p50_ms" not in row:
        return {f"{title} ms": "", f"{title} of TTFT": ""}
    share = f"{100 * row[f'{name}_share_of_ttft']:.1f} %"
    return {f"{title} ms": f"{row[f'{name}_p50_ms']:.2f}", f"{title} of TTFT": share}


@contextlib.contextmanager
def model_of(model: str, shape: str | None, device: str, num_tokens: int) -> Iterator[str]:
    """Find or make a checkpoint whose context window holds the prompts."""
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
    prompts goes through each, in turns. `exposed` is the time between the first and the second
    token beyond what later tokens take; `exposed_transfer` the part of it in which the request
    waits for its KV (`prefill_store` and `decode_fetch`). Each answer's provenance is checked for
    the way that it went. --timeline draws one more request of each way, the way's name behind the
    file's. The bundled model's window is lengthened where it is shorter than the prompts.
    """
    if drawing:
        plots.check("--timeline", drawing)
    rng = random.Random(seed)
    figures = []
    drawings: dict[str, Callable[[Path], None]] = {}
    with model_of(model, shape, device, max(prompt_tokens) + OUTPUT_TOKENS) as path_of_model:
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
                    found = measured(clients, rng, num_tokens, requests)
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


# -- what a prefix hit is worth

SHARES = (0.0, 0.5, 0.95)
"""Shares of a prompt that are in the store."""
_READY_S = 120.0

Hit = tuple[list[int], float, int]
"""A prompt that is partly in the store: (prompt, share, tokens of it that are stored)."""


def hits(rng: random.Random, num_tokens: int, count: int, block_size: int) -> list[Hit]:
    """Plan `count` prompts for each share, in turns; no two share a prefix."""
    return [
        (
            [rng.randrange(100, 2000) for _ in range(num_tokens)],
            share,
            int(share * num_tokens) // block_size * block_size,
        )
        for _, share in itertools.product(range(count), SHARES)
    ]


def by_share(cluster: LocalCluster, asked: Sequence[Hit]) -> dict[float, Series]:
    """Store the prefixes, restart the workers so that they forget them, then send the prompts.
    Raises: RuntimeError when a hit was another than meant."""
    found = {share: Series() for share in SHARES}
    with SyncClient(cluster.address) as client:
        for prompt, _, num_stored in track(asked, "storing", console=harness.CONSOLE):
            if num_stored:
                # One token more: a prompt's last token is never taken from a cache.
                ask(client, prompt[: num_stored + 1], 2)
        for name, info in cluster.processes.items():
            if info.kind in ("prefill", "decode"):
                cluster.restart(name)
        cluster.wait_ready(_READY_S)
        warm_up = random.Random(-1)
        for _ in range(_NUM_WARM_UPS):
            ask(client, [warm_up.randrange(100, 2000) for _ in asked[0][0]], OUTPUT_TOKENS)
        for prompt, share, num_stored in track(asked, "asking", console=harness.CONSOLE):
            times_s, end = ask(client, prompt, OUTPUT_TOKENS)
            assert end.provenance is not None
            (leg,) = (leg for leg in end.provenance.legs if leg.role == "prefill")
            if (leg.num_tokens_from_store, leg.num_tokens_local) != (num_stored, 0):
                raise RuntimeError(f"{num_stored} tokens from the store were meant: {leg}")
            found[share].add(times_s)
            found[share].stages.append(end.times)
            time.sleep(_SETTLE_S)  # what the last one stores and frees in the background
    return found


@harness.case
@click.option("--requests", default=5, help="of each length and share")
@click.option("--prompt-tokens", type=Several(int), default="1024,8192")
@click.option("--model", default=ClusterConfig().model)
@click.option("--transport", type=click.Choice(TRANSPORTS), default="shm")
@click.option("--block-size", default=16)
@click.option("--store-mib", default=2048, help="room for every prefix")
@click.option("--seed", default=0)
def prefix_hit(
    requests: int,
    prompt_tokens: Sequence[int],
    model: str,
    transport: str,
    block_size: int,
    store_mib: int,
    seed: int,
) -> dict[str, Any]:
    """Milliseconds to the first token without a hit, and with 50 and 95 % of the prompt in the
    store.

    Workers are restarted after the prefixes were stored, so that every hit comes from the store and
    none from a worker's own cache; each answer's provenance is checked for that. The ceiling of a
    hit is the cold time without the share that hit.
    """
    rng, rows = random.Random(seed), []
    with with_window(model, max(prompt_tokens) + OUTPUT_TOKENS) as path_of_model:
        overrides = (
            f"worker.engine.block_size={block_size}",
            f"store.capacity_bytes={store_mib << 20}",
        )
        config = ClusterConfig(
            model=path_of_model, port=0, transport=transport, overrides=overrides
        )
        with LocalCluster(config) as cluster:
            for num_tokens in prompt_tokens:
                found = by_share(cluster, hits(rng, num_tokens, requests, block_size))
                cold_s = statistics.median(found[0.0].ttft_s)
                for share, series in found.items():
                    of_cold = round(statistics.median(series.ttft_s) / cold_s, 3)
                    row = {"num_prompt_tokens": num_tokens, "hit_share": share}
                    row |= {"ttft_of_cold": of_cold, "ceiling_of_cold": round(1 - share, 3)}
                    rows.append(row | series.figures())
    shown = [{name: one for name, one in row.items() if name != "stage_p50_ms"} for row in rows]
    harness.show("medians", shown)
    about = {"model": model, "transport": transport, "num_requests": requests}
    return {**about, "num_output_tokens": OUTPUT_TOKENS, "figures": rows}


# -- what tracing costs

RATIO = 0.01
_SENT_S = 1.5
"""Above `tracing.send_interval_s`: by then the spans of a round are sent."""
_CALLS_UNTRACED = 64
"""Spans of one request in all processes if it were traced, counted from above."""


class Sink(trace_service_pb2_grpc.TraceServiceServicer):
    """A collector of trace spans that keeps what is needed here. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.num_spans = 0
        self.stages_ns: dict[bytes, dict[str, int]] = {}
        """Nanoseconds of each stage up to the first token, by trace."""

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:
        """Take a batch of spans, as the OTLP collector service does."""
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


@contextlib.contextmanager
def collecting() -> Iterator[tuple[Sink, str]]:
    """Serve a Sink until the body ends. Yields: the sink and its address."""
    sink, server = Sink(), grpc.server(futures.ThreadPoolExecutor(max_workers=4))
    add: Any = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
    add(sink, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield sink, f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait(5)


@dataclass(frozen=True)
class Load:
    """The requests of `tracing`: their lengths, and how many are sent at once."""

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
        """User and system time of all processes so far, in seconds."""
        return sum(map(harness.cpu_s, self._pids))

    def serve(self, *, is_traced: bool) -> tuple[float, bytes]:
        """Send one request. Returns: seconds to its first token, and its trace."""
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
        """Measure a round of requests: CPU seconds per request, sending of spans included."""
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
    call = TracedCall()
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


def residues(cluster: TracedCluster, sink: Sink, num_requests: int) -> list[tuple[float, float]]:
    """Seconds to the first token as the client sees it, and the part of it that the request's
    stages do not explain, by request, one after the other."""
    asked = [cluster.serve(is_traced=True) for _ in range(num_requests)]
    time.sleep(_SENT_S)
    return [
        (ttft_s, ttft_s - sum(sink.stages_ns[trace_id].values()) / 1e9)
        for ttft_s, trace_id in asked
    ]


def _tracing_figures(
    cpu_s: dict[bool, list[float]],
    num_spans: float,
    not_traced_s: float,
    left: Sequence[tuple[float, float]],
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
        "residue_percent_p50": round(
            100 * statistics.median(open_s / ttft_s for ttft_s, open_s in left), 3
        ),
        "residue_ms_p50": round(1e3 * statistics.median(open_s for _, open_s in left), 3),
        "ttft_ms_p50": round(1e3 * statistics.median(ttft_s for ttft_s, _ in left), 3),
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
            left = residues(cluster, sink, requests)
            cluster.close()
    cpu_s = {way: by_name[str(way)] for way in ways}
    figures = _tracing_figures(cpu_s, num_spans, untraced_s(), left)
    harness.show("tracing", [{"figure": name, "": value} for name, value in figures.items()])
    return {"grpc": entrypoint.grpc_experiments(), **figures}


main = harness.program(__doc__, handover, prefix_hit, tracing)

if __name__ == "__main__":
    main()
