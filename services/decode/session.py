"""One router's stream: its keys, the requests behind them, and the end of all of them when it
breaks.

A handle's leases are given back by whom it was made for. One that comes for a request that is over
by then was; what comes under a key that this stream never knew, or for another request, may be
somebody else's, whose leases are left to lapse.

Knows no stubs. Belongs to the loop's thread.
"""

from __future__ import annotations

import asyncio

from process.deadline import Deadline
from process.errors import AlreadyExists, BatonError, NotFound
from services.decode.ask import DecodeAsk
from services.decode.intake import Handover
from services.decode.leases import give_back, is_for
from services.decode.request import DecodeRequest
from services.decode.sink import EventSink, Load
from services.decode.worker import DecodeWorker
from services.worker.handle import Handle

_MAX_PAST = 256
"""Requests whose end a router may not have heard of when it hands over; guessed, far above what it
has under way at one worker."""


class StreamSession:
    """See the module."""

    def __init__(self, worker: DecodeWorker, sink: EventSink) -> None:
        self._worker = worker
        self._sink = sink
        self._requests: dict[int, DecodeRequest] = {}
        self._past: dict[int, tuple[str, str]] = {}  # request id and tenant by key, oldest first
        self._idle = asyncio.Event()
        self._idle.set()

    def reserve(self, key: int, ask: DecodeAsk, deadline: Deadline) -> None:
        """Begin a request. Raises: AlreadyExists when the key is in use."""
        if key in self._requests:
            raise AlreadyExists(f"key {key} is in use on this stream")
        request = self._worker.begin(self._sink, key, ask, deadline)
        assert request.task is not None
        self._requests[key] = request
        self._idle.clear()
        request.task.add_done_callback(lambda _: self._over(request))

    def generate(self, key: int, handover: Handover) -> None:
        """Hand the KV over.

        An unknown key (refused, ended) is answered so; the handle's leases are given back if they
        are of that key's request.
        """
        request = self._requests.get(key)
        owner = request.owner if request is not None else self._past.get(key)
        try:
            if request is None:
                raise NotFound(f"no request {key} on this stream (any more)")
            request.hand_over(handover)
        except BatonError as error:
            if handover.handle is not None and owner and is_for(handover.handle, *owner):
                give_back(self._worker.core, handover.handle)
            self.refuse(key, error)

    def prefetch(self, key: int, handle: Handle) -> None:
        """Pull what a partial handle names, early. Nothing happens when the request is over, or has
        its final handle already."""
        request = self._requests.get(key)
        if request is not None:
            request.arrival.prefetch(handle)

    def cancel(self, key: int) -> None:
        """End a request; nothing happens when it is over already."""
        request = self._requests.get(key)
        if request is not None:
            request.cancel(say_so=True)

    def cancel_sample(self, key: int, sample_index: int) -> None:
        """End one sample of a request, and the request with its last one."""
        request = self._requests.get(key)
        if request is not None:
            request.cancel_sample(sample_index)

    def refuse(self, key: int, error: BaseException) -> None:
        """A command was wrong: say so under its key."""
        self._sink.failed(key, error, None)
        self._sink.flush(Load.now(self._worker.core.thread.stats))

    async def wait_idle(self) -> None:
        """Until every request of the stream is over. Each has its own deadline."""
        await self._idle.wait()

    def close(self) -> None:
        """The stream is gone: cancel all of its requests, and take back what nobody heard of.
        Idempotent."""
        for request in list(self._requests.values()):
            request.cancel(say_so=False)
        self._sink.close()

    def _over(self, request: DecodeRequest) -> None:
        del self._requests[request.key]
        self._past[request.key] = request.owner
        if len(self._past) > _MAX_PAST:
            del self._past[next(iter(self._past))]
        if not self._requests:
            self._idle.set()
