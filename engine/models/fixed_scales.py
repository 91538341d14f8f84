"""Scales that are fixed at start, one for all keys (and one for all values) of a layer: found from
the greatest numbers of a fixed prompt. Load time only."""

from __future__ import annotations

from collections.abc import Callable

import torch
from baton_kernels.quantize import scale_for

from engine.batch import Batch, Span
from engine.kv.layout import KvLayout
from engine.kv.memory import KvMemory
from engine.models.quantized_blocks import Scales
from engine.models.step_attention import Attend, StepAttention

_NUM_TOKENS = 128
_HEADROOM = 1.25
"""Other prompts' numbers may be greater: those beyond are clamped. A guess."""


class _Greatest:
    """Attends as StepAttention does, and notes the greatest key and value of each layer."""

    def __init__(self, step: StepAttention, num_layers: int) -> None:
        self._step = step
        self.found: list[tuple[torch.Tensor, torch.Tensor | None]] = [
            (torch.zeros(()), None)
        ] * num_layers

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
        """See attention_hook.Attend."""
        self.found[layer] = (key.abs().max(), None if is_latent else value.abs().max())
        return self._step.attend(
            layer, query, key, value, scaling, window, softcap, sinks, is_latent
        )


@torch.inference_mode()
def find_scales(
    forward: Callable[[Batch, Attend], object],
    layout: KvLayout,
    *,
    vocab_size: int,
    num_positions: int | None,
    device: str,
) -> tuple[Scales, ...]:
    """One pair per layer. The prompt is a function of the vocabulary's size and the number of
    positions alone, so that every start of a model finds the same.

    Args:
        forward: computes a batch with the model, attending as it is told.
        num_positions: that the model was made for; None: any.
    """
    num_tokens = min(_NUM_TOKENS, num_positions or _NUM_TOKENS)
    token_ids = tuple((7919 * i + 17) % vocab_size for i in range(num_tokens))
    batch = Batch(token_ids, (Span(0, num_tokens, ()),), (num_tokens - 1,))
    memory = KvMemory(layout.raw, 1, device)  # of which nothing is used
    step = StepAttention(batch, memory.layer_views(), layout.block_size)
    greatest = _Greatest(step, layout.num_layers)
    forward(batch, greatest)
    return tuple(
        (
            float(scale_for(keys * _HEADROOM, layout.dtype)),
            None if values is None else float(scale_for(values * _HEADROOM, layout.dtype)),
        )
        for keys, values in greatest.found
    )
