"""Streaming of weights for a model that is larger than the device memory that they may use: some
layers lie in host memory (`StreamingPlan`), and each is copied to the device while those before
it are computed (`StreamedLayers`).

There are two buffers on the device. A streamed layer is computed from one of them; when its
computation is queued, the copy of the streamed layer after the next one into the same buffer is
queued behind it (LayerCopies orders them). The order is cyclic: the first layers of the next pass
are copied during the last ones of this. A layer that is called out of order (after a failed pass)
is copied again.

A layer is only a module with tensors: hooks on its call set the tensors' data to the place of its
numbers. transformers_backend.py decides which models can be streamed, and loads them. Engine thread
only.

Invariant (`check_integrity`): the layers on the device and the buffers use no more than the
configured memory; each layer computes with its own place there, or with a buffer.
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
"""Why linear layers of a streamed model are not packed: a packed tensor is opaque, and cannot be
copied to another one's memory."""

NUM_BUFFERS = 2
"""Number of buffers on the device: a layer is computed from one while the next is copied to the
other."""


# -- which layers are streamed


@dataclass(frozen=True)
class StreamingPlan:
    """The place of each layer: on the device or in host memory."""

    layer_bytes: tuple[int, ...]
    rest_bytes: int
    """Bytes of the weights outside of layers (embeddings, head, norms), which lie on the device."""

    streamed: tuple[int, ...]
    """Indices of the layers that lie in host memory, ascending; the others lie on the device."""

    @property
    def buffer_bytes(self) -> int:
        """Bytes of each buffer: those of the largest streamed layer."""
        return max((self.layer_bytes[index] for index in self.streamed), default=0)

    @property
    def host_bytes(self) -> int:
        """Bytes of all streamed layers, which every pass copies."""
        return sum(self.layer_bytes[index] for index in self.streamed)

    @property
    def device_bytes(self) -> int:
        """Bytes of the weights on the device, the buffers included."""
        resident = sum(self.layer_bytes) - self.host_bytes
        return self.rest_bytes + resident + NUM_BUFFERS * self.buffer_bytes


def make_plan(layer_bytes: Sequence[int], rest_bytes: int, device_bytes: int) -> StreamingPlan:
    """Plan as many layers on the device as fit in `device_bytes` together with the other weights
    and the buffers. Streamed layers are spread evenly, so that each is copied during the
    computation of layers on the device.

    Raises: LoadError if not even the buffers and the other weights fit.
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
"""Alignment in bytes that kernels and copies need, the same as that of torch's allocations."""


