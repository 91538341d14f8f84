"""Which transport moves blocks: by the name in the worker's settings, and by where its blocks lie.

Nothing is ever replaced by something else: what cannot be used here is refused. One asyncio loop.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from kvstore.nixl_agent import NixlAgent
from kvstore.rpc import Attached, StoreRpc
from kvstore.slab import Slab
from kvstore.transport.base import CUDA_IPC, BlockMemory, Transport
from kvstore.transport.device_shm import DeviceShmTransport
from kvstore.transport.grpc_chunks import GrpcTransport
from kvstore.transport.mapped import MappedTransport
from kvstore.transport.nixl import NixlTransport
from kvstore.transport.shm import ShmTransport
from kvstore.transport.staged import StagedTransport
from process.errors import FailedPrecondition


async def connect(
    transport: str,
    memory: BlockMemory,
    rpc: StoreRpc,
    agent: NixlAgent | None,
    attached: Attached,
) -> Transport:
    """Args: transport: one of TRANSPORTS, or of DIRECT_TRANSPORTS to a lender. agent: for nixl,
        with `memory` registered.

    Raises: FailedPrecondition when it cannot be used here.
    """
    if transport == "shm":
        if memory.device is not None:
            return await DeviceShmTransport.connect(memory, attached)
        return await ShmTransport.connect(memory, attached)
    if transport == CUDA_IPC:
        return await MappedTransport.connect(memory, rpc, attached)
    if transport == "nixl" and agent is not None:
        if memory.device is not None and memory.device.memory == "VRAM":
            await _refuse_store_of_this_host(attached)
        return await NixlTransport.connect(memory, rpc, agent, attached)
    if transport == "grpc":
        if memory.device is not None:
            return await StagedTransport.over(
                memory, lambda rows: GrpcTransport(rows, rpc, attached)
            )
        return GrpcTransport(memory, rpc, attached)
    raise ValueError(f"transport: {transport!r}, with{'' if agent else 'out'} an agent")


async def _refuse_store_of_this_host(attached: Attached) -> None:
    """Between a device and another process' host memory NIXL falls to under 1 GB/s, without a word
    (measured). A lender has no slab, and its blocks lie on a device as a rule."""
    if not attached.slab_path:
        return
    try:
        slab = await asyncio.to_thread(Slab.open, Path(attached.slab_path), attached.incarnation)
    except FailedPrecondition:
        return  # another host's, as far as can be seen from here; a slow link shows as degraded
    slab.close()
    raise FailedPrecondition(
        "transport nixl: the store is on this host, where NIXL moves a device's blocks 100 times "
        "below the bus; set transport to shm"
    )
