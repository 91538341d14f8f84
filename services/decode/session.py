"""StreamSession: one router's stream: its keys, the requests behind them, and their cancellation
when it breaks.

A handle's leases are released only here if it was made for a request of this stream, which may be
over by then; those of a handle under an unknown key or for another request are left to expire.

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
"""Most finished requests that are remembered, of whose end a router may not have learned when it
hands over. Guessed, far above what a router has in progress at one worker."""


class StreamSession:
    """Requests of one stream, by the router's keys."""

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
        """Pass a handover to its request. For an unknown key (refused, ended) the failure is sent;
        the handle's leases are released if they belong to that key's request."""
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
        """Start to pull what a partial handle names; ignored when the request is over, or has its
        final handle already."""
        request = self._requests.get(key)
        if request is not None:
            request.arrival.prefetch(handle)

    def cancel(self, key: int) -> None:
        """Cancel a request; one that is over is ignored."""
        request = self._requests.get(key)
        if request is not None:
            request.cancel(say_so=True)

    def cancel_sample(self, key: int, sample_index: int) -> None:
        """End one sample of a request, and the request with its last one."""
        request = self._requests.get(key)
        if request is not None:
            request.cancel_sample(sample_index)

    def refuse(self, key: int, error: BaseException) -> None:
        """Send the error of an invalid command under its key."""
        self._sink.failed(key, error, None)
        self._sink.flush(Load.now(self._worker.core.thread.stats))

    async def wait_idle(self) -> None:
        """Wait until every request of the stream is over. Each has its own deadline."""
        await self._idle.wait()

    def close(self) -> None:
        """Cancel all requests because the stream has ended, and release the handles that were not
        delivered. Idempotent."""
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
