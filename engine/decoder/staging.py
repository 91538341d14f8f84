"""Staging: tensors from a file to the device through two pinned buffers, so that the copy to the
device runs while the next piece is read. On CPU a plain copy. Load time only; knows no names."""

from __future__ import annotations

import torch

_PIECE_BYTES = 64 * 1024 * 1024


class Staging:
    """See the module. After the `with` block all copies have ended."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[torch.Tensor] = []
        self._events: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0
        if device.type == "cuda":
            self._buffers = [
                torch.empty(_PIECE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)
            ]

    def __enter__(self) -> Staging:
        return self

    def __exit__(self, *_: object) -> None:
        if self._buffers:
            torch.cuda.synchronize(self._device)

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy a CPU tensor into `target`, of the same shape and any dtype, dense."""
        if not self._buffers:
            target.copy_(source)
            return
        if not target.is_contiguous():
            raise ValueError("target: not dense")
        flat, into = source.reshape(-1), target.view(-1)
        step = _PIECE_BYTES // target.element_size()
        for first in range(0, flat.numel(), step):
            piece = flat[first : first + step]
            buffer = self._next_buffer().view(target.dtype)[: piece.numel()]
            buffer.copy_(piece)
            into[first : first + piece.numel()].copy_(buffer, non_blocking=True)
            self._events[self._turn] = torch.cuda.current_stream(self._device).record_event()

    def _next_buffer(self) -> torch.Tensor:
        self._turn = 1 - self._turn
        event = self._events[self._turn]
        if event is not None:
            event.synchronize()
        return self._buffers[self._turn]
