"""Which layers of a model stay on the device and which are streamed to it, where its weights may
take only so many bytes there. Pure functions of sizes; knows no tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.errors import LoadError

NUM_BUFFERS = 2
"""One layer is computed from one while the next one's copy goes into the other."""


@dataclass(frozen=True)
class OffloadPlan:
    """Where each layer lies."""

    layer_bytes: tuple[int, ...]
    rest_bytes: int
    """What is no layer: embeddings, head, norms. On the device."""

    streamed: tuple[int, ...]
    """Layers that lie in host memory, ascending; the others stay on the device."""

    @property
    def buffer_bytes(self) -> int:
        """Of each buffer: the largest streamed layer."""
        return max((self.layer_bytes[index] for index in self.streamed), default=0)

    @property
    def host_bytes(self) -> int:
        """Of all streamed layers; a pass copies as many."""
        return sum(self.layer_bytes[index] for index in self.streamed)

    @property
    def device_bytes(self) -> int:
        """Of what stays there, and of the buffers."""
        resident = sum(self.layer_bytes) - self.host_bytes
        return self.rest_bytes + resident + NUM_BUFFERS * self.buffer_bytes


def make_plan(layer_bytes: Sequence[int], rest_bytes: int, device_bytes: int) -> OffloadPlan:
    """As many layers on the device as fit in `device_bytes` beside the rest and the buffers; the
    streamed ones spread evenly among them, so that each has their computation to be copied under.

    Raises: LoadError where not even the buffers and the rest fit.
    """
    num_layers = len(layer_bytes)
    for num_streamed in range(num_layers + 1):
        streamed = tuple(index * num_layers // num_streamed for index in range(num_streamed))
        plan = OffloadPlan(tuple(layer_bytes), rest_bytes, streamed)
        if plan.device_bytes <= device_bytes:
            return plan
    raise LoadError(
        f"weights_device_bytes: {device_bytes} are too few: {NUM_BUFFERS} buffers of a layer "
        f"({max(layer_bytes, default=0)} bytes each) and what is no layer (embeddings, head, "
        f"norms: {rest_bytes} bytes) take {plan.device_bytes}"
    )
