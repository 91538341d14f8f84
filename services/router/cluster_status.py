"""ClusterStatus: the cluster as this router sees it, for GetClusterStatus: workers, stores, and a
list of problems.

`collect` asks every worker and store at once, within one short timeout; a process that does not
answer is shown as of its last heartbeat. `as_heard` shows the last heartbeats only. One asyncio
loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

import grpc.aio

from kvstore.node_ids import is_lender
from process import rpc
from process.authorization import PeerRole
from process.rpc import Dialer
from protos import (
    common_pb2,
    decode_pb2_grpc,
    inference_pb2,
    kvstore_pb2,
    kvstore_pb2_grpc,
    prefill_pb2_grpc,
)
from services.router.policies import PREFILL
from services.router.prefixes import PrefixLookup
from services.router.registry import Registry
from services.router.worker_views import ServedModel, Snapshot, StoreView, find_problem_of_all


class ClusterStatus:
    """Builder of GetClusterStatus replies."""

    def __init__(
        self,
        registry: Registry,
        lookup: PrefixLookup,
        *,
        served: Sequence[ServedModel],
        router_id: str,
        timeout_s: float,
        max_step_s: float,
        check_integrity: Callable[[], str],
        dial: Dialer = rpc.PLAIN,
    ) -> None:
        """timeout_s: limit of each call to a worker or store.
        max_step_s: age of an engine step, in seconds, from which a worker is reported as
            hanging.
        check_integrity: checks the router's own invariants; returns what is broken, or an empty
            string."""
        self._registry = registry
        self._lookup = lookup
        self._served = served
        self._router_id = router_id
        self._timeout_s = timeout_s
        self._max_step_s = max_step_s
        self._check_integrity = check_integrity
        self._dial = dial

    async def collect(self) -> inference_pb2.GetClusterStatusReply:
        """Return the status, by asking every process; without the counters of requests."""
        snapshot = await self._registry.poll()
        heartbeats = self._registry.statuses()
        workers, stores = await asyncio.gather(
            asyncio.gather(*(self._worker(status) for status in heartbeats)),
            asyncio.gather(*(self._store(store) for store in snapshot.stores)),
        )
        problems = self._problems(snapshot)
        problems += _silent((w.worker_id, ok) for w, ok in workers)
        problems += _silent((store.node_id, store.reachable) for store in stores)
        statuses = [status for status, _ in workers]
        problems += (problem for status in statuses for problem in link_problems(status))
        problems += _tiers_off(stores)
        problems += _damaged(stores)
        problems += filter(None, [self._check_integrity()])
        return self._reply(snapshot, statuses, stores, problems)

    async def as_heard(self) -> inference_pb2.GetClusterStatusReply:
        """Return the status by the last heartbeats: no process is asked, and no invariant is
        checked."""
        snapshot = self._registry.snapshot
        workers, stores = self._registry.statuses(), self._registry.store_statuses()
        problems = self._problems(snapshot)
        problems += (problem for status in workers for problem in link_problems(status))
        problems += _tiers_off(stores)
        problems += _damaged(stores)
        return self._reply(snapshot, workers, stores, problems)

    def _problems(self, snapshot: Snapshot) -> list[str]:
        """Return the problems that the router knows without asking other processes."""
        problems = [*snapshot.problems]
        if not snapshot.is_redis_reachable:
            problems.append("Redis is not reachable: workers and stores are shown as last known")
        problems += [
            f"{name} has no heartbeat: its process hangs, or was killed" for name in snapshot.silent
        ]
        if self._lookup.problem is not None:
            problems.append(self._lookup.problem)
        problems += [
            problem
            for worker in snapshot.workers
            if (problem := find_problem_of_all(worker, self._served)) is not None
        ]
        problems += [
            f"worker {worker.worker_id} hangs: its engine has been inside one step for "
            f"{worker.step_age_s:.0f} s"
            for worker in snapshot.workers
            if worker.step_age_s > self._max_step_s
        ]
        problems += adapter_problems(snapshot)
        return problems

    def _reply(
        self,
        snapshot: Snapshot,
        workers: Iterable[common_pb2.WorkerStatus],
        stores: Iterable[inference_pb2.StoreStatus],
        problems: Iterable[str],
    ) -> inference_pb2.GetClusterStatusReply:
        return inference_pb2.GetClusterStatusReply(
            workers=workers,
            stores=stores,
            redis_reachable=snapshot.is_redis_reachable,
            router_id=self._router_id,
            problems=problems,
        )

    async def _worker(
        self, heartbeat: common_pb2.WorkerStatus
    ) -> tuple[common_pb2.WorkerStatus, bool]:
        """Return a worker's status, and whether it answered; else its last heartbeat."""
        make_stub = (
            prefill_pb2_grpc.PrefillStub
            if heartbeat.role == PREFILL
            else decode_pb2_grpc.DecodeStub
        )
        async with self._dial(heartbeat.address, PeerRole(heartbeat.role)) as channel:
            try:
                status: common_pb2.WorkerStatus = await make_stub(channel).GetWorkerStatus(
                    common_pb2.GetWorkerStatusRequest(), timeout=self._timeout_s
                )
            except grpc.aio.AioRpcError:
                return heartbeat, False
        return status, True

    async def _store(self, store: StoreView) -> inference_pb2.StoreStatus:
        """Return a store's status; `reachable` is false when it does not answer."""
        reply = inference_pb2.StoreStatus(
            node_id=store.node_id, address=store.address, incarnation=store.incarnation
        )
        async with self._dial(store.address, PeerRole.KVSTORE) as channel:
            try:
                own: kvstore_pb2.GetStatusReply = await kvstore_pb2_grpc.KvStoreStub(
                    channel
                ).GetStatus(
                    kvstore_pb2.GetStatusRequest(check_integrity=True), timeout=self._timeout_s
                )
            except grpc.aio.AioRpcError:
                return reply
        reply.reachable = True
        reply.incarnation = own.incarnation.hex()
        for name in _STORE_FIELDS:
            setattr(reply, name, getattr(own, name))
        reply.tenants.extend(own.tenants)
        return reply


