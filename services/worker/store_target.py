"""StoreTarget: address, identity, memory and transport with which a worker attaches to a store.
Immutable; `target_of` makes it from the settings, and `attach` makes it a client."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from kvstore.client import KvStoreClient
from kvstore.transport.base import BlockMemory
from process import rpc
from process.authorization import PeerRole
from process.rpc import Dialer
from services.worker.config import WorkerSettings
from services.worker.device_memory import block_memory, check_transports
from services.worker.engine_port import WorkerEngine


@dataclass(frozen=True)
class StoreTarget:
    """Connection parameters of one store."""

    address: str
    worker_id: str
    worker_incarnation: bytes
    fingerprint: str
    memory: BlockMemory
    transport: str
    nixl_net_devices: str = "lo"
    dial: Dialer = rpc.PLAIN
    """How the worker opens gRPC connections to its peers."""
    role: PeerRole = PeerRole.KVSTORE
    """Role of the peer at `address`: a store, or a prefill worker that lends."""


def target_of(
    engine: WorkerEngine,
    settings: WorkerSettings,
    worker_id: str,
    worker_incarnation: bytes,
    dial: Dialer,
    memory: BlockMemory | None = None,
) -> StoreTarget | None:
    """Return the target for the home store of this worker life; None without a store.

    Args:
        memory: block memory of the previous life, over the same engine; None: there was none.
    Raises: FailedPrecondition for a device or transport by which the engine's KV cannot be moved.
    """
    if not settings.store_address:
        return None
    check_transports(
        engine.kv, settings.transport, settings.remote_transport, settings.direct_transport
    )
    return StoreTarget(
        address=settings.store_address,
        worker_id=worker_id,
        worker_incarnation=worker_incarnation,
        fingerprint=engine.model_info.fingerprint,
        memory=memory or block_memory(engine.kv),
        transport=settings.transport,
        nixl_net_devices=settings.nixl_net_devices,
        dial=dial,
    )


async def attach(target: StoreTarget, timeout_s: float) -> KvStoreClient:
    """Attach this worker life to a store. Raises: the errors of KvStoreClient.attach."""
    return await KvStoreClient.attach(
        target.address,
        worker_id=target.worker_id,
        worker_incarnation=target.worker_incarnation,
        fingerprint=target.fingerprint,
        memory=target.memory,
        transport=target.transport,
        timeout_s=timeout_s,
        nixl_net_devices=target.nixl_net_devices,
        dial=target.dial,
        role=target.role,
    )


Attach = Callable[[StoreTarget, float], Awaitable[KvStoreClient]]
"""Function like `attach`, called with a target and a timeout in seconds."""
