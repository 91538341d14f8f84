"""Steps: one after the other: who is let in, who computes what, and what came of it as one value.
Events of a step that an exception cut short are told by the next. Engine thread only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from engine.constraints import Constraints
from engine.entrance import Entrance
from engine.group import Group
from engine.kv.cache_manager import KVCacheManager
from engine.metrics import EngineMetrics, Totals, count_running_and_waiting
from engine.outputs import RequestOutput, StepOutput
from engine.runner import Runner
from engine.scheduler import Scheduler

IDLE_WAIT_S = 0.002
"""How long a step waits that has nothing to compute yet. Short beside a compilation, long beside a
look at who waits; guessed."""


class Steps:
    """See the module.

    Args:
        groups: the live requests.
        clock: of the metrics.
    """

    def __init__(
        self,
        entrance: Entrance,
        scheduler: Scheduler,
        runner: Runner,
        constraints: Constraints,
        cache_manager: KVCacheManager,
        metrics: EngineMetrics,
        totals: Totals,
        *,
        groups: Mapping[str, Group],
        clock: Callable[[], float],
    ) -> None:
        self._entrance = entrance
        self._scheduler = scheduler
        self._runner = runner
        self._constraints = constraints
        self._cache_manager = cache_manager
        self._metrics = metrics
        self._totals = totals
        self._groups = groups
        self._clock = clock
        self._untold: list[RequestOutput] = []

    def has_work(self) -> bool:
        """Whether `take` would compute or tell anything. What is in flight of live samples is work,
        as they are; a launch that nobody waits for any more is none."""
        has_news = bool(self._untold)
        return has_news or self._entrance.has_waiting or self._scheduler.has_work()

    @property
    def is_device_behind(self) -> bool:
        """See engine/loop.py:Engine.is_device_behind."""
        return self._runner.is_device_behind

    def take(self) -> StepOutput:
        """The next one. See engine/loop.py:Engine.step."""
        began = self._clock()
        self._untold += self._entrance.let_in_ready(self._clock)
        is_admitting = not self._entrance.wants_places
        has_begun = self._runner.has_begun
        plan = {} if has_begun else self._scheduler.next_plan(is_admitting=is_admitting)
        num_prefills = num_decodes = num_guessed = num_kept = 0
        is_computing = bool(plan) or has_begun
        if is_computing:
            result = self._runner.run(
                plan,
                self._scheduler,
                is_admitting=is_admitting,
                is_settled=not self._entrance.has_waiting,
            )
            self._untold += result.events
            num_prefills, num_decodes = result.num_prefill_tokens, result.num_decode_tokens
            num_guessed, num_kept = result.num_guessed_tokens, result.num_kept_tokens
        elif not self._untold:
            self._idle()
        events, self._untold = self._untold, []
        self._totals.num_steps += 1
        # Kept guesses are among the decodes.
        num_refused = num_guessed - num_kept
        self._totals.num_computed_tokens += num_prefills + num_decodes + num_refused
        if is_computing:
            seconds = self._clock() - began
            self._totals.num_computing_steps += 1
            self._totals.num_decode_tokens += num_decodes
            self._totals.step_s += seconds
            num_used_blocks = self._cache_manager.num_used
            self._metrics.on_step(num_prefills, num_decodes, seconds, num_used_blocks)
            if num_guessed:
                self._metrics.on_guesses(num_guessed, num_kept)
        num_running, num_waiting = count_running_and_waiting(self._groups)
        return StepOutput(
            events=tuple(events),
            num_scheduled_tokens=num_prefills + num_decodes,
            num_free_blocks=self._cache_manager.num_available,
            num_running=num_running,
            num_waiting=num_waiting,
            step=self._totals.num_steps,
            began_s=began,
            ended_s=self._clock(),
        )

    def _idle(self) -> None:
        self._cache_manager.in_flight.settle()  # nobody waits for it, and here is the time
        if self._constraints.has_waiting:
            self._constraints.wait(IDLE_WAIT_S)
        elif self._scheduler.running:  # bytes are on their way
            time.sleep(IDLE_WAIT_S)
