"""LayerStream: a model larger than the device memory that its weights may take. Layers beyond it
lie in host memory, and each is copied to the device under the computation of those before it.

There are two buffers on the device. A streamed layer is computed from one of them; when its
computation is queued, the copy of the one after the next into the same buffer is queued behind it
(`offload_copies` says how they wait for one another). The order goes round: the first layers of
the next pass are copied under the last ones of this. What comes out of order (after a pass that
failed in its middle) is copied anew.

It knows of a layer that it has tensors and is called: hooks point the tensors to where its numbers
lie. How a model is loaded for it, and which models can be, is in `offload_load`. Engine thread
only.

Invariant (`check_integrity`): what stays on the device, and the buffers, take no more than was
given; each layer computes with its own place there, or with a buffer.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from engine.errors import IntegrityError
from engine.models.offload_copies import Copies, HostMemory, copies_for
from engine.models.offload_packed import PackedLayer
from engine.models.offload_plan import NUM_BUFFERS, OffloadPlan


class DeviceBytes:
    """The account of the device memory that weights may take.

    Attributes: limit, taken, peak: bytes.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.taken = 0
        self.peak = 0

    def take(self, num_bytes: int) -> None:
        """Before they are. Raises: IntegrityError for more than the limit: plans keep to it."""
        self.taken += num_bytes
        self.peak = max(self.peak, self.taken)
        if self.taken > self.limit:
            raise IntegrityError(f"{self.taken} bytes of weights on the device of {self.limit}")

    def give_back(self, num_bytes: int) -> None:
        """After `take`."""
        self.taken -= num_bytes


class LayerStream:
    """Brings each layer of a model into its place, and streams those that have none.

    Args:
        layers: in the order of their calls, in host memory; their numbers are moved from there.
        packed: their tensors.
        plan: which of them stay.
        device: that computes.
        account: what of the device's bytes is taken already (the plan's `rest_bytes`).
        copies: None: those of the device.
    Attributes:
        plan, account: as given.
        num_copies: layers copied so far; a pass takes as many as there are streamed ones.
    Raises: LoadError where host memory cannot be had.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        packed: Sequence[PackedLayer],
        plan: OffloadPlan,
        device: torch.device,
        account: DeviceBytes,
        copies: Copies | None = None,
    ) -> None:
        self.plan = plan
        self.account = account
        self.num_copies = 0
        self._copies = copies or copies_for(device)
        self._hosts: list[HostMemory] = []
        self._hooks: list[Any] = []
        self._end = weakref.finalize(self, _end, self._copies, self._hosts, self._hooks)
        self._resident: list[tuple[PackedLayer, torch.Tensor]] = []
        self._streamed = [packed[index] for index in plan.streamed]
        account.take(NUM_BUFFERS * plan.buffer_bytes)
        self._buffers = [
            torch.empty(plan.buffer_bytes, dtype=torch.uint8, device=device)
            for _ in range(NUM_BUFFERS)
        ]
        for index, one in enumerate(packed):
            if index in plan.streamed:
                self._hosts.append(HostMemory(one.num_bytes, device))
                one.write(self._hosts[-1].bytes)
                one.point(one.views(self._buffers[0]))  # its own memory is free now
            else:
                account.take(one.num_bytes)
                place = torch.empty(one.num_bytes, dtype=torch.uint8, device=device)
                one.write(place)
                one.point(one.views(place))
                self._resident.append((one, place))
        # Made here: a view that is made in inference mode could not be pointed to outside of it.
        self._views = [[one.views(buffer) for buffer in self._buffers] for one in self._streamed]
        self._holds: list[int | None] = [None] * NUM_BUFFERS
        """Which streamed layer each buffer has, or is being given."""
        for number, index in enumerate(plan.streamed):
            enter, leave = partial(self._enter, number), partial(self._leave, number)
            self._hooks.append(layers[index].register_forward_pre_hook(enter))
            self._hooks.append(layers[index].register_forward_hook(leave))
        if self._streamed:
            self._restart(0)

    def _enter(self, number: int, *_: object) -> None:
        if number not in self._holds:
            self._restart(number)
        buffer = self._holds.index(number)
        self._copies.wait(buffer)
        self._streamed[number].point(self._views[number][buffer])

    def _leave(self, number: int, *_: object) -> None:
        self._begin((number + NUM_BUFFERS) % len(self._streamed), self._holds.index(number))

    def _restart(self, number: int) -> None:
        """Go on from here, whatever the buffers have."""
        for buffer in range(NUM_BUFFERS):
            self._begin((number + buffer) % len(self._streamed), buffer)

    def _begin(self, number: int, buffer: int) -> None:
        size = self._streamed[number].num_bytes
        self._holds[buffer] = None
        self._copies.begin(buffer, self._hosts[number].bytes, self._buffers[buffer][:size])
        self._holds[buffer] = number
        self.num_copies += 1

    def close(self) -> None:
        """Stop copying and let go of the host memory; the layers are not computed again.
        Idempotent."""
        self._end()

    def check_integrity(self) -> None:
        """Raises: IntegrityError where a layer lies elsewhere than planned, or the bytes of all do
        not add up to what is taken, or are more than may be."""
        taken = self.plan.rest_bytes + sum(buffer.nbytes for buffer in self._buffers)
        taken += sum(place.nbytes for _, place in self._resident)
        if not taken == self.plan.device_bytes == self.account.taken <= self.account.limit:
            raise IntegrityError(
                f"{taken} bytes of weights on the device, {self.account.taken} by the account, "
                f"{self.plan.device_bytes} planned, {self.account.limit} given"
            )
        if not all(one.lies_in(place) for one, place in self._resident):
            raise IntegrityError("a layer of the device left its place")
        for number, one in enumerate(self._streamed):
            if not any(one.lies_in(buffer) for buffer in self._buffers):
                raise IntegrityError(f"streamed layer {number} lies in no buffer")


def _end(copies: Copies, hosts: list[HostMemory], hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()
    copies.settle()
    for host in hosts:
        host.close()
