"""WorkerCollector: Prometheus metrics of a worker, from its engine's snapshot and the worker's own
counters.

At each scrape the engine is asked on its own thread, with a short deadline. When it does not answer
in time, `baton_up` is 0 and the engine's metrics are left out, so that no stale values are shown.
Called on the metrics server's thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from concurrent.futures import TimeoutError as WaitTimeoutError

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from engine.metrics import MetricsSnapshot
from process.metrics import (
    SCRAPE_WAIT_S,
    Labels,
    counter,
    counters,
    gauge,
    gauges,
    histogram,
    trace_spans,
)
from process.rpc_errors import BatonError
from services.worker.kv_swap import StoreParking
from services.worker.runtime import WorkerCore


class WorkerCollector(Collector):
    """Prometheus collector of one worker."""

    def __init__(self, core: WorkerCore, loop: asyncio.AbstractEventLoop) -> None:
        """Create a collector. `loop`: the event loop that `core` belongs to."""
        self._core = core
        self._loop = loop

    def follow(self, core: WorkerCore) -> None:
        """Replace the core by that of the worker's next life on the same event loop."""
        self._core = core

    def collect(self) -> Iterable[Metric]:
        """Return all metrics as of now; blocks for the engine's answer within a short bound."""
        core = self._core
        labels = {"worker_id": core.identity.worker_id, "role": core.identity.role}
        snapshot = self._snapshot()
        yield gauge("baton_up", "1 while the process answers.", labels, snapshot is not None)
        yield from _of_worker(core, labels)
        yield from _of_links(core, labels)
        yield from core.transfers.collect()
        counts = core.tracing.counters
        yield trace_spans(labels, counts.num_exported, counts.num_failed, counts.num_dropped)
        if core.parking is not None:
            yield from _of_parking(core.parking, labels)
        if snapshot is not None:
            yield from _of_engine(snapshot, labels)

    def _snapshot(self) -> MetricsSnapshot | None:
        asking = asyncio.run_coroutine_threadsafe(
            self._core.thread.call(lambda engine: engine.metrics()), self._loop
        )
        try:
            return asking.result(SCRAPE_WAIT_S)
        except (WaitTimeoutError, TimeoutError, BatonError):
            asking.cancel()
            return None


def _of_worker(core: WorkerCore, labels: Labels) -> Iterator[Metric]:
    """Return the worker's own counters, which need no engine."""
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
    yield counters(
        "baton_kv_source_tokens",
        "Prompt tokens of ended requests by where their KV came from.",
        labels,
        "source",
        sources.items(),
    )
    by_reason = (
        (
            "baton_kv_recomputed_blocks",
            "Blocks that were or should have been in the store and had to be computed, by reason.",
            counts.recomputed,
        ),
        (
            "baton_kv_early_pulls_failed",
            "Partial handles refused, pulls while prefill ran that did not bring all, and "
            "questions that a lender did not answer (but for leases that had ended); the final "
            "handle tried again.",
            counts.early_pulls_failed,
        ),
        (
            "baton_kv_not_written_back_blocks",
            "Blocks that no handle names and that could not be stored, by reason.",
            counts.not_written_back,
        ),
        (
            "baton_decode_moved_requests",
            "Requests that left a draining worker: draining: with their KV; else why without.",
            counts.moved,
        ),
    )
    for name, text, found in by_reason:
        yield counters(name, text, labels, "reason", sorted(dict(found).items()))
    yield counters(
        "baton_kv_handovers",
        "Prompts handed over to decode, by the way that the KV went.",
        labels,
        "path",
        sorted((path.name.lower(), count) for path, count in dict(counts.handovers).items()),
    )
    one_by_one = (
        (
            "baton_kv_early_tokens",
            "Prompt tokens whose KV was fetched while prefill still ran.",
            counts.num_prompt_tokens_early,
        ),
        (
            "baton_kv_direct_tokens",
            "Prompt tokens whose KV was read out of a prefill worker's own cache.",
            counts.num_prompt_tokens_direct,
        ),
        (
            "baton_kv_written_back_blocks",
            "Blocks that no handle names (decode's answers, some prompts) and that were stored.",
            counts.num_blocks_written_back,
        ),
    )
    for name, text, count in one_by_one:
        yield counter(name, text, labels, count)
    yield gauges(
        "baton_kv_blocks", "Blocks of the device cache by class.", labels, "class", blocks.items()
    )
    yield gauges(
        "baton_engine_requests", "Live requests by state.", labels, "state", requests.items()
    )
    yield gauge("baton_worker_draining", "1: takes no new request.", labels, core.draining)
    yield gauge(
        "baton_store_attached",
        "1 while the worker's own store answers it.",
        labels,
        core.connector.client is not None,
    )
    if core.lender is not None:
        lent = core.lender.num_lent_blocks
        yield gauge(
            "baton_kv_lent_blocks",
            "Blocks that others may read, and those entered to be lent while they are computed.",
            labels,
            lent,
        )


