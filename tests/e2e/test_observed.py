"""A cluster of two models, over NIXL or gRPC as the seed draws, that is watched.

- A request is served by the workers of the model that it names, over gRPC and HTTP, and no KV of
  one model meets the other's.
- One trace of each request over all four kinds of process, its blocks' history, logs that name the
  trace and never what was asked; a real Prometheus that scrapes all parts, and the live page in a
  real browser. The last two are skipped, loudly, where their program is not installed.
"""

from __future__ import annotations

import functools
import json
import random
import re
import shutil
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest

from baton import ClusterConfig, LocalCluster, cli
from baton.answers import Completion
from baton.client import SyncClient
from baton.cluster.supervisor import ClusterEvent
from process.rpc_errors import InvalidArgument
from process.trace_spans import TraceContext
from protos import inference_pb2, inference_pb2_grpc
from tests.harness.browser import browsing, text_of
from tests.harness.cluster import DRAWN_TRANSPORT, STORE_SIZE, assert_idle, oracle, prompts
from tests.harness.otlp_receiver import (
    OtlpReceiver,
    Received,
    assert_sums,
    receiving,
    root_of,
    stages_of,
)
from tools import dashboard_panels

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

BOUND_S = 60.0
ALERTS = Path(__file__).parents[2] / "helm" / "baton" / "alerts" / "baton.yaml"
MODELS = ("baton-5m", "baton-5m-draft")
MAX_TOKENS = 8
PARTS = {"router"} | {
    f"{kind}-{index}" for kind in ("store", "prefill", "decode") for index in range(len(MODELS))
}
SECRET = "Once upon a lighthouse"


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
    stopped: dict[str, threading.Event]
    """By part: set once it was stopped."""

    def generate(self, number: int, **fields: object) -> list[inference_pb2.GenerateResponse]:
        """One request to the first model, under a trace of its own, whose id is `number`."""
        parent = TraceContext(number, 1, True)
        fields = {"model": MODELS[0], "text": PROMPT} | fields
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
    stopped = {part: threading.Event() for part in PARTS}

    def on_event(event: ClusterEvent) -> None:
        if event.what == "stopped" and event.name in PARTS:
            stopped[event.name].set()

    with receiving() as receiver:
        config = ClusterConfig(
            port=0,
            http_port=0,
            model=MODELS[0],
            more_models=MODELS[1:],
            transport=DRAWN_TRANSPORT,
            metrics=True,
            trace_to=receiver.address,
            log_dir=str(log_dir),
            handover="store",
            overrides=(STORE_SIZE, *quick, "worker.engine.max_num_tokens_per_step=128"),
        )
        with LocalCluster(config, on_event) as cluster:
            yield Traced(cluster, receiver, log_dir, stopped)
            assert_idle(cluster)


@pytest.fixture
def cluster(traced: Traced) -> LocalCluster:
    return traced.cluster


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[SyncClient]:
    with SyncClient(cluster.address) as connected:
        yield connected


def prompts_for_both(seed: int, num: int) -> list[tuple[int, ...]]:
    """The same ids for both models: both have the same vocabulary."""
    return [tuple(prompt) for prompt in prompts(oracle(MODELS[0]), random.Random(seed), num)]


def test_each_name_is_answered_by_its_own_model(
    cluster: LocalCluster, client: SyncClient, seed: int
) -> None:
    """Both at once, and the same prompts: an answer of the wrong model, or KV of it, would show."""
    asked = [(model, prompt) for prompt in prompts_for_both(seed, 6) for model in MODELS]
    right = [oracle(model).greedy(prompt, MAX_TOKENS) for model, prompt in asked]
    status = {worker.worker_id: worker.model for worker in client.status().workers}
    assert sorted(status.values()) == sorted(MODELS * 2)

    def complete(one: tuple[str, tuple[int, ...]]) -> Completion:
        model, prompt = one
        return client.complete(prompt, model=model, max_tokens=MAX_TOKENS, temperature=0.0)

    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(complete, asked * 2))
    fingerprints: dict[str, set[str]] = {model: set() for model in MODELS}
    num_moved = 0
    for (model, _), tokens, answer in zip(asked * 2, right * 2, answers, strict=True):
        assert list(answer.token_ids) == tokens, model
        assert answer.provenance.model == model
        fingerprints[model].add(answer.provenance.model_fingerprint)
        legs = answer.provenance.legs
        assert {status[leg.worker_id] for leg in legs} == {model}
        assert not any(leg.recomputed for leg in legs)
        assert {leg.transport for leg in legs} <= {DRAWN_TRANSPORT, ""}
        num_moved += sum(leg.num_tokens_from_store for leg in legs if leg.role == "decode")
    assert num_moved > 0
    assert [len(found) for found in fingerprints.values()] == [1, 1]
    assert fingerprints[MODELS[0]] != fingerprints[MODELS[1]]


