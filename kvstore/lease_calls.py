"""A client's leases, seen from the worker: renewed, released, and what was read under them told to
the store once.

Through some transports the store sees no read; whoever copies adds to `num_bytes_untold`, and the
next call that the store hears carries it. So it is with blocks that were verified, where the store
keeps their history. One asyncio loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from kvstore import answer_checks, wire
from kvstore.block import Block
from kvstore.errors import LeaseLapsed
from kvstore.lending.told import Told, Word
from kvstore.rpc import Attached, StoreRpc
from process import spans
from process.deadline import Deadline
from process.errors import BatonError
from protos import kvstore_pb2

MAX_VERIFIED_TOLD = 65_536
"""In one call; what is beyond it the history does without."""


class LeaseCalls:
    """See the module."""

    def __init__(self, rpc: StoreRpc, attached: Attached) -> None:
        self._rpc = rpc
        self._attached = attached
        self._verified: list[kvstore_pb2.VerifiedBlocks] = []
        self._num_verified = 0
        self.num_bytes_untold = 0

    def verified(self, blocks: Sequence[Block]) -> None:
        """These were fetched, and their checksums are right."""
        if not blocks or not self._attached.keeps_history:
            return
        self._num_verified += len(blocks)
        if self._num_verified <= MAX_VERIFIED_TOLD:
            self._verified.append(
                kvstore_pb2.VerifiedBlocks(
                    frames=[block.frame for block in blocks],
                    generations=[block.generation for block in blocks],
                    traceparent=spans.current().traceparent,
                )
            )

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

    async def await_lent(
        self,
        lease_id: str,
        num_known: int,
        num_wanted: int,
        wait_s: float,
        hold_s: float,
        deadline: Deadline,
    ) -> tuple[Told, Word]:
        """See StoreClient.await_lent; hold_s: for how long what is told shall stay in place."""
        wanted = (lease_id, num_known, num_wanted, wait_s, hold_s)
        return await await_lent(self._rpc, self._attached, *wanted, deadline)

    async def _tell(
        self,
        method: Callable[..., Any],
        request: kvstore_pb2.RenewRequest | kvstore_pb2.ReleaseRequest,
        deadline: Deadline,
    ) -> Any:
        """A call that also tells the store, once, how much was copied without it, and what was
        verified."""
        request.num_bytes_read, self.num_bytes_untold = self.num_bytes_untold, 0
        if self._verified:
            request.attachment_id = self._attached.attachment_id
            request.verified.extend(self._verified)
            self._verified, self._num_verified = [], 0
        try:
            return await self._rpc.call(method, request, deadline)
        except LeaseLapsed:
            raise  # it was heard all the same
        except (BatonError, asyncio.CancelledError):
            self.num_bytes_untold += request.num_bytes_read
            raise


async def await_lent(
    rpc: StoreRpc,
    attached: Attached,
    lease_id: str,
    num_known: int,
    num_wanted: int,
    wait_s: float,
    hold_s: float,
    deadline: Deadline,
) -> tuple[Told, Word]:
    """See LeaseCalls.await_lent."""
    request = kvstore_pb2.AwaitLentRequest(
        attachment_id=attached.attachment_id,
        lease_id=lease_id,
        num_known=num_known,
        num_wanted=num_wanted,
        budget_ms=wire.ttl_ms(wait_s),
        takes_unsealed=True,
        hold_ms=int(hold_s * 1000),
    )
    asked_s = time.monotonic()
    reply = await rpc.call(rpc.stub.AwaitLent, request, deadline)
    with rpc.reading():
        told = answer_checks.read_rest(reply, request, time.monotonic() - asked_s)
    return told, told.word(asked_s)
