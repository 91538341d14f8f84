"""CopyPipeline: when pieces are given, by whom, and what becomes of the device's queues. run_copy
ends what was begun, also where no thread is to be had."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore import errors
from kvstore.transport import device
from kvstore.transport.copy_pipeline import (
    IN_FLIGHT,
    CopyPipeline,
    Flight,
    IsStopped,
    piece_end,
    run_copy,
)
from process.deadline import Deadline
from process.rpc_errors import DeadlineExceeded
from tests.harness.fake_device import FakeDevice, FakeQueue

SIZE = 64


def never() -> bool:
    return False


def always() -> bool:
    return True


class Copying:
    """Items of SIZE bytes from one device to another, one in a piece.

    Attributes:
        given: first items of the pieces that the device was given, in order; sizes: theirs.
        fails_at: the item whose giving fails, once.
    """

    def __init__(self, num_items: int) -> None:
        self.num_items = num_items
        self.device, self.lenders = FakeDevice(), FakeDevice()
        self.view = np.zeros(num_items * SIZE, np.uint8)
        self.lent_view = np.arange(num_items * SIZE).astype(np.uint8)
        self._target = self.device.holding(self.view)
        self._shared = self.lenders.share(self.lenders.holding(self.lent_view))
        self._source = self.device.map_shared(self._shared)
        self.given: list[int] = []
        self.sizes: list[int] = []
        self.fails_at: int | None = None
        self.num_queues = 0
        new_queue = self.device.new_queue

        def counted() -> FakeQueue:
            self.num_queues += 1
            return new_queue()

        self.device.new_queue = counted  # type: ignore[method-assign]
        self.pipeline = CopyPipeline(self.device, 1)

    def give(self, queue: Any, part: slice) -> None:
        if part.start == self.fails_at:
            self.fails_at = None
            raise errors.TransferFailed("the test says so")
        at = part.start * SIZE
        row = [self._target + at, self._source + at, SIZE * (part.stop - part.start)]
        queue.between(np.array([row], np.uint64))
        self.given.append(part.start)
        self.sizes.append(part.stop - part.start)

    def flight(self) -> Flight:
        return Flight(self.pipeline, self.num_items, self.give)

    def run(self) -> None:
        self.pipeline.run(self.num_items, self.give, never)

    @property
    def num_here(self) -> int:
        """Leading items that have come."""
        same = (self.view == self.lent_view).reshape(-1, SIZE).all(axis=1)
        return int(np.append(same, False).argmin())

    def close(self) -> None:
        self.device.engine_runs.set()
        self.pipeline.close()
        self.device.unmap_shared(self._shared, self._source)


@pytest.fixture
def copying() -> Iterator[Copying]:
    made = Copying(IN_FLIGHT + 2)
    yield made
    made.close()


def test_one_queue_serves_one_flight_after_another(copying: Copying) -> None:
    for _ in range(3):
        copying.run()
    assert copying.num_here == copying.num_items and copying.num_queues == 1


def test_a_flight_that_failed_is_over_when_that_is_said(copying: Copying) -> None:
    """And nothing more is given, also where it could be."""
    copying.fails_at = 1
    copying.device.engine_runs.clear()
    flight = copying.flight()
    flight.begin()
    with ThreadPoolExecutor(1) as pool:
        ending = pool.submit(flight.finish, never)
        with pytest.raises(TimeoutError):
            ending.result(0.05)
        copying.device.engine_runs.set()
        with pytest.raises(errors.TransferFailed, match="the test says so"):
            ending.result(20)
    assert copying.given == [0] and copying.num_here == 1
    copying.run()
    assert copying.num_queues == 1, "it was given back"


@pytest.mark.parametrize("is_early", [False, True])
def test_who_is_stopped_gives_nothing_more(copying: Copying, is_early: bool) -> None:
    copying.run()
    copying.given.clear()
    flight = copying.flight()
    if is_early:
        flight.begin_early(never, IN_FLIGHT)
    else:
        flight.begin()
    assert copying.given == list(range(IN_FLIGHT))
    with pytest.raises(DeadlineExceeded):
        flight.finish(always)
    assert copying.given == list(range(IN_FLIGHT)) and copying.num_queues == 1
    copying.run()
    assert copying.num_queues == 1


def test_early_only_as_much_is_given_as_is_said(copying: Copying) -> None:
    copying.run()
    copying.given.clear()
    copying.view[:] = 0
    flight = copying.flight()
    flight.begin_early(never, 2)
    assert copying.given == [0, 1]
    flight.finish(never)
    assert copying.num_here == copying.num_items == len(copying.given)


@pytest.mark.parametrize(("is_stopped", "num_pieces"), [(always, IN_FLIGHT), (never, 0)])
def test_what_may_not_begin_early_takes_no_queue(
    copying: Copying, is_stopped: Any, num_pieces: int
) -> None:
    copying.run()
    copying.given.clear()
    flight = copying.flight()
    flight.begin_early(is_stopped, num_pieces)
    assert not copying.given
    copying.run()
    assert copying.num_queues == 1
    if is_stopped():
        with pytest.raises(DeadlineExceeded):
            flight.finish(is_stopped)
    else:
        flight.finish(is_stopped)
    assert copying.num_queues == 1


def test_early_no_queue_is_made(copying: Copying) -> None:
    flight = copying.flight()
    flight.begin_early(never, IN_FLIGHT)
    assert copying.num_queues == 0 and not copying.given
    flight.finish(never)
    assert copying.num_queues == 1 and copying.num_here == copying.num_items


def test_one_flight_waits_for_its_thread_with_a_queue(copying: Copying) -> None:
    """However many begin early and wait: there are no more queues than threads, and one."""
    flights = [copying.flight() for _ in range(2)]
    for flight in flights:
        flight.begin()
    for flight in flights:
        flight.finish(never)
    assert copying.num_queues == 2
    copying.given.clear()
    waiting = [copying.flight() for _ in range(4)]
    for flight in waiting:
        flight.begin_early(never, 1)
        copying.run()  # the one thread is at something else
    assert copying.num_queues == 2 and copying.given.count(0) == 1 + len(waiting)
    for flight in waiting:
        flight.finish(never)
        copying.given.clear()
        again = copying.flight()
        again.begin_early(never, 1)
        assert copying.given == [0], "it may be early again"
        again.finish(never)
    assert copying.num_queues == 2


@given(st.integers(1, 300), st.integers(1, 80), st.integers(1, 80))
def test_pieces_are_all_of_it_and_the_last_ones_short(num: int, most: int, least: int) -> None:
    least = min(most, least)
    edges = [0]
    while edges[-1] < num:
        edges.append(piece_end(edges[-1], num, most, least))
    assert edges[-1] == num
    sizes = [stop - start for start, stop in pairwise(edges)]
    assert all(0 < size <= most for size in sizes) and sizes == sorted(sizes, reverse=True)
    assert sizes[-1] <= least
    for start, size in zip(edges, sizes, strict=False):
        assert size < (num - start) / 2 + least, "no more than half, in whole ones"
    assert sum(size < least for size in sizes) <= 1


@pytest.mark.parametrize(
    ("size", "least", "given"), [(8, 1, [0, 8, 12, 14, 15]), (4, 1, [0, 4, 8]), (4, 4, [0, 4, 8])]
)
def test_short_pieces_are_under_way_as_many_as_are_so_much(
    size: int, least: int, given: list[int]
) -> None:
    """None of them is waited for before the next is given; and no more than that is."""
    copying = Copying(16)
    copying.pipeline = CopyPipeline(copying.device, size, least)
    copying.device.engine_runs.clear()
    flight = copying.flight()
    flight.begin()
    assert copying.given == given
    copying.device.engine_runs.set()
    flight.finish(never)
    assert copying.given[: len(given)] == given and sum(copying.sizes) == copying.num_items
    copying.close()


def test_pieces_without_a_least_are_as_large_as_may_be(copying: Copying) -> None:
    pipeline = CopyPipeline(copying.device, 4)
    assert [pipeline.piece_end(at, 10) for at in (0, 4, 8)] == [4, 8, 10]
    pipeline = CopyPipeline(copying.device, 4, 1)
    assert [pipeline.piece_end(at, 10) for at in (0, 4, 7, 9)] == [4, 7, 9, 10]


def test_pieces_are_waited_for_without_looks_but_for_the_last(
    copying: Copying, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other piece hides how late a thread wakes that has waited for the last."""
    naps: list[int] = []
    waits: list[int] = []

    class Looked:
        """Over at its hundredth look."""

        num_looks = 0

        def is_over(self) -> bool:
            self.num_looks += 1
            return self.num_looks >= 100

        def wait(self) -> None:
            waits.append(landed)

    class Napping:
        @staticmethod
        def sleep(seconds: float) -> None:
            naps.append(landed)

    landed = 0

    def land(part: slice) -> None:
        nonlocal landed
        landed = part.stop

    monkeypatch.setattr(device, "time", Napping)
    monkeypatch.setattr(FakeQueue, "mark", lambda self: Looked())
    copying.pipeline.run(copying.num_items, copying.give, never, land)
    assert waits == list(range(copying.num_items - 1)) and landed == copying.num_items
    assert not naps


def test_threads_that_take_queues_at_once_take_each_its_own(copying: Copying) -> None:
    """Between the look whether there is one and the taking, another may take the last."""

    class Taken(list[Any]):
        def __bool__(self) -> bool:
            return True

        def __len__(self) -> int:
            return 1

    copying.pipeline._queues = Taken()
    assert copying.pipeline.take_free_queue() is None
    queue = copying.pipeline.take_queue()
    assert copying.num_queues == 1
    copying.pipeline._queues = [queue]


async def test_without_a_thread_what_was_begun_is_ended_here() -> None:
    pool = ThreadPoolExecutor(1)
    asyncio.get_running_loop().set_default_executor(pool)
    pool.shutdown()
    steps: list[str] = []

    def begin(is_stopped: IsStopped) -> None:
        steps.append("begun" if not is_stopped() else "stopped")

    def copy(is_stopped: IsStopped) -> None:
        steps.append("copies" if not is_stopped() else "ends")
        raise DeadlineExceeded("it was told to stop")

    with pytest.raises(RuntimeError, match="shutdown"):
        await run_copy(copy, Deadline.after(30), begin)
    assert steps == ["begun", "ends"]
