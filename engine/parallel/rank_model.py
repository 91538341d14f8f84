"""RankModel: one rank's part of our decoder, run together with the other ranks. In rank 0 it is a
part of ParallelModel (engine/parallel/parallel_model.py), in the others all that there is.

Hidden states come in from the stage before and go to the stage after; within a stage the decoder
itself adds up and joins. Knows no requests and no processes. Invariant: `forward` is called with
equal batches in equal order at all ranks. The thread that computes.
"""

from __future__ import annotations

from pathlib import Path

import torch
from baton_kernels.dispatch import Backend

from engine.batch import Batch
from engine.config import EngineConfig
from engine.decoder.inputs import DecodeInputs, mixed_inputs, singles_first
from engine.kv.layout import KvLayout
from engine.kv.memory import TORCH_DTYPES, KvMemory
from engine.models.interface import Progress
from engine.models.llama import (
    LlamaConfig,
    LlamaDecoder,
    LlamaWeights,
    Share,
    block_rows,
    on_device,
    rope_table,
)
from engine.models.self_check import NUM_VERIFY_TOKENS, verify_logits
from engine.models.weights import read_weights
from engine.parallel.rank_grid import RankPlace
from engine.parallel.rank_memory import RankMemory
from engine.parallel.ranks import Ranks

_BACKENDS: tuple[Backend, ...] = ("auto", "reference")


class RankModel:
    """One rank's part of a LlamaDecoder model.

    Args:
        weights: this rank's weights (`share_of`).
        num_positions: number of positions of the longest request.
        is_exact: as in LlamaDecoder.
    """

    def __init__(
        self,
        weights: LlamaWeights,
        ranks: Ranks,
        *,
        num_positions: int,
        device: str,
        is_exact: bool = False,
    ) -> None:
        place = ranks.place
        self._device = torch.device(device)
        self._ranks = ranks
        self._hidden_size, self.vocab_size = weights.shape.hidden_size, weights.shape.vocab_size
        self._dtype = weights.layers[0].norm.dtype
        self._decoder = LlamaDecoder(
            weights,
            rope_table(weights.shape, num_positions, self._device),
            is_exact=is_exact,
            collective=ranks if place.num_shares > 1 else None,
        )

    @property
    def weight_bytes(self) -> int:
        """Bytes of this rank's weights."""
        return self._decoder.weights.num_bytes

    @property
    def is_fp8(self) -> bool:
        """Whether the layers' matrices are stored in fp8."""
        return self._decoder.weights.is_fp8

    def attach(self, memory: KvMemory) -> None:
        """Use this cache from now on: the whole model's, of which this rank uses its layers and
        heads, or this rank's own (memory.RankMemory)."""
        if memory.is_whole:
            share = self._decoder.weights.share
            layers = range(share.first_layer, share.first_layer + len(self._decoder.weights.layers))
            views = memory.layer_views(layers, share.rank, share.num_ranks)
        else:
            views = memory.layer_views()
        self._decoder.attach([block_rows(view, memory.layout) for view in views])

    @torch.inference_mode()
    def forward(self, batch: Batch) -> torch.Tensor:
        """Compute a batch together with the other ranks. Returns: logits [R, V] in the last stage,
        [0, V] in others. Raises: RankFailed."""
        with on_device(self._device):
            inputs = mixed_inputs(singles_first(batch), self._device)
            hidden = self._receive(inputs.num_rows)
            return self._finish(self._decoder.forward(inputs, hidden))

    @torch.inference_mode()
    def decode(self, inputs: DecodeInputs) -> torch.Tensor:
        """Compute one token of each sequence together with the other ranks; CUDA graphs can capture
        it. Returns: logits [B, V] in the last stage, [0, V] in others. Raises: RankFailed."""
        hidden = self._receive(inputs.num_rows)
        return self._finish(self._decoder.decode(inputs, hidden))

    def verify(self, layout: KvLayout) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute logits for the check of the kernels, at all ranks at once, through a temporary
        cache. Returns: those of the kernels, and those of plain torch."""
        num_blocks = layout.num_blocks_for(NUM_VERIFY_TOKENS)
        self.attach(RankMemory(layout, self._ranks.place, num_blocks, str(self._device)))
        found = []
        for backend in _BACKENDS:
            self._decoder.use_backend(backend)
            found.append(verify_logits(self.forward, self.vocab_size, layout))
        self._decoder.use_backend("auto")
        return found[0], found[1]

    def _receive(self, num_rows: int) -> torch.Tensor | None:
        """Receive the output of the stage before, [T, hidden]; None in the first stage."""
        if self._ranks.place.is_first:
            return None
        hidden = torch.empty(num_rows, self._hidden_size, dtype=self._dtype, device=self._device)
        self._ranks.receive(hidden)
        return hidden

    def _finish(self, computed: torch.Tensor) -> torch.Tensor:
        if self._ranks.place.is_last:
            return computed
        self._ranks.send(computed)
        return computed.new_empty(0, self.vocab_size)


def share_of(place: RankPlace, shape: LlamaConfig) -> Share:
    """Convert a Place to the Share that the decoder's weights use."""
    layers = place.layers(shape.num_layers)
    return Share(place.share, place.num_shares, layers.start, len(layers))


def load_rank(
    config: EngineConfig,
    folder: Path,
    shape: LlamaConfig,
    ranks: Ranks,
    *,
    progress: Progress | None = None,
) -> RankModel:
    """Read this rank's part of a checkpoint to its device.

    Args:
        config: `device`, `dtype` and `context_window` are set, not "auto" or 0.
        shape: the sizes of the whole model.
    Raises: LoadError, CheckpointError.
    """
    device = torch.device(config.device)
    with on_device(device):
        weights = read_weights(
            folder,
            shape,
            dtype=TORCH_DTYPES[config.dtype],
            device=device,
            share=share_of(ranks.place, shape),
            weight_dtype="" if config.weight_dtype == "auto" else config.weight_dtype,
            progress=progress,
        )
        return RankModel(
            weights,
            ranks,
            num_positions=config.context_window,
            device=config.device,
            is_exact=config.exact,
        )
