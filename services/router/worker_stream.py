"""WorkerStream: one multiplexed stream to one life of one worker, of either role. It is met at
once, so that no request waits for a connection, and met again with growing pauses until the worker
is given up.

Every request that this router has there is a leg, named by a key; one message up carries the news
of many. When the stream breaks, every leg on it fails with Unavailable. A worker that comes back
under the same id with another incarnation is another stream. What is said on a stream is its
role's: `decode_stream`, `prefill_stream`.

Law: a key is in the table from `_enter` until the worker's last word on it or the stream's end. One
asyncio loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import grpc
import grpc.aio

from process import logs, rpc
from process.authorization import PeerRole
from process.background_tasks import end_tasks
from process.deadline import Deadline
from process.errors import BatonError, Internal, Unavailable
from process.rpc import Dialer
from services.router.views import WorkerView

logger = logging.getLogger(__name__)

_FIRST_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 1.0


class Leg(Protocol):
    """One key of one stream."""

    key: int

    @property
    def is_over(self) -> bool:
        """Whether the worker's last word is there."""
        ...

    def fail(self, error: BatonError) -> None:
        """The end, by the stream's fault."""
        ...


LegT = TypeVar("LegT", bound=Leg)
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
