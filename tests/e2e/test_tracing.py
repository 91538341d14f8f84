"""A traced cluster: one trace of each request over all four kinds of process, its blocks' history,
and logs that name the trace and never what was asked.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from baton import cli
from baton.local_cluster import ClusterConfig, LocalCluster
from process.trace_context import TraceContext
from protos import inference_pb2, inference_pb2_grpc
from tests.harness.cluster import assert_idle
from tests.harness.otlp_receiver import OtlpReceiver, Received, receiving
from tests.wire.test_trace import assert_sums, root_of, stages_of

pytestmark = pytest.mark.e2e

MARK = "xyzzyplugh"
"""In prompts; nowhere else on this machine."""
PROMPT = f"Once upon a time a {MARK} met another {MARK}. " * 20
ENDS = {"serve prefill", "serve decode", "call prefill", "call decode", "decode_steps"}
"""Spans that a process sends after all that lie within them."""
SERVICES = {"baton-router", "baton-prefill", "baton-decode", "baton-kvstore"}


@dataclass(frozen=True)
class Traced:
    """A cluster, where its traces go, and where its logs are."""

    cluster: LocalCluster
    receiver: OtlpReceiver
    log_dir: Path

    def generate(self, number: int, **fields: object) -> list[inference_pb2.GenerateResponse]:
        """One request under a trace of its own, whose id is `number`."""
        parent = TraceContext(number, 1, True)
        fields.setdefault("text", PROMPT)
        request = inference_pb2.GenerateRequest(**fields)  # type: ignore[arg-type]
        request.sampling.max_tokens = 24
        with grpc.insecure_channel(self.cluster.address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            return list(stub.Generate(request, timeout=30, metadata=parent.headers))

    def spans_of(self, number: int) -> list[Received]:
        """All of that trace, from all processes."""
        trace_id = f"{number:032x}"

        def is_whole(spans: list[Received]) -> bool:
            found = [each for each in spans if each.trace_id == trace_id]
            ids = {each.span_id for each in found}
            roots = [each for each in found if each.parent_id not in ids]
            names = {each.name for each in found}
            return len(roots) == 1 and names >= ENDS and {x.service for x in found} == SERVICES

        spans = self.receiver.wait(is_whole)
        return [each for each in spans if each.trace_id == trace_id]

    def lines(self) -> list[str]:
        """Of all logs."""
        return [
            line
            for path in sorted(self.log_dir.iterdir())
            for line in path.read_text(errors="replace").splitlines()
        ]


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    log_dir = tmp_path_factory.mktemp("logs")
    quick = [f"{part}.tracing.send_interval_s=0.05" for part in ("router", "worker", "store")]
    with receiving() as receiver:
        config = ClusterConfig(
            port=0,
            trace_to=receiver.address,
            log_dir=str(log_dir),
            handover="store",
            overrides=(*quick, "worker.engine.max_num_tokens_per_step=128"),
        )
        with LocalCluster(config) as cluster:
            yield Traced(cluster, receiver, log_dir)
            assert_idle(cluster)


@pytest.fixture(scope="module")
def first(traced: Traced) -> list[inference_pb2.GenerateResponse]:
    """What 0xE2E1 was answered, the first request of all with this prompt."""
    return traced.generate(0xE2E1)


def test_one_trace_over_all_processes(
    traced: Traced, first: list[inference_pb2.GenerateResponse]
) -> None:
    spans = traced.spans_of(0xE2E1)
    root = root_of(spans)
    names = assert_sums(spans, root)
    assert {"prefill_compute", "prefill_wire", "decode", "stream"} <= set(names)
    by_id = {each.span_id: each for each in spans}
    for each in spans:
        assert each is root or each.parent_id in by_id, f"{each.name} hangs in the air"
    chunks = [each for each in spans if each.name == "prefill_chunk"]
    num_computed = first[-1].provenance.legs[0].num_tokens_computed
    assert len(chunks) >= 2
    assert sum(each.attributes["baton.num_tokens"] for each in chunks) == num_computed
    moved = {name: 0 for name in ("kv_read", "kv_write")}
    for each in spans:
        if each.name in moved:
            assert each.attributes["baton.transport"] == "shm"
            moved[each.name] += each.attributes["baton.num_bytes"]
    legs = {leg.role: leg for leg in first[-1].provenance.legs}
    assert moved["kv_read"] == legs["decode"].num_bytes_read > 0
    assert moved["kv_write"] >= legs["prefill"].num_bytes_written > 0, "and what decode wrote back"
    # The account that the client got is the same.
    told_s = sum(stage.seconds for stage in first[-1].times)
    traced_s = sum(each.end_ns - each.begin_ns for each in stages_of(spans, root)) / 1e9
    assert traced_s >= told_s > 0


@pytest.mark.usefixtures("first")
def test_a_hit_is_linked_to_who_computed_the_prefix(traced: Traced) -> None:
    traced.generate(0xE2E2, text=PROMPT + "first")
    traced.generate(0xE2E3, text=PROMPT + "second")
    links = [
        link.trace_id.hex()
        for each in traced.spans_of(0xE2E3)
        if each.name == "kvstore Match"
        for link in each.span.links
    ]
    assert f"{0xE2E1:032x}" in links


def test_the_history_of_a_block_can_be_asked_for(
    traced: Traced, capsys: pytest.CaptureFixture[str]
) -> None:
    traced.generate(0xE2E4, text=f"Quite another {MARK}. " * 30)
    reads = [each for each in traced.spans_of(0xE2E4) if each.name == "kv_read"]
    chain_hash = reads[0].attributes["baton.block.first"]
    redis = ["--redis", traced.cluster.redis_url]
    assert cli.main(["block", chain_hash[:12], "--json", *redis]) == 0
    (store,) = json.loads(capsys.readouterr().out)["stores"]
    (block,) = store["blocks"]
    assert block["chain_hash"] == chain_hash and block["tiers"] == ["host"]
    events = {event["what"]: event for event in block["events"]}
    assert events["written"]["worker_id"] == "prefill-0"
    assert events["verified"]["worker_id"] == "decode-0"
    assert {event["trace_id"] for event in events.values()} == {f"{0xE2E4:032x}"}
    assert cli.main(["block", chain_hash, *redis]) == 0
    shown = capsys.readouterr().out
    assert chain_hash in shown and "verified" in shown and "prefill-0" in shown


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["zz"], "HASH"),
        (["00" * 17], "32 digits"),
        (["ffffffffffffffffffff"], "no store remembers"),
    ],
)
def test_what_cannot_be_shown_is_said(
    traced: Traced, arguments: list[str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["block", *arguments, "--redis", traced.cluster.redis_url]) != 0
    assert word in capsys.readouterr().err


def test_logs_name_the_trace_and_never_what_was_asked(traced: Traced) -> None:
    """Also of requests that were refused, with what was wrong in them."""
    traced.generate(0xE2E5, request_id="logged")
    with pytest.raises(grpc.RpcError):
        traced.generate(0xE2E6, text="")
    for sampling in ({"stop": [MARK * 100]}, {"regex": f"({MARK}"}, {"bad_words": [MARK] * 999}):
        with pytest.raises(grpc.RpcError):
            traced.generate(0xE2E7, sampling=sampling)
    lines = traced.lines()
    assert not [line for line in lines if MARK in line]
    events = [json.loads(line) for line in lines if line.startswith("{")]
    (over,) = [
        each
        for each in events
        if each["event"] == "request_over" and each["request_id"] == "logged"
    ]
    assert over["trace_id"] == f"{0xE2E5:032x}" and len(over["span_id"]) == 16
