"""What heartbeats show of a worker's load beyond this router's own part of it.

A heartbeat was written up to BEAT_AGE_S before it is read: what this router had there at some
moment of that time may be in it, though it has ended since. So the most that was there within it is
taken off, and what is left is other routers'. Where that is too much for a moment, the next look
puts it right. One role; no I/O. One asyncio loop.

WorkerStream: one multiplexed stream to one life of one worker, of either role. It is met at
once, so that no request waits for a connection, and met again with growing pauses until the worker
is given up.

Every request that this router has there is a leg, named by a key; one message up carries the news
of many. When the stream breaks, every leg on it fails with Unavailable. A worker that comes back
under the same id with another incarnation is another stream. What is said on a stream is its
role's: `decode_stream`, `prefill_stream`.

Law: a key is in the table from `_enter` until the worker's last word on it or the stream's end. One
asyncio loop.

The streams to all workers of one role, kept in step with the registry. One asyncio loop.

A worker that is new gets a stream at once, so that the first request need not wait for a
connection. Another incarnation under a known id: the old stream is closed, its requests fail. Gone
from the registry: no new request goes there, and when it stays away for the grace time its stream
is closed as well. While Redis is away everybody known stays known, so nothing is given up.

One prompt's part of a prefill stream: its state, and an inbox of what its reader has not taken.

States: RUNNING -> OVER with the worker's account or its no; `close` leads from RUNNING to
CANCELLING, and the worker's last word from there to OVER; a broken stream leads to OVER from
everywhere. Nothing here waits on the network.

Law: a handle that came with an account is its reader's once it is taken; one that nobody takes is
given back. Partial handles go to whoever wants them as they come and are never kept. One asyncio
loop.

One multiplexed stream to one life of one prefill worker: a message up carries all that came
since the last one. One asyncio loop.

Prompts to prefill workers, and how much this router has sent to each.

One stream per worker life (`prefill_stream`). Cancelling the caller cancels the prompt at the
worker. Law: tokens counted as sent are taken off again when their caller is done, however that
ends. One asyncio loop.

One request's part of a decode stream: its state, and an inbox that merges what its reader has
not taken yet, sample by sample.

States: RESERVING -> RESERVED -> GENERATING -> OVER; `is_queued` while RESERVING, once the worker
has set blocks aside and has the request wait for its places. `cancel` leads from each of the first
three to CANCELLING, and the worker's last word from there to OVER; a broken stream leads to OVER
from everywhere. A worker that leaves ends it, too, by moving it: the handle that comes with that is
whoever takes it, and is given back when nobody does.

Nothing here waits on the network: commands are queued on the stream, events come from its reader.
Of partial handles that wait on the stream only the newest is kept: a worker that does not read
holds one of each request, however much is computed meanwhile. One asyncio loop.

One multiplexed stream to one life of one decode worker: a message up carries a whole engine
step, and the worker's load after it.

Law: beside the stream's own, blocks and places are counted as asked for exactly until the worker
answers the reservation. One asyncio loop.

The streams to all decode workers, and what the router knows of each worker's load by them.

Which streams there are: `worker_streams`. One asyncio loop.
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
"""A heartbeat that is read may be so old: one beat, and as long again for a busy process."""


class OthersLoad:
    """See the module."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ours: dict[str, deque[tuple[float, int]]] = {}
        """By worker id: when we had how much there, the oldest first; it held until the next."""
        self._others: dict[str, int] = {}

    def note(self, worker_id: str, num_ours: int) -> None:
        """So much of ours is there now."""
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
        """The registry was looked at. `told`: of a worker, by its heartbeat; `num_ours`: now, by
        id. Returns: ids of workers of which something else is known than before."""
        others, ours = {}, {}
        for worker in workers:
            name = worker.worker_id
            self.note(name, num_ours(name))
            ours[name] = self._ours[name]
            others[name] = max(0, told(worker) - max(num for _, num in ours[name]))
        before, self._others, self._ours = self._others, others, ours
        return [name for name, num in others.items() if before.get(name) != num]

    def of(self, worker_id: str) -> int | None:
        """What others have there; None: no heartbeat was seen."""
        return self._others.get(worker_id)


logger = logging.getLogger(__name__)

_FIRST_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 1.0


class StreamLeg(Protocol):
    """One key of one stream."""

    key: int

    @property
    def is_over(self) -> bool:
        """Whether the worker's last word is there."""
        ...

    def fail(self, error: BatonError) -> None:
        """The end, by the stream's fault."""
        ...


LegT = TypeVar("LegT", bound=StreamLeg)
Call = grpc.aio.StreamStreamCall[Any, Any]


