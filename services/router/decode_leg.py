"""One request's part of a decode stream: its state, and an inbox that merges what its reader has
not taken yet, sample by sample.

States: RESERVING -> RESERVED -> GENERATING -> OVER; `is_queued` while RESERVING, once the worker
has set blocks aside and has the request wait for its places. `cancel` leads from each of the first
three to CANCELLING, and the worker's last word from there to OVER; a broken stream leads to OVER
from everywhere. A worker that leaves ends it, too, by moving it: the handle that comes with that is
whoever takes it, and is given back when nobody does.

Nothing here waits on the network: commands are queued on the stream, events come from its reader.
Of partial handles that wait on the stream only the newest is kept: a worker that does not read
holds one of each request, however much is computed meanwhile. One asyncio loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from process import rpc, trace_spans
from process.deadline import Deadline
from process.errors import BatonError, Internal, Unavailable
from protos import common_pb2, decode_pb2
from services.router.sealed_handle import Command, SealedHandle


class LegState(Enum):
    """See the module."""

    RESERVING = "reserving"
    RESERVED = "reserved"
    GENERATING = "generating"
    CANCELLING = "cancelling"
    OVER = "over"


ALLOWED: dict[LegState, frozenset[LegState]] = {
    LegState.RESERVING: frozenset({LegState.RESERVED, LegState.CANCELLING, LegState.OVER}),
    LegState.RESERVED: frozenset({LegState.GENERATING, LegState.CANCELLING, LegState.OVER}),
    LegState.GENERATING: frozenset({LegState.CANCELLING, LegState.OVER}),
    LegState.CANCELLING: frozenset({LegState.OVER}),
    LegState.OVER: frozenset(),
}


@dataclass
class SampleNews:
    """What came of one sample: tokens in order, and why they are its last if they are."""

    sample_index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[common_pb2.TokenLogprobs] = field(default_factory=list)
    traces: list[common_pb2.StepTrace] = field(default_factory=list)
    reason: common_pb2.FinishReason = common_pb2.FINISH_REASON_UNSPECIFIED
    stop_token_id: int | None = None
    score: float | None = None


@dataclass(frozen=True)
class Moved:
    """The worker let the request go where it was: another one goes on."""

    news: decode_pb2.DecodeMoved
    """All but the handle."""
    handle: SealedHandle | None


@dataclass(frozen=True)
class Arrival:
    """All that came since the reader last looked, each sample once, and the request's end if it is
    there. Its handle is the reader's."""

    samples: tuple[SampleNews, ...] = ()
    finished: decode_pb2.DecodeFinished | None = None
    error: BatonError | None = None
    moved: Moved | None = None


