"""What a worker's /metrics shows: its engine's snapshot and the worker's own counts, in Prometheus'
words.

The engine is asked on its own thread, by whoever scrapes, within a short bound; when it does not
answer in time, `baton_up` is 0 and the engine's numbers are left out rather than shown old. Called
from the metrics server's thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import TimeoutError as WaitTimeoutError

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from engine.metrics import HistogramSnapshot, MetricsSnapshot
from process.errors import BatonError
from services.worker.core import WorkerCore
from services.worker.parking import StoreParking

SCRAPE_WAIT_S = 2.0
"""For the engine's answer: longer than a step should take."""


class WorkerCollector(Collector):
    """See the module."""

    def __init__(self, core: WorkerCore, loop: asyncio.AbstractEventLoop) -> None:
        """`loop`: the one that `core` belongs to."""
        self._core = core
        self._loop = loop

    def collect(self) -> Iterable[Metric]:
        """All metrics, now."""
        labels = {"worker_id": self._core.identity.worker_id, "role": self._core.identity.role}
        names, values = tuple(labels), tuple(labels.values())
        snapshot = self._snapshot()
        yield _gauge("baton_up", "1 while the engine answers.", names, values, snapshot is not None)
        yield from _of_worker(self._core, names, values)
        yield from _of_links(self._core, names, values)
        if self._core.parking is not None:
            yield from _of_parking(self._core.parking, names, values)
        if snapshot is not None:
            yield from _of_engine(snapshot, names, values)

    def _snapshot(self) -> MetricsSnapshot | None:
        asking = asyncio.run_coroutine_threadsafe(
            self._core.thread.call(lambda engine: engine.metrics()), self._loop
        )
        try:
            return asking.result(SCRAPE_WAIT_S)
        except (WaitTimeoutError, TimeoutError, BatonError):
            asking.cancel()
            return None


def _of_worker(core: WorkerCore, names: Sequence[str], values: Sequence[str]) -> Iterator[Metric]:
    """The worker's own counts; they need no engine."""
    stats, counts = core.thread.stats, core.counts
    sources = {
        "computed": counts.num_prompt_tokens_computed,
        "local": counts.num_prompt_tokens_local,
        "store": counts.num_prompt_tokens_from_store,
    }
    blocks = {
        "free": stats.num_free_blocks,
        "cached": stats.num_cached_blocks,
        "referenced": stats.num_referenced_blocks,
        "quarantined": stats.num_quarantined_blocks,
    }
    requests = {
        "reserved": stats.num_reserved,
        "waiting": stats.num_waiting,
        "running": stats.num_running,
        "holding": stats.num_holding,
    }
    yield _counters(
        "baton_kv_source_tokens",
        "Prompt tokens of ended requests by where their KV came from.",
        (*names, "source"),
        values,
        sources.items(),
    )
    yield _counters(
        "baton_kv_recomputed_blocks",
        "Blocks that were or should have been in the store and had to be computed, by reason.",
        (*names, "reason"),
        values,
        sorted(counts.recomputed.items()),
    )
    yield _counters(
        "baton_kv_early_tokens",
        "Prompt tokens whose KV was fetched while prefill still ran.",
        names,
        values,
        [(None, counts.num_prompt_tokens_early)],
    )
    yield _counters(
        "baton_kv_direct_tokens",
        "Prompt tokens whose KV was read out of a prefill worker's own cache.",
        names,
        values,
        [(None, counts.num_prompt_tokens_direct)],
    )
    yield _counters(
        "baton_kv_handovers",
        "Prompts handed over to decode, by the way that the KV went.",
        (*names, "path"),
        values,
        sorted((path.name.lower(), count) for path, count in counts.handovers.items()),
    )
    yield _counters(
        "baton_kv_early_pulls_failed",
        "Pulls while prefill ran that did not bring all; the final handle tried again; by reason.",
        (*names, "reason"),
        values,
        sorted(counts.early_pulls_failed.items()),
    )
    yield _counters(
        "baton_kv_written_back_blocks",
        "Full blocks of answers that decode stored.",
        names,
        values,
        [(None, counts.num_blocks_written_back)],
    )
    yield _counters(
        "baton_kv_not_written_back_blocks",
        "Full blocks of answers that decode could not store, by reason.",
        (*names, "reason"),
        values,
        sorted(counts.not_written_back.items()),
    )
    blocks_family = GaugeMetricFamily(
        "baton_kv_blocks", "Blocks of the device cache by class.", labels=(*names, "class")
    )
    requests_family = GaugeMetricFamily(
        "baton_engine_requests", "Live requests by state.", labels=(*names, "state")
    )
    for family, levels in ((blocks_family, blocks), (requests_family, requests)):
        for name, level in levels.items():
            family.add_metric((*values, name), level)
        yield family
    if core.lender is not None:
        lent = core.lender.num_lent_blocks
        yield _gauge("baton_kv_lent_blocks", "Blocks that others may read.", names, values, lent)


