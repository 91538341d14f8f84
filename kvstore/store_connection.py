"""A worker's gRPC connection to one store, or to one worker that lends its cache: calls with
deadlines, errors of `process.rpc_errors`, heartbeats.

The connection breaks when the store is away, when it was restarted (another incarnation answers),
and when a reply cannot be right. It stays broken for good: every further call fails at once, and
its owner attaches again. Nothing here retries. One asyncio loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import grpc.aio

from kvstore.block_source import StoreInfo
from kvstore.errors import LeaseLapsed
from kvstore.wire import SpoiledAnswer
from process import logs, rpc, trace_spans
from process.authorization import PeerRole
from process.deadline import Deadline
from process.rpc import Dialer
from process.rpc_errors import BatonError, DeadlineExceeded, Internal, NotFound, Unavailable
from protos import kvstore_pb2, kvstore_pb2_grpc

logger = logging.getLogger(__name__)

HEARTBEAT_S = 5.0
"""Time between two heartbeats of a worker: a twelfth of the store's default attachment_ttl_s."""
DETACH_S = 2.0
"""Time for the Detach call; a store that does not receive it notices the worker's end by itself."""
_HEARTBEAT_TIMEOUT_S = 5.0


class StoreConnection:
    """The gRPC connection of one worker to a store or lender: it makes the calls of `stub`, sends
    heartbeats, and notices when the peer is gone. `broken` says why it is of no use any more; None
    while it works."""

    def __init__(
        self, address: str, dial: Dialer = rpc.PLAIN, role: PeerRole = PeerRole.KVSTORE
    ) -> None:
        """Args: address: host:port or unix:/path of the store. role: what the peer's certificate
        must name: a store, or a prefill worker that lends."""
        self.address = address
        self.broken: str | None = None
        self._channel = dial(address, role)
        self._loss: asyncio.Task[None] | None = None
        self.stub = kvstore_pb2_grpc.KvStoreStub(self._channel)

    # -- calls

    async def call(
        self,
        method: Callable[..., Any],
        request: Any,
        deadline: Deadline,
        *,
        even_if_broken: bool = False,
    ) -> Any:
        """Make one call (unary, or a stream of requests with one reply). even_if_broken: also on a
        broken connection.

        Raises: LeaseLapsed, Unavailable, DeadlineExceeded, and any other error of the store.
        """
        if not even_if_broken:
            self.check()
        if deadline.expired:
            # gRPC would send the request all the same.
            raise DeadlineExceeded("no time is left for the call")
        with self.closing_is_unavailable():
            try:
                reply = await method(
                    request, timeout=deadline.left_s(), metadata=trace_spans.current_span().headers
                )
            except grpc.aio.AioRpcError as error:
                raise self.translate(error) from error
        with self.checking_reply():
            if reply is None:  # gRPC gives None for a message that it cannot parse
                raise SpoiledAnswer("it cannot be read")
        return reply

    @contextlib.contextmanager
    def checking_reply(self) -> Iterator[None]:
        """Context in which a reply is checked: a SpoiledAnswer raised within it breaks the
        connection, since what the store did for that call is unknown. The store cleans up after an
        attachment that is over.

        Raises: Unavailable for a SpoiledAnswer.
        """
        try:
            yield
        except SpoiledAnswer as error:
            self.mark_broken(f"an answer came that cannot be right: {error}")
            raise Unavailable(f"store {self.address}: {error}", retry_after_s=0.0) from error

    @contextlib.contextmanager
    def closing_is_unavailable(self) -> Iterator[None]:
        """Context in which a call is awaited: a cancellation that closing the channel caused
        becomes Unavailable, for the caller was not cancelled. A cancellation of the caller itself
        goes through."""
        task = asyncio.current_task()
        num_cancels = task.cancelling() if task is not None else 0
        try:
            yield
        except asyncio.CancelledError:
            if task is not None and task.cancelling() > num_cancels:
                raise
            self.check()
            raise Unavailable(f"store {self.address}: the connection was closed") from None

    def translate(self, error: grpc.aio.AioRpcError) -> BatonError:
        """Convert the gRPC error of a failed call to a BatonError. Unavailable and Internal break
        the connection: the store is away, or its answer was damaged, and what it reserved is
        unknown."""
        ours = rpc.error_from_rpc(error)
        if isinstance(ours, Unavailable | Internal):
            self.mark_broken(str(ours))
        if isinstance(ours, NotFound):
            return LeaseLapsed(str(ours))
        return ours

    # -- broken for good

    def check(self) -> None:
        """Check that the connection is not broken. Raises: Unavailable with the reason."""
        if self.broken is not None:
            raise Unavailable(f"store {self.address}: {self.broken}", retry_after_s=0.0)

    def mark_broken(self, reason: str) -> None:
        """Break the connection for good: every further call fails with the first reason given."""
        if self.broken is None:
            self.broken = reason

    async def send_heartbeats(self, store: StoreInfo, every_s: float) -> None:
        """Call the store every `every_s` until the connection breaks, to show that this worker
        lives and to notice when the store is gone or was restarted."""
        request = kvstore_pb2.MatchRequest(attachment_id=store.attachment_id)
        while not self.broken:
            await self.sleep_until_lost(every_s)
            try:
                reply = await self.call(
                    self.stub.Match, request, Deadline.after(_HEARTBEAT_TIMEOUT_S)
                )
            except BatonError as error:
                self.mark_broken(f"no heartbeat: {error}")
            else:
                if reply.incarnation != store.incarnation:
                    self.mark_broken("the store was restarted")

    async def sleep_until_lost(self, seconds: float) -> None:
        """Sleep for `seconds`, less if the channel loses its connection: the store may be dead."""
        ready = grpc.ChannelConnectivity.READY
        if self._loss is None or self._loss.done():
            if self._channel.get_state() is not ready:
                await asyncio.sleep(seconds)
                return
            # One watch for as long as the connection lasts: gRPC keeps each until it ends.
            self._loss = asyncio.create_task(self._channel.wait_for_state_change(ready))
            self._loss.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.wait([self._loss], timeout=seconds)

    async def detach(self, attachment_id: str) -> None:
        """End the attachment at the store. A failure is only logged: the store notices the
        worker's end by itself."""
        if self.broken:
            return
        request = kvstore_pb2.DetachRequest(attachment_id=attachment_id)
        try:
            await self.call(self.stub.Detach, request, Deadline.after(DETACH_S))
        except BatonError as error:
            logs.event(logger, "detach_failed", level=logging.DEBUG, why=str(error))

    async def close(self) -> None:
        """Close the channel; calls under way fail with Unavailable."""
        self.mark_broken("closed")
        if self._loss is not None:
            self._loss.cancel()
        await self._channel.close()
