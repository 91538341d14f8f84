"""What happened to blocks of late, asked of every store that is registered.

Knows Redis' registry and the `KvStore` service; asks, and changes nothing. One asyncio loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import grpc.aio

from kvstore import index
from process import registry, rpc
from process.access import PeerRole
from process.errors import BatonError
from process.registry import RedisAccess
from process.rpc import Dialer
from protos import inference_pb2, kvstore_pb2, kvstore_pb2_grpc

REDIS_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Told:
    """One store's answer."""

    node_id: str
    blocks: Sequence[kvstore_pb2.BlockHistory] = ()
    problem: str = ""
    """Why there is none; empty: there is one."""


async def ask(
    redis_url: str,
    prefix: bytes,
    *,
    max_blocks: int,
    timeout_s: float,
    dial: Dialer = rpc.PLAIN,
    access: RedisAccess = registry.NO_ACCESS,
) -> list[Told]:
    """All stores' histories of blocks whose chain hash begins with `prefix`, by node id.

    Args: max_blocks: of each store. timeout_s: for one store.
    Raises: Unavailable when Redis does not answer.
    """
    client = registry.connect_redis(redis_url, REDIS_TIMEOUT_S, access)
    try:
        stores = await index.PrefixIndex(client, REDIS_TIMEOUT_S).stores()
    finally:
        await client.aclose()
    request = kvstore_pb2.GetBlockHistoryRequest(chain_hash=prefix, max_blocks=max_blocks)
    ordered = sorted(stores, key=lambda store: store.node_id)
    return await asyncio.gather(*(_ask_one(store, request, timeout_s, dial) for store in ordered))


async def _ask_one(
    store: inference_pb2.StoreStatus,
    request: kvstore_pb2.GetBlockHistoryRequest,
    timeout_s: float,
    dial: Dialer,
) -> Told:
    async with dial(store.address, PeerRole.KVSTORE) as channel:
        stub = kvstore_pb2_grpc.KvStoreStub(channel)
        try:
            reply = await stub.GetBlockHistory(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            ours: BatonError = rpc.error_from_rpc(error)
            return Told(store.node_id, problem=str(ours))
    if not reply.keeps_history:
        return Told(store.node_id, problem="remembers nothing (max_history_blocks = 0)")
    return Told(store.node_id, reply.blocks)
