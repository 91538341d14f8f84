"""Gives back the leases of handles that no decode worker will take over.

A handle's leases belong to whoever holds it. The router holds it between the prefill worker's
answer and the decode worker's command; when the request ends in between (a stop in the first
token's text, a cancel), it tells the stores. Best effort and off the request's path: a lease that
stays lapses by itself. One asyncio loop.
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
    """See the module."""

    def __init__(self, *, timeout_s: float, dial: Dialer = rpc.PLAIN) -> None:
        self._timeout_s = timeout_s
        self._dial = dial
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def num_under_way(self) -> int:
        """Stores being told."""
        return len(self._tasks)

    def release(self, sealed: SealedHandle) -> None:
        """Tell every store and lender that the handle names; never waits."""
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
        """Wait for what is under way; bounded by the timeout."""
        await asyncio.gather(*self._tasks)

    async def _tell(self, address: str, role: PeerRole, lease_ids: list[str]) -> None:
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
