"""The cluster as this router sees it: workers, stores, and what is not as it should be.

Every process is asked itself, all at once, within one short time; who does not answer is shown as
last heard of. One asyncio loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import grpc.aio

from kvstore.lending import is_lender
from process import serving
from protos import (
    common_pb2,
    decode_pb2_grpc,
    inference_pb2,
    kvstore_pb2,
    kvstore_pb2_grpc,
    prefill_pb2_grpc,
)
from services.router.lookup import PrefixLookup
from services.router.policy import PREFILL
from services.router.registry import Registry
from services.router.views import ServedModel, StoreView, find_problem, worker_view


class ClusterStatus:
    """See the module."""

    def __init__(
        self,
        registry: Registry,
        lookup: PrefixLookup,
        *,
        served: ServedModel,
        router_id: str,
        timeout_s: float,
        check_integrity: Callable[[], str],
    ) -> None:
        """`check_integrity` recomputes the router's own laws; it returns what is broken, or an
        empty string.
        """
        self._registry = registry
        self._lookup = lookup
        self._served = served
        self._router_id = router_id
        self._timeout_s = timeout_s
        self._check_integrity = check_integrity

    async def collect(self) -> inference_pb2.GetClusterStatusReply:
        """All but the servicer's counters."""
        snapshot = await self._registry.poll()
        heartbeats = self._registry.statuses()
        workers, stores = await asyncio.gather(
            asyncio.gather(*(self._worker(status) for status in heartbeats)),
            asyncio.gather(*(self._store(store) for store in snapshot.stores)),
        )
        problems = [*snapshot.problems]
        if not snapshot.is_redis_reachable:
            problems.append("Redis is not reachable: workers and stores are shown as last known")
        if self._lookup.problem is not None:
            problems.append(self._lookup.problem)
        problems += [
            problem
            for status in heartbeats
            if (problem := find_problem(worker_view(status), self._served)) is not None
        ]
        problems += _silent((w.worker_id, ok) for w, ok in workers)
        problems += _silent((store.node_id, store.reachable) for store in stores)
        problems += (problem for status, _ in workers for problem in link_problems(status))
        problems += (
            f"the file tier of store {store.node_id} is off: {store.file_tier_problem}"
            for store in stores
            if store.file_tier_problem
        )
        problems += filter(None, [self._check_integrity()])
        return inference_pb2.GetClusterStatusReply(
            workers=[status for status, _ in workers],
            stores=stores,
            redis_reachable=snapshot.is_redis_reachable,
            router_id=self._router_id,
            problems=problems,
        )

    async def _worker(
        self, heartbeat: common_pb2.WorkerStatus
    ) -> tuple[common_pb2.WorkerStatus, bool]:
        make_stub = (
            prefill_pb2_grpc.PrefillStub
            if heartbeat.role == PREFILL
            else decode_pb2_grpc.DecodeStub
        )
        async with serving.channel(heartbeat.address) as channel:
            try:
                status: common_pb2.WorkerStatus = await make_stub(channel).GetWorkerStatus(
                    common_pb2.GetWorkerStatusRequest(), timeout=self._timeout_s
                )
            except grpc.aio.AioRpcError:
                return heartbeat, False
        return status, True

    async def _store(self, store: StoreView) -> inference_pb2.StoreStatus:
        reply = inference_pb2.StoreStatus(
            node_id=store.node_id, address=store.address, incarnation=store.incarnation
        )
        async with serving.channel(store.address) as channel:
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
    "integrity_error",
    "file_tier_problem",
)


def link_problems(status: common_pb2.WorkerStatus) -> list[str]:
    """What is wrong with a worker's ways to stores and lenders, a line each: slower than they
    should be, or not measured.
    """
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


def _silent(answers: Iterable[tuple[str, bool]]) -> list[str]:
    return [f"{name} does not answer" for name, answered in answers if not answered]
