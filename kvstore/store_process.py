"""Runs a whole KV store process on one asyncio loop: StoreNode, gRPC server and index publisher,
from settings to a clean end.

`running` is what `python -m kvstore` and in-process tests share.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from kvstore.block_changes import ChangeLog, NullLog
from kvstore.config import KvStoreSettings
from kvstore.index_publisher import PrefixIndexPublisher
from kvstore.service import KvStoreServicer
from kvstore.store_node import StoreNode
from kvstore.store_status import StoreMetrics, store_status
from process import grpc_server
from process.authorization import RULES, PeerRole
from process.metrics import HealthProbes, LoopCollector, MetricsServer
from process.tls import TlsIdentity
from process.tracing import Tracing


@dataclass(frozen=True)
class RunningStore:
    """A store that serves in this process. address: what workers dial. metrics_address: of
    /metrics; empty: it is not served."""

    node: StoreNode
    address: str
    publisher: PrefixIndexPublisher | None
    metrics_address: str = ""


@asynccontextmanager
async def running(settings: KvStoreSettings) -> AsyncIterator[RunningStore]:
    """Serve a store until the body ends, then stop within about `stop_timeout_s`.

    Raises: Unavailable when the address is taken; NoCapacity when slab_dir has too little room.
    """
    changes = ChangeLog() if settings.redis_url else NullLog()
    publisher: PrefixIndexPublisher | None = None
    tracing = Tracing.of(
        settings.tracing, "kvstore", settings.node_id or f"kvstore-{secrets.token_hex(4)}"
    )
    node = StoreNode(settings, settings.node_id, changes=changes, tracing=tracing)
    servicer = KvStoreServicer(
        node,
        node,
        tracing=tracing,
        index_state=lambda: (publisher.sequence, publisher.synced) if publisher else (0, False),
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
        if settings.redis_url:
            publisher = _publisher(settings, node, changes, address)
            publisher.start()
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
            if publisher is not None:
                await publisher.stop()
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
    settings: KvStoreSettings, node: StoreNode, changes: ChangeLog, address: str
) -> PrefixIndexPublisher:
    return PrefixIndexPublisher(
        settings.redis_url,
        node_id=node.node_id,
        incarnation=node.incarnation,
        status=lambda: store_status(node, address),
        changes=changes,
        snapshot=node.snapshot,
        heartbeat_s=settings.heartbeat_s,
        heartbeat_ttl_s=settings.heartbeat_ttl_s,
        timeout_s=settings.redis_timeout_s,
        access=settings.redis,
    )
