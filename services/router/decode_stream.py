"""One multiplexed stream to one life of one decode worker, and the set of all such streams.

Every request of this router that the worker decodes is a leg, named by a key; one message up
carries a whole engine step. When the stream breaks, every leg on it fails with Unavailable, and the
stream is opened again with growing pauses until the worker is given up. A worker that comes back
under the same id with another incarnation is another stream.

Law: a key is in the table from `open` until the worker's last word on it or the stream's end. One
asyncio loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass

import grpc.aio

from process import logs, serving
from process.deadline import Deadline
from process.errors import BatonError, Internal, Unavailable
from process.tasks import end_tasks
from protos import decode_pb2
from services.router.decode_leg import DecodeLeg
from services.router.sealed_handle import Command
from services.router.views import WorkerView

logger = logging.getLogger(__name__)

_METHOD = "/baton.v1.Decode/Stream"
"""Called by name: the generated stub would read the handles that are only passed on."""

_FIRST_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 1.0


@dataclass(frozen=True)
class StepLoad:
    """A worker's load as of its last step; fresher than any heartbeat."""

    num_free_blocks: int
    num_requests: int


class DecodeStream:
    """See the module."""

    def __init__(
        self, worker: WorkerView, *, connect_timeout_s: float, on_progress: Callable[[], None]
    ) -> None:
        """`on_progress` is called when a leg ends: room may be free now."""
        self.worker_id = worker.worker_id
        self.incarnation = worker.incarnation
        self.address = worker.address
        self.load: StepLoad | None = None
        self._connect_timeout_s = connect_timeout_s
        self._on_progress = on_progress
        self._legs: dict[int, DecodeLeg] = {}
        self._last_key = 0
        self._outgoing: asyncio.Queue[Command] = asyncio.Queue()
        self._is_up = asyncio.Event()
        self._is_closed = False
        self._failure = Unavailable(f"decode worker {self.worker_id} is not reached yet")
        self._task = asyncio.create_task(self._run())

    @property
    def is_up(self) -> bool:
        return self._is_up.is_set()

    @property
    def num_legs(self) -> int:
        """Keys that wait for their worker's last word."""
        return len(self._legs)

    async def open(self, reserve: decode_pb2.ReserveDecode, deadline: Deadline) -> DecodeLeg:
        """Send a reservation as soon as the stream is up.

        Returns: the leg, still RESERVING; its owner cancels it whatever happens.
        Raises: Unavailable when the worker is not reached in time.
        """
        if not self.is_up:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(deadline.sooner(self._connect_timeout_s).left_s()):
                    await self._is_up.wait()
        if not self.is_up or self._is_closed:
            raise self._failure
        self._last_key += 1
        leg = DecodeLeg(self._last_key, self.worker_id, self._outgoing.put_nowait)
        self._legs[leg.key] = leg
        self._outgoing.put_nowait(Command(decode_pb2.DecodeCommand(key=leg.key, reserve=reserve)))
        return leg

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
        if self._legs and not self.is_up:
            raise Internal(f"stream to {self.worker_id} is down and keeps legs")

    async def _run(self) -> None:
        backoff_s = _FIRST_BACKOFF_S
        while True:
            was_up = False
            try:
                was_up = await self._serve_once()
            except Exception as error:  # the last line of defence: the worker must be met again
                self._failure = Unavailable(f"decode worker {self.worker_id}: {error}")
                logger.exception("decode_stream_failed")
            finally:
                self._break()
            if was_up:
                backoff_s = _FIRST_BACKOFF_S
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
            backoff_s = min(_MAX_BACKOFF_S, backoff_s * 2)

    async def _serve_once(self) -> bool:
        """Connect and serve until the stream ends. Returns: whether it was up at all."""
        async with serving.channel(self.address) as channel:
            try:
                async with asyncio.timeout(self._connect_timeout_s):
                    await channel.channel_ready()
            except TimeoutError:
                self._failure = Unavailable(f"decode worker {self.worker_id} is not reached")
                return False
            call = channel.stream_stream(
                _METHOD,
                request_serializer=Command.write,
                response_deserializer=decode_pb2.DecodeEvents.FromString,
            )()
            self._outgoing = asyncio.Queue()
            self._is_up.set()
            logs.event(logger, "decode_stream_up", worker_id=self.worker_id, address=self.address)
            writer = asyncio.create_task(self._write(call, self._outgoing))
            try:
                await self._read(call)
                self._failure = Unavailable(f"decode worker {self.worker_id} ended the stream")
            except grpc.aio.AioRpcError as error:
                cause = serving.error_from_rpc(error)
                self._failure = Unavailable(
                    f"decode worker {self.worker_id} is gone: {cause}", retry_after_s=1.0
                )
            finally:
                writer.cancel()
                call.cancel()
                await asyncio.gather(writer, return_exceptions=True)
        return True

    async def _write(
        self,
        call: grpc.aio.StreamStreamCall[Command, decode_pb2.DecodeEvents],
        outgoing: asyncio.Queue[Command],
    ) -> None:
        # The reader sees the end of a broken call, too, and deals with it.
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                await call.write(await outgoing.get())

    async def _read(
        self, call: grpc.aio.StreamStreamCall[Command, decode_pb2.DecodeEvents]
    ) -> None:
        while True:
            message = await call.read()
            if not isinstance(message, decode_pb2.DecodeEvents):
                return  # the worker closed its side
            self.load = StepLoad(message.num_free_blocks, message.num_running + message.num_waiting)
            for event in message.events:
                self._dispatch(event)

    def _dispatch(self, event: decode_pb2.DecodeEvent) -> None:
        leg = self._legs.get(event.key)
        if leg is None:
            logs.event(
                logger,
                "event_for_unknown_key",
                level=logging.WARNING,
                worker_id=self.worker_id,
                key=event.key,
            )
            return
        leg.on_event(event)
        if leg.is_over:
            del self._legs[leg.key]
            self._on_progress()

    def _break(self) -> None:
        self._is_up.clear()
        self.load = None
        legs, self._legs = self._legs, {}
        if legs:
            logs.event(
                logger,
                "decode_stream_broken",
                level=logging.WARNING,
                worker_id=self.worker_id,
                num_legs=len(legs),
                why=str(self._failure),
            )
        for leg in legs.values():
            leg.fail(_copy(self._failure))
        self._on_progress()


def _copy(error: BatonError) -> BatonError:
    # One exception object raised in many tasks would mix their tracebacks.
    return Unavailable(str(error), retry_after_s=error.retry_after_s)
