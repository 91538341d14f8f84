"""A whole store process on one loop: node, gRPC server, index publisher, from settings to a clean
end.

`running` is what `python -m kvstore` and in-process tests share.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import redis.asyncio

from kvstore.account import tenants
from kvstore.config import KvStoreSettings
from kvstore.frames import FrameState
from kvstore.index_publisher import PrefixIndexPublisher
from kvstore.metrics import StoreMetrics
from kvstore.node import StoreNode
from kvstore.server import KvStoreServicer
from process import grpc_server, registry
from process.access import RULES, PeerRole
from process.metrics import HealthProbes, LoopCollector, MetricsServer
from process.tls import TlsIdentity
from process.tracing import Tracing
from protos import inference_pb2


@dataclass(frozen=True)
class RunningStore:
    """address: what workers dial. metrics_address: of /metrics; empty: nobody listens."""

    node: StoreNode
    address: str
    publisher: PrefixIndexPublisher | None
    metrics_address: str = ""


@asynccontextmanager
async def running(settings: KvStoreSettings) -> AsyncIterator[RunningStore]:
    """Serve until the body ends, then stop within about `stop_timeout_s`.

    Raises: Unavailable when the address is taken; NoCapacity when slab_dir has too little room.
    """
    changes: list[PrefixIndexPublisher] = []

    def on_change(present: bool, chain_hash: bytes) -> None:
        for publisher in changes:
            publisher.on_change(present, chain_hash)

    tracing = Tracing.of(
        settings.tracing, "kvstore", settings.node_id or f"kvstore-{secrets.token_hex(4)}"
    )
    node = StoreNode(settings, settings.node_id, on_change=on_change, tracing=tracing)
    servicer = KvStoreServicer(
        node, lambda: (changes[0].sequence, changes[0].synced) if changes else (0, False)
    )
    server, bound = await grpc_server.listen(
        settings.listen,
        [servicer.add_to],
        identity=TlsIdentity.of(settings.tls, PeerRole.KVSTORE),
        rules=RULES[PeerRole.KVSTORE],
    )
    try:
        node.node_id = settings.node_id or f"{socket.gethostname()}-{bound.rpartition(':')[2]}"
        address = settings.advertise or bound
        node.start()
        tracing.start()
        client = None
        if settings.redis_url:
            client = registry.connect_redis(
                settings.redis_url, settings.redis_timeout_s, settings.redis
            )
            changes.append(_publisher(settings, node, address, client))
            changes[0].start()
        publisher = changes[0] if changes else None
        health = HealthProbes()
        metrics = _metrics_server(node, publisher, health)
        try:
            health.follow()
            # It listens, and needs no more.
            health.set_check(lambda: "draining" if node.is_draining else "")
            if settings.metrics_listen:
                metrics.start(settings.metrics_listen)
            yield RunningStore(node, address, publisher, metrics.address)
        finally:
            health.end()
            await asyncio.to_thread(metrics.stop)
            await server.stop(settings.stop_timeout_s)
            if client is not None:
                await changes[0].stop()
                await client.aclose()
    finally:
        await server.stop(0)
        await node.stop()
        await asyncio.to_thread(tracing.stop)


def _metrics_server(
    node: StoreNode, publisher: PrefixIndexPublisher | None, health: HealthProbes
) -> MetricsServer:
    shown = StoreMetrics(node, publisher)
    collector = LoopCollector(asyncio.get_running_loop(), shown.read, shown.silent)
    return MetricsServer(collector, health=health)


def _publisher(
    settings: KvStoreSettings, node: StoreNode, address: str, client: redis.asyncio.Redis
) -> PrefixIndexPublisher:
    return PrefixIndexPublisher(
        client,
        node_id=node.node_id,
        incarnation=node.incarnation,
        status=lambda: store_status(node, address),
        present=node.present,
        heartbeat_s=settings.heartbeat_s,
        heartbeat_ttl_s=settings.heartbeat_ttl_s,
        timeout_s=settings.redis_timeout_s,
    )


def store_status(node: StoreNode, address: str) -> inference_pb2.StoreStatus:
    """What the registry says about this store."""
    status = inference_pb2.StoreStatus(
        node_id=node.node_id,
        address=address,
        incarnation=node.incarnation.hex(),
        reachable=True,
        integrity_error=node.integrity_error,
        file_tier_problem=node.file_tier_problem,
    )
    store = node.store
    if store is not None:
        status.frame_bytes = store.frame_bytes
        status.num_frames = store.frames.num_frames
        status.num_free = store.frames.count(FrameState.FREE)
        status.num_writing = store.frames.count(FrameState.WRITING)
        status.num_committed = store.frames.count(FrameState.COMMITTED)
        status.num_pinned = store.num_pinned()
        status.num_quarantined = store.frames.count(FrameState.QUARANTINED)
        status.num_leases = len(store.leases)
        status.num_lookups = store.counters.num_lookups
        status.num_blocks_matched = store.counters.num_blocks_matched
        status.num_blocks_asked = store.counters.num_blocks_asked
        status.num_bytes_written = store.counters.num_bytes_written
        status.num_bytes_read = store.counters.num_bytes_read
        status.num_evictions = store.places.num_evictions
        status.num_pages = store.places.pages.num_pages
        status.num_pages_used = store.places.pages.num_used
        status.num_demoted = store.moves.num_demoted
        status.num_promoted = store.moves.num_promoted
        status.num_pages_bad = store.moves.num_pages_bad
        status.num_damaged = store.counters.num_damaged
        status.tenants.extend(tenants(store))
    return status
