"""A worker's side of one attachment: the handshake, the heartbeat while it lasts, the goodbye.

No transport is replaced by another, and nothing here tries twice. One asyncio loop.
"""

from __future__ import annotations

import logging
import secrets
from dataclasses import dataclass

from kvstore import answer_checks, wire
from kvstore.lending.host import own_host_id
from kvstore.nixl_agent import NixlAgent
from kvstore.rpc import Attached, StoreRpc
from kvstore.transport.base import (
    CUDA_IPC,
    DIRECT_TRANSPORTS,
    TRANSPORTS,
    BlockMemory,
    Transport,
)
from kvstore.transport.connect import connect
from kvstore.transport.nixl import region_of
from process import logs
from process.deadline import Deadline
from process.errors import BatonError
from protos import kvstore_pb2

logger = logging.getLogger(__name__)

HEARTBEAT_S = 5.0
"""A twelfth of the store's default attachment_ttl_s."""
_HEARTBEAT_TIMEOUT_S = 5.0
GOODBYE_S = 2.0
"""Time for saying goodbye; a store that does not hear it notices by itself."""


@dataclass(frozen=True)
class Introduction:
    """What a worker says about itself. fingerprint: hex. transport: of those in transport/base."""

    worker_id: str
    worker_incarnation: bytes
    fingerprint: str
    memory: BlockMemory
    transport: str
    nixl_net_devices: str = "lo"


async def meet(rpc: StoreRpc, who: Introduction, deadline: Deadline) -> tuple[Attached, Transport]:
    """Introduce this life of a worker to the store. Owns `rpc` from here on until it returns.

    Raises: FailedPrecondition (another layout; the transport cannot be used here), Unavailable,
        NoCapacity (the store has no room for a slab), DeadlineExceeded. Nothing stays attached.
    """
    known = dict.fromkeys((*TRANSPORTS, *DIRECT_TRANSPORTS))
    if who.transport not in known:
        raise ValueError(f"transport: one of {', '.join(known)}, got {who.transport!r}")
    agent: NixlAgent | None = None
    attached: Attached | None = None
    request = kvstore_pb2.AttachRequest(
        worker_id=who.worker_id,
        worker_incarnation=who.worker_incarnation,
        model_fingerprint=bytes.fromhex(who.fingerprint),
        block_bytes=who.memory.block_bytes,
        transport=who.transport,
    )
    try:
        async with deadline.timeout(f"attaching to store {rpc.address}"):
            if who.transport == "nixl":
                # A name of its own each time: the store never takes it for a former life's.
                name = f"worker-{secrets.token_hex(16)}"
                agent = await NixlAgent.start(name, who.nixl_net_devices, deadline)
                await _describe_region(request, agent, who.memory)
            if who.transport == CUDA_IPC:
                request.host_id = own_host_id()
            request.checksum = wire.checksum_of(request)
            reply = await rpc.call(rpc.stub.Attach, request, deadline)
            with rpc.reading():
                answer_checks.check_attached(reply, request)
            attached = Attached.of(reply)
            return attached, await connect(who.transport, who.memory, rpc, agent, attached)
    except BaseException:
        if agent is not None:
            await agent.close(Deadline.after(GOODBYE_S))
        if attached is not None:
            await say_goodbye(rpc, attached.attachment_id)
        await rpc.close()
        raise


async def beat(rpc: StoreRpc, attached: Attached, every_s: float) -> None:
    """Tell the store that this worker lives, and learn whether the store does, until the connection
    is broken."""
    request = kvstore_pb2.MatchRequest(attachment_id=attached.attachment_id)
    while not rpc.broken:
        await rpc.rest(every_s)
        try:
            reply = await rpc.call(rpc.stub.Match, request, Deadline.after(_HEARTBEAT_TIMEOUT_S))
        except BatonError as error:
            rpc.mark_broken(f"no heartbeat: {error}")
        else:
            if reply.incarnation != attached.incarnation:
                rpc.mark_broken("another life of the store answers")


async def say_goodbye(rpc: StoreRpc, attachment_id: str) -> None:
    """Tell the store, if it listens; otherwise it notices by itself."""
    if rpc.broken:
        return
    request = kvstore_pb2.DetachRequest(attachment_id=attachment_id)
    try:
        await rpc.call(rpc.stub.Detach, request, Deadline.after(GOODBYE_S))
    except BatonError as error:
        logs.event(logger, "detach_failed", level=logging.DEBUG, why=str(error))


async def _describe_region(
    request: kvstore_pb2.AttachRequest, agent: NixlAgent, memory: BlockMemory
) -> None:
    region = region_of(memory)
    request.nixl_agent = agent.name
    device = memory.device
    if device is None:
        request.nixl_metadata = await agent.register(region)
    else:
        request.nixl_metadata = await agent.register(region, before=device.use_in_this_thread)
    request.region_address = region.address
    request.region_num_blocks = memory.num_blocks
    request.region_device_id = region.device_id
    request.region_memory = region.memory
