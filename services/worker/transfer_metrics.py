"""TransferMetrics: durations and sizes of a worker's KV transfers: histograms by direction,
transport and place, failed blocks by reason, and blocks that are put again.

`watch` is called with every client of a store or lender that the worker attaches to. Transfers that
measure a link are none of these. Loop's thread; read from the metrics server's thread at any time
(prometheus_client's values are made for that).
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.metrics_core import Metric

from kvstore.client import KvStoreClient, TransferStats
from kvstore.errors import REASONS
from kvstore.node_ids import is_lender

_BOUNDS_S = (
    *(0.000_25, 0.000_5, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05),
    *(0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
"""Histogram buckets in seconds: from one small block over shared memory to a long prompt over a
slow network. Guessed."""

_BOUNDS_BYTES = tuple(float(1 << power) for power in range(12, 34, 2))
"""Histogram buckets in bytes: 4 KiB to 4 GiB, by factors of four."""

HOME, ELSEWHERE, LENDER = "home", "elsewhere", "lender"


class TransferMetrics:
    """Prometheus histograms and counters of one worker's transfers."""

    def __init__(self, worker_id: str, role: str) -> None:
        self._who = (worker_id, role)
        self._registry = registry = CollectorRegistry()
        names = ("worker_id", "role", "direction", "transport", "place")
        self._seconds = Histogram(
            "baton_transfer_seconds",
            "One transfer of blocks, from the call until they are verified or committed.",
            names,
            registry=registry,
            buckets=_BOUNDS_S,
        )
        self._bytes = Histogram(
            "baton_transfer_bytes",
            "Moved by one transfer and of use.",
            names,
            registry=registry,
            buckets=_BOUNDS_BYTES,
        )
        self._failed = Counter(
            "baton_transfer_failed_blocks",
            "Blocks that a transfer did not bring, or whose verification failed, by reason.",
            (*names, "reason"),
            registry=registry,
        )

        self._put_again = Counter(
            "baton_transfer_put_again_blocks",
            "Blocks that the store did not take because it lacks what they follow; the worker puts "
            "them again with that, which is no failure.",
            ("worker_id", "role", "transport", "place"),
            registry=registry,
        )

    def watch(self, client: KvStoreClient, *, is_home: bool) -> None:
        """Count the transfers of a client. is_home: it is of the worker's own store."""
        place = HOME if is_home else LENDER if is_lender(client.node_id) else ELSEWHERE

        for reason in REASONS:  # from 0 on: the first failure is an increase, too
            self._failed.labels(*self._who, "read", client.transport_name, place, reason)

        self._put_again.labels(*self._who, client.transport_name, place)

        def on_transfer(stats: TransferStats) -> None:
            labels = (*self._who, stats.direction, stats.transport, place)
            if stats.num_bytes:
                self._seconds.labels(*labels).observe(stats.seconds)
                self._bytes.labels(*labels).observe(stats.num_bytes)
            for reason, num_blocks in stats.failed.items():
                self._failed.labels(*labels, reason).inc(num_blocks)
            if stats.num_put_again:
                again = self._put_again.labels(*self._who, stats.transport, place)
                again.inc(stats.num_put_again)

        client.on_transfer = on_transfer

    def collect(self) -> Iterable[Metric]:
        """Return all metrics as of now."""
        return self._registry.collect()
