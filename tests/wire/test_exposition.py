"""/metrics of every kind of process: strictly well formed, bounded, never going down, and just what
docs/metrics.md says there is.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import aiohttp
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvstore import block_hash, store_process
from kvstore.config import KvStoreSettings
from process.metrics import LoopCollector, MetricsServer
from process.registry import BEAT_TTL_MS
from process.rpc import PLAIN
from protos import common_pb2
from services.draft.server import DraftCollector
from services.draft.thread import DraftThread
from services.router.metrics import RouterMetrics
from services.worker import metrics as worker_metrics
from services.worker.draft_channel import DraftPeers
from services.worker.kv_swap import StoreParking
from services.worker.metrics import WorkerCollector
from services.worker.runtime import Identity
from tests.harness import autoscaler_bench, draft_workers, exposition
from tests.harness.exposition import WHO, Family, scrape, values
from tests.harness.gated_engine import BLOCK_SIZE, prompt_of
from tests.harness.handles import blocks_of
from tests.harness.prefill_decode_pair import pair
from tests.harness.redis_server import RedisServer
from tests.harness.router_bench import http_bench, running
from tests.harness.waiting import until

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"
_ROW = re.compile(r"\| `(\w+)` \| (\w+) \| (.*?) \|")


@asynccontextmanager
async def _served(*collectors: Collector) -> AsyncIterator[str]:
    server = MetricsServer(*collectors)
    server.start("127.0.0.1:0")
    try:
        yield server.address
    finally:
        await asyncio.to_thread(server.stop)


def _documented() -> dict[str, tuple[str, set[str]]]:
    """Name -> type and labels, by the page."""
    rows = _ROW.findall(DOCS.read_text(encoding="utf-8"))
    assert len({name for name, _, _ in rows}) == len(rows), "a metric has two rows"
    return {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}


def _documented_names(*of_processes: dict[str, Family]) -> set[str]:
    """Of families, which are all as the page says."""
    documented = _documented()
    for family in (family for families in of_processes for family in families.values()):
        assert family.name in documented, f"docs/metrics.md lacks {family.name}"
        kind, labels = documented[family.name]
        assert kind == family.type, family.name
        if family.samples:
            who = next((who for who in WHO if who <= family.labels), set())
            assert family.labels - who == labels, family.name
    return {name for families in of_processes for name in families}


async def _of_workers_and_store(folder: Path) -> set[str]:
    """After one prompt twice, by both ways: every number of theirs is well formed, and only ever
    grows where it says so."""
    async with pair(folder) as p:
        loop = asyncio.get_running_loop()
        store = store_process.StoreMetrics(p.store.node, None)
        async with (
            _served(WorkerCollector(p.prefill.core, loop)) as prefill,
            _served(WorkerCollector(p.decode.core, loop)) as decode,
            _served(LoopCollector(loop, store.read, store.silent)) as kvstore,
        ):
            addresses = (prefill, decode, kvstore)
            before = [await scrape(address) for address in addresses]
            prompt = prompt_of(4 * BLOCK_SIZE + 1)
            answers = [
                await p.generate(prompt, name=f"r{index}", max_tokens=5) for index in range(2)
            ]
            await p.check()  # leases are given back behind the answers
            after = [await scrape(address) for address in addresses]
        settings = KvStoreSettings(slab_dir=str(folder), metrics_listen="127.0.0.1:0")
        async with store_process.running(settings) as other:
            early = await scrape(other.metrics_address)
            assert "baton_store_frames" not in early  # no memory yet, and no number for it
    for one, other_one in zip(before, after, strict=True):
        exposition.check_grown(one, other_one)
    read = [_read_bytes(families) for families in after[:2]]
    found, idle = values(after[2]), values(before[2])
    assert read[1] == sum(answer.leg.num_bytes_read for answer in answers) > 0
    assert sum(read) == found["baton_store_bytes_total,read"]
    assert idle["baton_store_bytes_total,read"] == idle["baton_store_bytes_total,written"] == 0
    assert found["baton_store_blocks_found_total"] <= found["baton_store_blocks_asked_total"]
    assert found["baton_store_frames,quarantined"] == found["baton_store_leases"] == 0
    assert found["baton_store_integrity_broken"] == 0
    assert found["baton_up"] == 1
    return _documented_names(*after)


def _read_bytes(families: dict[str, Family]) -> float:
    """That a worker's transfers brought out of stores."""
    return sum(
        sample.value
        for sample in families["baton_transfer_bytes"].samples
        if sample.name.endswith("_sum") and sample.labels["direction"] == "read"
    )


