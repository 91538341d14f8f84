"""Site: one linear layer of a loaded model that an adapter can add to, and how it is made to.

Knows no model: engine/models/lora_sites.py finds the sites. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from engine.lora.deltas import Deltas


class AdaptedLinear(nn.Module):
    """Base of our own linear layers: they add `deltas` themselves, before what they fuse behind the
    product. Any other linear layer is an nn.Linear, and gets a hook."""

    in_features: int
    out_features: int
    deltas: Deltas | None = None


Linear = nn.Linear | AdaptedLinear


@dataclass(frozen=True)
class Site:
    """`out_features` columns of `linear`'s output, from `column` on."""

    linear: Linear
    column: int
    in_features: int
    out_features: int


def attach(linear: Linear, deltas: Deltas) -> RemovableHandle | None:
    """From now on the linear adds `deltas`. Returns what `detach` needs."""
    if isinstance(linear, nn.Linear):
        return linear.register_forward_hook(_adding(deltas))
    linear.deltas = deltas
    return None


def detach(linear: Linear, handle: RemovableHandle | None) -> None:
    """The linear is as it was before `attach`."""
    if handle is not None:
        handle.remove()
    elif not isinstance(linear, nn.Linear):
        linear.deltas = None


def _adding(deltas: Deltas) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        if deltas.is_wanted:
            x = args[0]
            deltas.add(x.reshape(-1, x.shape[-1]), out.view(-1, out.shape[-1]))

    return hook
