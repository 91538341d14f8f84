"""StreamedLayers against a device that does things as late, and in as odd an order, as streams and
events allow: every layer is computed with its own numbers, whatever order layers are called in."""

from __future__ import annotations

import contextlib
import random
import weakref
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from engine.errors import IntegrityError, LoadError
from engine.models.weight_streaming import (
    NUM_BUFFERS,
    DeviceBytes,
    HostMemory,
    PackedLayer,
    StreamedLayers,
    StreamingPlan,
    make_plan,
)

CPU = torch.device("cpu")


class Device:
    """Two queues, one of computation and one of copies, with nothing done until `finish`, which
    takes the next of either as `rng` likes, as far as what waits for what allows. LayerCopies."""

    def __init__(self, rng: random.Random, forgets: str = "") -> None:
        self._rng = rng
        self._forgets = forgets
        self._computation: list[tuple[int, Callable[[], object]]] = []
        """(copies that must be done before it, what it does)."""
        self._copying: list[tuple[int, Callable[[], object]]] = []
        """(computation that must be done before it, what it does)."""
        self._newest: dict[int, int] = {}
        self._must = 0

    def compute(self, work: Callable[[], object]) -> None:
        self._computation.append((self._must, work))

    def begin(self, buffer: int, source: torch.Tensor, target: torch.Tensor) -> None:
        after = 0 if self._forgets == "computed" else len(self._computation)
        self._copying.append((after, lambda: target.copy_(source)))
        self._newest[buffer] = len(self._copying)

    def wait(self, buffer: int) -> None:
        if self._forgets != "copied":
            self._must = max(self._must, self._newest[buffer])

    def settle(self) -> None:
        pass

    def finish(self) -> None:
        computed = copied = 0
        while computed < len(self._computation) or copied < len(self._copying):
            can: list[str] = []
            if computed < len(self._computation) and self._computation[computed][0] <= copied:
                can.append("compute")
            if copied < len(self._copying) and self._copying[copied][0] <= computed:
                can.append("copy")
            if self._rng.choice(can) == "compute":
                self._computation[computed][1]()
                computed += 1
            else:
                self._copying[copied][1]()
                copied += 1


class Layer(nn.Module):
    """Its numbers are all the same, and a part of them is no parameter, as in fused layers."""

    def __init__(self, number: int, size: int, seen: list[tuple[int, float, float]]) -> None:
        super().__init__()
        self.number = number
        self.weight = nn.Parameter(torch.full((size, 3), float(number)), requires_grad=False)
        self.extra = torch.full((5,), float(number), dtype=torch.bfloat16)
        self.device: Any = None
        self._seen = seen

    def forward(self, fails: bool = False) -> None:
        weight, extra = self.weight.data, self.extra.data
        assert weight.shape[1] == 3 and extra.dtype is torch.bfloat16
        self.device.compute(
            lambda: self._seen.append(
                (self.number, float(weight.mean()), float(extra.float().mean()))
            )
        )
        if fails:
            raise RuntimeError("in the middle")


def _streamed(
    rng: random.Random, forgets: str = ""
) -> tuple[Device, list[Layer], StreamedLayers, list[tuple[int, float, float]]]:
    seen: list[tuple[int, float, float]] = []
    sizes = [rng.randint(1, 400) for _ in range(rng.randint(1, 9))]
    layers = [Layer(number + 1, size, seen) for number, size in enumerate(sizes)]
    packed = [PackedLayer(layer) for layer in layers]
    least = 100 + NUM_BUFFERS * max(one.num_bytes for one in packed)
    given = rng.randint(least, least + sum(one.num_bytes for one in packed))
    plan = make_plan([one.num_bytes for one in packed], 100, given)
    device, account = Device(rng, forgets), DeviceBytes(given)
    account.take(100)
    stream = StreamedLayers(layers, packed, plan, CPU, account, device)
    for layer in layers:
        layer.device = device
    return device, layers, stream, seen


def _called(rng: random.Random, layers: list[Layer]) -> list[int]:
    """Call them: passes, some of which fail in their middle, and strays. Returns who was."""
    numbers: list[int] = []
    for _ in range(rng.randint(1, 5)):
        order = list(layers)
        if rng.random() < 0.2:
            rng.shuffle(order)
        failing = rng.choice(order) if rng.random() < 0.3 else None
        for layer in order:
            numbers.append(layer.number)
            if layer is failing:
                with pytest.raises(RuntimeError, match="in the middle"):
                    layer(fails=True)
                break
            layer()
    return numbers


def test_every_layer_is_computed_with_its_own_numbers(
    seed: int, scale: Callable[[int], int]
) -> None:
    for index in range(scale(2000)):
        device, layers, stream, seen = _streamed(random.Random(f"{seed}-{index}"))
        numbers = _called(random.Random(f"{seed}-{index}-calls"), layers)
        stream.check_integrity()
        device.finish()
        assert seen == [(number, float(number), float(number)) for number in numbers], index
        assert stream.account.peak == stream.plan.device_bytes <= stream.account.limit


@pytest.mark.parametrize("forgets", ["copied", "computed"])
def test_a_wait_that_is_forgotten_shows(forgets: str) -> None:
    """The test above must be able to fail."""
    wrong = 0
    for index in range(40):
        device, layers, _stream, seen = _streamed(random.Random(index), forgets)
        numbers = _called(random.Random(f"{index}-calls"), layers)
        device.finish()
        wrong += seen != [(number, float(number), float(number)) for number in numbers]
    assert wrong > 5


