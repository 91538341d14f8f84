"""Rope: the rotary embedding that a head's config.json asks for. The scaled kinds are transformers'
to compute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from engine.errors import LoadError

KINDS = ("default", "linear", "llama3", "yarn")


class Rope(NamedTuple):
    """See the module."""

    frequencies: torch.Tensor
    """[D / 2] float32."""

    scale: float
    """Of cosines and sines."""

    def turns(
        self, positions: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines, [1, T, D] each, of positions [T]."""
        angles = positions.float()[:, None] * self.frequencies
        angles = torch.cat((angles, angles), dim=-1)[None]
        return (angles.cos() * self.scale).to(dtype), (angles.sin() * self.scale).to(dtype)


def read_rope(config: Mapping[str, Any], head_dim: int, device: str, where: str) -> Rope:
    """Raises: LoadError that begins with `where`."""
    scaling = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in KINDS:
        raise LoadError(
            f"{where} rope_scaling {kind!r}; heads are computed with {', '.join(KINDS)}"
        )
    theta = float(config.get("rope_theta") or scaling.get("rope_theta") or 10000.0)
    if kind in ("default", "linear"):
        steps = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        divisor = float(scaling.get("factor", 1.0)) if kind == "linear" else 1.0
        return Rope((theta**-steps / divisor).to(device), 1.0)
    # Here: a process without heads needs none of it.
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = scaling | {"rope_type": kind, "rope_theta": theta}
    parameters.pop("type", None)
    fields = {"max_position_embeddings": config.get("max_position_embeddings")}
    fields = {name: value for name, value in fields.items() if value is not None}
    try:
        whole = LlamaConfig(head_dim=head_dim, rope_parameters=parameters, **fields)
        frequencies, scale = ROPE_INIT_FUNCTIONS[kind](whole, torch.device("cpu"))
    except (KeyError, ValueError, TypeError, ZeroDivisionError) as error:
        line = str(error).partition("\n")[0]
        raise LoadError(f"{where} rope_scaling {scaling}, which cannot be ({line})") from error
    return Rope(frequencies.float().to(device), float(scale))