class PackedLayer:
    """The weights of one layer (parameters, and tensors that its modules keep as attributes) as one
    run of bytes.

    Attributes:
        tensors: the layer's tensors, each once; setting their data changes what the layer computes
            with.
        num_bytes: size of all of them, each aligned to 256 bytes.
    """

    def __init__(self, layer: nn.Module) -> None:
        self.tensors: list[torch.Tensor] = list(weights_of(layer))
        sizes = [-(-tensor.nbytes // _ALIGN) * _ALIGN for tensor in self.tensors]
        self._shapes = [(tensor.dtype, tensor.shape, tensor.nbytes) for tensor in self.tensors]
        self._offsets = list(itertools.accumulate(sizes, initial=0))[:-1]
        self.num_bytes = max(sum(sizes), _ALIGN)

    def views(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """Return views of `memory`, [num_bytes or more] uint8, as the layer's tensors."""
        return [
            memory[offset : offset + num_bytes].view(dtype).view(shape)
            for offset, (dtype, shape, num_bytes) in zip(self._offsets, self._shapes, strict=True)
        ]

    def write(self, memory: torch.Tensor) -> None:
        """Copy the tensors' numbers into `memory`."""
        for view, tensor in zip(self.views(memory), self.tensors, strict=True):
            view.copy_(tensor)

    def point(self, views: Sequence[torch.Tensor]) -> None:
        """Make the layer compute with the numbers in `views`."""
        for tensor, view in zip(self.tensors, views, strict=True):
            tensor.data = view

    def lies_in(self, memory: torch.Tensor) -> bool:
        """Whether the layer computes with the numbers in `memory`."""
        return all(
            tensor.data_ptr() == memory.data_ptr() + offset
            for offset, tensor in zip(self._offsets, self.tensors, strict=True)
            if tensor.numel() > 0  # an empty one lies nowhere
        )


def weights_of(layer: nn.Module) -> Iterator[torch.Tensor]:
    """Iterate over a layer's parameters, and the tensors that its modules keep as plain attributes,
    each once."""
    seen: set[int] = set()
    for module in layer.modules():
        kept = (value for value in vars(module).values() if isinstance(value, torch.Tensor))
        for tensor in itertools.chain(module.parameters(recurse=False), kept):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield tensor


# -- copies, and the host memory that they come from


class LayerCopies(Protocol):
    """Protocol of copies into the buffers, which run in the order in which they were begun."""

    def begin(self, buffer: int, source: torch.Tensor, target: torch.Tensor) -> None:
        """Begin to copy `source` to `target`, after all computation that was queued before, which
        may read the target.

        Args: buffer: the index of the buffer that `target` belongs to.
        """
        ...

    def wait(self, buffer: int) -> None:
        """Make computation that is queued from now on wait for the newest copy into this buffer."""
        ...

    def settle(self) -> None:
        """Wait until all copies are done."""
        ...


class PlainCopies:
    """LayerCopies that are done when `begin` returns."""

    def begin(self, buffer: int, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy `source` to `target` at once."""
        target.copy_(source)

    def wait(self, buffer: int) -> None:
        """Return at once, since all copies are done."""

    def settle(self) -> None:
        """Return at once, since all copies are done."""


class StreamCopies:
    """LayerCopies on a side stream of a CUDA device, ordered with the computing stream by events,
    so that no thread waits."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._copied = [_event() for _ in range(NUM_BUFFERS)]
        self._computed = [_event() for _ in range(NUM_BUFFERS)]

    def begin(self, buffer: int, source: torch.Tensor, target: torch.Tensor) -> None:
        """Queue the copy on the side stream, after all computation that was queued before."""
        self._computed[buffer].record(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._computed[buffer])
            target.copy_(source, non_blocking=True)
            self._copied[buffer].record(self._stream)
        # Were the buffer freed, its memory would not be given away before the copy is done.
        target.record_stream(self._stream)

    def wait(self, buffer: int) -> None:
        """Make the computing stream wait for the newest copy into this buffer."""
        torch.cuda.current_stream(self._device).wait_event(self._copied[buffer])

    def settle(self) -> None:
        """Wait until the side stream has done all copies."""
        self._stream.synchronize()


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def copies_for(device: torch.device) -> LayerCopies:
    """Return the LayerCopies for this kind of device."""
    return StreamCopies(device) if device.type == "cuda" else PlainCopies()


class HostMemory:
    """Page-aligned host memory that a device copies from. For CUDA it is pinned at its exact size
    (torch's own pinned memory is rounded up to a power of two).

    Args: device: the device that copies.
    Raises: LoadError if the memory cannot be allocated or pinned.
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
        """The memory, [num_bytes] uint8."""
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
        """Unpin the memory; no copy may be reading it. Idempotent."""
        self._unpin()


# -- the layers of a model


class DeviceBytes:
    """The account of the device memory that weights may use.

    Attributes: limit, taken, peak: bytes.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.taken = 0
        self.peak = 0

    def take(self, num_bytes: int) -> None:
        """Record an allocation before it is made. Raises: IntegrityError above the limit, which
        plans never exceed."""
        self.taken += num_bytes
        self.peak = max(self.peak, self.taken)
        if self.taken > self.limit:
            raise IntegrityError(f"{self.taken} bytes of weights on the device of {self.limit}")

    def give_back(self, num_bytes: int) -> None:
        """Record that memory recorded by `take` was freed."""
        self.taken -= num_bytes


class StreamedLayers:
    """Moves each layer of a model to its planned place, and streams the layers that lie in host
    memory.

    Args:
        layers: the layers in the order of their calls, in host memory; their numbers are moved from
            there.
        packed: the tensors of each layer.
        plan: the place of each layer.
        device: the device that computes.
        account: the device memory's account, with the plan's `rest_bytes` already taken.
        copies: None: those for the kind of device.
    Attributes:
        plan, account: as given.
        num_copies: number of copies so far; each pass makes one per streamed layer.
    Raises: LoadError if host memory cannot be allocated.
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
        """The index of the streamed layer that each buffer contains or is receiving; None: no
        layer."""
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
        """Start copying this streamed layer and the next into the buffers, whatever they
        contain."""
        for buffer in range(NUM_BUFFERS):
            self._begin((number + buffer) % len(self._streamed), buffer)

    def _begin(self, number: int, buffer: int) -> None:
        size = self._streamed[number].num_bytes
        self._holds[buffer] = None
        self._copies.begin(buffer, self._hosts[number].bytes, self._buffers[buffer][:size])
        self._holds[buffer] = number
        self.num_copies += 1

    def close(self) -> None:
        """Stop copying and free the host memory; the layers cannot be computed afterwards.
        Idempotent."""
        self._end()

    def check_integrity(self) -> None:
        """Check places and sizes of all layers. Raises: IntegrityError where a layer lies elsewhere
        than planned, or the bytes on the device differ from the account or exceed the limit."""
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
