"""DecodeWorker: a decode worker's requests, and the dispatch of the engine's events to them.

A request holds places in the engine's steps, one for each sample, from its reservation on: by the
time when its KV is there they are still free, so that a stream that has begun waits for no other.
Requests for which there are none stand in line, and their reservation is not answered before they
have theirs. Law: places held are at most those that there are.

What one request goes through is in services/decode/request.py. The engine's events of one step
reach every stream by one `flush`. Belongs to the loop's thread; speaks values, not stubs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from engine.outputs import StepOutput
from process.deadline import Deadline
from process.errors import Internal
from services.decode.ask import DecodeAsk
from services.decode.request import DecodeRequest
from services.decode.sink import EventSink, Load
from services.decode.states import DecodeState
from services.worker.core import WorkerCore


class DecodeWorker:
    """All decode requests of one engine, from all streams."""

    def __init__(self, core: WorkerCore) -> None:
        self.core = core
        self._num_places = core.settings.engine.max_num_running
        core.num_free_places = lambda: self.num_free_places
        self._requests: dict[str, DecodeRequest] = {}
        self._line: list[DecodeRequest] = []

    def start(self) -> None:
        """Start the engine's thread; called once, on the event loop."""
        self.core.thread.start(self._on_step, self._on_failure)

    @property
    def num_waiting(self) -> int:
        """Return the number of requests that have not drawn their first token here."""
        return sum(not request.is_decoding for request in self._requests.values())

    @property
    def num_free_places(self) -> int:
        """Return the number of places for samples of further requests, not counting those that
        waiting requests need. No reservation is refused for lack of places; routers hold requests
        back before a queue forms here."""
        num_taken = sum(request.num_places for request in self._requests.values())
        return max(0, self._num_places - num_taken)

    @property
    def num_in_line(self) -> int:
        """Return the number of requests that wait for places."""
        return len(self._line)

    @property
    def states(self) -> dict[str, DecodeState]:
        """Return the states of the live requests, by their engine request id."""
        return {engine_id: request.state for engine_id, request in self._requests.items()}

    def begin(self, sink: EventSink, key: int, ask: DecodeAsk, deadline: Deadline) -> DecodeRequest:
        """Start a request; the sink gets all its events from here on."""
        request = DecodeRequest(
            self.core,
            sink,
            key,
            ask,
            deadline,
            num_waiting=lambda: self.num_waiting,
            on_fewer_places=self._grant,
            on_over=self.forget,
        )
        self._requests[request.engine_id] = request
        self._line.append(request)
        # A client that has seen a part of its answer waits between two tokens.
        self._line.sort(key=lambda one: not one.has_begun)
        self._grant()
        request.task = asyncio.create_task(request.live())
        return request

    def leave(self, by: Deadline) -> None:
        """Move every request to another worker by the time `by`, with its KV if that is stored by
        then. New requests are refused already (`WorkerCore.draining`)."""
        for request in list(self._requests.values()):
            request.leave(by)

    def forget(self, request: DecodeRequest) -> None:
        """Remove a request at the end of its life; idempotent."""
        if self._requests.pop(request.engine_id, None) is not None:
            request.close()
            if request in self._line:
                self._line.remove(request)
            self._grant()

    def _on_step(self, output: StepOutput) -> None:
        load = Load.after_step(output)
        sinks: dict[int, EventSink] = {}
        for event in output.events:
            request = self._requests.get(event.request_id)
            if request is not None:  # else cancelled while the step ran
                request.chunks.add(event, output)
                request.on_event(event)
                sinks[id(request.sink)] = request.sink
        self._grant()
        for sink in sinks.values():
            sink.flush(load)

    def _grant(self) -> None:
        """Grant places to the next waiting requests, as far as they are free."""
        if not self._line:
            return
        num_needed = [request.num_places for request in self._line]
        num_held = sum(request.num_places for request in self._requests.values()) - sum(num_needed)
        num = num_granted(num_needed, num_held, self._num_places)
        granted, self._line = self._line[:num], self._line[num:]
        for request in granted:
            request.take_places()

    def _on_failure(self, error: Internal) -> None:
        for request in self._requests.values():
            request.fail(error)
        self.core.failed.set()


def num_granted(needed: Iterable[int], num_held: int, num_places: int) -> int:
    """Return how many waiting requests get their places now, from the head of the queue on, without
    overtaking.

    Args:
        needed: places that each waiting request needs.
        num_held: places that are held now.
        num_places: places in total.
    """
    num = 0
    for num_needed in needed:
        if num_held + num_needed > num_places:
            break
        num_held += num_needed
        num += 1
    return num
