"""Checksums that a device computes in a few slots: whoever begins more than there are slots for
waits for the device alone, never for himself or for others who wait, too."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvstore.errors import TransferFailed
from services.worker.device_checksums import ChecksumBatches

NUM_SLOTS, BATCH_SIZE = 3, 4


class SlowDevice:
    """Ends what it was given one by one, in order: one batch whenever it is looked at `num_looks`
    times."""

    def __init__(self, num_looks: int = 2) -> None:
        self.num_looks = num_looks
        self.num_given = self.num_done = self.num_seen = 0
        self.error: RuntimeError | None = None
        self.lock = threading.Lock()

    def give(self) -> int:
        with self.lock:
            self.num_given += 1
            return self.num_given

    def has_done(self, number: int) -> bool:
        with self.lock:
            if self.error is not None:
                raise self.error
            self.num_seen += 1
            if self.num_looks and self.num_seen % self.num_looks == 0:
                self.num_done = min(self.num_done + 1, self.num_given)
            return number <= self.num_done


class FakeSlot:
    """Its numbers change as soon as another batch is started in it."""

    def __init__(self, device: SlowDevice) -> None:
        self._device = device
        self._number = 0
        self._found: list[int] = []
        self.after: list[object] = []

    def start(self, block_ids: Sequence[int], after: Any) -> None:
        self.after.append(after)
        if after is not None:
            after.before(7)
        assert self._device.has_done(self._number), "the device still works with this slot"
        self._found = [number_of(block_id) for block_id in block_ids]
        self._number = self._device.give()

    def is_over(self) -> bool:
        return self._device.has_done(self._number)

    def values(self, count: int) -> list[int]:
        assert self.is_over()
        return self._found[:count]


def number_of(block_id: int) -> int:
    return block_id * block_id + 7


def batches_on(device: SlowDevice, stall_s: float = 5.0) -> ChecksumBatches[FakeSlot]:
    slots = [FakeSlot(device) for _ in range(NUM_SLOTS)]
    return ChecksumBatches(slots, BATCH_SIZE, "the device", stall_s)


def numbers(block_ids: Sequence[int]) -> list[int]:
    return [number_of(block_id) for block_id in block_ids]


def test_one_call_may_want_more_than_all_slots_hold() -> None:
    batches, wanted = batches_on(SlowDevice()), list(range(100, 100 + 7 * BATCH_SIZE + 1))
    assert batches.begin(wanted).result() == numbers(wanted)
    assert batches.begin([]).result() == []


def test_one_caller_may_begin_more_than_there_are_slots_before_a_result() -> None:
    """As a copy does, piece by piece (mapped.py)."""
    batches = batches_on(SlowDevice())
    parts = [[10 * piece, 10 * piece + 1] for piece in range(4 * NUM_SLOTS)]
    pending = [batches.begin(part) for part in parts]
    assert [each.result() for each in pending] == [numbers(part) for part in parts]


def test_callers_beside_one_another_do_not_wait_for_each_others_slots() -> None:
    batches = batches_on(SlowDevice(num_looks=5))
    wrong: list[object] = []

    def call(caller: int) -> None:
        for round_ in range(20):
            parts = [[caller, round_, piece] for piece in range(NUM_SLOTS)]
            pending = [batches.begin(part) for part in parts]
            if caller % 2:
                continue  # it does not want them any more
            found = [each.result() for each in pending]
            if found != [numbers(part) for part in parts]:
                wrong.append((caller, round_, found))

    run_beside([lambda caller=caller: call(caller) for caller in range(6)])
    assert wrong == []


def run_beside(calls: Sequence[Callable[[], None]]) -> None:
    failed: list[BaseException] = []

    def guarded(call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=guarded, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
        assert not thread.is_alive(), "somebody waits for ever"
    assert failed == []


class Mark:
    """Behind some copies. `error`: the device cannot wait for it."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error

    def is_over(self) -> bool:
        return True

    def before(self, stream: int) -> None:
        if self._error is not None:
            raise self._error


def test_every_batch_of_a_call_is_behind_its_mark() -> None:
    device, mark = SlowDevice(), Mark()
    slots = [FakeSlot(device) for _ in range(NUM_SLOTS)]
    batches = ChecksumBatches(slots, BATCH_SIZE, "the device")
    wanted = list(range(2 * BATCH_SIZE + 1))
    assert batches.begin(wanted, mark).result() == numbers(wanted)
    assert [after for slot in slots for after in slot.after] == [mark] * 3


def test_a_mark_that_fails_leaves_no_numbers_of_another_batch() -> None:
    batches = batches_on(SlowDevice())
    failure = TransferFailed("cuStreamWaitEvent: no")
    with pytest.raises(TransferFailed, match="cuStreamWaitEvent"):
        batches.begin([1], Mark(failure))
    with pytest.raises(TransferFailed, match="did not answer before"):
        batches.begin(list(range(NUM_SLOTS * BATCH_SIZE)))


def test_a_device_that_does_not_answer_has_failed_for_good() -> None:
    device = SlowDevice()
    batches = batches_on(device, stall_s=0.05)
    device.num_looks = 0
    with pytest.raises(TransferFailed, match="the device: no answer in time"):
        batches.begin([1]).result()
    with pytest.raises(TransferFailed, match="did not answer before"):
        batches.begin([2])


def test_an_error_of_the_device_has_one_line() -> None:
    device = SlowDevice()
    batches = batches_on(device)
    pending = batches.begin([1])
    device.error = RuntimeError("an illegal memory access\nand much more")
    with pytest.raises(TransferFailed, match=r"the device: an illegal memory access$"):
        pending.result()
