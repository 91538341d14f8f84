"""The order in which the scheduler looks at those that wait is that of engine/scheduler.py:rank."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.engine import LLMEngine
from engine.request import RequestState
from engine.scheduler import SchedulingPolicy, WaitingSequence, rank
from engine.testing.fake_model import FakeModel


def _sequence(number: int, order: int, priority: int, state: RequestState) -> Any:
    return SimpleNamespace(
        key=(str(number), 0),
        group=SimpleNamespace(order=order),
        request=SimpleNamespace(priority=priority),
        state=state,
    )


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_it_is_that_of_rank(policy: SchedulingPolicy, seed: int) -> None:
    """Those of three kinds; who came first may join the line last (its grammar took its time)."""
    rng = random.Random(f"line {seed}")
    config = EngineConfig(num_blocks=16, policy=policy)
    for _ in range(20):
        scheduler = LLMEngine(config, FakeModel(block_size=4, context_window=64))._scheduler
        orders = rng.sample(range(100), 40)
        waiting = []
        for number, order in enumerate(orders):
            kind = rng.choice(
                [
                    RequestState.QUEUED,
                    RequestState.WAITING,
                    RequestState.PREEMPTED,
                    RequestState.PARKED,
                ]
            )
            one = _sequence(number, order, rng.randint(-1, 1), kind)
            if kind is RequestState.QUEUED:
                scheduler.queued.add(one)
            elif kind is RequestState.WAITING:
                scheduler.waiting[one.key] = one
            else:
                scheduler.preempted[one.key] = one
            is_preempted = kind in (RequestState.PREEMPTED, RequestState.PARKED)
            waiting.append(
                WaitingSequence(one.key, one.request.priority, order, 1, is_preempted=is_preempted)
            )
        ranked = sorted(waiting, key=lambda one: rank(one, policy, 3))
        assert [one.key for one in scheduler.next_in_line()] == [one.key for one in ranked]
