"""The one place where Hugging Face modelling code meets our attention: a registered attention
function.

All state rides in a keyword that flows from `model(...)` to the function, `baton_step`: a Recorder
while probing, a TorchPagedAttention while serving. Call shape (stable since transformers 5.0,
source: its AttentionInterface documentation):

    fn(module, query [1, H, T, D], key [1, K, T, D], value, attention_mask, scaling=,
    sliding_window=, ...) -> ([1, T, H, D], None)

No cache object and no mask take part: a mask name that is not registered makes transformers build
none. Thread: whoever calls the model.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface

from engine.layers.torch_attention import Attend
from engine.models.latent import LATENTS, Latents

NAME = "baton_paged"

_KNOWN = frozenset({"dropout", "position_ids", "is_causal", "use_cache"})
"""Keywords that say nothing we must act on. Any other one that is set may change attention: refuse
it."""


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    baton_step: Attend | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """See the module. Raises: TypeError for what would be computed wrongly; the probe turns it into
    a refusal."""
    if baton_step is None:
        raise TypeError("this model's code does not hand keywords on to its attention")
    if attention_mask is not None:
        raise TypeError("this model's code builds an attention mask of its own")
    if others.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise TypeError(f"{type(module).__name__} is not causal")
    unknown = [
        name
        for name, value in others.items()
        if name not in _KNOWN and value is not None and value is not False
    ]
    if unknown:
        raise TypeError(f"attention with {', '.join(sorted(unknown))}")
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise TypeError(f"{type(module).__name__} has no layer_idx")
    latents: Latents | None = getattr(module, LATENTS, None)
    out = baton_step.attend(
        layer,
        query[0] if latents is None else latents.absorb(query[0]),
        key[0],
        value[0],
        scaling,
        sliding_window,
        softcap,
        s_aux,
        latents is not None,
    )
    if latents is not None:
        out = latents.expand(out)
    return out[None], None


AttentionInterface.register(NAME, paged_attention)
