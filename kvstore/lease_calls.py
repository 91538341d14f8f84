"""A client's leases, seen from the worker: renewed, released, and what was read under them told to
the store once.

Through some transports the store sees no read; whoever copies adds to `num_bytes_untold`, and the
next call that the store hears carries it. One asyncio loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from kvstore import wire
from kvstore.errors import LeaseLapsed
from kvstore.rpc import StoreRpc
from process.deadline import Deadline
from process.errors import BatonError
from protos import kvstore_pb2


class LeaseCalls:
    """See the module."""

    def __init__(self, rpc: StoreRpc) -> None:
        self._rpc = rpc
        self.num_bytes_untold = 0

    async def renew(self, lease_id: str, ttl_s: float, deadline: Deadline) -> None:
        """Let the lease live at least `ttl_s` from now. Raises: LeaseLapsed."""
        request = kvstore_pb2.RenewRequest(lease_id=lease_id, ttl_ms=wire.ttl_ms(ttl_s))
        await self._tell(self._rpc.stub.Renew, request, deadline)

    async def release(self, lease_ids: Sequence[str], deadline: Deadline) -> int:
        """End leases; empty ids and leases that are over are passed over. Returns: how many
        ended."""
        request = kvstore_pb2.ReleaseRequest(
            lease_ids=[lease_id for lease_id in lease_ids if lease_id]
        )
        reply = await self._tell(self._rpc.stub.Release, request, deadline)
        return int(reply.num_released)

    async def _tell(
        self,
        method: Callable[..., Any],
        request: kvstore_pb2.RenewRequest | kvstore_pb2.ReleaseRequest,
        deadline: Deadline,
    ) -> Any:
        """A call that also tells the store, once, how much was copied without it."""
        request.num_bytes_read, self.num_bytes_untold = self.num_bytes_untold, 0
        try:
            return await self._rpc.call(method, request, deadline)
        except LeaseLapsed:
            raise  # it was heard all the same
        except (BatonError, asyncio.CancelledError):
            self.num_bytes_untold += request.num_bytes_read
            raise
