"""PrefillClient and DecodeStreams: the router's gRPC clients of the prefill workers and of the
decode workers, with one multiplexed stream to each worker.

`WorkerStreams` keeps the streams of one role in step with the registry. A new worker gets a stream
at once, so that no request waits for a connection. When a known id comes back with another
incarnation, the old stream is closed and its requests fail. A worker that is gone from the registry
gets no new requests, and its stream is closed when it stays away for the grace time. While Redis is
away every known worker stays known, so no stream is closed.

`WorkerStream` is the stream to one incarnation of one worker; `PrefillStream` and `DecodeStream`
add the messages of their role. It reconnects with growing pauses until it is closed. Each request
on it has a key and a call object; one message carries the news of many keys (from a decode worker:
a whole engine step, and the worker's load after it). When the stream breaks, every call on it fails
with Unavailable. Invariants: a key is in the table from `_enter` until the worker's last message
about it or the end of the stream; a decode stream counts blocks and places as asked for exactly
until the worker answers the reservation.

`PrefillCall` is one prompt on a prefill stream. RUNNING -> OVER with the worker's account or its
error; `close` leads from RUNNING to CANCELLING, and the worker's last message from there to OVER.
Partial handles go to a callback as they come and are never kept. The handle that comes with the
account belongs to the reader once it is taken; otherwise it is given back.

`DecodeCall` is one request on a decode stream. RESERVING -> RESERVED -> GENERATING -> OVER; while
RESERVING, `is_queued` is set once the worker has set blocks aside and queues the request for
places. `cancel` leads from each of the first three states to CANCELLING, and the worker's last
message from there to OVER. A worker that leaves ends the call by moving it; the handle that comes
with the move belongs to the reader that takes it, and is given back when it is not taken. Of
partial handles that wait to be written only the newest is kept, so that a worker that does not read
costs one handle for each request.

Both calls hold an inbox of what their reader has not taken yet; a decode call's inbox merges tokens
by sample. A broken stream leads to OVER from every state. No method of a call waits on the network
except those that wait for news: commands are queued on the stream.

`OthersLoad` estimates the part of a worker's load that comes from other routers, from heartbeats.

`PrefillClient` counts the prompt tokens that it has sent to each worker; they are counted until the
caller is done, however that ends. Cancelling the caller cancels the prompt at the worker.

One asyncio loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from process import logs, rpc, trace_spans
from process.authorization import PeerRole
from process.background_tasks import end_tasks
from process.deadline import Clock, Deadline
from process.registry import BEAT_EVERY_S
from process.rpc import Dialer
from process.rpc_errors import BatonError, Cancelled, Internal, Unavailable
from protos import common_pb2, decode_pb2, prefill_pb2
from services.router.config import RouterTimes
from services.router.sealed_handle import (
    Command,
    Opening,
    PrefillNews,
    PrefillWord,
    SealedHandle,
    words_of,
)
from services.router.worker_views import WorkerView

BEAT_AGE_S = 2 * BEAT_EVERY_S
"""Greatest age in seconds of a heartbeat when it is read: one beat, and as long again for a busy
process."""


class OthersLoad:
    """Estimate of each worker's load from other routers: what its heartbeat shows beyond this
    router's own part. For the workers of one role.

    A heartbeat was written up to BEAT_AGE_S before it is read, and may show requests of this router
    that have ended since. Therefore the most that this router had there within that time is
    subtracted. Where that is too much, the next heartbeat corrects it.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ours: dict[str, deque[tuple[float, int]]] = {}
        """By worker id: (time in seconds, this router's load from then until the next entry),
        oldest first."""
        self._others: dict[str, int] = {}

    def note(self, worker_id: str, num_ours: int) -> None:
        """Record this router's load on a worker as of now."""
        now_s = self._clock()
        past = self._ours.setdefault(worker_id, deque())
        past.append((now_s, num_ours))
        while len(past) > 1 and past[1][0] <= now_s - BEAT_AGE_S:
            past.popleft()

    def reckon(
        self,
        workers: Iterable[WorkerView],
        told: Callable[[WorkerView], int],
        num_ours: Callable[[str], int],
    ) -> list[str]:
        """Recompute the estimates from the registry's heartbeats.

        Args:
            told: returns the load of a worker by its heartbeat.
            num_ours: returns this router's load now, by worker id.
        Returns: ids of workers whose estimate changed.
        """
        others, ours = {}, {}
        for worker in workers:
            name = worker.worker_id
            self.note(name, num_ours(name))
            ours[name] = self._ours[name]
            others[name] = max(0, told(worker) - max(num for _, num in ours[name]))
        before, self._others, self._ours = self._others, others, ours
        return [name for name, num in others.items() if before.get(name) != num]

    def of(self, worker_id: str) -> int | None:
        """Return the load of other routers on a worker; None: no heartbeat was seen."""
        return self._others.get(worker_id)


logger = logging.getLogger(__name__)

_FIRST_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 1.0


class StreamLeg(Protocol):
    """Call of one key on one stream, as the stream sees it."""

    key: int

    @property
    def is_over(self) -> bool:
        """Whether the worker's last message has come, or the stream has ended."""
        ...

    def fail(self, error: BatonError) -> None:
        """End the call with an error of the stream."""
        ...


LegT = TypeVar("LegT", bound=StreamLeg)
Call = grpc.aio.StreamStreamCall[Any, Any]