def test_a_pass_copies_each_streamed_layer_once_while_the_one_before_is_computed() -> None:
    rng = random.Random(0)
    device, layers, stream, _ = _streamed(rng)
    while len(stream.plan.streamed) < 3:
        device, layers, stream, _ = _streamed(rng)

    def look(number: int, *_: object) -> None:
        """The next one's copy was begun before this one's computation."""
        assert sorted(stream._holds) == sorted((number, (number + 1) % len(stream.plan.streamed)))

    for number, index in enumerate(stream.plan.streamed):
        layers[index].register_forward_pre_hook(partial(look, number))
    for num_passes in range(1, 4):
        for layer in layers:
            layer()
        assert stream.num_copies == NUM_BUFFERS + num_passes * len(stream.plan.streamed)
    device.finish()


def test_a_closed_stream_copies_no_more() -> None:
    rng = random.Random(1)
    _, layers, stream, _ = _streamed(rng)
    while not stream.plan.streamed:
        _, layers, stream, _ = _streamed(rng)
    before = stream.num_copies
    stream.close()
    stream.close()
    for layer in layers:
        layer()
    assert stream.num_copies == before


def test_what_does_not_add_up_is_found() -> None:
    rng = random.Random(2)
    _, layers, stream, _ = _streamed(rng)
    while not 0 < len(stream.plan.streamed) < len(layers):
        _, layers, stream, _ = _streamed(rng)
    stream.check_integrity()
    resident = next(
        layer for index, layer in enumerate(layers) if index not in stream.plan.streamed
    )
    for layer, told in (
        (layers[stream.plan.streamed[0]], "lies in no buffer"),
        (resident, "left its place"),
    ):
        was = layer.weight.data
        layer.weight.data = was.clone()
        with pytest.raises(IntegrityError, match=told):
            stream.check_integrity()
        layer.weight.data = was
    stream.check_integrity()
    stream.account.give_back(1)
    with pytest.raises(IntegrityError, match="bytes of weights on the device"):
        stream.check_integrity()


def test_an_account_takes_no_more_than_its_limit() -> None:
    account = DeviceBytes(10)
    account.take(10)
    account.give_back(4)
    with pytest.raises(IntegrityError, match="11 bytes of weights on the device of 10"):
        account.take(5)
    assert account.peak == 11


# -- plans


def test_plans(seed: int, scale: Callable[[int], int]) -> None:
    """What is planned fits, streams no layer without need, and its buffers hold every streamed
    layer."""
    rng = random.Random(seed)
    for _ in range(scale(4000)):
        sizes = [rng.randint(1, 50)] * rng.randint(1, 12)
        if rng.random() < 0.5:
            sizes = [rng.randint(1, 50) for _ in sizes]
        rest = rng.randint(0, 60)
        least = rest + NUM_BUFFERS * max(sizes)
        given = rng.randint(max(1, least - 20), max(least, rest + sum(sizes)) + 20)
        try:
            plan = make_plan(sizes, rest, given)
        except LoadError as error:
            assert given < min(least, rest + sum(sizes))
            assert f"take {least}" in str(error) and str(given) in str(error)
            continue
        if len(set(sizes)) == 1:  # else fewer may do: the largest layers may be among the others
            assert given >= min(least, rest + sum(sizes))
        resident = [size for index, size in enumerate(sizes) if index not in plan.streamed]
        assert plan.device_bytes == rest + sum(resident) + NUM_BUFFERS * plan.buffer_bytes <= given
        assert plan.host_bytes + sum(resident) == sum(sizes)
        assert all(sizes[index] <= plan.buffer_bytes for index in plan.streamed)
        assert bool(plan.streamed) == (rest + sum(sizes) > given)
        if len(set(sizes)) == 1:
            num_resident = min(len(sizes), (given - rest) // sizes[0] - NUM_BUFFERS)
            expected = len(sizes) if not plan.streamed else num_resident
            assert len(resident) == expected


@pytest.mark.parametrize(
    ("num_layers", "num_resident", "streamed"),
    [(8, 4, (0, 2, 4, 6)), (8, 0, tuple(range(8))), (6, 2, (0, 1, 3, 4)), (9, 6, (0, 3, 6))],
)
def test_streamed_layers_are_spread_among_the_others(
    num_layers: int, num_resident: int, streamed: tuple[int, ...]
) -> None:
    plan = make_plan([10] * num_layers, 7, 7 + 10 * (NUM_BUFFERS + num_resident))
    assert plan == StreamingPlan((10,) * num_layers, 7, streamed)


def test_an_empty_tensor_lies_anywhere() -> None:
    """torch gives it no address."""
    layer = nn.Linear(3, 2)
    layer.nothing = torch.empty(0)
    packed = PackedLayer(layer)
    memory = torch.zeros(packed.num_bytes, dtype=torch.uint8)
    packed.write(memory)
    packed.point(packed.views(memory))
    assert packed.lies_in(memory)
    assert not packed.lies_in(memory.clone())


def test_pinned_memory_is_unpinned_when_copies_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the interpreter's end, too: there finalizers run newest first, the stream's own last."""
    unpinned: list[int] = []
    runtime = SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=unpinned.append)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    memory = HostMemory(64, torch.device("cuda"))
    assert isinstance(memory._unpin, weakref.finalize)
    assert not memory._unpin.atexit
    memory.close()
    memory.close()
    assert unpinned == [memory.bytes.data_ptr()]
