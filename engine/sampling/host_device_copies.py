"""Copies of small arrays to a device and back through pinned memory, which do not wait for earlier
work in the device's queue. On CPU nothing is copied. Engine thread only."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray


def bring(words: NDArray[Any], device: torch.device) -> torch.Tensor:
    """Copy an array to a device. Returns: a tensor of the same numbers; on CPU it shares memory
    with `words`, otherwise `words` may be changed afterwards."""
    host = torch.from_numpy(words)
    if device.type != "cuda":
        return host if device.type == "cpu" else host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


class StreamMark:
    """A point in a device's current stream, after all that was queued so far. On CPU it is always
    reached."""

    def __init__(self, device: torch.device | str) -> None:
        self._event: torch.cuda.Event | None = None
        if torch.device(device).type == "cuda":
            self._event = torch.cuda.current_stream(device).record_event()

    def wait(self) -> None:
        """Block until the device has reached the point."""
        if self._event is not None:
            self._event.synchronize()


class Fetched:
    """A tensor that is being copied to the host.

    Args: source: the tensor; later work in the device's queue may overwrite it, on CPU it is not
        copied.
    """

    def __init__(self, source: torch.Tensor) -> None:
        self._host = source
        self._done: torch.cuda.Event | None = None
        if source.device.type == "cuda":
            self._host = torch.empty_like(source, device="cpu", pin_memory=True)
            self._host.copy_(source, non_blocking=True)
            self._done = torch.cuda.current_stream(source.device).record_event()
        elif source.device.type != "cpu":
            self._host = source.cpu()

    def wait(self) -> NDArray[Any]:
        """Block until the copy is done. Returns: the numbers."""
        if self._done is not None:
            self._done.synchronize()
        values: NDArray[Any] = self._host.numpy()
        return values