class WorkerStream(ABC, Generic[LegT]):
    """Multiplexed stream to one incarnation of one worker; subclasses add the messages of their
    role."""

    def __init__(
        self,
        worker: WorkerView,
        role: PeerRole,
        *,
        connect_timeout_s: float,
        on_change: Callable[[], None],
        dial: Dialer = rpc.PLAIN,
    ) -> None:
        """on_change: called when the stream has come up or gone down."""
        self.worker_id = worker.worker_id
        self.incarnation = worker.incarnation
        self.address = worker.address
        self._role = role
        self._who = f"{role.value} worker {self.worker_id}"
        self._connect_timeout_s = connect_timeout_s
        self._on_change = on_change
        self._dial = dial
        self._legs: dict[int, LegT] = {}
        self._last_key = 0
        self._outgoing: asyncio.Queue[Any] = asyncio.Queue()
        self._is_up = False
        self._is_closed = False
        self._attempted = asyncio.Event()
        """Set when an attempt to connect has ended, either way, and no other one has begun."""
        self._failure = Unavailable(f"{self._who} is not reached yet")
        self._task = asyncio.create_task(self._run())

    # ---- implemented by the stream of each role

    @abstractmethod
    def _begin(self, channel: grpc.aio.Channel) -> Call:
        """Open the gRPC call of the stream on `channel`."""

    @abstractmethod
    def _take(self, message: Any) -> None:
        """Handle a message of the worker. Raises: BatonError when the stream must be given up."""

    def _on_break(self) -> None:
        """Clean up after the stream has gone down, before its calls fail."""

    # ---- common to both roles

    @property
    def is_up(self) -> bool:
        """Whether commands reach the worker."""
        return self._is_up

    @property
    def num_legs(self) -> int:
        """Number of keys that wait for the worker's last message."""
        return len(self._legs)

    async def close(self, why: str) -> None:
        """End the stream for good; its calls fail."""
        self._is_closed = True
        self._failure = Unavailable(why)
        await end_tasks([self._task])

    def check_integrity(self) -> None:
        """Raises: Internal when a call that is over is still in the table, or the table holds calls
        while the stream is down."""
        if any(leg.is_over or leg.key != key for key, leg in self._legs.items()):
            raise Internal(f"stream to {self.worker_id} keeps a leg that is over")
        if self._legs and not self._is_up:
            raise Internal(f"stream to {self.worker_id} is down and keeps legs")

    async def _wait_up(self, deadline: Deadline) -> None:
        """Wait until the stream is up; no longer than the current attempt to connect takes.

        Raises: Unavailable when the worker is not reached.
        """
        if not self._is_up:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(deadline.sooner(self._connect_timeout_s).left_s()):
                    await self._attempted.wait()
        if not self._is_up or self._is_closed:
            raise _copy(self._failure)

    def _next_key(self) -> int:
        self._last_key += 1
        return self._last_key

    def _enter(self, leg: LegT) -> None:
        """Put a call into the table, so that the worker's messages reach it."""
        self._legs[leg.key] = leg

    def _leg(self, key: int) -> LegT | None:
        """Return the call of `key`; None, and a line in the log, when the key is unknown."""
        leg = self._legs.get(key)
        if leg is None:
            logs.event(
                logger,
                "event_for_unknown_key",
                level=logging.WARNING,
                worker_id=self.worker_id,
                key=key,
            )
        return leg

    async def _run(self) -> None:
        """Connect and serve, again and again with growing pauses, until cancelled."""
        backoff_s = _FIRST_BACKOFF_S
        while True:
            was_up = False
            try:
                was_up = await self._serve_once()
            except Exception as error:  # the last line of defence: the worker must be met again
                self._failure = Unavailable(f"{self._who}: {error}")
                logger.exception("worker_stream_failed")
            finally:
                self._break()
            if was_up:
                backoff_s = _FIRST_BACKOFF_S
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
            self._attempted.clear()
            backoff_s = min(_MAX_BACKOFF_S, backoff_s * 2)

    async def _serve_once(self) -> bool:
        """Connect, and serve until the stream ends. Returns: whether it was up at all."""
        async with self._dial(self.address, self._role) as channel:
            if not await self._reached(channel):
                self._failure = Unavailable(f"{self._who} is not reached", retry_after_s=1.0)
                return False
            call = self._begin(channel)
            self._outgoing = asyncio.Queue()
            self._is_up = True
            self._attempted.set()
            self._on_change()
            logs.event(
                logger,
                "worker_stream_up",
                role=self._role.value,
                worker_id=self.worker_id,
                address=self.address,
            )
            writer = asyncio.create_task(self._write(call, self._outgoing))
            try:
                while (message := await call.read()) is not grpc.aio.EOF:
                    self._take(message)
                self._failure = Unavailable(f"{self._who} ended the stream", retry_after_s=1.0)
            except grpc.aio.AioRpcError as error:
                cause = rpc.error_from_rpc(error)
                self._failure = Unavailable(f"{self._who} is gone: {cause}", retry_after_s=1.0)
            except BatonError as error:
                self._failure = Unavailable(f"{self._who}: {error}", retry_after_s=1.0)
            finally:
                writer.cancel()
                call.cancel()
                await asyncio.gather(writer, return_exceptions=True)
        return True

    async def _reached(self, channel: grpc.aio.Channel) -> bool:
        """Return whether the worker accepted the connection; a refused connection returns
        at once."""
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                state = channel.get_state(try_to_connect=True)
                while state is not grpc.ChannelConnectivity.READY:
                    if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                        return False
                    await channel.wait_for_state_change(state)
                    state = channel.get_state(try_to_connect=True)
        except TimeoutError:
            return False
        return True

    async def _write(self, call: Call, outgoing: asyncio.Queue[Any]) -> None:
        """Write queued commands to the call until it ends."""
        # The reader sees the end of a broken call, too, and handles it.
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                await call.write(await outgoing.get())

    def _break(self) -> None:
        """Fail all calls with the reason why the stream is down."""
        self._is_up = False
        self._attempted.set()
        self._on_break()
        legs, self._legs = self._legs, {}
        self._on_change()
        if legs:
            logs.event(
                logger,
                "worker_stream_broken",
                level=logging.WARNING,
                role=self._role.value,
                worker_id=self.worker_id,
                num_legs=len(legs),
                why=str(self._failure),
            )
        for leg in legs.values():
            leg.fail(_copy(self._failure))


