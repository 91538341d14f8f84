"""One tiny forward pass that shows what a model really caches, and refuses a model that would be
computed wrongly.

It reads shapes from the tensors that reach the attention function, not from the config. Run once at
load.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from engine.errors import ModelNotSupported
from engine.kv.layout import LayerKv

_NUM_TOKENS = 3


@dataclass(frozen=True)
class Probed:
    """What each layer does, in order."""

    layers: tuple[LayerKv, ...]
    """What it caches per token."""
    windows: tuple[int | None, ...]
    """How many tokens back it sees; None: all."""


class Recorder:
    """Stands in for TorchPagedAttention: notes each layer's dims and window, attends to nothing."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerKv] = {}
        self.windows: dict[int, int | None] = {}

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int | None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        is_latent: bool = False,
    ) -> torch.Tensor:
        """Note one layer. Raises: TypeError for a shape that paged attention does not have."""
        if layer in self.layers:
            raise TypeError(f"layer {layer} attends twice")
        if key.shape[1] != query.shape[1] or value.shape[1] != query.shape[1]:
            raise TypeError(
                f"layer {layer} attends to {key.shape[1]} keys for {query.shape[1]} tokens"
            )
        if query.shape[0] % key.shape[0] or query.shape[2] != key.shape[2]:
            raise TypeError(
                f"layer {layer} has queries {tuple(query.shape)} and keys {tuple(key.shape)}"
            )
        num_v_heads = 0 if is_latent else value.shape[0]
        self.layers[layer] = LayerKv(key.shape[0], key.shape[2], num_v_heads, value.shape[2])
        self.windows[layer] = window
        return query.new_zeros(query.shape[1], query.shape[0], value.shape[2])


@torch.inference_mode()
def probe(model: Any, *, num_layers: int, device: str) -> Probed:
    """What each layer caches per token, and how far it sees.

    Args:
        model: a transformers causal language model that uses `transformers_backend.ATTENTION_NAME`.
        num_layers: as the config says.
    Raises: ModelNotSupported.
    """
    recorder = Recorder()
    positions = torch.arange(_NUM_TOKENS, device=device)[None]
    name = type(model).__name__
    try:
        model(
            input_ids=torch.zeros_like(positions),
            position_ids=positions,
            use_cache=False,
            baton_step=recorder,
        )
    except TypeError as error:
        raise ModelNotSupported(f"{name} cannot run on the paged cache: {error}") from error
    if sorted(recorder.layers) != list(range(num_layers)):
        raise ModelNotSupported(
            f"{name} has {num_layers} layers, but attention ran in layers {sorted(recorder.layers)}"
        )
    return Probed(
        tuple(recorder.layers[index] for index in range(num_layers)),
        tuple(recorder.windows[index] for index in range(num_layers)),
    )
