"""The numbers of a KV store, as GetStatus, its entry in the registry (Redis) and /metrics show
them.

The fields of `StoreStats` have the names that GetStatusReply and StoreStatus give them, so that a
message is filled by name. Prometheus has names and labels of its own. Before the first worker
attached there is no memory: messages have zeros, and the families of frames no samples. Tenants
without a share are one sample together: their names come from clients, and there is no bound on
them.

Reads, changes nothing. One asyncio loop; /metrics reads on it, too (process/metrics.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields

from prometheus_client.metrics_core import Metric

from kvstore.block_source import PastBlock, StoreStats
from kvstore.block_store import BlockStore
from kvstore.errors import REASONS
from kvstore.index_publisher import PrefixIndexPublisher
from kvstore.slab import Slab
from kvstore.slot_pool import SlotState
from kvstore.store_node import StoreNode
from kvstore.tenant_shares import TenantSlots
from process.metrics import Labels, counter, counters, gauge, gauges, trace_spans
from protos import common_pb2, inference_pb2, kvstore_pb2

MAX_TENANTS = 64
"""Most tenants in one message."""
OTHER_TENANTS = "(others)"
"""The label of all tenants without a share of their own, together."""


def fill(
    message: kvstore_pb2.GetStatusReply | inference_pb2.StoreStatus, stats: StoreStats
) -> None:
    """Set the fields of a status message that have the name of a field of `stats`, and its
    tenants."""
    names = set(message.DESCRIPTOR.fields_by_name) - {"tenants", "refused"}
    for field in fields(stats):
        if field.name in names:
            setattr(message, field.name, getattr(stats, field.name))
    message.tenants.extend(
        common_pb2.TenantUsage(
            tenant=each.tenant,
            num_blocks=each.num_slots,
            num_blocks_guaranteed=each.num_guaranteed,
        )
        for each in stats.tenants[:MAX_TENANTS]
    )
    if isinstance(message, kvstore_pb2.GetStatusReply):
        for reason, num_blocks in sorted(stats.refused.items()):
            if num_blocks:
                message.refused.add(reason=reason, num_blocks=num_blocks)


def store_status(node: StoreNode, address: str) -> inference_pb2.StoreStatus:
    """Make the store's row for the registry."""
    status = inference_pb2.StoreStatus(
        node_id=node.node_id,
        address=address,
        incarnation=node.incarnation.hex(),
        reachable=True,
    )
    fill(status, node.stats())
    return status


def past_to_proto(past: PastBlock) -> kvstore_pb2.BlockHistory:
    """Convert a block's events, and where it lies now, to a message."""
    chain_hash, history, node = past
    message = kvstore_pb2.BlockHistory(
        chain_hash=chain_hash, num_events_forgotten=history.num_events - len(history.events)
    )
    for event in history.events:
        trace_id = f"{event.trace.trace_id:032x}" if event.trace is not None else ""
        message.events.add(
            unix_us=int(event.unix_s * 1e6),
            what=event.what,
            worker_id=event.worker_id,
            trace_id=trace_id,
        )
    if node is not None:
        if node.block is not None:
            message.tiers.append(common_pb2.TIER_HOST)
        if node.page is not None:
            message.tiers.append(common_pb2.TIER_FILE)
        message.num_hits, message.num_pins = node.num_hits, node.num_pins
        message.parent = node.parent.chain_hash if node.parent is not None else b""
    return message


class StoreMetrics:
    """The metrics of a store for /metrics: `read` on the store's loop, `silent` when that does not
    answer."""

    def __init__(self, node: StoreNode, publisher: PrefixIndexPublisher | None) -> None:
        self._node = node
        self._publisher = publisher

    def read(self) -> Sequence[Metric]:
        """All metrics of the store, with their values of now."""
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
        """The metrics of a store whose loop does not answer: that it is not up."""
        return [_up({"node_id": self._node.node_id}, False)]


def _up(labels: Labels, is_up: bool) -> Metric:
    return gauge("baton_up", "1 while the process answers.", labels, is_up)


def _of_node(node: StoreNode, labels: Labels) -> Iterator[Metric]:
    yield gauge(
        "baton_store_integrity_broken",
        "1 when a conservation law of the store was found broken since its start.",
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
    stats = StoreStats.of(store)
    by_state = [(state.value, store.frames.count(state)) for state in SlotState]
    yield gauges("baton_store_frames", "Frames by state.", labels, "state", by_state)
    by_state = [("used", stats.num_pages_used), ("free", stats.num_pages - stats.num_pages_used)]
    yield gauges("baton_store_pages", "Pages of the file tier.", labels, "state", by_state)
    levels = (
        ("baton_store_frame_bytes", "Size of a frame.", stats.frame_bytes),
        ("baton_store_pinned_frames", "Frames that a lease holds.", stats.num_pinned),
        ("baton_store_tail_frames", "Unfilled last blocks of prompts.", stats.num_tails),
        ("baton_store_leases", "Leases that have not ended.", stats.num_leases),
        ("baton_store_attachments", "Attached workers.", stats.num_attachments),
    )
    for name, text, level in levels:
        yield gauge(name, text, labels, level)
    yield gauges(
        "baton_store_tenant_blocks",
        "Blocks of every tier by tenant: those with a share of their own, and all others together.",
        labels,
        "tenant",
        _by_tenant(stats.tenants, store.limits.shares.shares),
    )
    sums = (
        ("baton_store_lookups", "Prefixes asked for.", stats.num_lookups),
        (
            "baton_store_blocks_asked",
            "Blocks that were looked up.",
            stats.num_blocks_asked,
        ),
        (
            "baton_store_blocks_found",
            "Of those, present in any tier.",
            store.counters.num_blocks_found,
        ),
        (
            "baton_store_blocks_lost",
            "Of those found, gone or bad when they were brought into memory.",
            store.counters.num_blocks_lost,
        ),
        ("baton_store_evictions", "Blocks that gave way to others.", stats.num_evictions),
        (
            "baton_store_leases_lapsed",
            "Leases that ended without a release.",
            stats.num_leases_lapsed,
        ),
        ("baton_store_demoted_blocks", "Blocks copied to the file tier.", stats.num_demoted),
        (
            "baton_store_promoted_blocks",
            "Blocks brought back from the file tier.",
            stats.num_promoted,
        ),
        (
            "baton_store_damaged_blocks",
            "Blocks in memory whose bytes or generation were found changed.",
            stats.num_damaged,
        ),
        (
            "baton_store_bad_pages",
            "Pages found damaged, or that could not be read; never used.",
            stats.num_pages_bad,
        ),
    )
    for name, text, count in sums:
        yield counter(name, text, labels, count)
    yield counters(
        "baton_store_bytes",
        "Bytes of blocks that workers moved, without those that they measured their links with.",
        labels,
        "direction",
        [("written", stats.num_bytes_written), ("read", stats.num_bytes_read)],
    )
    yield counters(
        "baton_store_refused_blocks",
        "Blocks that were asked for and not given, by reason.",
        labels,
        "reason",
        sorted((dict.fromkeys(REASONS, 0) | dict(stats.refused)).items()),
    )


def _by_tenant(
    rows: Sequence[TenantSlots], shares: Mapping[str, object]
) -> list[tuple[str, float]]:
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
        "Changes published one by one.",
        labels,
        publisher.num_changes_published,
    )
    yield counter(
        "baton_index_full_publications",
        "Times that everything was published again.",
        labels,
        publisher.num_full_publications,
    )
    yield counter(
        "baton_index_failures",
        "Publications to Redis and heartbeats that failed.",
        labels,
        publisher.num_failures,
    )
