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
from engine.parallel.distributed_ranks import DistributedRanks
from engine.parallel.messages import Attach, Attached, ComputeBatch, Settle, Settled
from engine.parallel.microbatches import pieces
from engine.parallel.parallel_launches import ParallelAhead, build
from engine.parallel.rank_grid import Grid
from engine.parallel.rank_memory import RankMemory, map_file
from engine.parallel.rank_model import RankModel
from engine.parallel.rank_processes import RankProcesses
from engine.request import ModelInfo

MIN_PIECE_TOKENS = {"cpu": 64, "cuda": 1024}
"""Smallest number of tokens of a pipeline piece of a step, by kind of device. A smaller piece takes
about as long as the whole, since each piece reads the weights; guessed."""


@dataclass(frozen=True)
class Others:
    """The resources of a model of several ranks in addition to rank 0's part."""

    processes: RankProcesses
    ranks: DistributedRanks
    cache_file: int
    """Descriptor of the cache's file, on CPU."""

    meeting_file: int

    def close(self) -> None:
        """End the processes and close the files. Called by a finalizer, at most once."""
        self.processes.close()
        self.ranks.close()
        os.close(self.cache_file)
        os.close(self.meeting_file)


class ParallelModel:
    """A model over several processes, of which this is rank 0. Created by engine/models/loader.py,
    which starts the ranks.

    Args:
        layout: the layout of whole blocks.
        free_bytes: free bytes on the other ranks' devices, with their weights loaded.
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
        """The layout of the part of a block on one device: the first stage's, which has as many
        layers as any."""
        if self._device.type == "cpu":
            return self.layout
        return replace(self._place, stage=0).layout(self.layout)

    def device_memory(self) -> DeviceMemory | None:
        """Return this rank's device memory, with the free bytes of the device that has the least;
        None if unknown."""
        found = device_memory(
            self.info.device,
            weight_bytes=self.info.weight_bytes // (len(self.pids) + 1),
            step_bytes=self.info.step_bytes,
        )
        if found is None:
            return None
        return replace(found, free_bytes=found.free_bytes - self._uneven_bytes)

    def make_memory(self, num_blocks: int) -> KvMemory:
        """Create the cache of all ranks, or rank 0's part of it."""
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
        """Use the cache that `make_memory` created, at all ranks."""
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
        """Compute the batch together with all ranks (LoadedModel.forward). Raises: RankFailed, as
        every later call does then."""
        parts = pieces(batch, self._place.num_stages, MIN_PIECE_TOKENS[self._device.type])
        with self._processes.step():
            for piece in parts:
                self._processes.tell(ComputeBatch(piece))
            logits = [self._part.forward(piece) for piece in parts]
            if self._device.type == "cuda":
                # Or a rank that died would show as numbers: its kernels end when it is given up.
                torch.cuda.current_stream(self._device).synchronize()
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    def hidden(self) -> torch.Tensor:
        """Raise ValueError: the model keeps no hidden states, as `info.gives_embeddings` says."""
        raise ValueError("a model of several ranks keeps no hidden states")

    def every_hidden(self) -> torch.Tensor | None:
        """Return None: the model keeps no hidden states."""
        return None

    def layer_inputs(self) -> Mapping[int, torch.Tensor]:
        """Return no layer inputs: the model keeps none."""
        return {}

    @property
    def ends(self) -> Ends | None:
        """None: embedding and head are split between ranks."""
        return None

    def queues_step(self, batch: Batch) -> bool:
        """Return False: `forward` waits for the ranks."""
        return False

    def warm_up(self, progress: Progress | None = None) -> None:
        """Do nothing: plain steps of several ranks have no CUDA graphs."""

    def check_integrity(self) -> None:
        """Do nothing: there are no counts to check."""

    def check_alive(self) -> None:
        """Check that all ranks are alive. Raises: RankFailed if one has ended."""
        self._processes.check()

    def watch(self, tell: Callable[[], None]) -> None:
        """Register a callback for the failure of a rank; called from the watching thread."""
        self._processes.watch(tell)

    def close(self) -> None:
        """End the processes of the other ranks."""
        self._processes.close()
        if self.ahead is not None:
            self.ahead.close()
        self._finalizer()
