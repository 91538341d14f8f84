"""LeaseRelease: the router's release of the KV leases of handles that no decode worker will use.

The leases of a handle belong to the process that holds the handle. The router holds it between the
prefill worker's answer and the command to the decode worker. When the request ends in between (a
stop string in the first token, a cancel), the router releases the leases at the stores and lenders.
Best effort, in background tasks: a lease that is not released expires at the store. One asyncio
loop.
"""

from __future__ import annotations

import asyncio
import logging

import grpc.aio
from google.protobuf.message import DecodeError

from kvstore.node_ids import is_lender
from process import logs, rpc
from process.authorization import PeerRole
from process.rpc import Dialer
from protos import kvstore_pb2, kvstore_pb2_grpc
from services.router.sealed_handle import SealedHandle

logger = logging.getLogger(__name__)


class LeaseRelease:
    """Client that releases leases at stores and at prefill workers that lend blocks."""

    def __init__(self, *, timeout_s: float, dial: Dialer = rpc.PLAIN) -> None:
        self._timeout_s = timeout_s
        self._dial = dial
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def num_under_way(self) -> int:
        """Number of Release calls under way."""
        return len(self._tasks)

    def release(self, sealed: SealedHandle) -> None:
        """Release the leases of a handle at every store and lender that it names, in the
        background. A handle that cannot be parsed is logged and left to expire."""
        try:
            handle = sealed.opened()
        except DecodeError as error:
            logs.event(logger, "handle_unreadable", level=logging.WARNING, why=str(error))
            return
        leases: dict[tuple[str, PeerRole], set[str]] = {}
        for run in (*handle.runs, handle.tail):
            if run.lease_id and run.store_address:
                role = PeerRole.PREFILL if is_lender(run.node_id) else PeerRole.KVSTORE
                leases.setdefault((run.store_address, role), set()).add(run.lease_id)
        for (address, role), lease_ids in leases.items():
            task = asyncio.create_task(self._tell(address, role, sorted(lease_ids)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Wait for the calls under way; each is bounded by the timeout."""
        await asyncio.gather(*self._tasks)

    async def _tell(self, address: str, role: PeerRole, lease_ids: list[str]) -> None:
        """Release leases at one store or lender; a failure is logged."""
        async with self._dial(address, role) as channel:
            try:
                await kvstore_pb2_grpc.KvStoreStub(channel).Release(
                    kvstore_pb2.ReleaseRequest(lease_ids=lease_ids), timeout=self._timeout_s
                )
            except grpc.aio.AioRpcError as error:
                logs.event(
                    logger,
                    "lease_left_to_lapse",
                    level=logging.WARNING,
                    store_address=address,
                    why=str(rpc.error_from_rpc(error)),
                )