def _copy(error: BatonError) -> BatonError:
    """Return a new Unavailable with the same text."""
    # One exception object raised in many tasks would mix their tracebacks.
    return Unavailable(str(error), retry_after_s=error.retry_after_s)


StreamT = TypeVar("StreamT", bound=WorkerStream[Any])


class WorkerStreams(Generic[StreamT]):
    """Streams to all workers of one role, by worker id."""

    def __init__(
        self,
        role: PeerRole,
        *,
        lapse_grace_s: float,
        clock: Clock,
        make: Callable[[WorkerView], StreamT],
    ) -> None:
        """lapse_grace_s: seconds that a worker without heartbeat keeps its stream."""
        self._role = role
        self._lapse_grace_s = lapse_grace_s
        self._clock = clock
        self._make = make
        self._streams: dict[str, StreamT] = {}
        self._gone_since: dict[str, float] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self.on_change: list[Callable[[str], None]] = []
        """Callbacks, called with the id of a worker whose stream or load changed."""

    def reconcile(self, workers: Iterable[WorkerView]) -> None:
        """Open a stream to each of `workers` (the known workers of the role), and close those to
        workers that restarted or stayed away for the grace time."""
        known = {worker.worker_id: worker for worker in workers}
        for worker_id, stream in list(self._streams.items()):
            worker = known.get(worker_id)
            who = f"{self._role.value} worker {worker_id}"
            if worker is None:
                since = self._gone_since.setdefault(worker_id, self._clock())
                if self._clock() - since >= self._lapse_grace_s:
                    self._drop(worker_id, f"{who} has no heartbeat")
            elif (worker.incarnation, worker.address) != (stream.incarnation, stream.address):
                self._drop(worker_id, f"{who} restarted")
            else:
                self._gone_since.pop(worker_id, None)
        for worker_id, worker in known.items():
            if worker_id not in self._streams:
                self._streams[worker_id] = self._make(worker)

    def drop(self, worker_id: str, why: str) -> bool:
        """Close a worker's stream that has calls; they fail with `why`. The next `reconcile` opens
        a new stream. Returns: whether there were calls."""
        stream = self._streams.get(worker_id)
        if stream is None or not stream.num_legs:
            return False
        self._drop(worker_id, why)
        return True

    def find(self, worker_id: str) -> StreamT | None:
        """Return the worker's stream; None: the worker is not known, or its stream was closed."""
        return self._streams.get(worker_id)

    def __iter__(self) -> Iterator[StreamT]:
        return iter(self._streams.values())

    def tell(self, worker_id: str) -> None:
        """Call the callbacks of `on_change` for a worker."""
        for tell in self.on_change:
            tell(worker_id)

    async def close(self) -> None:
        """End every stream."""
        for worker_id in list(self._streams):
            self._drop(worker_id, "the router stops")
        await asyncio.gather(*self._closing, return_exceptions=True)

    def check_integrity(self) -> None:
        """Raises: Internal when a stream breaks its invariant."""
        for stream in self._streams.values():
            stream.check_integrity()

    def _drop(self, worker_id: str, why: str) -> None:
        """Remove a worker's stream, and close it in the background."""
        stream = self._streams.pop(worker_id)
        self.tell(worker_id)
        self._gone_since.pop(worker_id, None)
        task = asyncio.create_task(stream.close(why))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


GiveBack = Callable[[SealedHandle], None]


class CallState(Enum):
    """State of a PrefillCall."""

    RUNNING = "running"
    CANCELLING = "cancelling"
    OVER = "over"


PREFILL_TRANSITIONS: dict[CallState, frozenset[CallState]] = {
    CallState.RUNNING: frozenset({CallState.CANCELLING, CallState.OVER}),
    CallState.CANCELLING: frozenset({CallState.OVER}),
    CallState.OVER: frozenset(),
}


