"""Copies of layers from host memory into buffers on the device, and the host memory that they come
from: pinned, on a stream of their own, for a CUDA device; plain copies for a CPU.

Engine thread only.
"""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch

from engine.errors import LoadError
from engine.models.offload_plan import NUM_BUFFERS


class Copies(Protocol):
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
    """Done when `begin` returns. See Copies."""

    def begin(self, buffer: int, source: torch.Tensor, target: torch.Tensor) -> None:
        """See Copies."""
        target.copy_(source)

    def wait(self, buffer: int) -> None:
        """See Copies."""

    def settle(self) -> None:
        """See Copies."""


class StreamCopies:
    """On a side stream of a CUDA device, ordered against the stream that computes by events: no
    thread waits. See Copies."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._copied = [_event() for _ in range(NUM_BUFFERS)]
        self._computed = [_event() for _ in range(NUM_BUFFERS)]

    def begin(self, buffer: int, source: torch.Tensor, target: torch.Tensor) -> None:
        """See Copies."""
        self._computed[buffer].record(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._computed[buffer])
            target.copy_(source, non_blocking=True)
            self._copied[buffer].record(self._stream)
        # Were the buffer freed, its memory would not be given away before the copy is done.
        target.record_stream(self._stream)

    def wait(self, buffer: int) -> None:
        """See Copies."""
        torch.cuda.current_stream(self._device).wait_event(self._copied[buffer])

    def settle(self) -> None:
        """See Copies."""
        self._stream.synchronize()


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def copies_for(device: torch.device) -> Copies:
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
