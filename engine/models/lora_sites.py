"""Finds the linear layers of a loaded model that LoRA adapters can add to, by their names in the
checkpoint.

A layer that was fused has its projections' names still; q, k and v are columns of one matrix. Any
other linear is a site only if one small forward pass showed that it is called once, with every
token of the step in one row each: that leaves out the head, MoE experts, and linears whose weight
the model's code reads itself. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from engine.batch import Batch, warm_up
from engine.layers.linear import PackedLinear
from engine.lora.stacked_weights import Linear, Site
from engine.models.fused_layer import FusedDecoderLayer

NUM_PROBE_TOKENS = 3
_EXPERTS = "experts"


def find_sites(model: Any, forward: Callable[[Batch], torch.Tensor]) -> dict[str, Site]:
    """The sites of `model` by name.

    Args:
        model: a transformers causal language model, fused or not.
        forward: computes a Batch with it; called once, with a warm-up.
    """
    sites: dict[str, Site] = {}
    others: dict[str, Linear] = {}
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if isinstance(module, FusedDecoderLayer):
            for part, (fused, column, out_features) in module.parts().items():
                sites[f"{name}.{part}"] = Site(fused, column, fused.in_features, out_features)
            inside.update(module.modules())
        elif _is_linear(module) and module not in inside:
            if _EXPERTS not in name.split(".") and module is not model.get_output_embeddings():
                others[name] = cast(Linear, module)
    counts = _num_rows_seen(others, forward)
    for name, linear in others.items():
        if counts[name] == [NUM_PROBE_TOKENS]:
            sites[name] = Site(linear, 0, linear.in_features, linear.out_features)
    return sites


def _is_linear(module: nn.Module) -> bool:
    """A subclass of nn.Linear may compute something else."""
    return type(module) is nn.Linear or isinstance(module, PackedLinear)


def _num_rows_seen(
    linears: dict[str, Linear], forward: Callable[[Batch], torch.Tensor]
) -> dict[str, list[int]]:
    """Rows of each call of each linear in one forward pass."""
    counts: dict[str, list[int]] = {name: [] for name in linears}

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            is_plain = len(args) == 1 and isinstance(args[0], torch.Tensor)
            counts[name].append(args[0].numel() // args[0].shape[-1] if is_plain else 0)

        return hook

    handles = [linear.register_forward_pre_hook(note(name)) for name, linear in linears.items()]
    try:
        forward(warm_up(NUM_PROBE_TOKENS))
    finally:
        for handle in handles:
            handle.remove()
    return counts