def test_what_one_model_cached_is_no_hit_of_the_other(client: SyncClient, seed: int) -> None:
    prompt = next(p for p in prompts_for_both(seed + 1, 60) if len(p) >= 100)[:100]
    seen = []
    for model in (*MODELS, *MODELS):
        answer = client.complete(prompt, model=model, max_tokens=2, temperature=0.0)
        (leg,) = (leg for leg in answer.provenance.legs if leg.role == "prefill")
        seen.append(leg.num_tokens_computed)
    assert seen[:2] == [100, 100] and max(seen[2:]) < 100


def test_a_name_is_needed_and_must_be_there(client: SyncClient) -> None:
    for name in ("", "baton-6m"):
        with pytest.raises(InvalidArgument) as caught:
            client.complete("Once", model=name, max_tokens=1)
        assert caught.value.field == "model"
        assert all(model in str(caught.value) for model in MODELS)


def test_over_http(cluster: LocalCluster, client: SyncClient) -> None:
    with openai.OpenAI(
        base_url=f"http://{cluster.http_address}/v1", api_key="none", max_retries=0, timeout=60
    ) as http:
        assert {model.id for model in http.models.list()} == set(MODELS)
        for model in MODELS:
            options: Any = {"max_tokens": 12, "temperature": 0.0}
            answer = http.completions.create(model=model, prompt="Once upon a time", **options)
            expected = client.complete("Once upon a time", model=model, **options)
            assert answer.choices[0].text == expected.text and answer.model == model
        with pytest.raises(openai.NotFoundError):
            http.completions.create(model="baton-6m", prompt="Once")


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
            assert each.attributes["baton.transport"] == DRAWN_TRANSPORT
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
    stores = json.loads(capsys.readouterr().out)["stores"]
    (block,) = [block for store in stores for block in store["blocks"]]
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


def _until(found: Callable[[], Any], what: str) -> Any:
    """Ask until there is an answer."""
    end_s = time.monotonic() + BOUND_S
    while time.monotonic() < end_s:
        answer = found()
        if answer:
            return answer
        time.sleep(0.2)
    raise AssertionError(f"not within {BOUND_S:g} s: {what}")


class _Prometheus:
    """A Prometheus over the files that `baton up --metrics` wrote, scraping each second."""

    def __init__(self, config: Path, folder: Path) -> None:
        text = re.sub(r"(\w+_interval): \d+s", r"\1: 1s", config.read_text())
        own = folder / "prometheus.yml"
        own.write_text(f"{text}rule_files: [{json.dumps(str(ALERTS))}]\n")
        self._log = (folder / "prometheus.log").open("w")
        self._process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={own}",
                f"--storage.tsdb.path={folder / 'data'}",
                "--web.listen-address=127.0.0.1:0",
            ],
            stdout=subprocess.DEVNULL,
            stderr=self._log,
        )
        self._folder = folder
        self._url = _until(self._find_url, "prometheus listens")
        _until(self._is_ready, "prometheus reads its own files")

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()

    def get(self, path: str, **query: str) -> Any:
        url = f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=10) as reply:
            said = json.loads(reply.read())
        assert said["status"] == "success", said
        return said["data"]

    def value(self, query: str) -> float | None:
        """Of a query with one result; None while there is none."""
        result = self.get("query", query=query)["result"]
        return float(result[0]["value"][1]) if result else None

    def _is_ready(self) -> bool:
        """It answers queries; before that it listens, and says 503."""
        try:
            with urllib.request.urlopen(f"{self._url}/-/ready", timeout=10) as reply:
                return bool(reply.status == 200)
        except urllib.error.HTTPError as error:
            if error.code != 503:
                raise
            return False

    def _find_url(self) -> str:
        assert self._process.poll() is None, (self._folder / "prometheus.log").read_text()
        said = re.search(
            r'Listening on.*address="?(127\.0\.0\.1:\d+)',
            (self._folder / "prometheus.log").read_text(),
        )
        return f"http://{said[1]}" if said else ""


@pytest.fixture
def prometheus(cluster: LocalCluster, tmp_path: Path) -> Iterator[_Prometheus]:
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed: nothing is scraped for real")
    assert cluster.metrics_config is not None
    started = _Prometheus(cluster.metrics_config, tmp_path)
    try:
        yield started
    finally:
        started.stop()


