"""A model larger than the device memory that its weights may take: layers beyond it lie in host
memory (`StreamingPlan`), and each is copied to the device under the computation of those before it
(`StreamedLayers`).

There are two buffers on the device. A streamed layer is computed from one of them; when its
computation is queued, the copy of the one after the next into the same buffer is queued behind it
(LayerCopies: how they wait for one another). The order goes round: the first layers of the next
pass are copied under the last ones of this. What comes out of order (after a pass that failed in
its middle) is copied anew.

Knows of a layer that it has tensors and is called: hooks point the tensors to where its numbers
lie. transformers_backend.py says which models can be streamed, and loads them. Engine thread only.

Invariant (`check_integrity`): what stays on the device, and the buffers, take no more than was
given; each layer computes with its own place there, or with a buffer.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from engine.errors import IntegrityError, LoadError

WHY_PLAIN = "layers are streamed"
"""Why their linear layers are not packed: an opaque tensor cannot be copied to where another one
lies."""

NUM_BUFFERS = 2
"""One layer is computed from one while the next one's copy goes into the other."""


# -- which layers are streamed


@dataclass(frozen=True)
class StreamingPlan:
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


def make_plan(layer_bytes: Sequence[int], rest_bytes: int, device_bytes: int) -> StreamingPlan:
    """As many layers on the device as fit in `device_bytes` beside the rest and the buffers; the
    streamed ones spread evenly among them, so that each has their computation to be copied under.

    Raises: LoadError where not even the buffers and the rest fit.
    """
    num_layers = len(layer_bytes)
    for num_streamed in range(num_layers + 1):
        streamed = tuple(index * num_layers // num_streamed for index in range(num_streamed))
        plan = StreamingPlan(tuple(layer_bytes), rest_bytes, streamed)
        if plan.device_bytes <= device_bytes:
            return plan
    raise LoadError(
        f"weights_device_bytes: {device_bytes} are too few: {NUM_BUFFERS} buffers of a layer "
        f"({max(layer_bytes, default=0)} bytes each) and what is no layer (embeddings, head, "
        f"norms: {rest_bytes} bytes) take {plan.device_bytes}"
    )


# -- one layer as one run of bytes


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


# -- copies, and the host memory that they come from


class LayerCopies(Protocol):
    """Copies into the buffers, in the order in which they were begun."""

    def begin(self, buffer: int, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy `source` to `target` once all computation that was queued before is done: it may
        read what lies there.

        Args: buffer: whose bytes `target` are: its number.
        """
        ...

    def wait(self, buffer: int) -> None:
        """Computation that is queued from now on begins after the newest copy into this buffer."""
        ...

    def settle(self) -> None:
        """Returns when no copy is under way."""
        ...


class PlainCopies:
    """Done when `begin` returns. See LayerCopies."""

    def begin(self, buffer: int, source: torch.Tensor, target: torch.Tensor) -> None:
        """See LayerCopies."""
        target.copy_(source)

    def wait(self, buffer: int) -> None:
        """See LayerCopies."""

    def settle(self) -> None:
        """See LayerCopies."""


class StreamCopies:
    """On a side stream of a CUDA device, ordered against the stream that computes by events: no
    thread waits. See LayerCopies."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._copied = [_event() for _ in range(NUM_BUFFERS)]
        self._computed = [_event() for _ in range(NUM_BUFFERS)]

    def begin(self, buffer: int, source: torch.Tensor, target: torch.Tensor) -> None:
        """See LayerCopies."""
        self._computed[buffer].record(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._computed[buffer])
            target.copy_(source, non_blocking=True)
            self._copied[buffer].record(self._stream)
        # Were the buffer freed, its memory would not be given away before the copy is done.
        target.record_stream(self._stream)

    def wait(self, buffer: int) -> None:
        """See LayerCopies."""
        torch.cuda.current_stream(self._device).wait_event(self._copied[buffer])

    def settle(self) -> None:
        """See LayerCopies."""
        self._stream.synchronize()


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def copies_for(device: torch.device) -> LayerCopies:
    """What copies to this device."""
    return StreamCopies(device) if device.type == "cuda" else PlainCopies()


class HostMemory:
    """Bytes of host memory that a device copies from; page-aligned. On CUDA they are pinned: the
    device reads them itself, and exactly so many (torch's own pinned memory takes the next power of
    two).

    Args: device: that copies.
    Raises: LoadError where so many cannot be had, or cannot be pinned.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        try:
            memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise LoadError(
                f"no host memory for {num_bytes} bytes of weights ({error}): raise the memory "
                "limit, or weights_device_bytes"
            ) from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without them: slower, nothing else
                memory.madvise(mmap.MADV_HUGEPAGE)
        self.bytes: torch.Tensor = torch.frombuffer(memory, dtype=torch.uint8)
        """[num_bytes] uint8"""
        self._unpin: Callable[[], object] = lambda: None
        if device.type == "cuda":
            self._pin(device)

    def _pin(self, device: torch.device) -> None:
        address, num_bytes = self.bytes.data_ptr(), self.bytes.numel()
        with torch.cuda.device(device):
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            failed = int(runtime.cudaHostRegister(address, num_bytes, 0))
        if failed:
            raise LoadError(
                f"{num_bytes} bytes of host memory for weights cannot be pinned (CUDA error "
                f"{failed}): raise the memory limit (and `ulimit -l`), or weights_device_bytes"
            )
        # With the tensor, if not before: memory that is unmapped while it is pinned stays pinned.
        unpin = weakref.finalize(self.bytes, runtime.cudaHostUnregister, address)
        # At the interpreter's end the stream settles its copies first, and closes this then.
        unpin.atexit = False
        self._unpin = unpin

    def close(self) -> None:
        """The bytes are pinned no longer; nothing may be copying from them. Idempotent."""
        self._unpin()


# -- the layers of a model


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


class StreamedLayers:
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
        plan: StreamingPlan,
        device: torch.device,
        account: DeviceBytes,
        copies: LayerCopies | None = None,
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


def _end(copies: LayerCopies, hosts: list[HostMemory], hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()
    copies.settle()
    for host in hosts:
        host.close()