class PrefillCall:
    """One prompt on a prefill stream, with an inbox of messages not read yet."""

    def __init__(
        self,
        key: int,
        who: str,
        *,
        send: Callable[[prefill_pb2.PrefillCommand], None],
        on_partial: Callable[[SealedHandle], None],
        give_back: GiveBack,
    ) -> None:
        """who: the worker, as errors name it.
        on_partial: called with each partial handle until the account has come or the call is
            closed.
        give_back: called with a handle that the reader did not take."""
        self.key = key
        self.state = CallState.RUNNING
        self._who = who
        self._send = send
        self._on_partial = on_partial
        self._give_back = give_back
        self._inbox: deque[PrefillNews] = deque()
        self._error: BatonError | None = None
        self._changed = asyncio.Event()

    @property
    def is_over(self) -> bool:
        """Whether the worker's last message has come, or the stream has ended."""
        return self.state is CallState.OVER

    @property
    def has_news(self) -> bool:
        """Whether `next` returns or raises without waiting."""
        return bool(self._inbox) or self._error is not None

    async def next(self) -> PrefillNews:
        """Return the next message that is not a partial handle. The caller bounds the wait.

        Raises: the error of the worker or of the broken stream, after the messages before it;
            Internal after the account.
        """
        while not self._inbox:
            if self._error is not None:
                raise self._error
            if self.is_over:
                raise Internal(f"{self._who} has said its last word")
            self._changed.clear()
            await self._changed.wait()
        return self._inbox.popleft()

    def close(self) -> None:
        """Stop reading: ask the worker to end the prompt, and give back handles that were not
        taken. Allowed in any state, idempotent, never waits."""
        for news in self._inbox:
            self._drop(news)
        self._inbox.clear()
        if self.state is CallState.RUNNING:
            self._move(CallState.CANCELLING)
            cancel = prefill_pb2.CancelPrefill()
            self._send(prefill_pb2.PrefillCommand(key=self.key, cancel=cancel))

    def on_word(self, word: PrefillWord) -> None:
        """Take a message of the worker for this key; called by the stream's reader."""
        if word.failed is not None:
            self._fail(_error_of(word.failed, self._who))
            return
        news = word.news
        assert news is not None, "a word is news or a failure"
        is_closed = self.state is CallState.CANCELLING
        if word.is_last:
            self._move(CallState.OVER)
        if is_closed:
            self._drop(news)
        elif news.handle is not None and news.is_only_partial:
            self._on_partial(news.handle)
        else:
            self._inbox.append(news)
            self._changed.set()

    def fail(self, error: BatonError) -> None:
        """End the call with an error of the stream."""
        self._fail(error)

    def _fail(self, error: BatonError) -> None:
        self._error = error
        self._move(CallState.OVER)
        self._changed.set()

    def _drop(self, news: PrefillNews) -> None:
        """Give back the handle of a message that is not read; a partial one stays the worker's."""
        if news.handle is not None and not news.handle.is_partial:
            self._give_back(news.handle)

    def _move(self, state: CallState) -> None:
        """Change the state. Raises: Internal for a transition that is not allowed."""
        if state not in PREFILL_TRANSITIONS[self.state]:
            raise Internal(f"prefill call {self.key}: {self.state.value} -> {state.value}")
        self.state = state


def _error_of(failed: prefill_pb2.PrefillFailed, who: str) -> BatonError:
    """Return the error that a worker's failure message stands for."""
    retry_after_s = failed.retry_after_s if failed.HasField("retry_after_s") else None
    error = rpc.error_of_code(failed.code, failed.message, retry_after_s)
    if isinstance(error, Cancelled):
        # A stopping worker answers CANCELLED for its prompts; this router did not cancel.
        return Unavailable(f"{who} is stopping")
    return error


_PREFILL_METHOD = "/baton.v1.Prefill/Stream"
"""The method is called by name, because the generated stub would parse the handles, which are only
passed on."""


class PrefillStream(WorkerStream[PrefillCall]):
    """Multiplexed stream to one incarnation of one prefill worker."""

    def __init__(
        self,
        worker: WorkerView,
        *,
        connect_timeout_s: float,
        give_back: GiveBack,
        on_change: Callable[[], None] = lambda: None,
        dial: Dialer = rpc.PLAIN,
    ) -> None:
        """give_back: called with handles that no reader took."""
        self._give_back = give_back
        super().__init__(
            worker,
            PeerRole.PREFILL,
            connect_timeout_s=connect_timeout_s,
            on_change=on_change,
            dial=dial,
        )

    @property
    def num_running(self) -> int:
        """Number of calls that still have a reader."""
        return sum(call.state is CallState.RUNNING for call in self._legs.values())

    async def open(
        self,
        request: prefill_pb2.PrefillRequest,
        deadline: Deadline,
        on_partial: Callable[[SealedHandle], None],
    ) -> PrefillCall:
        """Send a prompt as soon as the stream is up, with what is left of its time.

        Returns: the call, which the caller must close in any case.
        Raises: Unavailable when the worker is not reached in time.
        """
        await self._wait_up(deadline)
        request.budget_ms = max(1, int(deadline.left_s() * 1000))
        call = PrefillCall(
            self._next_key(),
            self._who,
            send=self._outgoing.put_nowait,
            on_partial=on_partial,
            give_back=self._give_back,
        )
        self._enter(call)
        head = prefill_pb2.PrefillCommand(key=call.key)
        self._outgoing.put_nowait(
            Opening(head, prefill_pb2.PrefillCommand.PREFILL_FIELD_NUMBER, request)
        )
        return call

    def _begin(self, channel: grpc.aio.Channel) -> Call:
        return channel.stream_stream(
            _PREFILL_METHOD,
            request_serializer=_write_prefill,
            response_deserializer=_read_words,
        )()

    def _take(self, message: Any) -> None:
        """Pass the events of a message to their calls."""
        if not isinstance(message, list):
            raise Unavailable("a message cannot be read")
        for word in message:
            call = self._leg(word.key)
            if call is None:
                continue
            call.on_word(word)
            if call.is_over:
                del self._legs[call.key]


