"""How far the event loop is behind, and how long a stream should pause for it between two messages.

One message a token is what readers want and what costs: with more tokens than one process can send
so, each stream's next tokens merge where they wait while it pauses, and all get through with fewer,
larger messages. Nobody pauses while the loop keeps up; a pause grows while it does not, and shrinks
again when it does. Bounded. One asyncio loop.

Clients that ask and then take nothing: whoever lets an answer wait for `stall_s` has its request
cancelled, so that the workers' blocks serve somebody who reads.

An `AnswerReader` says when it begins to write and when its client took it, which costs next to
nothing. A check every `stall_s` / 8 finds those that have waited too long. Knows no protocol and no
request. One asyncio loop.

What both client ports keep in bounds: how much is read for whom, and who takes no answer.

A call's caller is asked for before its message is read; the port's other services (health,
reflection) ask for none, and share the room of their host. Knows no request. One asyncio loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self

from prometheus_client.metrics_core import Metric

from process.grpc_server import PublicPortLimits
from process.memory_budget import MemoryBudget, MemoryGrant
from process.metrics import Labels, counter, gauge
from process.rpc_errors import Cancelled, Internal
from services.router.callers import Caller
from services.router.config import RouterLimits, RouterTimes

_LOOK_S = 0.01
_BEHIND_S = 0.004
"""Later than this a timer does not come on a loop that keeps up: some 50 messages. Guessed."""
_GROWTH, _DECAY = 1.5, 0.8
_FIRST_S, _MOST_S = 0.002, 0.05
"""The longest is what a reader does not see."""


class LoopPace:
    """See the module."""

    def __init__(self) -> None:
        self.pause_s = 0.0
        """Of each stream after a message, now."""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to watch."""
        self._task = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        """No pauses from here on."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self.pause_s = 0.0

    def on_lag(self, lag_s: float) -> None:
        """A timer came `lag_s` after its time. Whether our own work or somebody else's on our cores
        made it late, fewer messages are what helps.
        """
        if lag_s > _BEHIND_S:
            self.pause_s = min(_MOST_S, max(_FIRST_S, self.pause_s * _GROWTH))
        else:
            self.pause_s = self.pause_s * _DECAY if self.pause_s > _FIRST_S / 2 else 0.0

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + _LOOK_S
            await asyncio.sleep(_LOOK_S)
            self.on_lag(loop.time() - due_s)


def reader_clock_s() -> float:
    """Return the time of the running loop, in seconds."""
    return asyncio.get_running_loop().time()


class StalledReaders:
    """See the module."""

    def __init__(self, stall_s: float) -> None:
        self.num_stalled = 0
        """Found so since the start."""
        self._stall_s = stall_s
        self._readers: set[AnswerReader] = set()
        self._next_look: asyncio.TimerHandle | None = None

    @property
    def num_readers(self) -> int:
        """Answers that are on their way."""
        return len(self._readers)

    def reader(self) -> AnswerReader:
        """Of one answer: a context around it. Raises at its end: Cancelled, if it stalled."""
        return AnswerReader(self)

    def check_integrity(self) -> None:
        """Raises: Internal when answers are not looked after."""
        if self._readers and self._next_look is None:
            raise Internal(f"{len(self._readers)} answers are written, and nobody looks after them")

    def add(self, reader: AnswerReader) -> None:
        """Look after it from now on."""
        self._readers.add(reader)
        if self._next_look is None:
            self._look_later()

    def remove(self, reader: AnswerReader) -> None:
        """No more."""
        self._readers.discard(reader)

    def _look_later(self) -> None:
        loop = asyncio.get_running_loop()
        self._next_look = loop.call_later(self._stall_s / 8, self._look)

    def _look(self) -> None:
        self._next_look = None
        late_s = reader_clock_s() - self._stall_s
        for reader in self._readers:
            if reader.waits_since_s is not None and reader.waits_since_s <= late_s:
                self.num_stalled += not reader.is_stalled
                reader.end(f"the client took nothing of its answer for {self._stall_s:g} s")
        if self._readers:
            self._look_later()


class AnswerReader:
    """One client, while its answer is written; see `StalledReaders.reader`."""

    __slots__ = ("_all", "_time", "_why", "waits_since_s")

    def __init__(self, readers: StalledReaders) -> None:
        self.waits_since_s: float | None = None
        """When the message that its client has not taken yet was written; None: it took all."""
        self._all = readers
        self._time = asyncio.timeout(None)
        self._why = ""

    @property
    def is_stalled(self) -> bool:
        """Whether it was given up."""
        return bool(self._why)

    def begin(self) -> None:
        """A message is about to be written."""
        self.waits_since_s = reader_clock_s()

    def took(self) -> None:
        """And was taken."""
        self.waits_since_s = None

    def end(self, why: str) -> None:
        """Cancel what runs in this context. Once."""
        if not self._why:
            self._why = why
            self._time.reschedule(0.0)

    async def __aenter__(self) -> Self:
        await self._time.__aenter__()
        self._all.add(self)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._all.remove(self)
        try:
            await self._time.__aexit__(kind, error, traceback)
        except TimeoutError as late:
            raise Cancelled(self._why) from late


AUTHORIZATION = "authorization"
"""Metadata with the API key, as HTTP's header."""


