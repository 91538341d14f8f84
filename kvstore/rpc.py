"""A worker's control connection to one life of one store: calls with deadlines, errors of our own.

Notices when the store is another life than the one attached to, or away: from then on the
connection is `broken` and every call fails at once; its owner attaches again. One asyncio loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc.aio

from kvstore.answer_checks import SpoiledAnswer
from kvstore.errors import LeaseLapsed
from kvstore.transport.device import Shared
from process import serving, spans
from process.access import Role
from process.deadline import Deadline
from process.errors import BatonError, DeadlineExceeded, Internal, NotFound, Unavailable
from process.serving import Dialer
from protos import kvstore_pb2, kvstore_pb2_grpc


@dataclass(frozen=True)
class Attached:
    """What the handshake told: who the store is and where its frames lie."""

    attachment_id: str
    node_id: str
    incarnation: bytes
    frame_bytes: int
    num_frames: int
    slab_path: str
    nixl_metadata: bytes
    region_address: int
    shared: Shared | None = None
    """A lender's memory, of transport cuda_ipc."""
    keeps_history: bool = False
    """It wants to hear which blocks were verified."""
    tells_when_lent: bool = False
    """A lender that can be asked for the rest of a lease that still grows."""

    @classmethod
    def of(cls, reply: kvstore_pb2.AttachReply) -> Attached:
        return cls(
            attachment_id=reply.attachment_id,
            node_id=reply.node_id,
            incarnation=reply.incarnation,
            frame_bytes=reply.frame_bytes,
            num_frames=reply.num_frames,
            slab_path=reply.slab_path,
            nixl_metadata=reply.nixl_metadata,
            region_address=reply.region_address,
            shared=Shared(reply.ipc_handle, reply.ipc_offset_bytes) if reply.ipc_handle else None,
            keeps_history=reply.keeps_history,
            tells_when_lent=reply.tells_when_lent,
        )


class StoreRpc:
    """See the module."""

    def __init__(
        self, address: str, dial: Dialer = serving.PLAIN, role: Role = Role.KVSTORE
    ) -> None:
        """`role`: of who answers there: a store, or a prefill worker that lends."""
        self.address = address
        self.broken: str | None = None
        self._channel = dial(address, role)
        self._loss: asyncio.Task[None] | None = None
        self.stub = kvstore_pb2_grpc.KvStoreStub(self._channel)

    async def call(
        self,
        method: Callable[..., Any],
        request: Any,
        deadline: Deadline,
        *,
        even_if_broken: bool = False,
    ) -> Any:
        """One call (unary, or a stream of requests with one reply).

        Raises: LeaseLapsed, Unavailable, DeadlineExceeded and what else the store says.
        """
        if not even_if_broken:
            self.check()
        if deadline.expired:
            raise DeadlineExceeded(
                "no time is left for the call"
            )  # gRPC would send it all the same
        with self.closing_is_unavailable():
            try:
                reply = await method(
                    request, timeout=deadline.left_s(), metadata=spans.current().headers
                )
            except grpc.aio.AioRpcError as error:
                raise self.translate(error) from error
        with self.reading():
            if reply is None:  # what gRPC makes of a message that is none
                raise SpoiledAnswer("it cannot be read")
        return reply

    async def rest(self, seconds: float) -> None:
        """Wait so long, or until the connection is lost: whoever answered may have died."""
        ready = grpc.ChannelConnectivity.READY
        if self._loss is None or self._loss.done():
            if self._channel.get_state() is not ready:
                await asyncio.sleep(seconds)
                return
            # One for as long as the connection lasts: gRPC keeps also those that nobody awaits.
            self._loss = asyncio.create_task(self._channel.wait_for_state_change(ready))
            self._loss.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.wait([self._loss], timeout=seconds)

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Looking at an answer: one that is spoiled breaks the connection. Nobody knows what the
        store has done for it, and the store cleans up after an attachment that is over.

        Raises: Unavailable for a SpoiledAnswer.
        """
        try:
            yield
        except SpoiledAnswer as error:
            self.mark_broken(f"an answer came that cannot be right: {error}")
            raise Unavailable(f"store {self.address}: {error}", retry_after_s=0.0) from error

    @contextlib.contextmanager
    def closing_is_unavailable(self) -> Iterator[None]:
        """Closing the channel cancels the calls on it: to their callers, whom nobody cancelled,
        that is a store that has gone."""
        task = asyncio.current_task()
        num_cancels = task.cancelling() if task is not None else 0
        try:
            yield
        except asyncio.CancelledError:
            if task is not None and task.cancelling() > num_cancels:
                raise
            self.check()
            raise Unavailable(f"store {self.address}: the connection was closed") from None

    def check(self) -> None:
        """Raises: Unavailable when the connection is broken."""
        if self.broken is not None:
            raise Unavailable(f"store {self.address}: {self.broken}", retry_after_s=0.0)

    def translate(self, error: grpc.aio.AioRpcError) -> BatonError:
        """Our error for a failed call; a store that is away breaks the connection, and so does an
        answer that was spoiled on its way: nobody knows what it had reserved, and the store cleans
        up after an attachment that is over."""
        ours = serving.error_from_rpc(error)
        if isinstance(ours, Unavailable | Internal):
            self.mark_broken(str(ours))
        if isinstance(ours, NotFound):
            return LeaseLapsed(str(ours))
        return ours

    def mark_broken(self, reason: str) -> None:
        if self.broken is None:
            self.broken = reason

    async def close(self) -> None:
        self.mark_broken("closed")
        if self._loss is not None:
            self._loss.cancel()
        await self._channel.close()
