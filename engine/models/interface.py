"""LoadedModel: what the engine needs of a model. One seam; the Hugging Face backend and
engine/fake.py stand behind it."""

from __future__ import annotations

from typing import Protocol

import torch

from engine.batch import Batch
from engine.kv.layout import KvLayout
from engine.kv.memory import KvMemory
from engine.lora.registry import Adapters
from engine.request import ModelInfo


class LoadedModel(Protocol):
    """A model with its weights in place. Called from the engine's thread only."""

    @property
    def info(self) -> ModelInfo:
        """What it is; `num_blocks` is 0, the engine knows it."""
        ...

    @property
    def layout(self) -> KvLayout:
        """What it caches per block."""
        ...

    @property
    def adapters(self) -> Adapters:
        """Its LoRA adapters; one that refuses every load where the model takes none."""
        ...

    def attach(self, memory: KvMemory) -> None:
        """Use this cache from now on. Called once, before `forward`."""
        ...

    def forward(self, batch: Batch) -> torch.Tensor:
        """Compute the batch's tokens, write their KV into their blocks, and give logits [R,
        vocab_size] for its draws.

        A token sees the cached tokens before it in its own request, and itself. The KV of
        batch-mates is never seen. A row's logits do not depend on what else is in the batch, beyond
        rounding.
        """
        ...
