"""From a Batch to tensors: rows, positions, tables and lengths of any step; and its words in pinned
memory, which a device that reads them as late as it may finds as they were written."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch import Batch, TokenSpan, warm_up
from engine.decoder.inputs import mixed_inputs, singles_first
from engine.decoder.int32_arrays import Tables, int32s, table_of
from engine.decoder.pinned_step_buffer import PinnedTurns, PinnedWords

CPU = torch.device("cpu")


def _random_batch(rng: random.Random) -> Batch:
    spans, draws, num_rows = [], [], 0
    for _ in range(rng.randint(1, 9)):
        start, length = rng.choice([0, 0, 5, 33]), rng.choice([1, 1, 2, 17])
        num_blocks = -(-(start + length) // 4)
        spans.append(TokenSpan(start, length, tuple(rng.randrange(99) for _ in range(num_blocks)),
                          rng.randrange(3)))  # fmt: skip
        num_rows += length
        if rng.random() < 0.7:
            draws.append(num_rows - 1)
    return Batch(tuple(rng.randrange(1000) for _ in range(num_rows)), tuple(spans), tuple(draws))


def _rows(batch: Batch) -> list[tuple[int, int, TokenSpan]]:
    """(token id, position, span) of each row."""
    places = [(position, span) for span in batch.spans for position in range(span.start, span.end)]
    return [(token, *place) for token, place in zip(batch.token_ids, places, strict=True)]


def test_singles_come_first_and_every_row_stays_itself(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(200):
        batch = _random_batch(rng)
        ordered = singles_first(batch)
        is_long = [span.num_tokens > 1 for span in ordered.spans]
        assert is_long == sorted(is_long)
        before, after = _rows(batch), _rows(ordered)
        assert sorted(before, key=repr) == sorted(after, key=repr)
        drawn = [before[row] for row in batch.draw_indices]
        assert [after[row] for row in ordered.draw_indices] == drawn


def test_tensors_say_what_the_batch_says(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(200):
        batch = singles_first(_random_batch(rng))
        inputs = mixed_inputs(batch, CPU)
        rows = _rows(batch)
        assert inputs.token_ids.tolist() == [token for token, _, _ in rows]
        assert inputs.positions.tolist() == [position for _, position, _ in rows]
        for row, index in enumerate(inputs.sequence_ids.tolist()):
            assert batch.spans[index] == rows[row][2]
        for span, table in zip(batch.spans, inputs.block_tables.tolist(), strict=True):
            assert tuple(table[: len(span.block_ids)]) == span.block_ids
            assert set(table[len(span.block_ids) :]) <= {0}
        singles = [span for span in batch.spans if span.num_tokens == 1]
        chunks = batch.spans[len(singles) :]
        assert inputs.num_singles == len(singles)
        assert inputs.ends.tolist() == [span.end for span in singles]
        assert inputs.starts.tolist() == [span.start for span in chunks]
        assert inputs.query_starts[0] == 0
        assert inputs.query_starts.diff().tolist() == [span.num_tokens for span in chunks]
        assert inputs.max_query_len == max((span.num_tokens for span in chunks), default=0)
        assert inputs.max_end == max((span.end for span in chunks), default=0)
        assert inputs.draw_indices.tolist() == list(batch.draw_indices)
        assert all(one.dtype == torch.int32 for one in (inputs.starts, inputs.draw_indices))
        assert inputs.starts.data_ptr() % 64 == inputs.token_ids.data_ptr() % 64


def test_a_warm_up_has_no_positions() -> None:
    """Its table is as wide as its tokens are many: what a kernel looks up must be there."""
    assert mixed_inputs(warm_up(100), CPU).block_tables.shape[1] >= 100
    inputs = mixed_inputs(warm_up(5), CPU)
    assert inputs.positions.tolist() == [-1] * 5
    assert inputs.starts.tolist() == [0]
    assert mixed_inputs(warm_up(1), CPU).ends.tolist() == [0]


def test_another_order_is_refused() -> None:
    batch = Batch((1, 2, 3), (TokenSpan(0, 2, (1,)), TokenSpan(4, 1, (0,))), ())
    with pytest.raises(ValueError, match="do not come first"):
        mixed_inputs(batch, CPU)


# -- tuples of integers as numpy's


int32 = st.integers(-(2**31), 2**31 - 1)


@settings(max_examples=25)
@given(values=st.lists(int32, max_size=40))
def test_they_are_numpys(values: list[int]) -> None:
    for found in (int32s(values), table_of(tuple(values))):
        assert found.dtype == np.int32 and found.tolist() == values
        assert not found.flags.writeable  # it is remembered
    assert table_of(tuple(values)) is table_of(tuple(values))


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1])
def test_what_is_no_int32_is_refused(value: int) -> None:
    with pytest.raises(struct.error):
        int32s([3, value])


def test_what_is_remembered_is_bound_in_bytes() -> None:
    """Of tables that grow with each step, as those of long sequences do."""
    limit = 1 << 16
    tables = Tables(max_bytes=limit)
    for num_blocks in range(500, 600):
        table = tuple(range(num_blocks))
        assert tables.of(table) is tables.of(table)
        assert tables.of(table).tolist() == list(table)
        assert tables.num_bytes <= limit
    assert tables.num_bytes > limit // 4, "some of it is remembered"
    assert len(tables.of(tuple(range(limit)))) == limit  # larger than all of it
    assert tables.num_bytes <= limit


# -- words in pinned memory


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
