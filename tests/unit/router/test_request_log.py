"""The request log and the usage history: what they keep, in which order, within which bounds."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from enum import Enum
from types import SimpleNamespace

import pytest

from protos import common_pb2, inference_pb2
from services.router import request_stats
from services.router.policies import Choice
from services.router.request_stats import MANY, MAX_SPANS, RequestLog, StageTimes, UsageHistory
from tests.harness.waiting import Clock, until

WALL_NS = 1_700_000_000 * 10**9


class _State(Enum):
    DECODING = "decoding"


class _Flow:
    state = _State.DECODING
    choice: Choice | None = None


def _message(num_tokens: int, **account: int) -> inference_pb2.GenerateResponse:
    message = inference_pb2.GenerateResponse(token_ids=[7] * num_tokens)
    if account:
        leg = common_pb2.KvLeg(role="prefill", num_tokens_computed=account["computed"])
        leg.num_tokens_local = account["local"]
        leg.from_store.add(num_tokens=account["store"])
        message.provenance.legs.append(leg)
        message.provenance.legs.append(common_pb2.KvLeg(role="decode", num_tokens_computed=999))
    return message


def test_a_request_from_its_arrival_to_its_account() -> None:
    clock, log = Clock(50.0), RequestLog(wall_ns=lambda: WALL_NS)
    times = StageTimes(clock)
    with log.follow("r", "t", "m", times) as record:
        clock.now_s += 1
        times.mark("receive")
        (told,) = log.newest(8)
        assert (told.state, told.outcome, told.elapsed_s) == ("waiting to be admitted", "", 1)
        record.flow, record.num_prompt_tokens = _Flow(), 20
        clock.now_s += 2
        record.on_message(_message(1))
        (told,) = log.newest(8)
        assert told.state == "decoding" and told.first_token_s == 3
        assert [(s.stage, s.begin_s, s.end_s) for s in told.spans] == [
            ("receive", 0, 1),
            ("decoding", 1, 3),
        ]
        record.on_message(_message(4, computed=5, local=8, store=7))
        times.mark("decode")
        record.outcome = "finished"
    assert log.num_live == 0
    (told,) = log.newest(8)
    assert (told.state, told.outcome, told.num_output_tokens) == ("", "finished", 5)
    assert told.arrived_unix_ms == WALL_NS // 10**6
    clock.now_s += 100
    assert log.newest(8)[0].elapsed_s == 3  # it does not age
    assert log.totals.sources == {"computed": 5, "local": 8, "store": 7}  # the first leg's alone
    assert (log.totals.num_finished, log.totals.num_output_tokens) == (1, 5)
    assert (log.totals.num_first_tokens, log.totals.first_token_s) == (1, 3)


def test_live_ones_come_first_and_the_oldest_is_forgotten() -> None:
    log = RequestLog(num_kept=3)
    for index in range(5):
        with log.follow(f"ended{index}", "t", "m", StageTimes()):
            pass
    with (
        log.follow("first", "t", "m", StageTimes()),
        log.follow("second", "t", "m", StageTimes()),
    ):
        ids = [told.request_id for told in log.newest(9)]
        assert ids == ["second", "first", "ended4", "ended3", "ended2"]
        assert [told.request_id for told in log.newest(1)] == ["second"]
        assert log.newest(0) == []


def test_many_tries_are_told_as_one_piece_without_a_gap() -> None:
    clock = Clock(50.0)
    times, log = StageTimes(clock), RequestLog()
    with log.follow("r", "t", "m", times) as record:
        for index in range(500):
            clock.now_s += 0.1
            times.mark("choose" if index % 2 else "reserve")
        record.outcome = "finished"
    spans = log.newest(1)[0].spans
    assert len(spans) == MAX_SPANS + 1 and spans[MAX_SPANS // 2].stage == MANY
    for before, after in itertools.pairwise(spans):
        assert before.end_s == after.begin_s
    assert spans[0].begin_s == 0 and spans[-1].end_s == pytest.approx(50)


def test_the_history_is_the_totals_cut_into_intervals(
    seed: int, scale: Callable[[int], int]
) -> None:
    """Whatever happens between points: their sums are the totals, and no more are kept than
    NUM_POINTS."""
    random_ = random.Random(seed)
    log, levels = RequestLog(), SimpleNamespace(now=(0, 0))
    history = UsageHistory(lambda: log.totals, lambda: levels.now, wall_ns=lambda: WALL_NS)
    num_points = request_stats.NUM_POINTS + 10
    sums = dict.fromkeys(("num_output_tokens", "num_tokens_local", "num_finished"), 0)
    for index in range(num_points):
        for _ in range(random_.randrange(3)):
            with log.follow("r", "t", "m", StageTimes()) as record:
                record.on_message(
                    _message(
                        random_.randrange(5),
                        computed=random_.randrange(9),
                        local=random_.randrange(9),
                        store=random_.randrange(9),
                    )
                )
                record.outcome = random_.choice(("finished", "failed"))
        levels.now = (index, 2 * index)
        history.take_point()
        for name in sums:
            sums[name] += getattr(history.points[-1], name)
    assert len(history.points) == request_stats.NUM_POINTS
    assert history.points[-1].num_in_flight == num_points - 1
    assert history.points[-1].num_waiting == 2 * (num_points - 1)
    assert sums == {
        "num_output_tokens": log.totals.num_output_tokens,
        "num_tokens_local": log.totals.sources["local"],
        "num_finished": log.totals.num_finished,
    }


async def test_the_history_takes_points_by_itself() -> None:
    history = UsageHistory(request_stats.Totals, lambda: (0, 0), interval_s=0.01)
    history.start()
    await until(lambda: len(history.points) >= 2)
    task = history._task
    await history.stop()
    assert task is not None and task.done()
