"""PackedLayer: the tensors of one layer of a model, as one run of bytes that can be copied at once,
and that the layer can be pointed at wherever it lies. Knows no model."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import nn

_ALIGN = 256
"""Bytes: what kernels and copies want of an address, and torch's own allocations have."""


class PackedLayer:
    """The weights of `layer`: its parameters, and tensors that its modules keep as attributes.

    Attributes:
        tensors: each once; the layer computes with them, wherever they are pointed.
        num_bytes: of all, each aligned.
    """

    def __init__(self, layer: nn.Module) -> None:
        self.tensors: list[torch.Tensor] = list(weights_of(layer))
        sizes = [-(-tensor.nbytes // _ALIGN) * _ALIGN for tensor in self.tensors]
        self._shapes = [(tensor.dtype, tensor.shape, tensor.nbytes) for tensor in self.tensors]
        self._offsets = list(itertools.accumulate(sizes, initial=0))[:-1]
        self.num_bytes = max(sum(sizes), _ALIGN)

    def views(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """The tensors as they lie in `memory`, [num_bytes or more] uint8."""
        return [
            memory[offset : offset + num_bytes].view(dtype).view(shape)
            for offset, (dtype, shape, num_bytes) in zip(self._offsets, self._shapes, strict=True)
        ]

    def write(self, memory: torch.Tensor) -> None:
        """Copy the tensors' numbers into `memory`."""
        for view, tensor in zip(self.views(memory), self.tensors, strict=True):
            view.copy_(tensor)

    def point(self, views: Sequence[torch.Tensor]) -> None:
        """From now on the layer computes with the numbers that lie there."""
        for tensor, view in zip(self.tensors, views, strict=True):
            tensor.data = view

    def lies_in(self, memory: torch.Tensor) -> bool:
        """Whether the layer computes with what lies in `memory`."""
        return all(
            tensor.data_ptr() == memory.data_ptr() + offset
            for offset, tensor in zip(self._offsets, self.tensors, strict=True)
            if tensor.numel() > 0  # an empty one lies nowhere
        )


def weights_of(layer: nn.Module) -> Iterator[torch.Tensor]:
    """Its parameters, and tensors that its modules keep as plain attributes, each once."""
    seen: set[int] = set()
    for module in layer.modules():
        kept = (value for value in vars(module).values() if isinstance(value, torch.Tensor))
        for tensor in itertools.chain(module.parameters(recurse=False), kept):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield tensor
