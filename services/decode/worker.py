"""A decode worker's requests, and the engine's events on their way to them.

What one request goes through is in services/decode/request.py. The engine's events of one step
reach every stream by one `flush`. Belongs to the loop's thread; speaks values, not stubs.
"""

from __future__ import annotations

import asyncio

from engine.step_output import StepOutput
from process.deadline import Deadline
from process.errors import Internal
from services.decode.ask import DecodeAsk
from services.decode.request import DecodeRequest
from services.decode.sink import EventSink, Load
from services.decode.states import DecodeState
from services.worker.core import WorkerCore
from services.worker.write_back import WriteBack

_EXTRA_PART = 16
"""One place more for each so many that run at once, and at least one: a few requests wait in the
engine, so that a place that becomes free is taken in the next step, not after the way to the router
and through prefill. Each of them may see a gap behind its first token, so they are few. Guessed."""


class DecodeWorker:
    """All decode requests of one engine, whatever stream they came over."""

    def __init__(self, core: WorkerCore) -> None:
        self.core = core
        self.write_back = WriteBack(
            core.connector,
            core.thread,
            core.limits,
            core.counts,
            block_size=core.model.block_size,
            on_room=lambda: core.on_room(),
        )
        max_num_running = core.settings.engine.max_num_running
        self._num_places = max_num_running + max(1, max_num_running // _EXTRA_PART)
        core.num_free_places = lambda: self.num_free_places
        self._requests: dict[str, DecodeRequest] = {}

    def start(self) -> None:
        """Begin to run the engine. Called once, on the loop."""
        self.core.thread.start(self._on_step, self._on_failure)

    @property
    def num_waiting(self) -> int:
        """Requests that have not drawn their first token here."""
        return sum(not request.is_decoding for request in self._requests.values())

    @property
    def num_free_places(self) -> int:
        """Places for samples of further requests. A request has its places from its reservation on:
        by the time when it needs them they are still there. Nothing is refused for want of one: a
        sample without waits in the engine, and routers hold requests back before it comes to that.
        """
        num_taken = sum(request.num_places for request in self._requests.values())
        return max(0, self._num_places - num_taken)

    @property
    def states(self) -> dict[str, DecodeState]:
        """Of the live requests, by their name in the engine."""
        return {engine_id: request.state for engine_id, request in self._requests.items()}

    def begin(self, sink: EventSink, key: int, ask: DecodeAsk, deadline: Deadline) -> DecodeRequest:
        """Start a request's life; the sink hears of everything from here on."""
        request = DecodeRequest(
            self.core,
            self.write_back,
            sink,
            key,
            ask,
            deadline,
            num_waiting=lambda: self.num_waiting,
            on_over=self.forget,
        )
        self._requests[request.engine_id] = request
        request.task = asyncio.create_task(request.live())
        return request

    def leave(self, by: Deadline) -> None:
        """The worker goes: every request moves, with its KV if that is stored by then. New ones are
        refused by now (`WorkerCore.draining`)."""
        for request in list(self._requests.values()):
            request.leave(by)

    def forget(self, request: DecodeRequest) -> None:
        """The end of a request's life; idempotent."""
        if self._requests.pop(request.engine_id, None) is not None:
            request.close()

    def _on_step(self, output: StepOutput) -> None:
        load = Load.after_step(output)
        sinks: dict[int, EventSink] = {}
        for event in output.events:
            request = self._requests.get(event.request_id)
            if request is not None:  # else cancelled while the step ran
                request.chunks.add(event, output)
                request.on_event(event)
                sinks[id(request.sink)] = request.sink
        for sink in sinks.values():
            sink.flush(load)

    def _on_failure(self, error: Internal) -> None:
        for request in self._requests.values():
            request.fail(error)
        self.core.failed.set()
