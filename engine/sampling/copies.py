"""Small arrays on their way to a device and back, without waiting for what was queued before them:
from and to pinned memory. On CPU they stay where they are. Engine thread only."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray


def bring(words: NDArray[Any], device: torch.device) -> torch.Tensor:
    """The same numbers on a device. `words` may be changed afterwards, but for those of CPU."""
    host = torch.from_numpy(words)
    if device.type != "cuda":
        return host if device.type == "cpu" else host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


class Mark:
    """All that was queued so far on a device's current stream."""

    def __init__(self, device: torch.device | str) -> None:
        self._event: torch.cuda.Event | None = None
        if torch.device(device).type == "cuda":
            self._event = torch.cuda.current_stream(device).record_event()

    def wait(self) -> None:
        """Until it is over."""
        if self._event is not None:
            self._event.synchronize()


class Fetched:
    """A tensor that is being copied to the host.

    Args:
        source: may be overwritten by what is queued later.
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
        """Its numbers, once all that was queued before the copy is over."""
        if self._done is not None:
            self._done.synchronize()
        values: NDArray[Any] = self._host.numpy()
        return values
