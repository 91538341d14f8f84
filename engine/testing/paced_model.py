"""PacedModel: any LoadedModel, on a device whose speed is given. Tokens and KV are the model's own;
a pass ends no sooner than such a device would end it, and this process computes nothing meanwhile.

So a few cores can hold a cluster whose workers are as slow as those of a large model, and where one
more of them helps: load and scaling are tried with it. What a real device does beyond that (its
memory, its own jitter) is not simulated; where the model alone takes longer than the pace, the pass
is late, and nothing is reported. Engine thread only.
"""

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
    """Seconds that a device takes for a pass. Raises: ValueError."""

    step_s: float = 0.0
    """For any, however little is in it."""

    token_s: float = 0.0
    """For each token more."""

    def __post_init__(self) -> None:
        for name in ("step_s", "token_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name}: {value} is no time that a device takes")

    def seconds(self, num_tokens: int) -> float:
        """For a pass of so many tokens."""
        return self.step_s + self.token_s * num_tokens


class PacedModel:
    """The given model with another time of `forward`. It launches nothing ahead, so that `forward`
    is all there is.

    Args:
        clock, wait: the device's time; seconds.
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
        """Whatever is not said here, the given model says."""
        return getattr(self._model, name)

    def forward(self, batch: Batch) -> torch.Tensor:
        """See LoadedModel. A warm-up is no pass of the device."""
        begin_s = self._clock()
        logits = self._model.forward(batch)
        if any(span.block_ids for span in batch.spans):
            left_s = self._pace.seconds(len(batch.token_ids)) - (self._clock() - begin_s)
            if left_s > 0:
                self._wait(left_s)
        return logits
