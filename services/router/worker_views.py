"""Workers and stores as the registry knows them, and whether a worker may serve the router's model.
Values; pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from protos import common_pb2


@dataclass(frozen=True)
class LinkView:
    """A worker's way to one store or lender, as it was measured when the two met."""

    read_bytes_per_s: float
    """Towards the worker; 0: it failed the measurement, by its own fault."""
    is_degraded: bool = False


@dataclass(frozen=True)
class WorkerView:
    """One life of one worker, as of its last heartbeat."""

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
    """How its own store is reached."""
    remote_transport: str
    """How it reads what lies elsewhere; empty: never."""
    lender_node_id: str
    """Node id under which it lends its own blocks; empty: it lends none."""
    is_draining: bool
    dtype: str
    adapters: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Digests of the contents of each adapter that it has loaded, by name."""
    links: Mapping[str, LinkView] = field(default_factory=dict)
    """The measured ones, by node."""
    num_queued_tokens: int = 0
    """Prompt tokens that it was sent, by all routers, and has yet to compute."""
    step_age_s: float = 0.0
    """How long its engine had been inside one step or job; 0: in none."""
    num_free_places: int | None = None
    """Of a decode worker: places for samples of further requests; None: it does not say."""


@dataclass(frozen=True)
class StartingWorker:
    """A worker process that loads its model and serves nothing yet."""

    worker_id: str
    role: str
    model: str


@dataclass(frozen=True)
class StoreView:
    """One life of one KV store."""

    node_id: str
    address: str
    incarnation: str
    """Hex digits."""


@dataclass(frozen=True)
class Snapshot:
    """The registry at one moment."""

    workers: tuple[WorkerView, ...] = ()
    stores: tuple[StoreView, ...] = ()
    is_redis_reachable: bool = False
    problems: tuple[str, ...] = ()
    """Entries that could not be read."""
    starting: tuple[StartingWorker, ...] = ()
    silent: tuple[str, ...] = ()
    """Names of workers and stores whose entry is there and whose heartbeat is not any more."""
    wishes: Mapping[str, common_pb2.AdapterWish] = field(default_factory=dict)
    """What the cluster wishes of adapters, by name; never changed in place."""
    routers: Mapping[str, bytes] = field(default_factory=dict)
    """Entries of all routers that live, by id, as they stand in Redis."""


@dataclass(frozen=True)
class ServedModel:
    """What the router serves: the names it answers to, its own first, and its tokenizer."""

    names: Sequence[str]
    tokenizer_digest: str


_MAX_QUEUED_TOKENS = 2**40
"""What a worker may say: no number of a peer may make a cost that no order has."""


def worker_view(status: common_pb2.WorkerStatus, before: WorkerView | None = None) -> WorkerView:
    """A heartbeat's status as a value; what it measured is the same object as in the view `before`
    while it is equal.
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
        # Cached blocks that nobody uses are evicted when needed.
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
    """Those whose engine has been inside one step for longer than `max_step_s`, by id, where
    another worker of the same role and model can take over. One that is alone keeps what it has:
    its step may end yet.
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
    """Those that were measured; of several to one store the last."""
    links = {}
    for status in sorted(statuses, key=lambda status: status.measured_unix_ms):
        rate = status.read_bytes_per_s
        if status.problem:
            # Too slow to be measured, or wrong bytes; else the reason lay elsewhere.
            if status.degraded:
                links[status.node_id] = LinkView(0.0, is_degraded=True)
        # No number of a peer may divide by zero, or make a cost that no order has.
        elif rate > 0 and math.isfinite(rate):
            links[status.node_id] = LinkView(rate, status.degraded)
    return links


def find_problem(worker: WorkerView, served: ServedModel) -> str | None:
    """Why `worker` cannot be used for `served`; None when it can."""
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
    """Why `worker` cannot be used for any model of `served`; None when it can."""
    problems = [(worker.model in model.names, find_problem(worker, model)) for model in served]
    if any(problem is None for _, problem in problems):
        return None
    # What keeps it from its own model says more than that it is none of the others.
    return max(problems, key=lambda entry: entry[0], default=(False, None))[1]