class WorkerStream(ABC, Generic[LegT]):
    """See the module."""

    def __init__(
        self,
        worker: WorkerView,
        role: PeerRole,
        *,
        connect_timeout_s: float,
        on_change: Callable[[], None],
        dial: Dialer = rpc.PLAIN,
    ) -> None:
        """`on_change` is called when the stream has come up or gone down."""
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
        """An attempt to meet the worker has ended, either way, and no other is under way."""
        self._failure = Unavailable(f"{self._who} is not reached yet")
        self._task = asyncio.create_task(self._run())

    # ---- what a role adds

    @abstractmethod
    def _begin(self, channel: grpc.aio.Channel) -> Call:
        """Open the stream's call."""

    @abstractmethod
    def _take(self, message: Any) -> None:
        """A message came. Raises: BatonError when the stream is of no use any more."""

    def _on_break(self) -> None:
        """The stream is down; its legs are about to fail."""

    # ---- what all have

    @property
    def is_up(self) -> bool:
        """Whether commands reach the worker."""
        return self._is_up

    @property
    def num_legs(self) -> int:
        """Keys that wait for their worker's last word."""
        return len(self._legs)

    async def close(self, why: str) -> None:
        """End the stream for good; its legs fail."""
        self._is_closed = True
        self._failure = Unavailable(why)
        await end_tasks([self._task])

    def check_integrity(self) -> None:
        """Raises: Internal when a leg that is over is still in the table, or one is there without a
        stream.
        """
        if any(leg.is_over or leg.key != key for key, leg in self._legs.items()):
            raise Internal(f"stream to {self.worker_id} keeps a leg that is over")
        if self._legs and not self._is_up:
            raise Internal(f"stream to {self.worker_id} is down and keeps legs")

    async def _wait_up(self, deadline: Deadline) -> None:
        """Until the stream is up; no longer than the attempt under way takes.

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
        """From here on the worker may speak of it."""
        self._legs[leg.key] = leg

    def _leg(self, key: int) -> LegT | None:
        """Whose news came; None, and a line in the log: nobody's."""
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
        """Connect and serve until the stream ends. Returns: whether it was up at all."""
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
        """Whether the worker took the connection. One that refuses it is known at once."""
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
        # The reader sees the end of a broken call, too, and deals with it.
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                await call.write(await outgoing.get())

    def _break(self) -> None:
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
    # One exception object raised in many tasks would mix their tracebacks.
    return Unavailable(str(error), retry_after_s=error.retry_after_s)


StreamT = TypeVar("StreamT", bound=WorkerStream[Any])


class WorkerStreams(Generic[StreamT]):
    """One stream per worker."""

    def __init__(
        self,
        role: PeerRole,
        *,
        lapse_grace_s: float,
        clock: Clock,
        make: Callable[[WorkerView], StreamT],
    ) -> None:
        """lapse_grace_s: how long a worker without heartbeat keeps its stream."""
        self._role = role
        self._lapse_grace_s = lapse_grace_s
        self._clock = clock
        self._make = make
        self._streams: dict[str, StreamT] = {}
        self._gone_since: dict[str, float] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self.on_change: list[Callable[[str], None]] = []
        """Called with the id of a worker of which more, or less, is known now."""

    def reconcile(self, workers: Iterable[WorkerView]) -> None:
        """Have a stream for each of `workers` (those of the role that are known now), and for no
        other life.
        """
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
        """Give up what runs on that worker's stream, whose requests fail with `why`; the next look
        at the registry makes another one. Returns: whether there was anything."""
        stream = self._streams.get(worker_id)
        if stream is None or not stream.num_legs:
            return False
        self._drop(worker_id, why)
        return True

    def find(self, worker_id: str) -> StreamT | None:
        """None: it is not known, or was given up."""
        return self._streams.get(worker_id)

    def __iter__(self) -> Iterator[StreamT]:
        return iter(self._streams.values())

    def tell(self, worker_id: str) -> None:
        """Something about that worker has changed."""
        for tell in self.on_change:
            tell(worker_id)

    async def close(self) -> None:
        """End every stream."""
        for worker_id in list(self._streams):
            self._drop(worker_id, "the router stops")
        await asyncio.gather(*self._closing, return_exceptions=True)

    def check_integrity(self) -> None:
        """Raises: Internal when a stream breaks its law."""
        for stream in self._streams.values():
            stream.check_integrity()

    def _drop(self, worker_id: str, why: str) -> None:
        stream = self._streams.pop(worker_id)
        self.tell(worker_id)
        self._gone_since.pop(worker_id, None)
        task = asyncio.create_task(stream.close(why))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