def _write_prefill(command: prefill_pb2.PrefillCommand | Opening) -> bytes:
    return command.write() if isinstance(command, Opening) else command.SerializeToString()


def _read_words(data: bytes) -> list[PrefillWord] | None:
    """Return the messages in `data`, one for each key's event; None: they cannot be parsed."""
    try:
        return list(words_of(data))
    except (ValueError, DecodeError):
        return None


class Listener(Protocol):
    """Receiver of what a prefill worker sends for one prompt."""

    async def show_prompt_logprobs(self, logprobs: Sequence[common_pb2.TokenLogprobs]) -> None:
        """Take log probabilities of the prompt's next tokens; all of them come before the first
        tokens."""
        ...

    async def show(self, first: prefill_pb2.PrefillReply) -> None:
        """Take a sample's first token."""
        ...

    def prefetch(self, partial: SealedHandle) -> None:
        """Take a partial handle, which names what is stored so far. Its leases stay the
        worker's."""
        ...

    def account_deadline(self) -> Deadline:
        """Return how long to wait for the account; called once all first tokens are shown."""
        ...


class PrefillClient:
    """Client of all prefill workers: sends prompts, and counts the tokens queued at each worker."""

    def __init__(
        self,
        times: RouterTimes,
        *,
        give_back: GiveBack,
        dial: Dialer = rpc.PLAIN,
        clock: Clock = time.monotonic,
    ) -> None:
        """give_back: called with handles that came too late for their reader."""
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
        """Callbacks, called with the id of a worker whose queue or stream changed."""
        return self._streams.on_change

    def reconcile(self, workers: Iterable[WorkerView]) -> None:
        """Follow the registry; `workers` are the known prefill workers. See
        `WorkerStreams.reconcile`."""
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
        """Return whether the stream to the worker is up."""
        stream = self._streams.find(worker_id)
        return stream is not None and stream.is_up

    def num_queued_tokens(self, worker_id: str) -> int:
        """Return the prompt tokens to be computed at a worker that it was sent and has not
        answered: this router's as of now, other routers' as of the worker's last heartbeat."""
        return self._queued_tokens[worker_id] + (self._others.of(worker_id) or 0)

    @property
    def num_calls(self) -> int:
        """Number of prompts that are being served, or lack their worker's last message."""
        return max(self._num_under_way, sum(stream.num_legs for stream in self._streams))

    async def prefill(
        self,
        worker: WorkerView,
        request: prefill_pb2.PrefillRequest,
        deadline: Deadline,
        listener: Listener,
        num_tokens: int | None = None,
    ) -> PrefillNews:
        """Have one prompt computed. The first token of each sample goes to `listener` as it comes,
        and so does each partial handle.

        Args: num_tokens: prompt tokens that are expected to need computing; None: all.
        Returns: the worker's last message, with its account and the handle.
        Raises: the worker's error; Unavailable when the worker is gone; DeadlineExceeded.
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
                call.close()  # sends nothing once the call is over
        finally:
            self._count(worker.worker_id, -num_tokens)
            self._num_under_way -= 1

    async def close(self) -> None:
        """End every stream; the router's requests must be over."""
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
        """Add `num_tokens` (negative: subtract) to the tokens queued at a worker."""
        self._queued_tokens[worker_id] += num_tokens
        self._others.note(worker_id, self._queued_tokens[worker_id])
        self._streams.tell(worker_id)

    def check_integrity(self) -> None:
        """Raises: Internal when a stream breaks its invariant, a count is negative, tokens are
        counted as queued without a call of `prefill`, or more prompts run than `prefill` has
        callers."""
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
    """Pass all messages of a call to `listener`. Returns: the last message. Only waits for the
    worker are bounded; waits for the client are not, so that no message is lost while it is sent.
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
    """Return the call's next message. Raises: DeadlineExceeded naming `what` was waited for."""
    if call.has_news:
        return await call.next()
    async with deadline.timeout(what):
        return await call.next()


def num_first_messages(sampling: common_pb2.SamplingParams) -> int:
    """Return the number of messages with first tokens for one prompt: one for each sample, and one
    for a whole beam search."""
    return 1 if sampling.HasField("beam") else sampling.n or 1


class LegState(Enum):
    """State of a DecodeCall."""

    RESERVING = "reserving"
    RESERVED = "reserved"
    GENERATING = "generating"
    CANCELLING = "cancelling"
    OVER = "over"


DECODE_TRANSITIONS: dict[LegState, frozenset[LegState]] = {
    LegState.RESERVING: frozenset({LegState.RESERVED, LegState.CANCELLING, LegState.OVER}),
    LegState.RESERVED: frozenset({LegState.GENERATING, LegState.CANCELLING, LegState.OVER}),
    LegState.GENERATING: frozenset({LegState.CANCELLING, LegState.OVER}),
    LegState.CANCELLING: frozenset({LegState.OVER}),
    LegState.OVER: frozenset(),
}


@dataclass
class SampleNews:
    """Tokens that came for one sample, in order; `reason` is set when they are its last."""

    sample_index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[common_pb2.TokenLogprobs] = field(default_factory=list)
    traces: list[common_pb2.StepTrace] = field(default_factory=list)
    reason: common_pb2.FinishReason = common_pb2.FINISH_REASON_UNSPECIFIED
    stop_token_id: int | None = None
    score: float | None = None


