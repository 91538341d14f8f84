"""A whole store process on one loop: node, gRPC server, index publisher, from settings to a clean
end.

`running` is what `python -m kvstore` and in-process tests share.
"""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import redis.asyncio

from kvstore.config import KvStoreSettings
from kvstore.frames import FrameState
from kvstore.index_publisher import PrefixIndexPublisher
from kvstore.node import StoreNode
from kvstore.server import KvStoreServicer, tenants
from process import redis_client, serving
from protos import inference_pb2


@dataclass(frozen=True)
class RunningStore:
    """address: what workers dial."""

    node: StoreNode
    address: str
    publisher: PrefixIndexPublisher | None


@asynccontextmanager
async def running(settings: KvStoreSettings) -> AsyncIterator[RunningStore]:
    """Serve until the body ends, then stop within about `stop_timeout_s`.

    Raises: Unavailable when the address is taken; NoCapacity when slab_dir has too little room.
    """
    changes: list[PrefixIndexPublisher] = []

    def on_change(present: bool, chain_hash: bytes) -> None:
        for publisher in changes:
            publisher.on_change(present, chain_hash)

    node = StoreNode(settings, settings.node_id, on_change=on_change)
    servicer = KvStoreServicer(
        node, lambda: (changes[0].sequence, changes[0].synced) if changes else (0, False)
    )
    server, bound = await serving.listen(settings.listen, [servicer.add_to])
    try:
        node.node_id = settings.node_id or f"{socket.gethostname()}-{bound.rpartition(':')[2]}"
        address = settings.advertise or bound
        node.start()
        client = None
        if settings.redis_url:
            client = redis_client.connect(settings.redis_url, settings.redis_timeout_s)
            changes.append(_publisher(settings, node, address, client))
            changes[0].start()
        try:
            yield RunningStore(node, address, changes[0] if changes else None)
        finally:
            await server.stop(settings.stop_timeout_s)
            if client is not None:
                await changes[0].stop()
                await client.aclose()
    finally:
        await server.stop(0)
        await node.stop()


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
        status.tenants.extend(tenants(store))
    return status
