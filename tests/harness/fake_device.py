"""A device in plain memory behind kvstore.transport.device.Device, as strict as a real one: copies
happen later, on a thread of its own, in order; host memory that was not registered is refused; a
copy that was given cannot be taken back; and another device's memory is reached only while it is
mapped."""

from __future__ import annotations

import ctypes
import itertools
import queue
import secrets
import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvstore.errors import TransferFailed
from kvstore.transport.device import PEER_COPIES, Copies, Shared, wait_for
from process.rpc_errors import FailedPrecondition


class FakeStream:
    """Kernels beside the copies: what it is given runs in order, on a thread of its own."""

    def __init__(self) -> None:
        self.handle = next(_numbers)
        _streams[self.handle] = self
        self._jobs: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="fake-stream", daemon=True).start()

    def give(self, job: Callable[[], object]) -> None:
        self._jobs.put(job)

    def _run(self) -> None:
        while True:
            self._jobs.get()()


class FakeMark:
    def __init__(self) -> None:
        self.over = threading.Event()

    def is_over(self) -> bool:
        return self.over.is_set()

    def wait(self) -> None:
        self.over.wait()

    def before(self, stream: int) -> None:
        _streams[stream].give(lambda: wait_for(self))


class FakeQueue:
    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="fake-dma", daemon=True)
        self._thread.start()

    def to_host(self, copies: Copies) -> None:
        self._give([(host, device, n) for device, host, n in copies.tolist()], copies)

    def to_device(self, copies: Copies) -> None:
        self._give([(device, host, n) for device, host, n in copies.tolist()], copies)

    def between(self, copies: Copies) -> None:
        if self._device.problem:
            raise TransferFailed(self._device.problem)
        self._device.num_pieces += 1
        self._device.peer_queues.add(self)
        for target, source, num_bytes in copies.tolist():
            self._device.check_between(target, source, num_bytes)
            self._jobs.put(
                lambda t=target, s=source, n=num_bytes: self._device.move(t, s, n)  # type: ignore[misc]
            )
        self._device.is_given.set()

    def mark(self) -> FakeMark:
        mark = FakeMark()
        self._jobs.put(mark.over.set)
        return mark

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join(30)
        assert not self._thread.is_alive(), "closed while something was under way"

    def _give(self, moves: list[tuple[int, int, int]], copies: Copies) -> None:
        if self._device.problem:
            raise TransferFailed(self._device.problem)
        for device, host, num_bytes in copies.tolist():
            self._device.check(device, host, num_bytes)
        for target, source, num_bytes in moves:
            self._jobs.put(lambda t=target, s=source, n=num_bytes: self._device.move(t, s, n))
        self._device.is_given.set()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._device.engine_runs.wait()
            job()


class FakeDevice:
    """memory: DRAM, so that NIXL can be told of it on a machine without GPUs.

    Attributes:
        engine_runs: cleared: copies that were given stay under way.
        is_given: set when copies are given.
        computes: set while kernels run.
        problem: what the next copies fail with.
        refusal: what registering and mapping fail with.
        on_move: called before each copy with (target, source, bytes).
        peer_copies: as a transport finds it when it is made.
        num_pieces, peer_queues: pieces that it was given to copy from elsewhere, and to whom of its
            queues.
    """

    device_id = 0
    memory = "DRAM"

    def __init__(self) -> None:
        self.engine_runs = threading.Event()
        self.engine_runs.set()
        self.is_given = threading.Event()
        self.computes = False
        self.problem = ""
        self.refusal = ""
        self.on_move: Callable[[int, int, int], None] = lambda *_: None
        self.peer_copies = PEER_COPIES
        self.num_pieces = 0
        self.peer_queues: set[FakeQueue] = set()
        self.registered: dict[int, int] = {}
        self.blocks: list[npt.NDArray[np.uint8]] = []
        self.num_moved_bytes = 0
        self.num_mapped: dict[int, int] = {}

    def holding(self, view: npt.NDArray[np.uint8]) -> int:
        """Let an array be this device's memory. Returns: its address."""
        self.blocks.append(view)
        return int(view.ctypes.data)

    def register(self, address: int, num_bytes: int) -> None:
        if self.refusal:
            raise FailedPrecondition(self.refusal)
        assert address % 4096 == 0 and address not in self.registered
        self.registered[address] = num_bytes

    def unregister(self, address: int) -> None:
        del self.registered[address]

    def compute_mark(self) -> FakeMark:
        device = self

        class ComputeMark(FakeMark):
            def is_over(self) -> bool:
                return not device.computes

            def wait(self) -> None:
                wait_for(self)

        return ComputeMark()

    def new_queue(self) -> FakeQueue:
        return FakeQueue(self)

    def use_in_this_thread(self) -> None:
        return

    def share(self, address: int) -> Shared:
        """Of one array: the handle is its key, as the driver's is of an allocation."""
        for block in self.blocks:
            start = int(block.ctypes.data)
            if start <= address < start + block.nbytes:
                handle = _handles.setdefault(start, secrets.token_bytes(64))
                _shared[handle] = (start, block.nbytes)
                return Shared(handle, address - start)
        raise FailedPrecondition("cuMemGetAddressRange_v2: CUDA_ERROR_NOT_FOUND (500)")

    def map_shared(self, shared: Shared) -> int:
        if self.refusal or shared.handle not in _shared:
            raise FailedPrecondition(self.refusal or "CUDA_ERROR_INVALID_HANDLE (400)")
        start, _ = _shared[shared.handle]
        self.num_mapped[start] = self.num_mapped.get(start, 0) + 1
        return start + shared.offset_bytes

    def unmap_shared(self, shared: Shared, address: int) -> None:
        start = address - shared.offset_bytes
        assert self.num_mapped[start] > 0
        self.num_mapped[start] -= 1

    def check_between(self, target: int, source: int, num_bytes: int) -> None:
        blocks = [(block.ctypes.data, block.nbytes) for block in self.blocks]
        assert _lies_in(target, num_bytes, blocks), "a copy over what is not this device's"
        mapped = [place for place in _shared.values() if self.num_mapped.get(place[0])]
        assert _lies_in(source, num_bytes, mapped), "a copy of memory that is not mapped"

    def check(self, device: int, host: int, num_bytes: int) -> None:
        blocks = [(block.ctypes.data, block.nbytes) for block in self.blocks]
        assert _lies_in(device, num_bytes, blocks), "a copy beside the device's memory"
        registered = list(self.registered.items())
        assert _lies_in(host, num_bytes, registered), "a copy of host memory that is not locked"

    def move(self, target: int, source: int, num_bytes: int) -> None:
        self.on_move(target, source, num_bytes)
        ctypes.memmove(target, source, num_bytes)
        self.num_moved_bytes += num_bytes


_numbers = itertools.count(1)
_streams: dict[int, FakeStream] = {}
"""As the driver knows them: by handle."""

_handles: dict[int, bytes] = {}
_shared: dict[bytes, tuple[int, int]] = {}
"""Handle -> (address, bytes): what the driver knows of all processes."""


def _lies_in(address: int, num_bytes: int, ranges: list[tuple[int, int]]) -> bool:
    return any(
        start <= address and address + num_bytes <= start + length for start, length in ranges
    )
