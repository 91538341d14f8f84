"""What a step has brought is on its way before the end of a request's life takes its time."""

from __future__ import annotations

from typing import Any

from engine.request import FinishReason
from engine.step_output import RequestEvent, StepOutput
from services.decode.sink import Load
from services.decode.worker import DecodeWorker


class _Recorder:
    """A request's chunks, its sink and itself, as far as a step's news go."""

    def __init__(self, name: str, heard: list[str], sink: Any = None) -> None:
        self._name, self._heard = name, heard
        self.sink, self.chunks = sink, self

    def add(self, _event: RequestEvent, _output: StepOutput) -> None:
        pass

    def on_event(self, event: RequestEvent) -> None:
        self._heard.append(f"{self._name} {event.token_ids}")

    def on_flushed(self) -> None:
        self._heard.append(f"{self._name} ends")

    def flush(self, load: Load) -> None:
        self._heard.append(f"{self._name} {load.step}")


def _event(name: str, finish_reason: FinishReason | None = None) -> RequestEvent:
    return RequestEvent(name, (1,), None, (), 2, finish_reason, None, None)


def test_all_is_flushed_before_anybody_ends() -> None:
    heard: list[str] = []
    router, other = _Recorder("router", heard), _Recorder("other router", heard)
    requests = {name: _Recorder(name, heard, sink=router) for name in ("a", "b")}
    requests["c"] = _Recorder("c", heard, sink=other)
    worker: Any = DecodeWorker.__new__(DecodeWorker)
    worker._requests = requests
    events = (_event("a", FinishReason.LENGTH), _event("b"), _event("gone"), _event("c"))
    worker._on_step(StepOutput(events, 4, 10, 3, 0, 7))
    told, flushed, ended = heard[:3], heard[3:5], heard[5:]
    assert told == ["a (1,)", "b (1,)", "c (1,)"]
    assert flushed == ["router 7", "other router 7"]
    assert ended == ["a ends", "b ends", "c ends"]