GiveBack = Callable[[SealedHandle], None]


class CallState(Enum):
    """See the module."""

    RUNNING = "running"
    CANCELLING = "cancelling"
    OVER = "over"


PREFILL_TRANSITIONS: dict[CallState, frozenset[CallState]] = {
    CallState.RUNNING: frozenset({CallState.CANCELLING, CallState.OVER}),
    CallState.CANCELLING: frozenset({CallState.OVER}),
    CallState.OVER: frozenset(),
}


class PrefillCall:
    """One key of one stream."""

    def __init__(
        self,
        key: int,
        who: str,
        *,
        send: Callable[[prefill_pb2.PrefillCommand], None],
        on_partial: Callable[[SealedHandle], None],
        give_back: GiveBack,
    ) -> None:
        """`who`: the worker, as errors name it. `on_partial`: told each partial handle, until the
        account is there or the call is closed."""
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
        return self.state is CallState.OVER

    @property
    def has_news(self) -> bool:
        """Whether `next` has something without waiting."""
        return bool(self._inbox) or self._error is not None

    async def next(self) -> PrefillNews:
        """The next message that is no partial handle. The caller bounds the wait.

        Raises: what the worker or the broken stream says, behind what came before it; Internal
            behind the account.
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
        """Nobody reads any more: ask for the end, and give back what was not taken. Any state,
        idempotent, never waits."""
        for news in self._inbox:
            self._drop(news)
        self._inbox.clear()
        if self.state is CallState.RUNNING:
            self._move(CallState.CANCELLING)
            cancel = prefill_pb2.CancelPrefill()
            self._send(prefill_pb2.PrefillCommand(key=self.key, cancel=cancel))

    def on_word(self, word: PrefillWord) -> None:
        """The stream's reader: something came for this key."""
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
        """The end, by the stream's fault."""
        self._fail(error)

    def _fail(self, error: BatonError) -> None:
        self._error = error
        self._move(CallState.OVER)
        self._changed.set()

    def _drop(self, news: PrefillNews) -> None:
        if news.handle is not None and not news.handle.is_partial:
            self._give_back(news.handle)

    def _move(self, state: CallState) -> None:
        if state not in PREFILL_TRANSITIONS[self.state]:
            raise Internal(f"prefill call {self.key}: {self.state.value} -> {state.value}")
        self.state = state


def _error_of(failed: prefill_pb2.PrefillFailed, who: str) -> BatonError:
    retry_after_s = failed.retry_after_s if failed.HasField("retry_after_s") else None
    error = rpc.error_of_code(failed.code, failed.message, retry_after_s)
    if isinstance(error, Cancelled):
        # A stopping worker says so of prompts under way; nobody here cancelled.
        return Unavailable(f"{who} is stopping")
    return error


_PREFILL_METHOD = "/baton.v1.Prefill/Stream"
"""Called by name: the generated stub would read the handles that are only passed on."""


class PrefillStream(WorkerStream[PrefillCall]):
    """See the module."""

    def __init__(
        self,
        worker: WorkerView,
        *,
        connect_timeout_s: float,
        give_back: GiveBack,
        on_change: Callable[[], None] = lambda: None,
        dial: Dialer = rpc.PLAIN,
    ) -> None:
        """`give_back`: takes the handles that nobody takes."""
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
        """Calls that somebody here still reads."""
        return sum(call.state is CallState.RUNNING for call in self._legs.values())

    async def open(
        self,
        request: prefill_pb2.PrefillRequest,
        deadline: Deadline,
        on_partial: Callable[[SealedHandle], None],
    ) -> PrefillCall:
        """Send a prompt as soon as the stream is up, with what is left of its time.

        Returns: the call; its owner closes it whatever happens.
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
    """None: it cannot be read."""
    try:
        return list(words_of(data))
    except (ValueError, DecodeError):
        return None


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


class LegState(Enum):
    """See the module."""

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
class CallUpdate:
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


class DecodeCall:
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

    async def take(self) -> CallUpdate:
        """Wait until something came, and take all of it as one. The caller bounds the wait."""
        inbox = self._inbox
        while not (inbox.samples or self.is_over):
            await self._next_change()
        samples, inbox.samples = tuple(inbox.samples.values()), {}
        moved, inbox.moved = inbox.moved, None
        return CallUpdate(samples, inbox.finished, inbox.error, moved)

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
        if state not in DECODE_TRANSITIONS[self.state]:
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


_DECODE_METHOD = "/baton.v1.Decode/Stream"
"""Called by name: the generated stub would read the handles that are only passed on."""


@dataclass(frozen=True)
class StepLoad:
    """A worker's load as of its last step; fresher than any heartbeat."""

    num_free_blocks: int
    num_others: int
    """Requests there that are none of ours."""
    num_free_places: int | None
    """Places for samples of further requests; None: the worker does not say."""