def _of_links(core: WorkerCore, names: Sequence[str], values: Sequence[str]) -> Iterator[Metric]:
    """The ways to stores, as measured when each was attached to."""
    labels = (*names, "peer", "transport")
    speeds = GaugeMetricFamily(
        "baton_link_bytes_per_s", "Measured when attached.", labels=(*labels, "direction")
    )
    latencies = GaugeMetricFamily(
        "baton_link_latency_seconds", "One block, there and back.", labels=labels
    )
    degraded = GaugeMetricFamily(
        "baton_link_degraded", "1: below its floor, or not measurable.", labels=labels
    )
    for link, verdict in core.links.links:
        peer = (*values, link.node_id, link.transport)
        degraded.add_metric(peer, float(verdict.degraded))
        if link.rates is not None:
            speeds.add_metric((*peer, "write"), link.rates.write_bytes_per_s)
            speeds.add_metric((*peer, "read"), link.rates.read_bytes_per_s)
            latencies.add_metric(peer, link.rates.latency_s)
    yield from (speeds, latencies, degraded)
    yield _counters(
        "baton_remote_store_refused",
        "Other nodes' stores that could not be used when asked for, by reason.",
        (*names, "reason"),
        values,
        sorted(dict(core.remote_stores.refused).items()),
    )


def _of_parking(
    parking: StoreParking, names: Sequence[str], values: Sequence[str]
) -> Iterator[Metric]:
    """Preempted requests' blocks on their way to the store and back."""
    yield _counters(
        "baton_parked_bytes",
        "Moved between this worker and its store for preempted requests.",
        (*names, "direction"),
        values,
        [("out", parking.num_bytes_stored), ("back", parking.num_bytes_fetched)],
    )
    yield _counters(
        "baton_parked_lost",
        "Preempted requests whose blocks did not come back, by reason.",
        (*names, "reason"),
        values,
        sorted(dict(parking.lost).items()),
    )
    rows = GaugeMetricFamily(
        "baton_parking_rows", "Blocks of staging memory by class.", labels=(*names, "class")
    )
    for name, level in parking.num_rows.items():
        rows.add_metric((*values, name), level)
    yield rows


def _of_engine(
    snapshot: MetricsSnapshot, names: Sequence[str], values: Sequence[str]
) -> Iterator[Metric]:
    """What the engine measured."""
    histograms = (
        ("baton_time_to_first_token_seconds", "From reserve to first token.", snapshot.ttft_s),
        ("baton_time_per_output_token_seconds", "Mean per ended sample.", snapshot.tpot_s),
        ("baton_inter_token_latency_seconds", "Between two steps with tokens.", snapshot.itl_s),
        ("baton_queue_seconds", "From start to first scheduled.", snapshot.queue_s),
        ("baton_step_seconds", "One step of the engine.", snapshot.step_s),
    )
    for name, text, histogram in histograms:
        family = HistogramMetricFamily(name, text, labels=names)
        family.add_metric(values, _buckets(histogram), histogram.sum)
        yield family
    counters = (
        ("baton_requests", "Reserved since start.", snapshot.num_requests),
        ("baton_prompt_tokens", "Asked for by all requests.", snapshot.num_prompt_tokens),
        ("baton_prompt_tokens_cached", "Found in the device cache.", snapshot.num_cached_tokens),
        ("baton_prompt_tokens_loaded", "Brought before start.", snapshot.num_loaded_tokens),
        ("baton_prefill_tokens", "Computed for prompts.", snapshot.num_prefill_tokens),
        ("baton_decode_tokens", "Computed for later draws.", snapshot.num_decode_tokens),
        ("baton_output_tokens", "Drawn or forced.", snapshot.num_output_tokens),
    )
    for name, text, count in counters:
        yield _counters(name, text, names, values, [(None, count)])
    by_name = (
        ("baton_requests_ended", "By outcome.", "outcome", snapshot.ended),
        ("baton_samples_finished", "By finish reason.", "reason", snapshot.finished),
        ("baton_preemptions", "By cause.", "cause", snapshot.preemptions),
    )
    for name, text, label, pairs in by_name:
        yield _counters(name, text, (*names, label), values, pairs)
    gauges = (
        ("baton_prefix_hit_ratio", "Cached / asked prompt tokens.", snapshot.hit_rate),
        ("baton_kv_utilisation_ratio", "Blocks that requests use.", snapshot.cache_utilisation),
        ("baton_prefill_tokens_per_second", "Of late.", snapshot.prefill_tokens_per_s),
        ("baton_decode_tokens_per_second", "Of late.", snapshot.decode_tokens_per_s),
    )
    for name, text, level in gauges:
        yield _gauge(name, text, names, values, level)


def _gauge(
    name: str, text: str, names: Sequence[str], values: Sequence[str], level: float
) -> Metric:
    family = GaugeMetricFamily(name, text, labels=names)
    family.add_metric(values, float(level))
    return family


def _counters(
    name: str,
    text: str,
    names: Sequence[str],
    values: Sequence[str],
    counts: Iterable[tuple[str | None, int]],
) -> Metric:
    family = CounterMetricFamily(name, text, labels=names)
    for label, count in counts:
        family.add_metric(values if label is None else (*values, label), count)
    return family


def _buckets(histogram: HistogramSnapshot) -> list[tuple[str, float]]:
    """Prometheus counts what is at most each bound, all smaller ones included."""
    buckets: list[tuple[str, float]] = []
    total = 0
    for bound, count in zip((*histogram.bounds, None), histogram.counts, strict=True):
        total += count
        buckets.append(("+Inf" if bound is None else repr(bound), total))
    return buckets