_STORE_FIELDS = (
    "frame_bytes",
    "num_frames",
    "num_free",
    "num_writing",
    "num_committed",
    "num_pinned",
    "num_quarantined",
    "num_leases",
    "num_lookups",
    "num_blocks_matched",
    "num_blocks_asked",
    "num_bytes_written",
    "num_bytes_read",
    "num_evictions",
    "num_pages",
    "num_pages_used",
    "num_demoted",
    "num_promoted",
    "num_pages_bad",
    "num_damaged",
    "integrity_error",
    "file_tier_problem",
)


def adapter_problems(snapshot: Snapshot) -> list[str]:
    """Return one line for each worker that has not loaded an adapter content that the cluster
    wishes; requests for the adapter do not go to it."""
    return [
        f"worker {worker.worker_id} has not loaded adapter {name!r} as it is wished (content "
        f"{wish.current.digest[:16]} of {wish.current.folder})"
        for name, wish in sorted(snapshot.wishes.items())
        for worker in snapshot.workers
        if wish.HasField("current")
        and worker.model == wish.model
        and not worker.is_draining
        and wish.current.digest not in worker.adapters.get(name, ())
    ]


def link_problems(status: common_pb2.WorkerStatus) -> list[str]:
    """Return one line for each link of a worker to a store or lender that is slower than it should
    be, or was not measured."""
    problems = []
    for link in status.links:
        is_read_only = is_lender(link.node_id)
        kind = "lender" if is_read_only else "store"
        name = f"link of {status.worker_id} to {kind} {link.node_id}"
        way = f"{name} over {link.transport}" if link.transport else name
        if link.problem:
            state = "is degraded" if link.degraded else "was not measured"
            problems.append(f"{way} {state}: {link.problem}")
        elif link.degraded:
            floor = link.floor_bytes_per_s
            limit = f", its floor is {_rate(floor)}" if floor else ""
            writes = "" if is_read_only else f"writes {_rate(link.write_bytes_per_s)} and "
            reads = f"reads {_rate(link.read_bytes_per_s)}"
            problems.append(f"{way} is degraded: it {writes}{reads}{limit}")
    return problems


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e6:.3g} MB/s"


def _tiers_off(stores: Iterable[inference_pb2.StoreStatus]) -> list[str]:
    """Return one line for each store whose file tier is off."""
    return [
        f"the file tier of store {store.node_id} is off: {store.file_tier_problem}"
        for store in stores
        if store.file_tier_problem
    ]


def _damaged(stores: Iterable[inference_pb2.StoreStatus]) -> list[str]:
    """Return one line for each store that found damaged blocks."""
    return [
        f"store {store.node_id} found {store.num_damaged} damaged blocks since it started: its "
        "memory is faulty, or another process writes into it"
        for store in stores
        if store.num_damaged
    ]


def _silent(answers: Iterable[tuple[str, bool]]) -> list[str]:
    """Return one line for each (name, has answered) that has not answered."""
    return [f"{name} does not answer" for name, answered in answers if not answered]
