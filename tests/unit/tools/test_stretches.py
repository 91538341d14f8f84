"""Loads that last until there is enough of them; what they are sent to is a fake that answers when
it is told to."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import pytest

from baton.load.runner import MessageArrival, RequestOutcome
from baton.load.workload import Planned
from benchmarks.autoscaling import Course, Moment, PoolSize, Stretch, rounds_of, send_all

_WAIT_S = 30.0


def _load(*times_s: float) -> list[Planned]:
    return [Planned(at_s, (number,), 1) for number, at_s in enumerate(times_s)]


class _Fake:
    """Where loads go; `seen` is what is seen of the workers: at which round one more serves."""

    def __init__(self, comes_with: int = 0) -> None:
        self.begun: list[Sequence[Planned]] = []
        self.num_answered = 0
        self.most_open = 0
        self.answers = asyncio.Event()
        self.comes_with = comes_with

    async def send(self, load: Sequence[Planned]) -> list[RequestOutcome]:
        self.begun.append(load)
        self.most_open = max(self.most_open, len(self.begun) - self.num_answered)
        await self.answers.wait()
        self.num_answered += 1
        return [
            RequestOutcome(
                each.at_s, each.at_s + 1, each.at_s + 3, (MessageArrival(each.at_s + 2, 1),)
            )
            for each in load
        ]

    def seen(self) -> Course:
        num = 2 if len(self.begun) >= self.comes_with else 1
        pools = {"prefill": PoolSize(2, num), "decode": PoolSize(2, num)}
        return Course((Moment(float(len(self.begun)), pools),))  # type: ignore[arg-type]


def _has_come(course: Course) -> bool:
    return course.most_ready("decode") > 1


async def test_a_stretch_is_sent_until_there_is_enough_and_then_the_next() -> None:
    fake = _Fake(comes_with=3)
    fake.answers.set()
    begin_s = time.monotonic()
    first, second = _load(0.0, 0.5), _load(0.25)
    stretches = [Stretch([first] * 9, _has_come), Stretch([second] * 9)]
    outcomes = await send_all(stretches, fake.send, fake.seen, begin_s)
    assert fake.begun == [first, first, first, second]
    assert fake.most_open == 1, "each round waits for the one before"
    assert len(outcomes) == 7


async def test_in_an_open_loop_no_round_waits_for_answers() -> None:
    """They come only when the last round is under way."""
    fake = _Fake(comes_with=4)
    stretches = [
        Stretch([_load(0.0)], round_s=0.001),
        Stretch([_load(0.0)] * 9, _has_come, round_s=0.001),
    ]
    async with asyncio.timeout(_WAIT_S):
        sending = asyncio.create_task(send_all(stretches, fake.send, fake.seen, time.monotonic()))
        while len(fake.begun) < 4:
            await asyncio.sleep(0.001)
        assert fake.num_answered == 0
        fake.answers.set()
        assert len(await sending) == 4
    assert fake.most_open == 4


async def test_what_never_is_enough_ends_with_its_rounds() -> None:
    fake = _Fake(comes_with=99)
    fake.answers.set()
    stretches = [Stretch([_load(0.0)] * 5, _has_come)]
    assert len(await send_all(stretches, fake.send, fake.seen, time.monotonic())) == 5


async def test_times_are_those_of_the_whole_load() -> None:
    """Each outcome is moved as a whole, by when its round began."""
    fake = _Fake()
    fake.answers.set()
    (later,) = await send_all(
        [Stretch([_load(0.5)])], fake.send, fake.seen, time.monotonic() - 100.0
    )
    assert later.planned_s >= 100.5
    assert later.sent_s - later.planned_s == pytest.approx(1.0)
    assert later.end_s - later.planned_s == pytest.approx(3.0)
    assert later.arrivals[0].at_s - later.planned_s == pytest.approx(2.0)


async def test_a_round_that_fails_ends_the_load() -> None:
    async def send(load: Sequence[Planned]) -> list[RequestOutcome]:
        raise RuntimeError("broken")

    with pytest.raises(ExceptionGroup) as raised:
        await send_all(
            [Stretch([_load(0.0)] * 3, round_s=0.0)], send, _Fake().seen, time.monotonic()
        )
    assert raised.group_contains(RuntimeError, match="broken")


def test_a_load_is_cut_at_its_rounds() -> None:
    cut = rounds_of(_load(0.0, 9.5, 10.0, 31.0), 10.0)
    assert [[each.at_s for each in load] for load in cut] == [[0.0, 9.5], [0.0], [], [1.0]]
    assert [each.prompt_token_ids for load in cut for each in load] == [(0,), (1,), (2,), (3,)]
    assert rounds_of([], 10.0) == []
