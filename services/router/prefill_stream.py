"""One multiplexed stream to one life of one prefill worker: a message up carries all that came
since the last one. One asyncio loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc.aio
from google.protobuf.message import DecodeError

from process import rpc
from process.authorization import PeerRole
from process.deadline import Deadline
from process.errors import Unavailable
from process.rpc import Dialer
from protos import prefill_pb2
from services.router.opening import Opening
from services.router.prefill_call import CallState, GiveBack, PrefillCall
from services.router.sealed_handle import PrefillWord, SealedHandle, words_of
from services.router.views import WorkerView
from services.router.worker_stream import Call, WorkerStream

_METHOD = "/baton.v1.Prefill/Stream"
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
            _METHOD,
            request_serializer=_write,
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


def _write(command: prefill_pb2.PrefillCommand | Opening) -> bytes:
    return command.write() if isinstance(command, Opening) else command.SerializeToString()


def _read_words(data: bytes) -> list[PrefillWord] | None:
    """None: it cannot be read."""
    try:
        return list(words_of(data))
    except (ValueError, DecodeError):
        return None
