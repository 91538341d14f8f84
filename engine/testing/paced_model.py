"""PacedModel: any LoadedModel on a device of a given speed. Tokens and KV are the model's own; a
forward pass ends no sooner than it would on such a device, and this process computes nothing
meanwhile. So a few cores can host a cluster whose workers are as slow as those of a large model,
for tests of load and scaling. Other properties of a real device (its memory, its jitter) are not
simulated; if the model alone takes longer than the pace, the forward pass is late, which is not
reported. Engine thread only."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from engine.batch import Batch
from engine.models.interface import DecodesAhead, LoadedModel


@dataclass(frozen=True)
class DevicePace:
    """Durations of a device's forward passes, in seconds. Raises: ValueError for a negative or
    infinite one."""

    step_s: float = 0.0
    """Duration of a forward pass without tokens."""

    token_s: float = 0.0
    """Additional duration per token."""

    def __post_init__(self) -> None:
        for name in ("step_s", "token_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name}: {value} is no time that a device takes")

    def seconds(self, num_tokens: int) -> float:
        """Return the duration of a forward pass of `num_tokens` tokens."""
        return self.step_s + self.token_s * num_tokens


class PacedModel:
    """The given model with another duration of `forward`. It launches nothing ahead.

    Args: clock, wait: the device's time, in seconds.
    """

    def __init__(
        self,
        model: LoadedModel,
        pace: DevicePace,
        *,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self._model = model
        self._pace = pace
        self._clock = clock
        self._wait = wait
        self.ahead: DecodesAhead | None = None

    def __getattr__(self, name: str) -> Any:
        """Return any other attribute of the given model."""
        return getattr(self._model, name)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Compute the batch, and wait until the device would have. A warm-up takes no time of the
        device."""
        begin_s = self._clock()
        logits = self._model.forward(batch)
        if any(span.block_ids for span in batch.spans):
            left_s = self._pace.seconds(len(batch.token_ids)) - (self._clock() - begin_s)
            if left_s > 0:
                self._wait(left_s)
        return logits