class DecodeStream(WorkerStream[DecodeCall]):
    """See the module."""

    def __init__(
        self,
        worker: WorkerView,
        *,
        connect_timeout_s: float,
        on_progress: Callable[[], None],
        on_load: Callable[[], None] = lambda: None,
        dial: Dialer = rpc.PLAIN,
    ) -> None:
        """`on_progress` is called when a leg ends: room may be free now. `on_load`: when what this
        side knows of the worker's load has changed."""
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
        """Blocks asked for by reservations that the worker has not answered: its own account does
        not show them yet."""
        return sum(num_blocks for num_blocks, _ in self._unanswered.values())

    @property
    def num_unanswered_places(self) -> int:
        """The same of places."""
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

        Returns: the leg, still RESERVING; its owner cancels it whatever happens.
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
        """As the stream's; also when an answer is waited for on behalf of nobody."""
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
        if not isinstance(message, decode_pb2.DecodeEvents):
            raise Unavailable("a message cannot be read")
        for event in message.events:
            self._dispatch(event)
        # Requests that wait for their prompt are in no account but in that of their blocks.
        num_ours = sum(leg.state is LegState.GENERATING for leg in self._legs.values())
        num_there = message.num_running + message.num_waiting
        num_free = message.num_free_places if message.HasField("num_free_places") else None
        self.load = StepLoad(message.num_free_blocks, max(0, num_there - num_ours), num_free)
        self._on_load()

    def _dispatch(self, event: decode_pb2.DecodeEvent) -> None:
        leg = self._leg(event.key)
        if leg is None:
            return
        had_blocks = leg.state is not LegState.RESERVING
        leg.on_event(event)
        self._unanswered.pop(leg.key, None)
        if leg.is_over:
            del self._legs[leg.key]
            # A refusal made no room: those who wait for some would wake one another for ever.
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
    """What a worker has, as far as one router can know."""

    num_free_blocks: int
    num_requests: int


class DecodeStreams:
    """One stream per decode worker."""

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
        """Called with the id of a worker of which more, or less, is known now."""
        return self._streams.on_change

    def reconcile(self, workers: Iterable[WorkerView]) -> None:
        """`workers` are those known now; see `WorkerStreams.reconcile`."""
        workers = list(workers)
        changed = self._others.reckon(workers, lambda worker: worker.num_requests, self.num_legs)
        for worker_id in changed:
            self._streams.tell(worker_id)
        self._streams.reconcile(workers)

    def load(self, worker: WorkerView) -> DecodeLoad:
        """The worker's load by its last news and what we have sent since; while it serves none of
        ours, by its heartbeat. (It sends no news then, and the last may be from before a cancel
        took effect.)
        """
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
        """Places for samples of further requests at the worker, by its last news and what we have
        sent since; None: it does not say.

        While it serves none of ours it sends no news, so either of the last and the heartbeat may
        be the older one: the higher number is taken. If that is too high the first answer puts it
        right; one that is too low would hold requests back for as long.
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
        """Requests of this router on that worker."""
        stream = self._streams.find(worker_id)
        return stream.num_legs if stream is not None else 0

    @property
    def num_open_legs(self) -> int:
        """Keys on all streams that wait for their worker's last word."""
        return sum(stream.num_legs for stream in self._streams)

    def drop(self, worker_id: str, why: str) -> bool:
        """See `WorkerStreams.drop`."""
        return self._streams.drop(worker_id, why)

    def is_up(self, worker_id: str) -> bool:
        """Whether the worker's stream stands."""
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
        """Send a reservation; see `DecodeStream.open`. Raises: Unavailable."""
        stream = self._streams.find(worker_id)
        if stream is None:
            raise Unavailable(f"decode worker {worker_id} is gone")
        leg = await stream.open(reserve, deadline, num_blocks, num_places)
        self._others.note(worker_id, stream.num_legs)
        return leg

    async def wait_for_progress(self, timeout_s: float) -> None:
        """Until some leg ended somewhere, so that there may be room; at most `timeout_s`."""
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
        """Raises: Internal when a stream breaks its law."""
        self._streams.check_integrity()

    def _make(self, worker: WorkerView) -> DecodeStream:
        return DecodeStream(
            worker,
            connect_timeout_s=self._times.connect_timeout_s,
            on_progress=self._progress.set,
            on_load=partial(self._streams.tell, worker.worker_id),
            dial=self._dial,
        )
