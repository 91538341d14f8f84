"""HuggingFaceModel: the universal backend. Modelling code of transformers, our paged attention, no
cache class of theirs.

All new tokens of all requests lie in one row [1, T]; position ids say where each belongs,
StepAttention which KV it sees. Runs under inference mode. Engine thread only.
"""

from __future__ import annotations

from typing import Any

import torch
from baton_kernels import reference

from engine.batch import Batch
from engine.kv.layout import KvLayout
from engine.kv.memory import KvMemory
from engine.models.step_attention import StepAttention
from engine.request import ModelInfo


class HuggingFaceModel:
    """A LoadedModel (models/interface.py). Built by models/load.py, which probed, fused and
    verified it."""

    def __init__(self, model: Any, info: ModelInfo, layout: KvLayout) -> None:
        self.info = info
        self.layout = layout
        self._model = model
        self._device = torch.device(info.device)
        self._views: list[tuple[torch.Tensor, torch.Tensor]] = []

    def attach(self, memory: KvMemory) -> None:
        """Views of each layer's keys and values in the cache."""
        self._views = layer_views(memory)

    @torch.inference_mode()
    def forward(self, batch: Batch) -> torch.Tensor:
        """See LoadedModel. Logits come in the model's dtype."""
        step = StepAttention(batch, self._views, self.layout.num_kv_heads, self.layout.block_size)
        return run(self._model, batch, step, self._device)


def layer_views(memory: KvMemory) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Per layer (keys, values) as head rows, [N * K, P, D] each."""
    return [
        (
            reference.head_rows(memory.cache, layer, 0),
            reference.head_rows(memory.cache, layer, 1),
        )
        for layer in range(memory.layout.num_layers)
    ]


def run(model: Any, batch: Batch, step: StepAttention, device: torch.device) -> torch.Tensor:
    """One forward pass of a transformers model over a batch; logits [R, V]."""
    token_ids = torch.tensor([batch.token_ids], device=device)
    positions = torch.tensor([batch.positions], device=device)
    logits: torch.Tensor = model(
        input_ids=token_ids,
        position_ids=positions,
        use_cache=False,
        past_key_values=None,
        logits_to_keep=torch.tensor(batch.draw_indices, dtype=torch.int64, device=device),
        baton_step=step,
    ).logits
    return logits[0]