@dataclass(frozen=True)
class Moved:
    """A leaving worker's last message on a request that another worker should continue."""

    news: decode_pb2.DecodeMoved
    """The message without the handle."""
    handle: SealedHandle | None


@dataclass(frozen=True)
class CallUpdate:
    """Everything that came since the last `take`: each sample once, and the request's end if it has
    come. The handle in `moved` belongs to the reader."""

    samples: tuple[SampleNews, ...] = ()
    finished: decode_pb2.DecodeFinished | None = None
    error: BatonError | None = None
    moved: Moved | None = None


@dataclass
class _Inbox:
    """News of a decode call that its reader has not taken."""

    samples: dict[int, SampleNews] = field(default_factory=dict)
    finished: decode_pb2.DecodeFinished | None = None
    error: BatonError | None = None
    moved: Moved | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class DecodeCall:
    """One request on a decode stream, with an inbox that merges what its reader has not taken."""

    def __init__(self, key: int, worker_id: str, send: Callable[[Command], None]) -> None:
        self.key = key
        self.worker_id = worker_id
        self.state = LegState.RESERVING
        self.is_queued = False
        """Whether the worker has set blocks aside and queues the request for places."""
        self.num_tokens_local = 0
        """Prompt tokens whose KV is in the worker's own cache; known once RESERVED."""
        self.span = trace_spans.NOOP_SPAN
        """Trace span of this call; it ends with the call."""
        self.incarnation = ""
        """Incarnation of the worker; set by the owner of the call."""
        self.block_size = 1
        """Tokens in a block of the worker's cache; set by the owner of the call."""
        self.give_back: Callable[[SealedHandle], None] = lambda handle: None
        """Called with a handle that came after its reader had stopped."""
        self._send = send
        self._inbox = _Inbox()
        self._early: Command | None = None  # the last partial handle that was sent

    @property
    def is_over(self) -> bool:
        """Whether the worker's last message has come, or the stream has ended."""
        return self.state is LegState.OVER

    async def wait_answered(self, deadline: Deadline) -> None:
        """Wait until the worker has reserved or queued the request.

        Raises: the error of the worker or of the broken stream; Unavailable when no answer came in
            time.
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
        """Wait until the worker holds blocks and places for this request. The caller bounds the
        wait.

        Raises: the error of the worker or of the broken stream.
        """
        while self.state is LegState.RESERVING:
            await self._next_change()
        self._check_reserving()

    def _check_reserving(self) -> None:
        """Raises: the error, if the call ended while a reservation was waited for."""
        if self._inbox.error is not None:
            raise self._inbox.error
        if self.state not in (LegState.RESERVING, LegState.RESERVED):
            raise Internal(f"decode worker {self.worker_id} ended a reservation without a reason")

    def prefetch(self, handle: SealedHandle) -> None:
        """Have the worker fetch what a partial handle names while prefill goes on. Does nothing
        unless the call is RESERVED."""
        if self.state is not LegState.RESERVED:
            return
        if self._early is not None and not self._early.is_written:
            self._early.handle = handle  # it names everything that the older handle named
            return
        command = decode_pb2.DecodeCommand(key=self.key, prefetch=decode_pb2.PrefetchDecode())
        self._early = Command(command, handle)
        self._send(self._early)

    def generate(
        self, command: decode_pb2.GenerateFromHandle, handle: SealedHandle | None = None
    ) -> None:
        """Start decoding after the tokens drawn already, which `command` holds, from `handle`
        (None: the worker computes the prompt itself).

        Raises: the error that broke the stream meanwhile.
        """
        if self.state is LegState.OVER:
            raise self._inbox.error or Internal("the reservation is over")
        self._move(LegState.GENERATING)
        message = decode_pb2.DecodeCommand(key=self.key, generate=command)
        self._send(Command(message, handle))

    def cancel_sample(self, sample_index: int) -> None:
        """Ask the worker to end one sample; the others go on. Does nothing when the request is
        over."""
        if self.state is LegState.GENERATING:
            command = decode_pb2.CancelSample(sample_index=sample_index)
            self._send(Command(decode_pb2.DecodeCommand(key=self.key, cancel_sample=command)))

    def cancel(self) -> None:
        """Ask the worker to end the request. Allowed in any state, idempotent, never waits."""
        self._give_back_untaken()
        if self.state in (LegState.CANCELLING, LegState.OVER):
            return
        self._move(LegState.CANCELLING)
        command = decode_pb2.DecodeCommand(key=self.key, cancel=decode_pb2.CancelDecode())
        self._send(Command(command))

    async def take(self) -> CallUpdate:
        """Wait until something has come, and return all of it. The caller bounds the wait."""
        inbox = self._inbox
        while not (inbox.samples or self.is_over):
            await self._next_change()
        samples, inbox.samples = tuple(inbox.samples.values()), {}
        moved, inbox.moved = inbox.moved, None
        return CallUpdate(samples, inbox.finished, inbox.error, moved)

    async def wait_over(self) -> decode_pb2.DecodeFinished | decode_pb2.DecodeMoved | None:
        """Wait for the worker's last message after `cancel`. The caller bounds the wait.

        Returns: the message, with the worker's account; None: the stream broke.
        """
        while not self.is_over:
            await self._next_change()
        moved = self._inbox.moved
        return moved.news if moved is not None else self._inbox.finished

    def on_event(self, event: decode_pb2.DecodeEvent) -> None:
        """Take an event of the worker for this key; called by the stream's reader."""
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
        """End the call with an error of the worker or of the stream."""
        self._inbox.error = error
        self._move(LegState.OVER)
        self._inbox.changed.set()

    def _give_back_untaken(self) -> None:
        """Give back the handle of a move that the reader has not taken."""
        moved = self._inbox.moved
        if moved is not None and moved.handle is not None:
            self._inbox.moved = Moved(moved.news, None)
            self.give_back(moved.handle)

    def _put(self, part: decode_pb2.DecodeTokens | decode_pb2.DecodeFinished) -> None:
        """Merge tokens of one sample into the inbox."""
        # After a cancel there is no reader: tokens drawn before the worker saw it are dropped.
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
        """Change the state. Raises: Internal for a transition that is not allowed."""
        if state not in DECODE_TRANSITIONS[self.state]:
            raise Internal(f"decode leg {self.key}: {self.state.value} -> {state.value}")
        self.state = state
        if state is LegState.OVER:
            self.span.end(self._inbox.error)


