"""The scheduler's short way for steps of decodes alone gives what plan_step gives."""

from __future__ import annotations

import random
from collections.abc import Callable

from engine.config import EngineConfig
from engine.engine import LLMEngine
from engine.request import Request, RequestState, Sampling
from engine.scheduler import RunningSequence, plan_step
from engine.testing.fake_model import FakeModel
from tests.harness.engines import hasher


def test_the_short_way_is_the_same_plan(seed: int, scale: Callable[[int], int]) -> None:
    rng = random.Random(seed)
    num_short = 0
    for _ in range(scale(200)):
        config = EngineConfig(
            num_blocks=400,
            max_num_tokens_per_step=rng.randint(4, 12),
            max_num_running=rng.randint(1, 4),
            max_num_tokens_per_request_step=rng.randint(0, 3),
            policy=rng.choice(["fcfs", "priority"]),
        )
        engine = LLMEngine(config, FakeModel(context_window=64))
        scheduler = engine._scheduler
        for number in range(rng.randint(1, 6)):
            prompt = tuple(rng.randrange(1, 97) for _ in range(rng.randint(1, 9)))
            sampling = Sampling(max_tokens=rng.randint(1, 12), ignore_eos=True)
            engine.reserve(
                Request(
                    str(number),
                    prompt,
                    sampling,
                    hasher(),
                    num_samples=rng.randint(1, config.max_num_running),
                )
            )
            engine.start(str(number))
        while engine.has_work():
            running = scheduler.running
            candidates = [
                RunningSequence(
                    key,
                    one.num_pending_tokens,
                    one.state is RequestState.RUNNING,
                    one.request.priority,
                    one.group.order,
                )
                for key, one in running.items()
            ]
            expected = plan_step(
                candidates,
                num_tokens_budget=config.max_num_tokens_per_step,
                max_num_tokens_each=config.max_num_tokens_per_request_step,
                policy=scheduler._policy,
            )
            assert list(scheduler._plan().items()) == list(expected.items())
            num_short += bool(running) and all(one.has_drawn for one in candidates)
            engine.step()
        engine.check_integrity()
    assert num_short > 10
