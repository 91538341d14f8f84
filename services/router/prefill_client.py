"""Calls to prefill workers, and how much this router has sent to each.

One channel per worker life. Cancelling the caller cancels the call, which cancels the work. Law:
tokens counted as sent are taken off again when their call is over, however it ends. One asyncio
loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterable
from typing import Any, Protocol

import grpc.aio

from process import serving
from process.deadline import Deadline
from process.errors import Cancelled, Internal, Unavailable
from protos import common_pb2, prefill_pb2
from services.router.sealed_handle import PrefillNews, SealedHandle
from services.router.views import WorkerView

_END_WAIT_S = 1.0
"""For the end of a call behind its last message; guessed, far above what it takes."""

_METHOD = "/baton.v1.Prefill/Prefill"
"""Called by name: the generated stub would read the handles that are only passed on."""

Life = tuple[str, str]
"""Address and incarnation: one life of one worker."""


class Listener(Protocol):
    """Who asked for a prompt."""

    async def show(self, first: prefill_pb2.PrefillReply) -> None:
        """A sample's first token, as soon as it comes."""
        ...

    def prefetch(self, partial: SealedHandle) -> None:
        """What the worker has stored so far. Its leases stay the worker's."""
        ...

    def account_deadline(self) -> Deadline:
        """Asked once all first tokens are shown: how long to wait for the rest."""
        ...


class PrefillClient:
    """All prefill workers."""

    def __init__(self) -> None:
        self._channels: dict[Life, grpc.aio.Channel] = {}
        self._queued_tokens: Counter[str] = Counter()
        self._num_calls: Counter[Life] = Counter()
        self._closing: set[asyncio.Task[None]] = set()

    def reconcile(self, workers: Iterable[WorkerView]) -> None:
        """Drop the channels of lives that are no more, once no call is under way on them."""
        alive = {(worker.address, worker.incarnation) for worker in workers}
        for life in [life for life in self._channels if life not in alive]:
            if self._num_calls[life]:
                continue  # it ends by its deadline, or with the peer's connection
            task = asyncio.create_task(self._channels.pop(life).close(grace=None))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
            del self._num_calls[life]

    def num_queued_tokens(self, worker_id: str) -> int:
        """Prompt tokens sent there and not answered yet."""
        return self._queued_tokens[worker_id]

    @property
    def num_calls(self) -> int:
        """Calls under way."""
        return self._num_calls.total()

    async def prefill(
        self,
        worker: WorkerView,
        request: prefill_pb2.PrefillRequest,
        deadline: Deadline,
        listener: Listener,
    ) -> PrefillNews:
        """One prompt in; the first token of each of its samples goes to `listener` as it comes, and
        so does each partial handle.

        Returns: the account and the handle.
        Raises: what the worker says; Unavailable when it is gone; DeadlineExceeded.
        """
        num_tokens = len(request.prompt_token_ids)
        life = (worker.address, worker.incarnation)
        if life not in self._channels:
            self._channels[life] = serving.channel(worker.address)
        method = self._channels[life].unary_stream(
            _METHOD,
            request_serializer=prefill_pb2.PrefillRequest.SerializeToString,
            response_deserializer=PrefillNews.parse,
        )
        self._queued_tokens[worker.worker_id] += num_tokens
        self._num_calls[life] += 1
        call = method(request, timeout=deadline.left_s())
        try:
            for _ in range(num_first_messages(request.sampling)):
                first = await _next(call, listener)
                if first is None or not (first.reply.token_ids or first.reply.beam_start):
                    raise Internal(f"prefill worker {worker.worker_id} answered without a token")
                await listener.show(first.reply)
            async with listener.account_deadline().timeout("the prefill worker's account"):
                last = await _next(call, listener)
            is_partial = last is not None and last.handle is not None and last.handle.is_partial
            if last is None or not last.reply.HasField("leg") or is_partial:
                raise Internal(f"prefill worker {worker.worker_id} gave no account")
            # The call's end follows at once. A worker that was cancelled before it would take its
            # handle for lost and release the leases. How the call ends says nothing more.
            with contextlib.suppress(grpc.aio.AioRpcError, TimeoutError):
                async with asyncio.timeout(_END_WAIT_S):
                    await call.read()
        except grpc.aio.AioRpcError as error:
            ours = serving.error_from_rpc(error)
            if isinstance(ours, Cancelled):
                # A stopping server says so of calls that it had not taken; nobody cancelled.
                ours = Unavailable(f"prefill worker {worker.worker_id} is stopping")
            raise ours from error
        finally:
            call.cancel()  # and with it the work; nothing once it is over
            self._queued_tokens[worker.worker_id] -= num_tokens
            self._num_calls[life] -= 1
        return last

    async def close(self) -> None:
        """Close every channel; the router's requests are over by then."""
        channels, self._channels = self._channels, {}
        await asyncio.gather(
            *self._closing, *(channel.close(grace=None) for channel in channels.values())
        )

    def check_integrity(self) -> None:
        """Raises: Internal when a count is below none, or tokens are queued without a call."""
        counts = (*self._queued_tokens.values(), *self._num_calls.values())
        if min(counts, default=0) < 0:
            raise Internal("a prefill count is below 0")
        if (self._queued_tokens.total() > 0) != (self.num_calls > 0):
            raise Internal(
                f"{self._queued_tokens.total()} prompt tokens queued in {self.num_calls} calls"
            )


async def _next(
    call: grpc.aio.UnaryStreamCall[Any, PrefillNews], listener: Listener
) -> PrefillNews | None:
    """The call's next message that is no partial handle; None: it has no more."""
    while True:
        message: Any = await call.read()
        if message is None:  # what cannot be parsed comes as None
            raise Unavailable("a message of the prefill worker cannot be read")
        if message is grpc.aio.EOF:
            return None
        news: PrefillNews = message
        if news.handle is None or not news.is_only_partial:
            return news
        listener.prefetch(news.handle)


def num_first_messages(sampling: common_pb2.SamplingParams) -> int:
    """Messages of a Prefill call before its account: a beam search has one start for all."""
    return 1 if sampling.HasField("beam") else sampling.n or 1
