"""ParallelModel: a LoadedModel (models/interface.py) that several processes compute. This one is
rank 0: it sends every batch to the others, computes its own part, and has the logits.

Where there are stages, a step of many tokens goes through them in several pieces, so that they work
at the same time. A rank that fails ends the model for good: every later call raises RankFailed.
Adapters are not for several ranks. Engine thread only; `close` may be called by whoever drops it.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from engine.batch import Batch
from engine.config import EngineConfig
from engine.kv.layout import KvLayout
from engine.kv.memory import KvMemory
from engine.kv.sizing import DeviceMemory, device_memory, free_memory_bytes
from engine.lora.manager import LoraManager
from engine.models.interface import Ends, Guesses, Progress
from engine.parallel.ahead import ParallelAhead, build
from engine.parallel.memory import RankMemory, map_file
from engine.parallel.messages import Attach, Attached, Settle, Settled, Step
from engine.parallel.pieces import pieces
from engine.parallel.place import Grid
from engine.parallel.process_ranks import ProcessRanks
from engine.parallel.processes import RankProcesses
from engine.parallel.rank_model import RankModel
from engine.request import ModelInfo

MIN_PIECE_TOKENS = {"cpu": 64, "cuda": 1024}
"""A step is cut into pieces of no fewer tokens. Below, a piece takes about as long as the whole:
weights are read once for each. Guesses."""


@dataclass(frozen=True)
class Others:
    """What a model of several ranks holds beside its own part."""

    processes: RankProcesses
    ranks: ProcessRanks
    cache_file: int
    """Descriptor of the cache's file, on CPU."""

    meeting_file: int

    def close(self) -> None:
        """End the processes, and let the files go. Idempotent by the finalizer that calls it."""
        self.processes.close()
        self.ranks.close()
        os.close(self.cache_file)
        os.close(self.meeting_file)


class ParallelModel:
    """See the module. Built by engine/models/loader.py, which formed the ranks.

    Args:
        layout: of whole blocks.
        free_bytes: on the other ranks' devices, with their weights in place.
    """

    def __init__(
        self,
        part: RankModel,
        others: Others,
        info: ModelInfo,
        layout: KvLayout,
        config: EngineConfig,
        free_bytes: Sequence[int] = (),
    ) -> None:
        self.info = info
        self.layout = layout
        self.adapters = LoraManager.refused("its layers are shared by several processes")
        self.ahead: ParallelAhead | None = None
        self.reads_unwritten = layout.dtype != info.dtype  # as LlamaModel
        self.guesses = Guesses.CHAINS
        self._max_rows, self._launches_ahead = config.max_num_running, config.overlap
        self._part = part
        self._others = others
        self._processes = others.processes
        self._place = others.ranks.place
        self._grid = Grid(config.tensor_parallel, config.pipeline_parallel)
        self._device = torch.device(info.device)
        self._uneven_bytes = 0
        if self._device.type == "cuda":
            self._uneven_bytes = max(0, free_memory_bytes(info.device) - min(free_bytes))
        # Also when this object is dropped, and at the interpreter's exit.
        self._finalizer = weakref.finalize(self, others.close)

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of ranks 1 and up."""
        return self._processes.pids

    @property
    def kv_record(self) -> KvLayout:
        """See LoadedModel: the first stage has as many layers as any."""
        if self._device.type == "cpu":
            return self.layout
        return replace(self._place, stage=0).layout(self.layout)

    def device_memory(self) -> DeviceMemory | None:
        """See LoadedModel: this rank's, less what another one's device has less free."""
        found = device_memory(
            self.info.device,
            weight_bytes=self.info.weight_bytes // (len(self.pids) + 1),
            step_bytes=self.info.step_bytes,
        )
        if found is None:
            return None
        return replace(found, free_bytes=found.free_bytes - self._uneven_bytes)

    def make_memory(self, num_blocks: int) -> KvMemory:
        """See LoadedModel."""
        if self._device.type == "cpu":
            return map_file(self.layout, num_blocks, self._others.cache_file)
        return RankMemory(
            self.layout,
            self._place,
            num_blocks,
            self.info.device,
            on_change=self._processes.tell,
            settle=self._settle,
        )

    def attach(self, memory: KvMemory) -> None:
        """See LoadedModel: `memory` is `make_memory`'s."""
        with self._processes.step():
            self._processes.tell(Attach(memory.num_blocks))
            self._part.attach(memory)
            if isinstance(memory, RankMemory):
                caches = [attached.cache for attached in self._processes.answers(Attached)]
                memory.reach(caches, self._grid)
        if not self._launches_ahead:
            return
        self.ahead = build(
            ParallelAhead,
            self._part,
            self._others.ranks,
            memory,
            max_rows=self._max_rows,
            context_window=self.info.context_window,
        )
        self.ahead.lead(self._processes)

    def _settle(self) -> None:
        with self._processes.step():
            self._processes.tell(Settle())
            self._processes.answers(Settled)

    def forward(self, batch: Batch) -> torch.Tensor:
        """See LoadedModel. Raises: RankFailed; every later call does, too."""
        parts = pieces(batch, self._place.num_stages, MIN_PIECE_TOKENS[self._device.type])
        with self._processes.step():
            for piece in parts:
                self._processes.tell(Step(piece))
            logits = [self._part.forward(piece) for piece in parts]
            if self._device.type == "cuda":
                # Or a rank that died would show as numbers: its kernels end when it is given up.
                torch.cuda.current_stream(self._device).synchronize()
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    def hidden(self) -> torch.Tensor:
        """See LoadedModel: `info` says that there is none."""
        raise ValueError("a model of several ranks keeps no hidden states")

    def every_hidden(self) -> torch.Tensor | None:
        """See LoadedModel."""
        return None

    def layer_inputs(self) -> Mapping[int, torch.Tensor]:
        """See LoadedModel: no batch may want any (`ends`)."""
        return {}

    @property
    def ends(self) -> Ends | None:
        """See LoadedModel: they lie in shares on several ranks."""
        return None

    def queues_step(self, batch: Batch) -> bool:
        """See LoadedModel: `forward` waits for the ranks."""
        return False

    def warm_up(self, progress: Progress | None = None) -> None:
        """See LoadedModel: plain steps of several ranks have no graphs."""

    def check_integrity(self) -> None:
        """See LoadedModel: each rank's layers lie there whole."""

    def check_alive(self) -> None:
        """See LoadedModel."""
        self._processes.check()

    def watch(self, tell: Callable[[], None]) -> None:
        """See LoadedModel."""
        self._processes.watch(tell)

    def close(self) -> None:
        """See LoadedModel."""
        self._processes.close()
        if self.ahead is not None:
            self.ahead.close()
        self._finalizer()
