"""The stores' part of a cluster's status: frames and leases, hits, pages of the file tier, tenants,
and the workers' links to them. Tables without a row are left out by the caller. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from baton.provenance_view import format_bytes, format_seconds
from baton.tables import percent, table
from protos import common_pb2, inference_pb2

NO_TENANT = "(none)"


def frames(stores: Sequence[inference_pb2.StoreStatus]) -> Table:
    """Host memory of each store, by what its frames are."""
    made = table(
        "frames of",
        numbers=("all", "free", "writing", "committed", "pinned", "quarantined", "leases"),
    )
    made.add_column("state")
    for store in stores:
        counts = (
            store.num_frames,
            store.num_free,
            store.num_writing,
            store.num_committed,
            store.num_pinned,
            store.num_quarantined,
            store.num_leases,
        )
        state = store.integrity_error or ("ok" if store.reachable else "not reachable")
        made.add_row(store.node_id, *map(str, counts), state)
    return made


def hits(stores: Sequence[inference_pb2.StoreStatus]) -> Table:
    """What each store was asked for and had, and the bytes that moved."""
    made = table(
        "blocks in", numbers=("asked for", "found", "hit rate", "written", "read", "evicted")
    )
    for store in stores:
        made.add_row(
            store.node_id,
            str(store.num_blocks_asked),
            str(store.num_blocks_matched),
            percent(store.num_blocks_matched, store.num_blocks_asked),
            format_bytes(store.num_bytes_written),
            format_bytes(store.num_bytes_read),
            str(store.num_evictions),
        )
    return made


def pages(stores: Sequence[inference_pb2.StoreStatus]) -> Table:
    """The file tier of each store that has one."""
    made = table("pages of", numbers=("all", "used", "demoted", "promoted", "bad"))
    for store in stores:
        if store.num_pages or store.num_demoted:
            counts = (
                store.num_pages,
                store.num_pages_used,
                store.num_demoted,
                store.num_promoted,
                store.num_pages_bad,
            )
            made.add_row(store.node_id, *map(str, counts))
    return made


def tenants(stores: Sequence[inference_pb2.StoreStatus]) -> Table:
    """Each tenant's part of each store, in blocks of every tier."""
    made = table("tenants of", "tenant", numbers=("blocks", "guaranteed"))
    for store in stores:
        for usage in sorted(store.tenants, key=lambda usage: usage.tenant):
            guaranteed = str(usage.num_blocks_guaranteed) if usage.num_blocks_guaranteed else "-"
            name = usage.tenant or NO_TENANT
            made.add_row(store.node_id, name, str(usage.num_blocks), guaranteed)
    return made


def links(workers: Sequence[common_pb2.WorkerStatus]) -> Table:
    """Each worker's way to each store that it met, as it was measured then."""
    made = table(
        "links of", "to", "transport", numbers=("write", "read", "latency of a block", "floor")
    )
    made.add_column("state")
    for worker in workers:
        for link in worker.links:
            numbers = (
                _rate(link.write_bytes_per_s),
                _rate(link.read_bytes_per_s),
                format_seconds(link.latency_s) if link.latency_s else "-",
                _rate(link.floor_bytes_per_s),
            )
            to = link.node_id or link.store_address
            made.add_row(worker.worker_id, to, link.transport, *numbers, _link_state(link))
    return made


def _rate(bytes_per_s: float) -> str:
    return f"{format_bytes(int(bytes_per_s))}/s" if bytes_per_s else "-"


def _link_state(link: common_pb2.LinkStatus) -> str:
    if link.problem:
        return f"not measured: {link.problem}"
    return "DEGRADED" if link.degraded else "ok"
