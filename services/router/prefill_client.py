"""Prompts to prefill workers, and how much this router has sent to each.

One stream per worker life (`prefill_stream`). Cancelling the caller cancels the prompt at the
worker. Law: tokens counted as sent are taken off again when their caller is done, however that
ends. One asyncio loop.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol

from process import rpc
from process.authorization import PeerRole
from process.deadline import Clock, Deadline
from process.errors import Internal, Unavailable
from process.rpc import Dialer
from protos import common_pb2, prefill_pb2
from services.router.config import RouterTimes
from services.router.others_load import OthersLoad
from services.router.prefill_call import GiveBack, PrefillCall
from services.router.prefill_stream import PrefillStream
from services.router.sealed_handle import PrefillNews, SealedHandle
from services.router.views import WorkerView
from services.router.worker_streams import WorkerStreams


class Listener(Protocol):
    """Who asked for a prompt."""

    async def show_prompt_logprobs(self, logprobs: Sequence[common_pb2.TokenLogprobs]) -> None:
        """Of the prompt's next tokens, as they come; all before the first tokens."""
        ...

    async def show(self, first: prefill_pb2.PrefillReply) -> None:
        """A sample's first token, as soon as it comes."""
        ...

    def prefetch(self, partial: SealedHandle) -> None:
        """What the worker has stored so far, as it comes. Its leases stay the worker's."""
        ...

    def account_deadline(self) -> Deadline:
        """Asked once all first tokens are shown: how long to wait for the rest."""
        ...


class PrefillClient:
    """All prefill workers."""

    def __init__(
        self,
        times: RouterTimes,
        *,
        give_back: GiveBack,
        dial: Dialer = rpc.PLAIN,
        clock: Clock = time.monotonic,
    ) -> None:
        """`give_back`: takes handles that came too late for whoever had asked."""
        self._times = times
        self._give_back = give_back
        self._dial = dial
        self._streams = WorkerStreams(
            PeerRole.PREFILL, lapse_grace_s=times.lapse_grace_s, clock=clock, make=self._make
        )
        self._queued_tokens: Counter[str] = Counter()
        self._others = OthersLoad(clock)
        self._num_under_way = 0

    @property
    def on_change(self) -> list[Callable[[str], None]]:
        """Called with the id of a worker whose queue or stream changed."""
        return self._streams.on_change

    def reconcile(self, workers: Iterable[WorkerView]) -> None:
        """`workers` are those known now; see `WorkerStreams.reconcile`."""
        workers = list(workers)
        changed = self._others.reckon(
            workers,
            lambda worker: worker.num_queued_tokens,
            lambda worker_id: self._queued_tokens[worker_id],
        )
        for worker_id in changed:
            self._streams.tell(worker_id)
        self._streams.reconcile(workers)

    def drop(self, worker_id: str, why: str) -> bool:
        """See `WorkerStreams.drop`."""
        return self._streams.drop(worker_id, why)

    def is_up(self, worker_id: str) -> bool:
        """Whether the worker's stream stands."""
        stream = self._streams.find(worker_id)
        return stream is not None and stream.is_up

    def num_queued_tokens(self, worker_id: str) -> int:
        """Prompt tokens to be computed, sent there and not answered yet: ours as of now, other
        routers' as of the worker's last heartbeat."""
        return self._queued_tokens[worker_id] + (self._others.of(worker_id) or 0)

    @property
    def num_calls(self) -> int:
        """Prompts under way, or without their worker's last word."""
        return max(self._num_under_way, sum(stream.num_legs for stream in self._streams))

    async def prefill(
        self,
        worker: WorkerView,
        request: prefill_pb2.PrefillRequest,
        deadline: Deadline,
        listener: Listener,
        num_tokens: int | None = None,
    ) -> PrefillNews:
        """One prompt in; the first token of each of its samples goes to `listener` as it comes, and
        so does each partial handle.

        Args: num_tokens: prompt tokens that should have to be computed; None: all.
        Returns: the account and the handle.
        Raises: what the worker says; Unavailable when it is gone; DeadlineExceeded.
        """
        if num_tokens is None:
            num_tokens = len(request.prompt_token_ids)
        stream = self._streams.find(worker.worker_id)
        if stream is None or stream.incarnation != worker.incarnation:
            raise Unavailable(f"prefill worker {worker.worker_id} is gone", retry_after_s=1.0)
        self._count(worker.worker_id, num_tokens)
        self._num_under_way += 1
        try:
            call = await stream.open(request, deadline, listener.prefetch)
            try:
                who = f"prefill worker {worker.worker_id}"
                return await _read(
                    call, num_first_messages(request.sampling), listener, deadline, who
                )
            finally:
                call.close()  # nothing once it is over
        finally:
            self._count(worker.worker_id, -num_tokens)
            self._num_under_way -= 1

    async def close(self) -> None:
        """End every stream; the router's requests are over by then."""
        await self._streams.close()

    def _make(self, worker: WorkerView) -> PrefillStream:
        return PrefillStream(
            worker,
            connect_timeout_s=self._times.connect_timeout_s,
            give_back=self._give_back,
            on_change=partial(self._streams.tell, worker.worker_id),
            dial=self._dial,
        )

    def _count(self, worker_id: str, num_tokens: int) -> None:
        self._queued_tokens[worker_id] += num_tokens
        self._others.note(worker_id, self._queued_tokens[worker_id])
        self._streams.tell(worker_id)

    def check_integrity(self) -> None:
        """Raises: Internal when a stream breaks its law, a count is below none, tokens are queued
        without a prompt under way, or more prompts run than are under way here.
        """
        self._streams.check_integrity()
        if min((*self._queued_tokens.values(), self._num_under_way), default=0) < 0:
            raise Internal("a prefill count is below 0")
        if (self._queued_tokens.total() > 0) != (self._num_under_way > 0):
            raise Internal(
                f"{self._queued_tokens.total()} prompt tokens queued in {self._num_under_way} calls"
            )
        num_running = sum(stream.num_running for stream in self._streams)
        if num_running > self._num_under_way:
            raise Internal(f"{num_running} prompts run for {self._num_under_way} callers")


async def _read(
    call: PrefillCall, num_firsts: int, listener: Listener, deadline: Deadline, who: str
) -> PrefillNews:
    """All of a call's messages. Only waits for the worker are bounded here, never the client: what
    is being shown must not be lost. Returns: the last one.
    """
    while num_firsts:
        first = await _next(call, deadline, "the prefill worker's answer")
        if first.reply.prompt_logprobs:
            await listener.show_prompt_logprobs(first.reply.prompt_logprobs)
            continue
        if not (first.reply.token_ids or first.reply.beam_start):
            raise Internal(f"{who} answered without a token")
        await listener.show(first.reply)
        num_firsts -= 1
    last = await _next(call, listener.account_deadline(), "the prefill worker's account")
    is_partial = last.handle is not None and last.handle.is_partial
    if not last.reply.HasField("leg") or is_partial:
        raise Internal(f"{who} gave no account")
    return last


async def _next(call: PrefillCall, deadline: Deadline, what: str) -> PrefillNews:
    if call.has_news:
        return await call.next()
    async with deadline.timeout(what):
        return await call.next()


def num_first_messages(sampling: common_pb2.SamplingParams) -> int:
    """Messages of a prompt before its account: a beam search has one start for all."""
    return 1 if sampling.HasField("beam") else sampling.n or 1
