"""Which transport moves blocks: by the name in the worker's settings, and by where its blocks lie.

Nothing is ever replaced by something else: what cannot be used here is refused. One asyncio loop.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from kvstore.connection import StoreConnection
from kvstore.slab import Slab
from kvstore.source import StoreInfo
from kvstore.transport.base import CUDA_IPC, BlockMemory, Transport
from kvstore.transport.cuda_ipc import CudaIpcTransport
from kvstore.transport.grpc import GrpcTransport, StagedTransport
from kvstore.transport.nixl import NixlTransport
from kvstore.transport.nixl_agent import NixlAgent
from kvstore.transport.shm import DeviceShmTransport, ShmTransport
from process.errors import FailedPrecondition


async def connect(
    transport: str,
    memory: BlockMemory,
    connection: StoreConnection,
    agent: NixlAgent | None,
    store: StoreInfo,
) -> Transport:
    """Args: transport: one of TRANSPORTS, or of DIRECT_TRANSPORTS to a lender. agent: for nixl,
        with `memory` registered.

    Raises: FailedPrecondition when it cannot be used here.
    """
    if transport == "shm":
        if memory.device is not None:
            return await DeviceShmTransport.connect(memory, store)
        return await ShmTransport.connect(memory, store)
    if transport == CUDA_IPC:
        return await CudaIpcTransport.connect(memory, connection, store)
    if transport == "nixl" and agent is not None:
        if memory.device is not None and memory.device.memory == "VRAM":
            await _refuse_store_of_this_host(store)
        return await NixlTransport.connect(memory, connection, agent, store)
    if transport == "grpc":
        if memory.device is not None:
            return await StagedTransport.over(
                memory, lambda rows: GrpcTransport(rows, connection, store)
            )
        return GrpcTransport(memory, connection, store)
    raise ValueError(f"transport: {transport!r}, with{'' if agent else 'out'} an agent")


async def _refuse_store_of_this_host(store: StoreInfo) -> None:
    """Between a device and another process' host memory NIXL falls to under 1 GB/s, without a word
    (measured). A lender has no slab, and its blocks lie on a device as a rule."""
    if not store.slab_path:
        return
    try:
        slab = await asyncio.to_thread(Slab.open, Path(store.slab_path), store.incarnation)
    except FailedPrecondition:
        return  # another host's, as far as can be seen from here; a slow link shows as degraded
    slab.close()
    raise FailedPrecondition(
        "transport nixl: the store is on this host, where NIXL moves a device's blocks 100 times "
        "below the bus; set transport to shm"
    )
