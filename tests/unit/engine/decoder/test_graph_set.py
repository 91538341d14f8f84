"""GraphSet against a device that only writes down what it is told: what is captured into which
graph, and what a run replays."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.decoder.graph_set import GraphSet
from engine.errors import IntegrityError


class Device:
    """Launches go into the graph that is being captured, or are done."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.open: list[str] | None = None

    def launch(self, name: str) -> None:
        (self.done if self.open is None else self.open).append(name)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    its = Device()

    class Graph:
        def __init__(self) -> None:
            self.launches: list[str] = []

        def capture_begin(self, *, pool: object, **_: object) -> None:
            assert its.open is None and pool == "pool"
            its.open = self.launches

        def capture_end(self) -> None:
            assert its.open is self.launches
            its.open = None

        def replay(self) -> None:
            its.done += [f"graph of {len(self.launches)}", *self.launches]

    fake: dict[str, Any] = {
        "CUDAGraph": Graph,
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
        "stream": lambda _: contextlib.nullcontext(),
    }
    for name, value in fake.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return its


MEMORY: Any = SimpleNamespace(pool="pool", stream=None)


def test_a_run_replays_what_its_shape_launched(device: Device) -> None:
    def compute(shape: str) -> None:
        for index in range(3):
            device.launch(f"{shape}{index}")

    graphs: GraphSet[str] = GraphSet(compute, uses_graphs=True)
    graphs.capture(["a", "b"], memory=MEMORY)
    assert device.done == ["a0", "a1", "a2", "b0", "b1", "b2"], "each once before its capture"
    device.done.clear()
    graphs.run("b")
    assert device.done == ["graph of 3", "b0", "b1", "b2"]
    with pytest.raises(IntegrityError, match="no graph of c"):
        graphs.run("c")
    graphs.forget()
    with pytest.raises(IntegrityError, match="no graph of b"):
        graphs.run("b")


def test_a_capture_that_fails_is_ended(device: Device) -> None:
    def compute(_: str) -> None:
        device.launch("first")
        if device.open is not None:
            raise RuntimeError("in the middle")

    graphs: GraphSet[str] = GraphSet(compute, uses_graphs=True)
    with pytest.raises(RuntimeError, match="in the middle"):
        graphs.capture(["a"], memory=MEMORY)
    assert device.open is None
    device.launch("second")
    assert device.done == ["first", "second"], "nothing is captured any more"
    with pytest.raises(IntegrityError, match="no graph of a"):
        graphs.run("a")