def _moved(news: decode_pb2.DecodeMoved) -> Moved:
    """Split a DecodeMoved into the message and its handle."""
    handle = None
    if news.HasField("handle"):
        handle = SealedHandle(news.handle.SerializeToString(), is_partial=False)
        news.ClearField("handle")
    return Moved(news, handle)


_DECODE_METHOD = "/baton.v1.Decode/Stream"
"""The method is called by name, because the generated stub would parse the handles, which are only
passed on."""


@dataclass(frozen=True)
class StepLoad:
    """Load of a decode worker after its last step; fresher than any heartbeat."""

    num_free_blocks: int
    num_others: int
    """Requests at the worker that are not this router's."""
    num_free_places: int | None
    """Places for samples of further requests; None: the worker does not report it."""


class DecodeStream(WorkerStream[DecodeCall]):
    """Multiplexed stream to one incarnation of one decode worker, with the load that it reports."""

    def __init__(
        self,
        worker: WorkerView,
        *,
        connect_timeout_s: float,
        on_progress: Callable[[], None],
        on_load: Callable[[], None] = lambda: None,
        dial: Dialer = rpc.PLAIN,
    ) -> None:
        """on_progress: called when a call ends, because there may be room now.
        on_load: called when the known load of the worker, or the state of the stream, has
            changed."""
        self.load: StepLoad | None = None
        self._on_progress = on_progress
        self._on_load = on_load
        # (blocks, places) asked for, by key, until there is an answer.
        self._unanswered: dict[int, tuple[int, int]] = {}
        super().__init__(
            worker,
            PeerRole.DECODE,
            connect_timeout_s=connect_timeout_s,
            on_change=on_load,
            dial=dial,
        )

    @property
    def num_unanswered_blocks(self) -> int:
        """Blocks of reservations that the worker has not answered; its reported load does not
        include them yet."""
        return sum(num_blocks for num_blocks, _ in self._unanswered.values())

    @property
    def num_unanswered_places(self) -> int:
        """Places of reservations that the worker has not answered."""
        return sum(num_places for _, num_places in self._unanswered.values())

    async def open(
        self,
        reserve: decode_pb2.ReserveDecode,
        deadline: Deadline,
        num_blocks: int = 0,
        num_places: int = 1,
    ) -> DecodeCall:
        """Send a reservation, which takes `num_blocks` and `num_places`, as soon as the stream is
        up.

        Returns: the call, still RESERVING; the caller must cancel it in any case.
        Raises: Unavailable when the worker is not reached in time.
        """
        await self._wait_up(deadline)
        leg = DecodeCall(self._next_key(), self.worker_id, self._outgoing.put_nowait)
        self._enter(leg)
        self._unanswered[leg.key] = num_blocks, num_places
        self._on_load()
        head = decode_pb2.DecodeCommand(key=leg.key)
        self._outgoing.put_nowait(
            Opening(head, decode_pb2.DecodeCommand.RESERVE_FIELD_NUMBER, reserve)
        )
        return leg

    def check_integrity(self) -> None:
        """Raises: Internal as WorkerStream's, and when a reservation is counted as unanswered
        without a call."""
        super().check_integrity()
        if not self._unanswered.keys() <= self._legs.keys():
            raise Internal(f"stream to {self.worker_id} waits for an answer to nobody")

    def _begin(self, channel: grpc.aio.Channel) -> Call:
        return channel.stream_stream(
            _DECODE_METHOD,
            request_serializer=_write_decode,
            response_deserializer=decode_pb2.DecodeEvents.FromString,
        )()

    def _take(self, message: Any) -> None:
        """Pass the events of a message to their calls, and record the worker's load."""
        if not isinstance(message, decode_pb2.DecodeEvents):
            raise Unavailable("a message cannot be read")
        for event in message.events:
            self._dispatch(event)
        # The worker counts running and waiting requests; one that waits for its prompt's KV is
        # neither, and shows only in the number of free blocks.
        num_ours = sum(leg.state is LegState.GENERATING for leg in self._legs.values())
        num_there = message.num_running + message.num_waiting
        num_free = message.num_free_places if message.HasField("num_free_places") else None
        self.load = StepLoad(message.num_free_blocks, max(0, num_there - num_ours), num_free)
        self._on_load()

    def _dispatch(self, event: decode_pb2.DecodeEvent) -> None:
        """Pass an event to its call; remove the call when it is over."""
        leg = self._leg(event.key)
        if leg is None:
            return
        had_blocks = leg.state is not LegState.RESERVING
        leg.on_event(event)
        self._unanswered.pop(leg.key, None)
        if leg.is_over:
            del self._legs[leg.key]
            # A refusal makes no room: waiting requests would wake one another for ever.
            if had_blocks:
                self._on_progress()

    def _on_break(self) -> None:
        self.load = None
        self._unanswered = {}
        self._on_progress()


