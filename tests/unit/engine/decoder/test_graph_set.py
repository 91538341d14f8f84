"""GraphSet against a device that only writes down what it is told: what is captured into which
graph, and what a run replays."""

from __future__ import annotations

import contextlib
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.decoder.graph_set import GraphSet
from engine.decoder.inputs import mixed_inputs, singles_first
from engine.errors import IntegrityError
from engine.kv.memory import KvMemory, LayerView
from tests.unit.engine.decoder.test_ahead_model import DEVICES, _model
from tests.unit.engine.decoder.test_trees import NUM_BLOCKS, _batch


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


def _launching(device: Device, cuts: dict[str, int]) -> GraphSet[str]:
    """Three launches a shape, with a cut before one of them."""

    def compute(shape: str) -> None:
        for index in range(3):
            if cuts.get(shape) == index:
                graphs.cut()
            device.launch(f"{shape}{index}")

    graphs: GraphSet[str] = GraphSet(compute, uses_graphs=True)
    return graphs


def test_what_follows_a_cut_is_a_graph_of_its_own(device: Device) -> None:
    graphs = _launching(device, {"a": 1})
    graphs.capture(["a", "b"], memory=MEMORY)
    assert device.done == ["a0", "a1", "a2", "b0", "b1", "b2"], "each once before its capture"
    device.done.clear()
    graphs.run("a")
    assert device.done == ["graph of 1", "a0", "graph of 2", "a1", "a2"]
    device.done.clear()
    graphs.run("b")
    assert device.done == ["graph of 3", "b0", "b1", "b2"]
    with pytest.raises(IntegrityError, match="no graph of c"):
        graphs.run("c")


def test_a_capture_that_fails_behind_a_cut_is_ended(device: Device) -> None:
    def compute(_: str) -> None:
        device.launch("first")
        graphs.cut()
        if device.open is not None:
            raise RuntimeError("in the middle")

    graphs: GraphSet[str] = GraphSet(compute, uses_graphs=True)
    with pytest.raises(RuntimeError, match="in the middle"):
        graphs.capture(["a"], memory=MEMORY)
    assert device.open is None
    graphs.cut()
    assert device.open is None, "nothing is captured any more"


@pytest.mark.parametrize("device", DEVICES)
def test_a_decoder_says_once_that_its_first_layers_are_launched(device: str, seed: int) -> None:
    """Two of three: their KV is there then, the last one's is not."""
    rng = random.Random(seed)
    model = _model(device, torch.float32, seed)
    batch = _batch(rng, ["tree", "one"])
    memory = KvMemory(model.layout, NUM_BLOCKS, device)
    model.attach(memory)
    ids = sorted({block_id for span in batch.spans for block_id in span.block_ids})
    written: list[list[bool]] = []

    def look() -> None:
        written.append(
            [bool(view.keys[_rows_of(view, ids)].any()) for view in memory.layer_views()]
        )

    inputs = mixed_inputs(singles_first(batch), torch.device(device))
    with torch.inference_mode():
        model.decoder.forward(replace(inputs, is_begun=look))
        assert written == [[True, True, False]]
        look()
    assert written[1] == [True, True, True]


def _rows_of(view: LayerView, block_ids: list[int]) -> list[int]:
    heads = view.heads
    return [
        block_id * heads.rows_per_block + head * heads.head_step
        for block_id in block_ids
        for head in range(heads.num_heads)
    ]