class Clients:
    """See the module."""

    def __init__(self, limits: RouterLimits, times: RouterTimes) -> None:
        self.readers = StalledReaders(times.stall_s)
        self.read_s = times.read_s
        """For a message, or a body, to arrive."""
        self.keep_alive_s = times.sse_keep_alive_s
        """For which an event stream may be silent."""
        self.memory_budget = MemoryBudget(limits.max_intake_bytes, wait_s=times.intake_wait_s)
        self._limits = limits
        self._times = times

    def grant(self, caller: Caller, host: str, num_bytes: int | None) -> MemoryGrant:
        """For one body. None: it does not say how long it is."""
        most = self._limits.max_request_bytes
        return self.memory_budget.grant(
            owner_of(caller, host), most if num_bytes is None else min(num_bytes, most)
        )

    def port_limits(self, service: str, caller_of: Callable[[str], Caller]) -> PublicPortLimits:
        """The bounds of a gRPC port; `caller_of` is asked about calls of `service`."""
        prefix = f"/{service}/"

        def authenticate(method: str, context: Any) -> str:
            caller = caller_of(authorization_of(context)) if method.startswith(prefix) else None
            return owner_of(caller, context.peer().rpartition(":")[0])

        return PublicPortLimits(
            authenticate,
            self.memory_budget,
            read_s=self.read_s,
            max_connections=self._limits.max_connections,
            idle_s=self._times.idle_s,
        )

    def families(self, labels: Labels) -> Iterator[Metric]:
        """For /metrics."""
        held = self.memory_budget.num_bytes
        text = "Requests' messages that are read or served, of limits.max_intake_bytes."
        yield gauge("baton_router_intake_bytes", text, labels, held)
        text = "Requests that found no room to be read in times.intake_wait_s."
        yield counter("baton_router_intake_refused", text, labels, self.memory_budget.num_refused)
        text = "Requests that arrived slowly, refused since others waited for their room."
        yield counter("baton_router_intake_recalled", text, labels, self.memory_budget.num_recalled)
        text = "Requests over gRPC cancelled since their client took nothing for times.stall_s."
        yield counter("baton_router_readers_stalled", text, labels, self.readers.num_stalled)

    def check_integrity(self) -> None:
        """Raises: Internal naming the law that is broken."""
        self.memory_budget.check_integrity()
        self.readers.check_integrity()

    @property
    def left(self) -> dict[str, int]:
        """What must be 0 when nobody is served."""
        return {
            "bytes taken in": self.memory_budget.num_bytes,
            "requests waiting to be read": self.memory_budget.num_waiting,
            "answers being written": self.readers.num_readers,
        }


def authorization_of(context: Any) -> str:
    """Of a gRPC call; empty: it has none."""
    return str(dict(context.invocation_metadata() or ()).get(AUTHORIZATION, ""))


def owner_of(caller: Caller | None, host: str) -> str:
    """Who shares room: those of one tenant; where nobody says who it is, those of one host."""
    return caller.tenant if caller is not None and caller.tenant else f"host {host}"
