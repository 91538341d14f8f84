"""What a store's /metrics shows: its frames and pages by state, lookups, leases, evictions, what it
refused and why, bytes, tenants with a guaranteed share, and how far the prefix index lags behind.

Read from the store's own counts on its loop (process/metrics.py); nothing is counted twice. Before
the first worker attached there is no memory, and the families of frames have no samples. Tenants
without a share are one sample together: their names are clients', and there is no bound on them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client.metrics_core import Metric

from kvstore import tenancy
from kvstore.block_store import BlockStore
from kvstore.errors import REASONS
from kvstore.index_publisher import PrefixIndexPublisher
from kvstore.node import StoreNode
from kvstore.slab import Slab
from kvstore.slot_pool import SlotState
from process.metrics import Labels, counter, counters, gauge, gauges, trace_spans

OTHER_TENANTS = "(others)"


class StoreMetrics:
    """`read` on the store's loop; `silent` when it does not answer."""

    def __init__(self, node: StoreNode, publisher: PrefixIndexPublisher | None) -> None:
        self._node = node
        self._publisher = publisher

    def read(self) -> Sequence[Metric]:
        """All metrics, now."""
        labels = {"node_id": self._node.node_id}
        found = [_up(labels, True), _of_spans(self._node, labels), *_of_node(self._node, labels)]
        if self._node.store is not None:
            found += _of_store(self._node.store, labels)
        if self._node.slab is not None:
            found += _of_slab(self._node.slab, labels)
        if self._publisher is not None:
            found += _of_index(self._publisher, labels)
        return found

    def silent(self) -> Sequence[Metric]:
        """What is known of a store whose loop does not answer."""
        return [_up({"node_id": self._node.node_id}, False)]


def _up(labels: Labels, is_up: bool) -> Metric:
    return gauge("baton_up", "1 while the process answers.", labels, is_up)


def _of_node(node: StoreNode, labels: Labels) -> Iterator[Metric]:
    yield gauge(
        "baton_store_integrity_broken",
        "1 when a conservation law of the store did not hold in this life.",
        labels,
        bool(node.integrity_error),
    )
    yield gauge(
        "baton_store_file_tier_off",
        "1 when the file tier that was asked for is not used.",
        labels,
        bool(node.file_tier_problem),
    )
    yield gauge(
        "baton_store_pushes_under_way",
        "Transfers that the store is writing into workers' memory.",
        labels,
        node.peers.num_moving if node.peers is not None else 0,
    )


def _of_spans(node: StoreNode, labels: Labels) -> Metric:
    counts = node.tracing.counters
    return trace_spans(labels, counts.num_exported, counts.num_failed, counts.num_dropped)


def _of_slab(slab: Slab, labels: Labels) -> Iterator[Metric]:
    yield gauge(
        "baton_store_slab_bytes",
        "Memory that the frames take, in whole pages.",
        labels,
        slab.num_bytes,
    )
    yield gauge(
        "baton_store_slab_page_bytes",
        "Size of its pages: above 4096 they are huge pages.",
        labels,
        slab.page_bytes,
    )


def _of_store(store: BlockStore, labels: Labels) -> Iterator[Metric]:
    frames, pages, counts = store.frames, store.table.pages, store.counters
    by_state = [(state.value, frames.count(state)) for state in SlotState]
    yield gauges("baton_store_frames", "Frames by state.", labels, "state", by_state)
    yield gauge("baton_store_frame_bytes", "Size of a frame.", labels, store.frame_bytes)
    yield gauge(
        "baton_store_pinned_frames", "Frames that a lease holds.", labels, store.num_pinned()
    )
    yield gauge(
        "baton_store_tail_frames", "Unfilled last blocks of prompts.", labels, store.num_tails
    )
    num_used = pages.count(SlotState.COMMITTED)
    by_state = [("used", num_used), ("free", pages.num_slots - num_used)]
    yield gauges("baton_store_pages", "Pages of the file tier.", labels, "state", by_state)
    yield gauge("baton_store_leases", "Leases that live.", labels, len(store.leases))
    yield gauge(
        "baton_store_attachments", "Workers that are attached.", labels, len(store.attachments)
    )
    yield gauges(
        "baton_store_tenant_blocks",
        "Blocks of every tier by tenant: those with a share of their own, and all others together.",
        labels,
        "tenant",
        _by_tenant(store),
    )
    one_by_one = (
        ("baton_store_lookups", "Prefixes asked for.", counts.num_lookups),
        (
            "baton_store_blocks_asked",
            "Blocks that were looked up, pages of draft models among them.",
            counts.num_blocks_asked,
        ),
        ("baton_store_blocks_found", "Of those, present in any tier.", counts.num_blocks_found),
        (
            "baton_store_blocks_lost",
            "Of those found, gone or bad when they were brought into memory.",
            counts.num_blocks_lost,
        ),
        ("baton_store_evictions", "Blocks that gave way to others.", store.table.num_evictions),
        (
            "baton_store_leases_lapsed",
            "Leases that nobody released in time.",
            counts.num_leases_lapsed,
        ),
        ("baton_store_demoted_blocks", "Blocks copied to the file tier.", store.table.num_demoted),
        (
            "baton_store_promoted_blocks",
            "Blocks brought back from the file tier.",
            store.table.num_promoted,
        ),
        (
            "baton_store_damaged_blocks",
            "Blocks in memory whose bytes or generation were found changed.",
            counts.num_damaged,
        ),
        (
            "baton_store_bad_pages",
            "Pages found damaged, or that could not be read; never used.",
            store.table.num_pages_bad,
        ),
    )
    for name, text, count in one_by_one:
        yield counter(name, text, labels, count)
    moved = [("written", counts.num_bytes_written), ("read", counts.num_bytes_read)]
    yield counters(
        "baton_store_bytes",
        "Bytes of blocks that workers moved, without those that they measured their links with.",
        labels,
        "direction",
        moved,
    )
    yield counters(
        "baton_store_refused_blocks",
        "Blocks that were asked for and not given, by reason.",
        labels,
        "reason",
        sorted((dict.fromkeys(REASONS, 0) | dict(store.refused)).items()),
    )


def _by_tenant(store: BlockStore) -> list[tuple[str, float]]:
    rows = tenancy.usage([store.table.frame_account, store.table.page_account])
    shares = store.limits.shares.shares
    named = [(row.tenant, row.num_slots) for row in rows if row.tenant in shares]
    others = sum(row.num_slots for row in rows) - sum(num for _, num in named)
    return [*named, (OTHER_TENANTS, others)]


def _of_index(publisher: PrefixIndexPublisher, labels: Labels) -> Iterator[Metric]:
    yield gauge("baton_index_synced", "1 while Redis has everything.", labels, publisher.synced)
    yield gauge(
        "baton_index_lag_seconds",
        "How long the oldest change waits that the index does not show yet.",
        labels,
        publisher.lag_s,
    )
    yield gauge(
        "baton_index_pending_changes",
        "Changes that Redis has not confirmed.",
        labels,
        publisher.num_pending,
    )
    yield counter(
        "baton_index_changes_published",
        "Changes that Redis was told one by one.",
        labels,
        publisher.num_changes_published,
    )
    yield counter(
        "baton_index_full_publications",
        "Times that everything was told again.",
        labels,
        publisher.num_full_publications,
    )
    yield counter(
        "baton_index_failures", "Talks with Redis that failed.", labels, publisher.num_failures
    )
