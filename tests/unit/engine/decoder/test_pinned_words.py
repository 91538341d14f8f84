"""PinnedWords against a device that reads them as late as it may: it finds a step's words as they
were written, whatever is written after them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

from engine.decoder.pinned_words import PinnedTurns, PinnedWords

NUM_WORDS = 40
_zeros = torch.zeros


class Device:
    """Does what is queued when somebody waits for what was queued behind it, and no sooner."""

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

    def zeros(*sizes: int, dtype: torch.dtype, pin_memory: bool = False) -> torch.Tensor:
        assert pin_memory
        return _zeros(*sizes, dtype=dtype)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: "stream")
    monkeypatch.setattr(torch, "zeros", zeros)
    return its


def test_what_is_written_is_read_however_late(device: Device, seed: int) -> None:
    """Steps of a few forms, each with a place and words of its own that only its first step
    writes; some fail before they are read."""
    rng = random.Random(seed)
    pinned = PinnedWords(NUM_WORDS, torch.device("cuda"))
    address = pinned.words.data_ptr()
    forms: list[tuple[int, int, list[int]]] = []
    for _ in range(3):
        first = rng.randrange(NUM_WORDS - 2)
        num_words = rng.randrange(2, NUM_WORDS - first + 1)
        forms.append((first, num_words, rng.sample(range(num_words), num_words // 2)))
    wanted: list[list[int]] = []
    found: list[list[int]] = []
    num_kept = 0
    last: int | None = None
    for _ in range(300):
        number = rng.randrange(len(forms)) if last is None or rng.random() < 0.5 else last
        first, num_words, shared = forms[number]
        has_form = rng.random() < 0.9
        words = pinned.begin(first, num_words, number if has_form else None)
        assert device.num_done == len(device.queue), "nobody writes into what is still read"
        assert pinned.is_kept == (has_form and number == last)
        assert pinned.is_kept or not words.any(), "nothing is left of another step"
        last = last if pinned.is_kept else None
        num_kept += pinned.is_kept
        expected = [100 * number + place if place in shared else 0 for place in range(num_words)]
        if not pinned.is_kept:
            words[shared] = [expected[place] for place in shared]
        for place in set(range(num_words)) - set(shared):
            expected[place] = words[place] = rng.randrange(1000)
        if rng.random() < 0.1:
            continue  # the step failed before it was read
        wanted.append(expected)
        device.queue.append(
            lambda here=slice(first, first + num_words): found.append(pinned.words[here].tolist())  # type: ignore[misc]
        )
        pinned.on_read()
        last = number if has_form else None
        if rng.random() < 0.2:
            device.run_until(len(device.queue))  # its draws were waited for
    device.run_until(len(device.queue))
    assert found == wanted and num_kept > 0
    assert pinned.words.data_ptr() == address


def test_without_cuda_nothing_is_waited_for() -> None:
    pinned = PinnedWords(5, torch.device("cpu"))
    for count in (3, 5, 2):
        pinned.begin(0, count)[1] = count
        assert pinned.words[:count].tolist() == [0, count, 0, 0, 0][:count]
        pinned.on_read()


def test_what_is_sent_in_turns_arrives_however_late_the_copy_is(device: Device, seed: int) -> None:
    rng = random.Random(seed)
    pinned = PinnedTurns(torch.device("cuda"))
    if rng.random() < 0.5:
        pinned.reserve(rng.randrange(1, NUM_WORDS))
    sent: list[tuple[Target, list[int]]] = []
    for _ in range(200):
        words = pinned.begin(rng.randrange(1, NUM_WORDS))
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


def test_in_turns_without_cuda_it_is_there_at_once() -> None:
    pinned = PinnedTurns(torch.device("cpu"))
    for count in (3, 5, 2):
        target = torch.full((count,), -1, dtype=torch.int32)
        pinned.begin(count)[1] = count
        pinned.send(target)
        assert target.tolist() == [0, count, 0, 0, 0][:count]