def _of_links(core: WorkerCore, labels: Labels) -> Iterator[Metric]:
    """Return the measured links to stores."""
    values = tuple(labels.values())
    names = (*labels, "peer", "transport")
    speeds = GaugeMetricFamily(
        "baton_link_bytes_per_second", "Measured when attached.", labels=(*names, "direction")
    )
    latencies = GaugeMetricFamily(
        "baton_link_latency_seconds",
        "Reading one block, checksum included: fastest of several, measured when attached.",
        labels=names,
    )
    degraded = GaugeMetricFamily(
        "baton_link_degraded", "1: below its floor, or not measurable.", labels=names
    )
    for link, verdict in core.links.links:
        peer = (*values, link.node_id, link.transport)
        degraded.add_metric(peer, float(verdict.degraded))
        if link.rates is not None:
            speeds.add_metric((*peer, "write"), link.rates.write_bytes_per_s)
            speeds.add_metric((*peer, "read"), link.rates.read_bytes_per_s)
            latencies.add_metric(peer, link.rates.latency_s)
    yield from (speeds, latencies, degraded)
    yield counters(
        "baton_remote_store_refused",
        "Other nodes' stores that could not be used when asked for, by reason.",
        labels,
        "reason",
        sorted(dict(core.remote_stores.refused).items()),
    )


def _of_parking(parking: StoreParking, labels: Labels) -> Iterator[Metric]:
    """Return the counters of parked blocks: preempted requests' KV moved to and from the store."""
    yield counters(
        "baton_parked_bytes",
        "Moved between this worker and its store for preempted requests.",
        labels,
        "direction",
        [("out", parking.num_bytes_stored), ("back", parking.num_bytes_fetched)],
    )
    yield counters(
        "baton_parked_lost",
        "Preempted requests whose blocks did not come back, by reason.",
        labels,
        "reason",
        sorted(dict(parking.lost).items()),
    )
    yield gauges(
        "baton_parking_rows",
        "Blocks of staging memory by class.",
        labels,
        "class",
        parking.staging.num_rows.items(),
    )


def _of_engine(snapshot: MetricsSnapshot, labels: Labels) -> Iterator[Metric]:
    """Return the metrics that the engine measured."""
    histograms = (
        ("baton_time_to_first_token_seconds", "From reserve to first token.", snapshot.ttft_s),
        ("baton_time_per_output_token_seconds", "Mean per ended sample.", snapshot.tpot_s),
        ("baton_inter_token_latency_seconds", "Between two steps with tokens.", snapshot.itl_s),
        ("baton_queue_seconds", "From start to first scheduled.", snapshot.queue_s),
        ("baton_step_seconds", "One step of the engine.", snapshot.step_s),
    )
    for name, text, seen in histograms:
        yield histogram(name, text, labels, seen.bounds, seen.counts, seen.sum)
    one_by_one = (
        ("baton_requests", "Requests that were reserved for.", snapshot.num_requests),
        ("baton_prompt_tokens", "Prompt tokens of all requests.", snapshot.num_prompt_tokens),
        (
            "baton_prompt_tokens_cached",
            "Of those, found in the device cache.",
            snapshot.num_cached_tokens,
        ),
        (
            "baton_prompt_tokens_loaded",
            "Of those, brought from a store before the start.",
            snapshot.num_loaded_tokens,
        ),
        ("baton_prefill_tokens", "Prompt tokens that were computed.", snapshot.num_prefill_tokens),
        ("baton_decode_tokens", "Tokens computed after the prompt.", snapshot.num_decode_tokens),
        ("baton_output_tokens", "Tokens drawn or forced.", snapshot.num_output_tokens),
        ("baton_guessed_tokens", "Guesses that were computed.", snapshot.num_guessed_tokens),
        (
            "baton_guessed_tokens_kept",
            "Guesses that were computed and kept.",
            snapshot.num_kept_tokens,
        ),
    )
    for name, text, count in one_by_one:
        yield counter(name, text, labels, count)
    by_name = (
        ("baton_requests_ended", "Requests that ended, by outcome.", "outcome", snapshot.ended),
        (
            "baton_samples_finished",
            "Samples that ended, by finish reason.",
            "reason",
            snapshot.finished,
        ),
        (
            "baton_preemptions",
            "Requests that lost their blocks for a while.",
            "cause",
            snapshot.preemptions,
        ),
    )
    for name, text, by, pairs in by_name:
        yield counters(name, text, labels, by, pairs)
    levels = (
        ("baton_prefix_hit_ratio", "Cached / asked prompt tokens.", snapshot.hit_rate),
        (
            "baton_kv_utilisation_ratio",
            "Share of the blocks that requests use.",
            snapshot.cache_utilisation,
        ),
        ("baton_prefill_tokens_per_second", "Of the last seconds.", snapshot.prefill_tokens_per_s),
        ("baton_decode_tokens_per_second", "Of the last seconds.", snapshot.decode_tokens_per_s),
    )
    for name, text, level in levels:
        yield gauge(name, text, labels, level)
