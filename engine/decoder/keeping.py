"""Keeping: what of one pass is kept beside its logits. Engine thread only."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(slots=True)
class Keeping:
    """Set on a Decoder for one pass of a whole model, which fills it. Not under a graph."""

    wants_every: bool = False
    """`every`, too: the last layer computes all rows then."""

    layers: tuple[int, ...] = ()
    """Whose `inputs` are wanted, too."""

    hidden: torch.Tensor | None = None
    """[R, hidden]: what the head makes logits of."""

    every: torch.Tensor | None = None
    """[T, hidden]: the same of all rows."""

    inputs: dict[int, torch.Tensor] = field(default_factory=dict)
    """[T, hidden] by layer."""

    def enter(self, layer: int, x: torch.Tensor) -> None:
        """Before this layer; x [T, hidden] is spoiled by it."""
        if layer in self.layers:
            self.inputs[layer] = x.clone()

    def in_order(self, places: torch.Tensor) -> None:
        """`every` and `inputs` of a pass whose rows were in another order.

        Args:
            places: [T] int64: where each row was.
        """
        if self.every is not None:
            self.every = self.every.index_select(0, places)
        self.inputs = {layer: rows.index_select(0, places) for layer, rows in self.inputs.items()}
