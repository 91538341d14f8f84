"""Latents (MLA): what DeepSeek-style attention caches per token, and attention over it without ever
expanding it.

The modelling code keeps, per token, one compressed vector c (rank R) and one rotated key r, and
expands c into keys and values by `kv_b_proj` = [W_K; W_V] in a method `expand_kv(c, r)`. We replace
that method by one that hands c and r on, and move the matrices to the other side:

    q . (W_K c) = (W_K^T q) . c        sum_t p_t W_V c_t = W_V sum_t p_t c_t

so that every query head attends to one shared "key" [c, r], whose first R columns are the "values"
(source: DeepSeek-V2, section 2.1.2). Works on modelling code since transformers 5.15.1. Load time:
`cache_latents`; then the engine's thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

LATENTS = "baton_latents"
"""Attribute of an attention module: its Latents."""


@dataclass(frozen=True)
class Latents:
    """The two halves of one layer's `kv_b_proj`."""

    keys: torch.Tensor
    """[H, nope, R]"""

    values: torch.Tensor
    """[H, Dv, R]"""

    def absorb(self, query: torch.Tensor) -> torch.Tensor:
        """[H, T, nope + rope] -> [H, T, R + rope]: queries that meet [c, r] itself."""
        num_nope = self.keys.shape[1]
        return torch.cat((query[..., :num_nope] @ self.keys, query[..., num_nope:]), dim=-1)

    def expand(self, out: torch.Tensor) -> torch.Tensor:
        """[T, H, R] -> [T, H, Dv]: from weighted latents to weighted values."""
        return torch.matmul(out.transpose(0, 1), self.values.transpose(1, 2)).transpose(0, 1)


def cache_latents(model: Any) -> int:
    """Make every attention of `model` that compresses its KV cache the compressed form. Returns how
    many there are."""
    num_layers = 0
    for module in model.modules():
        if not hasattr(module, "expand_kv"):
            continue
        num_nope, num_values = int(module.qk_nope_head_dim), int(module.v_head_dim)
        weight = module.kv_b_proj.weight.detach()  # [H * (nope + Dv), R]
        heads = weight.view(-1, num_nope + num_values, weight.shape[1])
        latents = Latents(heads[:, :num_nope], heads[:, num_nope:])
        setattr(module, LATENTS, latents)
        module.expand_kv = _hand_on
        module.kv_b_proj = torch.nn.Identity()  # not called any more; `latents` has its weight
        num_layers += 1
    return num_layers


def _hand_on(latent: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """In the place of `expand_kv`: [1, 1, T, R] and [1, 1, T, rope] -> [1, 1, T, R + rope], and its
    first R columns."""
    both = torch.cat((latent, rotated), dim=-1)
    return both, both[..., : latent.shape[-1]]
