"""One multiplexed stream to one life of one decode worker: a message up carries a whole engine
step, and the worker's load after it.

Law: beside the stream's own, blocks and places are counted as asked for exactly until the worker
answers the reservation. One asyncio loop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc.aio

from process import rpc
from process.authorization import PeerRole
from process.deadline import Deadline
from process.errors import Internal, Unavailable
from process.rpc import Dialer
from protos import decode_pb2
from services.router.decode_leg import DecodeLeg, LegState
from services.router.opening import Opening
from services.router.sealed_handle import Command
from services.router.views import WorkerView
from services.router.worker_stream import Call, WorkerStream

_METHOD = "/baton.v1.Decode/Stream"
"""Called by name: the generated stub would read the handles that are only passed on."""


@dataclass(frozen=True)
class StepLoad:
    """A worker's load as of its last step; fresher than any heartbeat."""

    num_free_blocks: int
    num_others: int
    """Requests there that are none of ours."""
    num_free_places: int | None
    """Places for samples of further requests; None: the worker does not say."""


class DecodeStream(WorkerStream[DecodeLeg]):
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
    ) -> DecodeLeg:
        """Send a reservation, which takes `num_blocks` and `num_places`, as soon as the stream is
        up.

        Returns: the leg, still RESERVING; its owner cancels it whatever happens.
        Raises: Unavailable when the worker is not reached in time.
        """
        await self._wait_up(deadline)
        leg = DecodeLeg(self._next_key(), self.worker_id, self._outgoing.put_nowait)
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
            _METHOD,
            request_serializer=_write,
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


def _write(command: Command | Opening) -> bytes:
    return command.write()