@dataclass
class _Inbox:
    samples: dict[int, SampleNews] = field(default_factory=dict)
    finished: decode_pb2.DecodeFinished | None = None
    error: BatonError | None = None
    moved: Moved | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class DecodeLeg:
    """One key of one stream."""

    def __init__(self, key: int, worker_id: str, send: Callable[[Command], None]) -> None:
        self.key = key
        self.worker_id = worker_id
        self.state = LegState.RESERVING
        self.is_queued = False
        """The worker has set blocks aside, and has the request wait for its places."""
        self.num_tokens_local = 0
        """Prompt tokens whose KV the worker holds already; known once reserved."""
        self.span = trace_spans.NOOP_SPAN
        """Of this leg, where its request is traced; it ends with the leg."""
        self.incarnation = ""
        """Of the worker, as its owner knows it."""
        self.block_size = 1
        """Tokens of a block of the worker's cache."""
        self.give_back: Callable[[SealedHandle], None] = lambda handle: None
        """Called with a handle that came when nobody wanted it any more."""
        self._send = send
        self._inbox = _Inbox()
        self._early: Command | None = None  # the last partial handle that was sent

    @property
    def is_over(self) -> bool:
        return self.state is LegState.OVER

    async def wait_answered(self, deadline: Deadline) -> None:
        """Until the worker has reserved or queued the request.

        Raises: what the worker or the broken stream says; Unavailable when no answer came in time.
        """
        try:
            async with asyncio.timeout(deadline.left_s()):
                while self.state is LegState.RESERVING and not self.is_queued:
                    await self._next_change()
        except TimeoutError as error:
            raise Unavailable(
                f"decode worker {self.worker_id} does not answer a reservation"
            ) from error
        self._check_reserving()

    async def wait_reserved(self) -> None:
        """Until the worker holds blocks and places for this request. The caller bounds the wait.

        Raises: what the worker or the broken stream says.
        """
        while self.state is LegState.RESERVING:
            await self._next_change()
        self._check_reserving()

    def _check_reserving(self) -> None:
        if self._inbox.error is not None:
            raise self._inbox.error
        if self.state not in (LegState.RESERVING, LegState.RESERVED):
            raise Internal(f"decode worker {self.worker_id} ended a reservation without a reason")

    def prefetch(self, handle: SealedHandle) -> None:
        """Have the worker fetch what a partial handle names while prefill goes on. Only a
        reservation that waits can use it: nothing in any other state, never after the end.
        """
        if self.state is not LegState.RESERVED:
            return
        if self._early is not None and not self._early.is_written:
            self._early.handle = handle  # it names all that the older one did
            return
        command = decode_pb2.DecodeCommand(key=self.key, prefetch=decode_pb2.PrefetchDecode())
        self._early = Command(command, handle)
        self._send(self._early)

    def generate(
        self, command: decode_pb2.GenerateFromHandle, handle: SealedHandle | None = None
    ) -> None:
        """Start decoding from a handle (None: the worker computes the prompt itself) after the
        tokens drawn already, which `command` holds.

        Raises: what broke the stream meanwhile.
        """
        if self.state is LegState.OVER:
            raise self._inbox.error or Internal("the reservation is over")
        self._move(LegState.GENERATING)
        message = decode_pb2.DecodeCommand(key=self.key, generate=command)
        self._send(Command(message, handle))

    def cancel_sample(self, sample_index: int) -> None:
        """Ask for the end of one sample; the others go on. Nothing when the request is over."""
        if self.state is LegState.GENERATING:
            command = decode_pb2.CancelSample(sample_index=sample_index)
            self._send(Command(decode_pb2.DecodeCommand(key=self.key, cancel_sample=command)))

    def cancel(self) -> None:
        """Ask for the end; any state, idempotent, never waits."""
        self._give_back_untaken()
        if self.state in (LegState.CANCELLING, LegState.OVER):
            return
        self._move(LegState.CANCELLING)
        command = decode_pb2.DecodeCommand(key=self.key, cancel=decode_pb2.CancelDecode())
        self._send(Command(command))

    async def take(self) -> Arrival:
        """Wait until something came, and take all of it as one. The caller bounds the wait."""
        inbox = self._inbox
        while not (inbox.samples or self.is_over):
            await self._next_change()
        samples, inbox.samples = tuple(inbox.samples.values()), {}
        moved, inbox.moved = inbox.moved, None
        return Arrival(samples, inbox.finished, inbox.error, moved)

    async def wait_over(self) -> decode_pb2.DecodeFinished | decode_pb2.DecodeMoved | None:
        """After `cancel`: the worker's last word with its account, None if the stream broke. The
        caller bounds the wait.
        """
        while not self.is_over:
            await self._next_change()
        moved = self._inbox.moved
        return moved.news if moved is not None else self._inbox.finished

    def on_event(self, event: decode_pb2.DecodeEvent) -> None:
        """The stream's reader: something came for this key."""
        kind = event.WhichOneof("event")
        if kind == "reserved":
            self.num_tokens_local = event.reserved.num_tokens_local
            self.is_queued = False
            if self.state is LegState.RESERVING:
                self._move(LegState.RESERVED)
        elif kind == "queued":
            self.is_queued = True
        elif kind == "tokens":
            self._put(event.tokens)
        elif kind == "finished":
            if event.finished.finish_reason != common_pb2.FINISH_REASON_CANCELLED:
                self._put(event.finished)
            self._inbox.finished = event.finished
            self._move(LegState.OVER)
        elif kind == "moved":
            self._inbox.moved = _moved(event.moved)
            if self.state is LegState.CANCELLING:
                self._give_back_untaken()
            self._move(LegState.OVER)
        elif kind == "failed":
            failed = event.failed
            retry_after_s = failed.retry_after_s if failed.HasField("retry_after_s") else None
            self.fail(rpc.error_of_code(failed.code, failed.message, retry_after_s))
        self._inbox.changed.set()

    def fail(self, error: BatonError) -> None:
        """The end, by the worker's or the stream's fault."""
        self._inbox.error = error
        self._move(LegState.OVER)
        self._inbox.changed.set()

    def _give_back_untaken(self) -> None:
        moved = self._inbox.moved
        if moved is not None and moved.handle is not None:
            self._inbox.moved = Moved(moved.news, None)
            self.give_back(moved.handle)

    def _put(self, part: decode_pb2.DecodeTokens | decode_pb2.DecodeFinished) -> None:
        # After a cancel nobody reads any more: what overshot is dropped here.
        if self.state is LegState.CANCELLING:
            return
        index = part.sample_index
        news = self._inbox.samples.setdefault(index, SampleNews(index))
        news.token_ids += part.token_ids
        news.logprobs += part.logprobs
        news.traces += part.traces
        news.reason = part.finish_reason
        if part.HasField("stop_token_id"):
            news.stop_token_id = part.stop_token_id
        if part.HasField("score"):
            news.score = part.score

    async def _next_change(self) -> None:
        await self._inbox.changed.wait()
        self._inbox.changed.clear()

    def _move(self, state: LegState) -> None:
        if state not in ALLOWED[self.state]:
            raise Internal(f"decode leg {self.key}: {self.state.value} -> {state.value}")
        self.state = state
        if state is LegState.OVER:
            self.span.end(self._inbox.error)


def _moved(news: decode_pb2.DecodeMoved) -> Moved:
    handle = None
    if news.HasField("handle"):
        handle = SealedHandle(news.handle.SerializeToString(), is_partial=False)
        news.ClearField("handle")
    return Moved(news, handle)