def test_prometheus_scrapes_all_parts_and_answers_every_query(
    cluster: LocalCluster, prometheus: _Prometheus
) -> None:
    def ups() -> dict[str, float]:
        found = prometheus.get("query", query="up")["result"]
        return {each["metric"]["part"]: float(each["value"][1]) for each in found}

    _until(lambda: ups() == dict.fromkeys(PARTS, 1.0), "all parts are up")
    counted = "sum(baton_router_output_tokens_total)"
    finished = 'baton_router_requests_total{outcome="finished"}'
    before = {query: prometheus.value(query) or 0 for query in (counted, finished)}
    with SyncClient(cluster.address) as client:
        for _ in range(2):
            client.complete(SECRET * 8, model=MODELS[0], max_tokens=8, ignore_eos=True)
    _until(lambda: prometheus.value(finished) == before[finished] + 2, "two requests more")
    assert prometheus.value(counted) == before[counted] + 16
    assert prometheus.value("sum(baton_up)") == len(PARTS)
    for name, (_, _, panels) in dashboard_panels.DASHBOARDS.items():
        for panel in panels:
            for _, query in panel.queries:
                asked = query.replace("$__rate_interval", "1m")
                assert prometheus.get("query", query=asked) is not None, (name, panel.title)
    groups = prometheus.get("rules")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len(rules) > 10
    _until(
        lambda: all(
            rule["health"] == "ok"
            for group in prometheus.get("rules")["groups"]
            for rule in group["rules"]
        ),
        "all rules were evaluated",
    )
    # A part that dies is down, not gone; its next life, on another port, is found.
    cluster.kill("store-0", restart=False)
    _until(lambda: ups().get("store-0") == 0, "the dead part is seen to be down")
    cluster.restart("store-0")
    cluster.wait_ready(BOUND_S)
    _until(lambda: ups() == dict.fromkeys(PARTS, 1.0), "its next life is scraped")


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Any]:
    with browsing(tmp_path / "profile") as driver:
        yield driver


def test_the_page_in_a_browser(cluster: LocalCluster, browser: Any) -> None:
    """Live, a request in full, the router away and back; no error in the browser's log, and no word
    of a prompt on the page."""

    text = functools.partial(text_of, browser)
    browser.get(f"http://{cluster.http_address}/live")
    _until(lambda: text("#link") == "live", "the page is live")
    _until(lambda: "decode-0" in text("#decode") and "prefill-0" in text("#prefill"), "workers")
    assert "store" in text("#stores")
    with SyncClient(cluster.address) as client:
        request_id = client.complete(SECRET * 8, model=MODELS[0], max_tokens=24).request_id
    _until(lambda: request_id in text("#requests"), "the request is shown")
    _until(lambda: "finished" in text("#requests tbody tr:first-child"), "as finished")
    assert "prefill-0 → decode-0" in text("#requests tbody tr:first-child")
    browser.find_element("css selector", "#requests tbody tr").click()
    detail = _until(lambda: text("#detail"), "it is shown in full")
    for words in (request_id, "prefill compute", "decode fetch", "prefill on prefill-0", "store"):
        assert words in detail
    _until(lambda: "Why it went there" in text("#detail"), "why the router chose so")
    _until(lambda: "%" in text("#figures"), "the hit rate is told")
    assert SECRET not in str(browser.page_source)
    assert browser.get_log("browser") == []

    cluster.kill("router", restart=False)
    _until(lambda: text("#link") == "reconnecting", "the page says that it is cut off")
    assert "decode-0" in text("#decode")  # what was known stays, dimmed
    assert browser.execute_script("return document.querySelector('main').className") == "stale"
    cluster.restart("router")
    cluster.wait_ready(BOUND_S)
    _until(lambda: text("#link") == "live", "the page is back")
    # A refused connection is the browser's own to log; anything else would be ours.
    said = [entry for entry in browser.get_log("browser") if "ERR_" not in entry["message"]]
    assert said == []


def test_a_worker_that_was_stopped_for_good_is_no_scrape_target(traced: Traced) -> None:
    """One that died stays a target, which is down. Last, since it ends workers of the tests
    before."""
    cluster = traced.cluster
    assert cluster.metrics_config is not None
    targets = cluster.metrics_config.with_name("targets.json")

    def parts() -> set[str]:
        return {group["labels"]["part"] for group in json.loads(targets.read_text())}

    assert parts() == PARTS
    cluster.stop_workers(["decode-1"])
    assert traced.stopped["decode-1"].wait(BOUND_S)
    assert parts() == PARTS - {"decode-1"}
    cluster.kill("prefill-0", restart=False)
    assert parts() == PARTS - {"decode-1"}
