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
from protos import common_pb2, prefill_pb2, prefill_pb2_grpc
from services.router.views import WorkerView

_END_WAIT_S = 1.0
"""For the end of a call behind its last message; guessed, far above what it takes."""

Life = tuple[str, str]
"""Address and incarnation: one life of one worker."""


class Listener(Protocol):
    """Who asked for a prompt."""

    async def show(self, first: prefill_pb2.PrefillReply) -> None:
        """A sample's first token, as soon as it comes."""
        ...

    def prefetch(self, partial: common_pb2.KvHandle) -> None:
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
    ) -> prefill_pb2.PrefillReply:
        """One prompt in; the first token of each of its samples goes to `listener` as it comes, and
        so does each partial handle.

        Returns: the account and the handle.
        Raises: what the worker says; Unavailable when it is gone; DeadlineExceeded.
        """
        num_tokens = len(request.prompt_token_ids)
        life = (worker.address, worker.incarnation)
        if life not in self._channels:
            self._channels[life] = serving.channel(worker.address)
        stub = prefill_pb2_grpc.PrefillStub(self._channels[life])
        self._queued_tokens[worker.worker_id] += num_tokens
        self._num_calls[life] += 1
        call = stub.Prefill(request, timeout=deadline.left_s())
        try:
            for _ in range(num_first_messages(request.sampling)):
                first = await _next(call, listener)
                if first is grpc.aio.EOF or not (first.token_ids or first.beam_start):
                    raise Internal(f"prefill worker {worker.worker_id} answered without a token")
                await listener.show(first)
            async with listener.account_deadline().timeout("the prefill worker's account"):
                last = await _next(call, listener)
            if last is grpc.aio.EOF or not last.HasField("leg") or last.handle.is_partial:
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
        reply: prefill_pb2.PrefillReply = last
        return reply

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
    call: grpc.aio.UnaryStreamCall[prefill_pb2.PrefillRequest, prefill_pb2.PrefillReply],
    listener: Listener,
) -> Any:
    """The call's next message that is no partial handle, or EOF."""
    while True:
        message: Any = await call.read()
        if message is None:  # what cannot be parsed comes as None
            raise Unavailable("a message of the prefill worker cannot be read")
        if message is grpc.aio.EOF or not _is_partial(message):
            return message
        listener.prefetch(message.handle)


def _is_partial(message: prefill_pb2.PrefillReply) -> bool:
    """Whether it brings only a handle, of a prompt that is still being computed."""
    says_more = message.token_ids or message.beam_start or message.HasField("leg")
    return message.handle.is_partial and not says_more


def num_first_messages(sampling: common_pb2.SamplingParams) -> int:
    """Messages of a Prefill call before its account: a beam search has one start for all."""
    return 1 if sampling.HasField("beam") else sampling.n or 1
