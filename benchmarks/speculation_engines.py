"""Engines of `benchmarks.speculation`: those that do the same shall take the same time.

What would make them differ is taken away, or varied. Weights of the target lie in memory once.
Engines are called one at a time, each in a thread of its own, all bound to one core. (One thread
would not do: what guesses cost is judged by the time that an engine's own thread computed.) What is
left, where an engine's cache and its thread's heap lie in memory, is an engine's own as long as it
lives, and up to some percent: so `renew` makes engine and thread anew, as often as a measurement
wants. The new one goes on with what the last one had learnt of guesses: what is tried for the first
time is tried once, as in an engine that lives on.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from benchmarks.speculation_steps import Step
from engine.config import EngineConfig
from engine.loop import Engine
from engine.models.load import Loaded
from engine.speculation.drafter import Draft, Drafter, Task
from engine.speculation.load import load_drafters


class Way:
    """One engine after the other, each with a thread.

    Args:
        model: not attached to a cache; all ways' may be one.
        core: that its threads are bound to; None: to none.
    """

    def __init__(self, model: Loaded, config: EngineConfig, core: int | None) -> None:
        self._model = model
        self._config = config
        self._core = core
        self._thread: ThreadPoolExecutor | None = None
        self._engine: Engine | None = None
        self._num_asked = 0

    @property
    def engine(self) -> Engine:
        assert self._engine is not None
        return self._engine

    def renew(self) -> None:
        """Another engine in another thread, which knows what the one before has learnt of
        guesses."""
        last, self._thread = self._thread, ThreadPoolExecutor(1, "engine", _bind, (self._core,))
        self._thread.submit(self._renew).result()
        if last is not None:
            last.shutdown()

    def _renew(self) -> None:
        last = self._engine
        # Shallow: the modules, and their weights, are everybody's.
        model = copy.copy(self._model)
        drafters = load_drafters(self._config, model.info)
        for drafter in drafters:
            self._watch(drafter)
        self._engine = engine = Engine(self._config, model, drafters=drafters)
        if last is None:
            engine.warm_up()
            return
        old, new = last._speculator, engine._speculator  # noqa: SLF001  nobody else wants it
        if old is not None and new is not None:
            new._exploration, new._lessons = old._exploration, old._lessons  # noqa: SLF001
        last.close()

    def _watch(self, drafter: Drafter) -> None:
        """Have it counted how often it is asked."""
        propose = drafter.propose

        def counted(tasks: Sequence[Task]) -> list[Draft]:
            self._num_asked += 1
            return propose(tasks)

        drafter.propose = counted  # type: ignore[method-assign]

    def step(self, answers: dict[str, list[int]]) -> Step:
        """Its tokens are appended to the answers."""
        assert self._thread is not None
        return self._thread.submit(self._step, answers).result()

    def _step(self, answers: dict[str, list[int]]) -> Step:
        num_asked, began_s, cpu_began_s = self._num_asked, time.perf_counter(), time.thread_time()
        output = self.engine.step()
        cpu_s, wall_s = time.thread_time() - cpu_began_s, time.perf_counter() - began_s
        for event in output.events:
            answers[event.request_id] += event.token_ids
        is_asked = self._num_asked > num_asked
        return Step(wall_s, cpu_s, output.num_scheduled_tokens, is_asked)

    def close(self) -> None:
        """Engine and thread end."""
        if self._engine is not None:
            self._engine.close()
        if self._thread is not None:
            self._thread.shutdown()


def _bind(core: int | None) -> None:
    """This thread, to a core."""
    torch.set_num_threads(1)
    if core is not None:
        os.sched_setaffinity(0, {core})