async def _of_an_autoscaler() -> set[str]:
    async with autoscaler_bench.running() as cluster:
        before = await scrape(cluster.autoscaler.metrics_address)
        await cluster.decide()
        after = await scrape(cluster.autoscaler.metrics_address)
    exposition.check_grown(before, after)
    found = values(after)
    assert found["baton_autoscaler_leader"] == found["baton_up"] == 1
    assert any(key.startswith("baton_autoscaler_decisions_total") for key in found)
    for role in ("prefill", "decode"):
        for what in ("wanted", "asked", "ready"):
            assert found[f"baton_autoscaler_{what}_workers,{role}"] == 1
    # Of an entry whose beat counts still.
    assert 0 <= found["baton_autoscaler_signal_age_seconds,routers"] < BEAT_TTL_MS / 1000
    return _documented_names(after)


async def _of_a_router() -> set[str]:
    async with running(metrics_listen="127.0.0.1:0") as bench:
        before = await scrape(bench.router.metrics_address)
        await bench.generate(sampling={"max_tokens": 5, "n": 2})
        after = await scrape(bench.router.metrics_address)
    exposition.check_grown(before, after)
    found = values(after)
    assert found["baton_router_workers,prefill"] == found["baton_router_workers,decode"] == 1
    assert found["baton_router_redis_reachable"] == 1
    num_tokens = [found[key] for key in found if key.startswith("baton_router_prompt_tokens_total")]
    assert sum(num_tokens) > 0
    assert found["baton_router_time_to_first_token_seconds_count"] == 1
    assert found["baton_router_time_per_output_token_seconds_count"] == 2
    # Five tokens of each sample came in at least two messages: prefill's, then decode's.
    assert found["baton_router_inter_token_latency_seconds_count"] >= 2
    return _documented_names(after)


async def test_answers_over_http_are_counted_by_path_and_status() -> None:
    """Paths are those of the routes, whatever clients write."""
    async with (
        http_bench(metrics_listen="127.0.0.1:0") as bench,
        aiohttp.ClientSession() as session,
    ):
        for path in ("/health", "/v1/models/x", "/v1/models/y", "/nowhere/1", "/nowhere/2"):
            await (await session.get(f"{bench.url}{path}")).read()
        said = {"Content-Type": "application/json"}
        url = f"{bench.url}/v1/completions"
        await (await session.post(url, data=b"{", headers=said)).read()
        families = await scrape(bench.router.metrics_address)
    found = {
        (sample.labels["path"], sample.labels["code"]): sample.value
        for sample in families["baton_router_http_answers_total"].samples
    }
    assert found == {
        ("/health", "200"): 1,
        ("/v1/models/{model}", "404"): 2,
        ("(none)", "404"): 2,
        ("/v1/completions", "400"): 1,
    }
    _documented_names(families)


async def test_an_index_that_lags_behind_says_so(tmp_path: Path) -> None:
    """Redis goes away: what it does not know, and how long already; it comes back and is told."""
    redis = RedisServer()
    await redis.start()
    try:
        settings = KvStoreSettings(
            node_id="n",
            slab_dir=str(tmp_path),
            capacity_bytes=1 << 20,
            redis_url=redis.url,
            redis_timeout_s=5.0,  # one that is gone says so at once
            metrics_listen="127.0.0.1:0",
        )
        async with store_process.running(settings) as store:
            publisher = store.publisher
            assert publisher is not None
            await until(lambda: publisher.synced)
            calm = values(await scrape(store.metrics_address))
            assert calm["baton_index_synced"] == 1 and calm["baton_index_lag_seconds"] == 0
            assert calm["baton_index_full_publications_total"] == 1
            redis.kill()
            num_failures = publisher.num_failures  # on a slow machine Redis may have been late
            store.node._changes.append(True, block_hash.chain(bytes(16), (1,) * 16, 16)[0])
            await until(lambda: publisher.num_failures > num_failures)
            behind = values(await scrape(store.metrics_address))
            assert behind["baton_index_synced"] == 0
            assert behind["baton_index_pending_changes"] == 1
            assert behind["baton_index_lag_seconds"] > 0
            await redis.start()
            await until(lambda: publisher.synced)
            last = await scrape(store.metrics_address)
            again = values(last)
            assert again["baton_index_lag_seconds"] == again["baton_index_pending_changes"] == 0
            assert again["baton_index_failures_total"] > 0
            _documented_names(last)
    finally:
        redis.remove()


class _Rows(Collector):
    def __init__(self, rows: list[Metric]) -> None:
        self._rows = rows

    def collect(self) -> list[Metric]:
        return self._rows


