"""`WorkerView`, `StoreView` and `Snapshot`: workers and stores as their heartbeats describe them,
and the checks whether a worker may serve the router's models.

Frozen values and pure functions. Numbers that workers report are bounded here: no report can divide
by zero or make costs that do not compare.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from protos import common_pb2


@dataclass(frozen=True)
class LinkView:
    """One worker's link to a store or lender, measured when the worker met it. A value."""

    read_bytes_per_s: float
    """Rate of reads into the worker; 0: the link failed its measurement."""
    is_degraded: bool = False


@dataclass(frozen=True)
class WorkerView:
    """One incarnation of a worker, as of its last heartbeat. A value."""

    worker_id: str
    role: str
    address: str
    incarnation: str
    model: str
    fingerprint: str
    tokenizer_digest: str
    block_size: int
    block_bytes: int
    num_blocks: int
    num_free_blocks: int
    num_requests: int
    context_window: int
    vocab_size: int
    store_node_id: str
    transport: str
    """Transport to the worker's own store."""
    remote_transport: str
    """Transport for reads from other stores and lenders; empty: it cannot read them."""
    lender_node_id: str
    """Node id under which other workers read this worker's cache; empty: they cannot."""
    is_draining: bool
    dtype: str
    adapters: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Content digests of the loaded adapters, by adapter name."""
    links: Mapping[str, LinkView] = field(default_factory=dict)
    """Measured links, by node id."""
    num_queued_tokens: int = 0
    """Prompt tokens from all routers that the worker has yet to compute."""
    step_age_s: float = 0.0
    """Time that the engine had been inside one step or job; 0: in none."""
    num_free_places: int | None = None
    """Samples that a decode worker can still take on; None: the worker does not report it."""


@dataclass(frozen=True)
class StartingWorker:
    """A worker process that loads its model and does not serve yet. A value."""

    worker_id: str
    role: str
    model: str


@dataclass(frozen=True)
class StoreView:
    """One incarnation of a KV store. A value."""

    node_id: str
    address: str
    incarnation: str
    """As hex digits."""


@dataclass(frozen=True)
class Snapshot:
    """Content of the registry at one moment. A value."""

    workers: tuple[WorkerView, ...] = ()
    stores: tuple[StoreView, ...] = ()
    is_redis_reachable: bool = False
    problems: tuple[str, ...] = ()
    """Error texts for entries that could not be read."""
    starting: tuple[StartingWorker, ...] = ()
    silent: tuple[str, ...] = ()
    """Names of workers and stores that have an entry but no heartbeat any more."""
    wishes: Mapping[str, common_pb2.AdapterWish] = field(default_factory=dict)
    """Wished adapters of the cluster, by name; never changed in place."""
    routers: Mapping[str, bytes] = field(default_factory=dict)
    """Redis entries of all live routers, by router id."""


@dataclass(frozen=True)
class ServedModel:
    """One model that the router serves: its names, the main one first, and its tokenizer."""

    names: Sequence[str]
    tokenizer_digest: str


_MAX_QUEUED_TOKENS = 2**40
"""Bound of what a worker may report, so that costs stay comparable."""


def worker_view(status: common_pb2.WorkerStatus, before: WorkerView | None = None) -> WorkerView:
    """Return a heartbeat's status as a view. Its `links` are the same object as in the earlier view
    `before` while they are equal.
    """
    links = _links(status.links)
    if before is not None and links == before.links:
        links = before.links
    return WorkerView(
        worker_id=status.worker_id,
        role=status.role,
        address=status.address,
        incarnation=status.incarnation,
        model=status.model,
        fingerprint=status.model_fingerprint,
        tokenizer_digest=status.tokenizer_digest,
        block_size=status.block_size,
        block_bytes=status.block_bytes,
        num_blocks=status.num_blocks,
        # Cached blocks that no request uses are evicted when needed.
        num_free_blocks=status.num_free_blocks + status.num_cached_blocks,
        num_requests=status.num_waiting + status.num_running,
        context_window=status.context_window,
        vocab_size=status.vocab_size,
        store_node_id=status.store_node_id,
        transport=status.transport,
        remote_transport=status.remote_transport,
        lender_node_id=status.lender_node_id,
        is_draining=status.draining,
        dtype=status.dtype,
        adapters=_adapters(status.adapters),
        links=links,
        num_queued_tokens=min(_MAX_QUEUED_TOKENS, status.num_queued_tokens),
        step_age_s=status.step_age_s,
        num_free_places=status.num_free_places if status.HasField("num_free_places") else None,
    )


def hung_workers(workers: Iterable[WorkerView], max_step_s: float) -> Mapping[str, WorkerView]:
    """Return the workers that have been inside one engine step for longer than `max_step_s`, by id.

    Only where another worker of the same role and model can take over. The only worker keeps its
    requests: its step may still end.
    """
    workers = list(workers)
    able = {
        (worker.role, worker.fingerprint)
        for worker in workers
        if worker.step_age_s <= max_step_s and not worker.is_draining
    }
    return {
        worker.worker_id: worker
        for worker in workers
        if worker.step_age_s > max_step_s and (worker.role, worker.fingerprint) in able
    }


def _adapters(statuses: Iterable[common_pb2.AdapterStatus]) -> Mapping[str, frozenset[str]]:
    digests: dict[str, frozenset[str]] = {}
    for status in statuses:
        digests[status.name] = digests.get(status.name, frozenset()) | {status.digest}
    return digests


def _links(statuses: Iterable[common_pb2.LinkStatus]) -> Mapping[str, LinkView]:
    """Return the measured links by node id; of several to one node the latest."""
    links = {}
    for status in sorted(statuses, key=lambda status: status.measured_unix_ms):
        rate = status.read_bytes_per_s
        if status.problem:
            # Degraded: too slow to measure, or wrong bytes. Other problems are not the link's.
            if status.degraded:
                links[status.node_id] = LinkView(0.0, is_degraded=True)
        # A rate of 0 would divide by zero; one that is not finite would not compare.
        elif rate > 0 and math.isfinite(rate):
            links[status.node_id] = LinkView(rate, status.degraded)
    return links


def find_problem(worker: WorkerView, served: ServedModel) -> str | None:
    """Return why `worker` cannot serve the model `served`; None when it can."""
    if worker.model not in served.names:
        return f"worker {worker.worker_id} serves another model, {worker.model}"
    if worker.tokenizer_digest != served.tokenizer_digest:
        return f"worker {worker.worker_id} has another tokenizer than this router"
    try:
        bytes.fromhex(worker.fingerprint)
    except ValueError:
        return f"worker {worker.worker_id} published a model fingerprint that is no hex"
    if not (worker.address and worker.block_size and worker.context_window and worker.vocab_size):
        return f"worker {worker.worker_id} published an incomplete status"
    return None


def find_problem_of_all(worker: WorkerView, served: Sequence[ServedModel]) -> str | None:
    """Return why `worker` cannot serve any model of `served`; None when it can."""
    problems = [(worker.model in model.names, find_problem(worker, model)) for model in served]
    if any(problem is None for _, problem in problems):
        return None
    # The problem with its own model says more than that it does not serve the others.
    return max(problems, key=lambda entry: entry[0], default=(False, None))[1]
