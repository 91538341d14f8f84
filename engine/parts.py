"""Parts: what an engine is made of, made in the order in which each needs the ones before it, and
the laws that hold among all of them. Who drives them: engine/loop.py. Engine thread only.

What the parts do: engine/scheduler.py who computes next, engine/kv/cache_manager.py whose blocks
are which, engine/preemptor.py how blocks are taken away and brought back, engine/constraints.py
grammars, engine/entrance.py from a request to the queue, engine/steps.py one step after the other,
engine/plain_steps.py its forward pass, engine/runner.py that and its draws,
engine/output_processor.py what came of it, engine/in_flight.py steps that are computed before they
are told.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Values
from contextlib import ExitStack

from engine.config import EngineConfig
from engine.constraints import Constraints, MakeService
from engine.decode_rows import DecodeRows
from engine.entrance import Entrance
from engine.foresight import Foresight
from engine.group import Group
from engine.in_flight import InFlight
from engine.kv.block_pool import BlockPool
from engine.kv.cache_manager import KVCacheManager
from engine.kv.memory import KvMemory
from engine.kv.radix_tree import RadixTree
from engine.kv.sizing import choose_num_blocks, free_memory_bytes
from engine.metrics import EngineMetrics, EngineStats, Totals, compute_stats
from engine.models.interface import LoadedModel
from engine.output_processor import OutputProcessor
from engine.parking import Parking, choose_parking
from engine.plain_steps import PlainSteps
from engine.preemptor import Preemptor
from engine.request import ModelInfo, StopPolicy
from engine.runner import Runner
from engine.scheduler import Scheduler
from engine.speculation.cost_clock import cost_clock
from engine.speculation.drafter import Drafter, close_all
from engine.speculation.wanted import make_speculator
from engine.steps import Steps


class Parts:
    """See the module. Arguments and errors: engine/loop.py:Engine."""

    def __init__(
        self,
        config: EngineConfig,
        model: LoadedModel,
        *,
        stop_policy: StopPolicy | None,
        parking: Parking | None,
        make_grammars: MakeService | None,
        drafters: Values[Drafter] | None,
        draft_bytes: int,
        clock: Callable[[], float],
    ) -> None:
        self.model = model
        self._drafters = drafters or ()
        window = model.info.context_window
        device = model.device_memory()
        num_blocks = choose_num_blocks(
            config,
            model.layout,
            window,
            free_memory_bytes(model.info.device),
            None if device is None else dataclasses.replace(device, draft_bytes=draft_bytes),
            model.kv_record,
        )
        self.kv: KvMemory = model.make_memory(num_blocks)
        self.model_info: ModelInfo = dataclasses.replace(model.info, num_blocks=num_blocks)
        model.attach(self.kv)
        self.pool = BlockPool(num_blocks)
        if self.kv.tails is not None:
            self.kv.tails.is_live = self.pool.is_used
        # A stop policy looks at every token before the next is drawn.
        is_ahead = config.overlap and stop_policy is None
        self.ahead = model.ahead if is_ahead else None
        self.in_flight = InFlight(self.ahead, self.pool, self.kv.layout.block_size)
        self.cache_manager = KVCacheManager(self.kv, RadixTree(self.pool), self.in_flight)
        self.metrics = EngineMetrics(clock, num_blocks)
        parking = choose_parking(config, self.kv.device, park_bytes(config, self.kv), parking)
        self.preemptor = Preemptor(self.cache_manager, parking, self.metrics)
        self.scheduler = Scheduler(config, self.cache_manager, self.preemptor, self.metrics)
        eos_token_ids = frozenset(model.info.eos_token_ids)
        self.groups: dict[str, Group] = {}
        self.totals = Totals()
        self.constraints = Constraints(
            make_grammars,
            eos_token_ids=eos_token_ids,
            jump_forward=config.jump_forward,
        )
        self.output_processor = OutputProcessor(
            self.groups,
            self.cache_manager,
            self.scheduler,
            self.preemptor,
            self.constraints,
            model.adapters,
            self.metrics,
            self.totals,
            eos_token_ids=eos_token_ids,
            stop_policy=stop_policy,
        )
        self.entrance = Entrance(
            config,
            self.model_info,
            self.kv.layout,
            self.groups,
            adapters=model.adapters,
            constraints=self.constraints,
            scheduler=self.scheduler,
            output_processor=self.output_processor,
            cache_manager=self.cache_manager,
            metrics=self.metrics,
            has_stop_policy=stop_policy is not None,
        )
        self.speculator = make_speculator(
            config,
            self.cache_manager,
            drafters,
            guesses=model.guesses,
            context_window=window,
            eos_token_ids=eos_token_ids,
            clock=cost_clock(config, model.info.device, clock),
        )
        plain = PlainSteps(
            model,
            self.kv,
            self.constraints,
            self.in_flight,
            self.speculator,
            eos_token_ids=eos_token_ids,
        )
        runner = Runner(
            model,
            plain,
            self.output_processor,
            self.in_flight,
            DecodeRows(
                self.ahead,
                self.cache_manager,
                eos_token_ids,
                clears_blocks=model.reads_unwritten,
                # Who guesses sees each prompt's step.
                takes_prompts=config.overlap_prompts and self.speculator is None,
            ),
            Foresight(self.scheduler, self.cache_manager.block_size),
            self.speculator,
            begins_early=self.ahead is not None,
            clock=clock,
        )
        self.steps = Steps(
            self.entrance,
            self.scheduler,
            runner,
            self.constraints,
            self.cache_manager,
            self.metrics,
            self.totals,
            groups=self.groups,
            clock=clock,
        )

    def close(self) -> None:
        """See engine/loop.py:Engine."""
        with ExitStack() as stack:  # the last first; each, whatever befalls another
            stack.callback(self.model.close)
            stack.callback(close_all, self._drafters)
            stack.callback(self.constraints.close)
            stack.callback(self.in_flight.close)

    def stats(self) -> EngineStats:
        """Levels and counts now."""
        return compute_stats(
            self.groups, self.cache_manager, self.totals, self.preemptor.num_by_cause
        )

    def check_integrity(self) -> None:
        """See engine/loop.py:Engine."""
        self.cache_manager.check_integrity(self.groups)
        self.kv.check_integrity()
        self.scheduler.check_integrity()
        self.preemptor.check_integrity(
            sequence for group in self.groups.values() for sequence in group.samples.values()
        )
        self.metrics.check_integrity()
        self.entrance.check_integrity()
        if self.speculator is not None:
            self.speculator.check_integrity()
        self.constraints.check_integrity()
        self.model.check_integrity()
        self.model.adapters.check_integrity(
            Counter(
                group.request.adapter for group in self.groups.values() if group.request.adapter
            )
        )


def park_bytes(config: EngineConfig, kv: KvMemory) -> int:
    """Bytes that a parking may take of this process' memory; 0: nothing is ever parked."""
    if config.preemption != "swap":
        return 0
    return config.park_bytes or kv.num_blocks * kv.layout.block_bytes