def _of_all() -> set[str]:
    """Families that only some processes have, and those of calls that a calm router never makes."""
    router = RouterMetrics("r", lambda: 0)
    router.on_choice("joint", "s", {"queue": 0.1}, 0.001)
    router.on_choice("round_robin", "turns", {"turns": 7.0}, 0.001)
    router.on_lookup(0.001, ok=False)
    router.on_retry("prefill_retried")
    router.on_suspect("decode")
    router.on_probe("ok")
    with pytest.raises(ValueError), router.errors_counted():
        raise ValueError("no detail of this may be shown")
    staging = SimpleNamespace(num_rows={"free": 1})
    parking = SimpleNamespace(
        num_bytes_stored=1, num_bytes_fetched=1, lost={"missing": 1}, staging=staging
    )
    labels = {"worker_id": "w", "role": "d"}
    rows = worker_metrics._of_parking(cast(StoreParking, parking), labels)
    registry = CollectorRegistry()
    registry.register(router)
    registry.register(_Rows([*rows, *_of_drafts()]))
    text = generate_latest(registry).decode()
    assert "detail" not in text and 'term="queue"' in text and 'term="turns"' not in text
    families = exposition.read(text)
    return _documented_names(families)


def _of_drafts() -> list[Metric]:
    """Of a draft worker, and of a decode worker that has one."""
    sessions = draft_workers.sessions(by=draft_workers.CountsOn())
    thread = SimpleNamespace(failure=None, num_waiting=0, sessions=sessions)
    drafts = DraftPeers(["127.0.0.1:1"], PLAIN)
    drafts.show(MetricsServer(), lambda: Identity.new("decode", "w"))
    own = DraftCollector(cast(DraftThread, thread), "w").collect()
    return [*(row for row in own if row.name != "baton_up"), *drafts.collect()]


async def test_the_page_names_what_there_is_and_nothing_else(tmp_path: Path) -> None:
    names = await _of_workers_and_store(tmp_path) | await _of_a_router()
    names |= await _of_an_autoscaler() | _of_all()
    index = {name for name in _documented() if name.startswith("baton_index_")}
    assert set(_documented()) - index == names


def test_a_long_label_or_a_second_series_is_found() -> None:
    """The reader itself can fail."""
    good = '# HELP baton_up Up.\n# TYPE baton_up gauge\nbaton_up{node_id="n"} 1.0\n'
    assert exposition.read(good)["baton_up"].samples[0].value == 1
    line = 'baton_up{node_id="n"} 1.0\n'
    for bad in (
        good + line,
        good.replace("baton_up", "batonUp"),
        good.replace('"n"', f'"{"n" * 65}"'),
        good.replace('node_id="n"', 'node_id="n",request_id="r"'),
        good.replace(" gauge", " counter"),
        good.replace("# HELP baton_up Up.\n", ""),
        good.rstrip("\n"),
    ):
        with pytest.raises(AssertionError):
            exposition.read(bad)
    counted = good.replace("baton_up", "baton_x_total").replace("gauge", "counter")
    before, after = exposition.read(counted), exposition.read(counted.replace("1.0", "0.0"))
    exposition.check_grown(after, before)
    with pytest.raises(AssertionError, match="went down"):
        exposition.check_grown(before, after)


def test_no_account_is_no_source() -> None:
    from services.router.metrics import prompt_sources

    assert prompt_sources(common_pb2.Provenance()) == {}


async def test_a_block_that_fails_verification_is_counted_by_reason(tmp_path: Path) -> None:
    """By the transfer, and by the store that looked for itself."""
    async with (
        pair(tmp_path) as p,
        p.stream() as stream,
        _served(WorkerCollector(p.decode.core, asyncio.get_running_loop())) as decode,
    ):
        before = _failed(await scrape(decode))
        assert before["checksum"] == 0  # there from the start: an alert sees the first one
        prompt = prompt_of(4 * BLOCK_SIZE + 1)
        key = await stream.begin(p.reserve(prompt, max_tokens=4))
        reply = await p.run_prefill(prompt, max_tokens=4, handover=common_pb2.HANDOVER_PATH_STORE)
        p.store.node.slab.frames[blocks_of(reply.handle.runs[0])[1].frame, 3] ^= 1
        await stream.generate(key, reply)
        answer = await stream.collect(key)
        assert answer.recomputed["checksum"] > 0
        after = await scrape(decode)
        assert _failed(after)["checksum"] == 1
        client = p.decode.core.connector.client
        assert client is not None
        await client.settle()  # the report to the store
        store = store_process.StoreMetrics(p.store.node, None)
        found = {
            sample.labels["reason"]: sample.value
            for family in store.read()
            if family.name == "baton_store_refused_blocks"
            for sample in family.samples
        }
        assert found["checksum"] == 1
        await p.check()


def _failed(families: dict[str, Family]) -> dict[str, float]:
    return {
        sample.labels["reason"]: sample.value
        for sample in families["baton_transfer_failed_blocks_total"].samples
        if sample.labels["direction"] == "read" and sample.labels["place"] == "home"
    }