def _write_decode(command: Command | Opening) -> bytes:
    return command.write()


@dataclass(frozen=True)
class DecodeLoad:
    """Load of a decode worker, as far as this router knows."""

    num_free_blocks: int
    num_requests: int


class DecodeStreams:
    """Client of all decode workers: one stream for each, and the load known of it."""

    def __init__(self, times: RouterTimes, clock: Clock, dial: Dialer = rpc.PLAIN) -> None:
        self._times = times
        self._dial = dial
        self._others = OthersLoad(clock)
        self._progress = asyncio.Event()
        self._streams = WorkerStreams(
            PeerRole.DECODE, lapse_grace_s=times.lapse_grace_s, clock=clock, make=self._make
        )

    @property
    def on_change(self) -> list[Callable[[str], None]]:
        """Callbacks, called with the id of a worker whose stream or load changed."""
        return self._streams.on_change

    def reconcile(self, workers: Iterable[WorkerView]) -> None:
        """Follow the registry; `workers` are the known decode workers. See
        `WorkerStreams.reconcile`."""
        workers = list(workers)
        changed = self._others.reckon(workers, lambda worker: worker.num_requests, self.num_legs)
        for worker_id in changed:
            self._streams.tell(worker_id)
        self._streams.reconcile(workers)

    def load(self, worker: WorkerView) -> DecodeLoad:
        """Return the worker's load by its last message and what this router has sent since. While
        the worker serves no request of this router, use its heartbeat: it sends no messages then,
        and the last one may be from before a cancel took effect."""
        num_others = self._others.of(worker.worker_id)
        num_others = worker.num_requests if num_others is None else num_others
        stream = self._streams.find(worker.worker_id)
        if stream is None or not stream.num_legs:
            return DecodeLoad(worker.num_free_blocks, num_others)
        num_free = worker.num_free_blocks
        if stream.load is not None:
            num_free, num_others = stream.load.num_free_blocks, stream.load.num_others
        return DecodeLoad(
            max(0, num_free - stream.num_unanswered_blocks), num_others + stream.num_legs
        )

    def num_free_places(self, worker: WorkerView) -> int | None:
        """Return the places for samples of further requests at the worker, by its last message and
        what this router has sent since; None: the worker does not report it.

        While the worker serves no request of this router it sends no messages, so either the last
        message or the heartbeat may be the older one. The higher number is taken: the first answer
        corrects a number that is too high, but one that is too low would hold requests back until
        newer news comes.
        """
        stream = self._streams.find(worker.worker_id)
        if stream is None or stream.load is None:
            num_free = worker.num_free_places
        elif stream.num_legs or worker.num_free_places is None:
            num_free = stream.load.num_free_places
        else:
            num_free = max(stream.load.num_free_places or 0, worker.num_free_places)
        if num_free is None or stream is None:
            return num_free
        return max(0, num_free - stream.num_unanswered_places)

    def num_legs(self, worker_id: str) -> int:
        """Return the number of this router's requests at a worker."""
        stream = self._streams.find(worker_id)
        return stream.num_legs if stream is not None else 0

    @property
    def num_open_legs(self) -> int:
        """Number of keys on all streams that wait for their worker's last message."""
        return sum(stream.num_legs for stream in self._streams)

    def drop(self, worker_id: str, why: str) -> bool:
        """See `WorkerStreams.drop`."""
        return self._streams.drop(worker_id, why)

    def is_up(self, worker_id: str) -> bool:
        """Return whether the stream to the worker is up."""
        stream = self._streams.find(worker_id)
        return stream is not None and stream.is_up

    async def open(
        self,
        worker_id: str,
        reserve: decode_pb2.ReserveDecode,
        deadline: Deadline,
        num_blocks: int = 0,
        num_places: int = 1,
    ) -> DecodeCall:
        """Send a reservation to a worker; see `DecodeStream.open`. Raises: Unavailable."""
        stream = self._streams.find(worker_id)
        if stream is None:
            raise Unavailable(f"decode worker {worker_id} is gone")
        leg = await stream.open(reserve, deadline, num_blocks, num_places)
        self._others.note(worker_id, stream.num_legs)
        return leg

    async def wait_for_progress(self, timeout_s: float) -> None:
        """Wait until some request has ended at some worker, so that there may be room; at most
        `timeout_s` seconds."""
        self._progress.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._progress.wait()
        except TimeoutError:
            return

    async def close(self) -> None:
        """End every stream."""
        await self._streams.close()

    def check_integrity(self) -> None:
        """Raises: Internal when a stream breaks its invariant."""
        self._streams.check_integrity()

    def _make(self, worker: WorkerView) -> DecodeStream:
        return DecodeStream(
            worker,
            connect_timeout_s=self._times.connect_timeout_s,
            on_progress=self._progress.set,
            on_load=partial(self._streams.tell, worker.worker_id),
            dial=self._dial,
        )
