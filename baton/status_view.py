"""A cluster's status as tables and as plain JSON values. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from google.protobuf.message import Message
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from baton.provenance_view import format_bytes
from protos import common_pb2, inference_pb2

_BLOCK_COLUMNS = ("all", "free", "cached", "in use", "quarantined", "waiting", "running")


def status_tables(status: inference_pb2.GetClusterStatusReply) -> RenderableType:
    """Requests, workers with their blocks and hit rates, stores with their frames and leases."""
    redis = "reachable" if status.redis_reachable else "NOT reachable: no remote prefix hits"
    head = Text(
        f"{status.num_requests_in_flight} requests in flight, {status.num_requests_finished} "
        f"finished, {status.num_requests_failed} failed; Redis {redis}"
    )
    workers = sorted(status.workers, key=lambda worker: worker.worker_id)
    stores = sorted(status.stores, key=lambda store: store.node_id)
    tables = (
        _workers(workers),
        _blocks(workers),
        _prompt_tokens(workers),
        _frames(stores),
        _hits(stores),
    )
    return Group(head, *(Padding(table, (1, 0, 0, 0)) for table in tables))


def to_plain(message: Message) -> dict[str, Any]:
    """A message as JSON values: all fields by name, numbers as numbers, bytes as hex."""
    return {field.name: _plain(getattr(message, field.name)) for field in message.DESCRIPTOR.fields}


def _plain(value: Any) -> Any:
    if isinstance(value, Message):
        return to_plain(value)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, str | int | float):
        return value
    return [_plain(item) for item in value]


def _workers(workers: Sequence[common_pb2.WorkerStatus]) -> Table:
    table = _table("worker", "role", "model", "dtype", "device", "transport", "state")
    for worker in workers:
        table.add_row(
            worker.worker_id,
            worker.role,
            worker.model,
            worker.dtype,
            worker.device,
            worker.transport,
            _state(worker),
        )
    return table


def _blocks(workers: Sequence[common_pb2.WorkerStatus]) -> Table:
    table = _table("blocks of", numbers=_BLOCK_COLUMNS)
    for worker in workers:
        in_use = (
            worker.num_blocks
            - worker.num_free_blocks
            - worker.num_cached_blocks
            - worker.num_quarantined_blocks
        )
        counts = (
            worker.num_blocks,
            worker.num_free_blocks,
            worker.num_cached_blocks,
            in_use,
            worker.num_quarantined_blocks,
            worker.num_waiting,
            worker.num_running,
        )
        table.add_row(worker.worker_id, *map(str, counts))
    return table


def _prompt_tokens(workers: Sequence[common_pb2.WorkerStatus]) -> Table:
    table = _table(
        "prompt tokens of",
        numbers=("computed", "local", "from store", "hit rate", "device hit rate", "output"),
    )
    for worker in workers:
        table.add_row(
            worker.worker_id,
            str(worker.num_prompt_tokens_computed),
            str(worker.num_prompt_tokens_local),
            str(worker.num_prompt_tokens_from_store),
            _hit_rate(worker),
            _percent(worker.num_prefix_tokens_cached, worker.num_prefix_tokens_asked),
            str(worker.num_output_tokens),
        )
    return table


def _frames(stores: Sequence[inference_pb2.StoreStatus]) -> Table:
    table = _table(
        "frames of",
        numbers=("all", "free", "writing", "committed", "pinned", "quarantined", "leases"),
    )
    table.add_column("state")
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
        table.add_row(store.node_id, *map(str, counts), state)
    return table


def _hits(stores: Sequence[inference_pb2.StoreStatus]) -> Table:
    table = _table(
        "blocks in", numbers=("asked for", "found", "hit rate", "written", "read", "evicted")
    )
    for store in stores:
        table.add_row(
            store.node_id,
            str(store.num_blocks_asked),
            str(store.num_blocks_matched),
            _percent(store.num_blocks_matched, store.num_blocks_asked),
            format_bytes(store.num_bytes_written),
            format_bytes(store.num_bytes_read),
            str(store.num_evictions),
        )
    return table


def _table(*columns: str, numbers: Sequence[str] = ()) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column)
    for column in numbers:
        table.add_column(column, justify="right")
    return table


def _hit_rate(worker: common_pb2.WorkerStatus) -> str:
    hits = worker.num_prompt_tokens_local + worker.num_prompt_tokens_from_store
    return _percent(hits, hits + worker.num_prompt_tokens_computed)


def _state(worker: common_pb2.WorkerStatus) -> str:
    if worker.integrity_error:
        return worker.integrity_error
    return "draining" if worker.draining else "ok"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "-"
