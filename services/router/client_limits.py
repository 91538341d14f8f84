"""`Clients` holds the limits that the gRPC and HTTP ports share: memory for request bodies, read
and idle times, and how long a client may stop reading.

- `Clients` authenticates the caller before a message is read and grants memory per tenant. Calls of
  the port's other services (health, reflection) need no caller and share the memory of their host.
- `StalledReaders` cancels a request when its client has taken nothing of the answer for `stall_s`,
  so that the KV blocks become free. An `AnswerReader` marks when a message is written and when it
  was taken; a timer checks all of them every `stall_s` / 8.
- `LoopPace` measures how far the event loop is behind and tells streams how long to pause between
  two messages. One message per token is what clients want, and expensive: during a pause the next
  tokens of a stream merge into one message. There are no pauses while the loop keeps up; they grow
  while it does not, up to a bound, and shrink again.

Knows no protocol details and no request contents. One asyncio loop.
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
"""Lag of a timer from which the loop counts as behind: some 50 messages. Guessed."""
_GROWTH, _DECAY = 1.5, 0.8
_FIRST_S, _MOST_S = 0.002, 0.05
"""Shortest and longest pause; a reader does not notice the longest."""


class LoopPace:
    """Pause between two messages of a stream, from the lag of the event loop."""

    def __init__(self) -> None:
        self.pause_s = 0.0
        """Current pause of each stream after a message."""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start measuring the lag."""
        self._task = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        """Stop measuring; there are no pauses any more."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self.pause_s = 0.0

    def on_lag(self, lag_s: float) -> None:
        """Adapt the pause to a timer that fired `lag_s` late. Whether this process or another one
        on the same cores is the cause, fewer messages help.
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
    """Watch over all answers being written: it cancels an answer when its client stalls."""

    def __init__(self, stall_s: float) -> None:
        self.num_stalled = 0
        """Answers that were cancelled as stalled since the start."""
        self._stall_s = stall_s
        self._readers: set[AnswerReader] = set()
        self._next_look: asyncio.TimerHandle | None = None

    @property
    def num_readers(self) -> int:
        """Number of answers being written."""
        return len(self._readers)

    def reader(self) -> AnswerReader:
        """Return the context manager for one answer; its exit raises Cancelled if it stalled."""
        return AnswerReader(self)

    def check_integrity(self) -> None:
        """Check the timer. Raises: Internal when answers are written and no check is due."""
        if self._readers and self._next_look is None:
            raise Internal(f"{len(self._readers)} answers are written, and nobody looks after them")

    def add(self, reader: AnswerReader) -> None:
        """Start watching an answer."""
        self._readers.add(reader)
        if self._next_look is None:
            self._look_later()

    def remove(self, reader: AnswerReader) -> None:
        """Stop watching an answer."""
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
    """Context manager around the writing of one answer; made by `StalledReaders.reader`."""

    __slots__ = ("_all", "_time", "_why", "waits_since_s")

    def __init__(self, readers: StalledReaders) -> None:
        self.waits_since_s: float | None = None
        """Loop time when the message that was not taken yet was written; None: all were taken."""
        self._all = readers
        self._time = asyncio.timeout(None)
        self._why = ""

    @property
    def is_stalled(self) -> bool:
        """Whether the answer was cancelled."""
        return bool(self._why)

    def begin(self) -> None:
        """Record that a message is about to be written."""
        self.waits_since_s = reader_clock_s()

    def took(self) -> None:
        """Record that the client took the message."""
        self.waits_since_s = None

    def end(self, why: str) -> None:
        """Cancel what runs in this context, with the reason `why`; only the first call counts."""
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
"""gRPC metadata key of the API key, as the HTTP header."""


class Clients:
    """Limits and counters that the gRPC and HTTP ports share; see the module docstring."""

    def __init__(self, limits: RouterLimits, times: RouterTimes) -> None:
        self.readers = StalledReaders(times.stall_s)
        self.read_s = times.read_s
        """Time for a message or a body to arrive."""
        self.keep_alive_s = times.sse_keep_alive_s
        """Longest silence of an event stream."""
        self.memory_budget = MemoryBudget(limits.max_intake_bytes, wait_s=times.intake_wait_s)
        self._limits = limits
        self._times = times

    def grant(self, caller: Caller, host: str, num_bytes: int | None) -> MemoryGrant:
        """Return a memory grant for one body. `num_bytes`: None where its length is not known."""
        most = self._limits.max_request_bytes
        return self.memory_budget.grant(
            owner_of(caller, host), most if num_bytes is None else min(num_bytes, most)
        )

    def port_limits(self, service: str, caller_of: Callable[[str], Caller]) -> PublicPortLimits:
        """Return the limits of a gRPC port; `caller_of` authenticates the calls of `service`."""
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
        """Yield the metrics for /metrics."""
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
        """Check the parts. Raises: Internal naming the broken invariant."""
        self.memory_budget.check_integrity()
        self.readers.check_integrity()

    @property
    def left(self) -> dict[str, int]:
        """Counts that must be 0 when no request is served, by description."""
        return {
            "bytes taken in": self.memory_budget.num_bytes,
            "requests waiting to be read": self.memory_budget.num_waiting,
            "answers being written": self.readers.num_readers,
        }


def authorization_of(context: Any) -> str:
    """Return the authorization metadata of a gRPC call; empty: there is none."""
    return str(dict(context.invocation_metadata() or ()).get(AUTHORIZATION, ""))


def owner_of(caller: Caller | None, host: str) -> str:
    """Return the owner of memory: the caller's tenant, or its host where the tenant is unknown."""
    return caller.tenant if caller is not None and caller.tenant else f"host {host}"
