"""PinnedWords against a device whose copies are as late as they may be: a step's words arrive as
they were sent, whatever is written after them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

from engine.decoder.pinned_words import PinnedWords

_empty = torch.empty


class Device:
    """Copies are made when somebody waits for what was queued behind them, and no sooner."""

    def __init__(self) -> None:
        self.queue: list[Callable[[], None]] = []
        self.num_done = 0

    def run_until(self, count: int) -> None:
        while self.num_done < count:
            self.queue[self.num_done]()
            self.num_done += 1


class Target:
    """Words on the device."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.words: list[int] | None = None

    def copy_(self, source: torch.Tensor, *, non_blocking: bool) -> None:
        assert non_blocking

        def copy() -> None:
            self.words = source.tolist()

        self._device.queue.append(copy)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    its = Device()

    class Event:
        def record(self, stream: object) -> None:
            assert stream == "stream"
            self._count = len(its.queue)

        def synchronize(self) -> None:
            its.run_until(self._count)

    def empty(*sizes: int, dtype: torch.dtype, pin_memory: bool = False) -> torch.Tensor:
        assert pin_memory
        return _empty(*sizes, dtype=dtype).fill_(-7)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: "stream")
    its_words = PinnedWords(torch.device("cuda"))
    monkeypatch.setattr(torch, "empty", empty)
    its.pinned = its_words  # type: ignore[attr-defined]
    return its


def _pinned(device: Device) -> PinnedWords:
    return cast(PinnedWords, cast(Any, device).pinned)


def test_what_is_sent_arrives_however_late_the_copy_is(device: Device, seed: int) -> None:
    rng = random.Random(seed)
    pinned = _pinned(device)
    sent: list[tuple[Target, list[int]]] = []
    for _ in range(200):
        words = pinned.begin(rng.randrange(1, 40))
        assert not words.any(), "nothing is left of a step before"
        for place in range(len(words)):
            if rng.random() < 0.5:
                words[place] = rng.randrange(1, 1000)
        if rng.random() < 0.1:
            continue  # the step failed before it was sent
        target = Target(device)
        pinned.send(cast(Any, target))
        sent.append((target, words.tolist()))
        if rng.random() < 0.2:
            device.run_until(len(device.queue))  # its draws were waited for
    assert device.num_done >= len(device.queue) - 2, "no more copies wait than there are buffers"
    device.run_until(len(device.queue))
    assert [target.words for target, _ in sent] == [words for _, words in sent]


def test_without_cuda_it_is_there_at_once() -> None:
    pinned = PinnedWords(torch.device("cpu"))
    for count in (3, 5, 2):
        target = torch.full((count,), -1, dtype=torch.int32)
        pinned.begin(count)[1] = count
        pinned.send(target)
        assert target.tolist() == [0, count, 0, 0, 0][:count]
