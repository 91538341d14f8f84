"""A cluster's status as tables and as plain JSON values. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from google.protobuf.message import Message
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from baton import store_tables
from baton.tables import percent, table
from protos import common_pb2, inference_pb2

_BLOCK_COLUMNS = ("all", "free", "cached", "in use", "quarantined", "lent", "waiting", "running")


def failed(status: inference_pb2.GetClusterStatusReply) -> str:
    """How many requests failed, by status code."""
    by_code = sorted(status.num_requests_failed_by_code.items())
    told = ", ".join(f"{num} {code}" for code, num in by_code)
    return f"{status.num_requests_failed} failed" + (f" ({told})" if told else "")


def status_tables(status: inference_pb2.GetClusterStatusReply) -> RenderableType:
    """Requests, what is not as it should be, workers with their blocks and hit rates, stores with
    their frames, leases, tiers and tenants, and the links between them.
    """
    redis = "reachable" if status.redis_reachable else "NOT reachable: no remote prefix hits"
    head = Text(
        f"{status.num_requests_in_flight} requests in flight, {status.num_requests_finished} "
        f"finished, {failed(status)}; Redis {redis}"
    )
    workers = sorted(status.workers, key=lambda worker: worker.worker_id)
    stores = sorted(status.stores, key=lambda store: store.node_id)
    problems = [Text(f"problem: {problem}", style="bold red") for problem in status.problems]
    always = (
        _workers(workers),
        _blocks(workers),
        _prompt_tokens(workers),
        store_tables.frames(stores),
        store_tables.hits(stores),
    )
    where_there_are = (
        store_tables.pages(stores),
        store_tables.tenants(stores),
        store_tables.links(workers),
    )
    tables = [*always, *(found for found in where_there_are if found.row_count)]
    return Group(head, *problems, *(Padding(shown, (1, 0, 0, 0)) for shown in tables))


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
    made = table(
        *("worker", "role", "model", "dtype", "device", "store", "own store over"),
        *("other stores over", "lenders over", "lends as", "state"),
    )
    for worker in workers:
        made.add_row(
            worker.worker_id,
            worker.role,
            worker.model,
            worker.dtype,
            worker.device,
            _store_of(worker),
            worker.transport,
            worker.remote_transport or "-",
            worker.direct_transport or "-",
            worker.lender_node_id or "-",
            _state(worker),
        )
    return made


def _blocks(workers: Sequence[common_pb2.WorkerStatus]) -> Table:
    made = table("blocks of", numbers=_BLOCK_COLUMNS)
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
            worker.num_lent_blocks,
            worker.num_waiting,
            worker.num_running,
        )
        made.add_row(worker.worker_id, *map(str, counts))
    return made


def _prompt_tokens(workers: Sequence[common_pb2.WorkerStatus]) -> Table:
    made = table(
        "prompt tokens of",
        numbers=("computed", "local", "from store", "hit rate", "device hit rate", "output"),
    )
    for worker in workers:
        made.add_row(
            worker.worker_id,
            str(worker.num_prompt_tokens_computed),
            str(worker.num_prompt_tokens_local),
            str(worker.num_prompt_tokens_from_store),
            _hit_rate(worker),
            percent(worker.num_prefix_tokens_cached, worker.num_prefix_tokens_asked),
            str(worker.num_output_tokens),
        )
    return made


def _hit_rate(worker: common_pb2.WorkerStatus) -> str:
    hits = worker.num_prompt_tokens_local + worker.num_prompt_tokens_from_store
    return percent(hits, hits + worker.num_prompt_tokens_computed)


def _store_of(worker: common_pb2.WorkerStatus) -> str:
    if not worker.store_address:
        return "none"
    return worker.store_node_id or "not attached"


def _state(worker: common_pb2.WorkerStatus) -> str:
    if worker.integrity_error:
        return worker.integrity_error
    return "draining" if worker.draining else "ok"
