"""CudaDevice: a CUDA GPU through the driver's own library (libcuda), without torch: page-locked
host memory, DMA on a stream of its own, events.

It shares the device's primary context with whatever else in the process uses CUDA (torch does), so
addresses of torch's tensors can be copied from and to. Importing this loads nothing; `open` does.

The engine's kernels run on the legacy default stream, torch's default. Our streams do not wait for
that one by themselves (NON_BLOCKING: otherwise its kernels would wait for our copies, too), which
is what `compute_mark` is for.

ctypes releases the GIL during every call. Any thread: each call makes the context current first.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_ulonglong, c_void_p
from typing import Any

import numpy as np

from kvstore.errors import TransferFailed
from kvstore.transport.device import PEER_COPIES, Copies, CopyQueue, DeviceMark, Shared
from process.rpc_errors import BatonError, FailedPrecondition

_LIBRARY = "libcuda.so.1"
_NOT_READY = 600
_STREAM_NON_BLOCKING = 1
_EVENT_BLOCKING_SYNC = 1
_EVENT_DISABLE_TIMING = 2
_HOST_REGISTER_PORTABLE = 1
_DEFAULT_STREAM = 0
_ENABLE_PEER_ACCESS = 1
_SOURCE_ORDER_STREAM = 1
_HINT_OVERLAP = 1
_BATCH_FROM = 4
"""Copies in one call from which a batch call pays. Guessed: each call costs 2 to 4 us."""


class _Location(ctypes.Structure):
    """CUmemLocation"""

    _fields_ = (("type", c_int), ("id", c_int))


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes"""

    _fields_ = (
        ("source_order", c_int),
        ("source_hint", _Location),
        ("target_hint", _Location),
        ("flags", c_uint),
    )


class _Handle(ctypes.Structure):
    """CUipcMemHandle, by value"""

    _fields_ = (("reserved", ctypes.c_char * 64),)


class CudaDevice:
    """A CUDA GPU, by number, over the driver's library; made by `open`. It implements the protocol
    `Device` (device.py), which says what each method does."""

    memory = "VRAM"
    peer_copies = PEER_COPIES

    def __init__(self, driver: _Driver, device_id: int, context: c_void_p) -> None:
        self.device_id = device_id
        self.driver = driver
        self._context = context

    @classmethod
    def open(cls, device_id: int) -> CudaDevice:
        """Open a GPU by its number. Raises: FailedPrecondition without a driver or such a
        device."""
        driver = _driver()
        device, context = c_int(), c_void_p()
        driver.call("cuDeviceGet", byref(device), c_int(device_id), error=FailedPrecondition)
        driver.call("cuDevicePrimaryCtxRetain", byref(context), device, error=FailedPrecondition)
        return cls(driver, device_id, context)

    def use_in_this_thread(self) -> None:
        """Make the GPU's context the calling thread's current one."""
        self.driver.call("cuCtxSetCurrent", self._context)

    def register(self, address: int, num_bytes: int) -> None:
        """Page-lock host memory of this process for DMA (cuMemHostRegister). Raises:
        FailedPrecondition saying why it cannot be."""
        self.use_in_this_thread()
        self.driver.call(
            "cuMemHostRegister_v2",
            c_void_p(address),
            c_size_t(num_bytes),
            c_uint(_HOST_REGISTER_PORTABLE),
            error=FailedPrecondition,
        )

    def unregister(self, address: int) -> None:
        """Unlock host memory that `register` locked. No copy from or to it may be under way."""
        self.use_in_this_thread()
        self.driver.call("cuMemHostUnregister", c_void_p(address))

    def compute_mark(self) -> DeviceMark:
        """A mark after all kernels on the legacy default stream, where the engine's run."""
        self.use_in_this_thread()
        return CudaMark(self, c_void_p(_DEFAULT_STREAM))

    def new_queue(self) -> CopyQueue:
        """Make a stream for copies."""
        return CudaQueue(self)

    def share(self, address: int) -> Shared:
        """Get the IPC handle of the allocation that holds `address`. Raises: FailedPrecondition
        where it cannot be shared."""
        self.use_in_this_thread()
        handle, base, size = _Handle(), c_ulonglong(), c_size_t()
        call = functools.partial(self.driver.call, error=FailedPrecondition)
        call("cuMemGetAddressRange_v2", byref(base), byref(size), c_ulonglong(address))
        call("cuIpcGetMemHandle", byref(handle), base)
        return Shared(bytes(handle), address - base.value)

    def map_shared(self, shared: Shared) -> int:
        """Map another process's allocation by its IPC handle, in this device's context, whichever
        device the memory is of. Returns: its address here. Raises: FailedPrecondition."""
        if len(shared.handle) != ctypes.sizeof(_Handle):
            raise FailedPrecondition(f"shared memory: a handle of {len(shared.handle)} bytes")
        self.use_in_this_thread()
        base = c_ulonglong()
        self.driver.call(
            "cuIpcOpenMemHandle_v2",
            byref(base),
            _Handle.from_buffer_copy(shared.handle),
            c_uint(_ENABLE_PEER_ACCESS),
            error=FailedPrecondition,
        )
        return base.value + shared.offset_bytes

    def unmap_shared(self, shared: Shared, address: int) -> None:
        """Unmap what `map_shared` mapped. No copy from or to the memory may be under way."""
        self.use_in_this_thread()
        self.driver.call("cuIpcCloseMemHandle", c_ulonglong(address - shared.offset_bytes))


class CudaMark:
    """A CUDA event, recorded on a stream."""

    def __init__(self, device: CudaDevice, stream: c_void_p) -> None:
        self._device = device
        self._event = c_void_p()
        self._is_over = False
        driver = device.driver
        flags = _EVENT_DISABLE_TIMING | _EVENT_BLOCKING_SYNC
        driver.call("cuEventCreate", byref(self._event), c_uint(flags))
        driver.call("cuEventRecord", self._event, stream)

    def is_over(self) -> bool:
        """Whether all work before the event has ended. Raises: TransferFailed when the device
        failed."""
        if not self._is_over:
            result = self._device.driver.library.cuEventQuery(self._event)
            if result == _NOT_READY:
                return False
            self._device.driver.check(result, "cuEventQuery", TransferFailed)
            self._is_over = True
        return True

    def wait(self) -> None:
        """See Mark."""
        self._device.use_in_this_thread()
        self._device.driver.call("cuEventSynchronize", self._event)
        self._is_over = True

    def before(self, stream: int) -> None:
        """Make a stream wait for the event (cuStreamWaitEvent). Raises: TransferFailed."""
        self._device.use_in_this_thread()
        driver = self._device.driver
        driver.call("cuStreamWaitEvent", c_void_p(stream), self._event, c_uint(0))

    def __del__(self) -> None:
        # An event may be destroyed before it is over; at the process's end there is no context.
        if self._event:
            self._device.driver.library.cuEventDestroy_v2(self._event)


class CudaQueue:
    """A CUDA stream of copies."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._driver = device.driver
        self._stream = c_void_p()
        self.uses_batches = self._driver.batch is not None
        """Whether many copies go in one call: the driver has cuMemcpyBatchAsync_v2 (CUDA 13)."""
        device.use_in_this_thread()
        self._driver.call("cuStreamCreate", byref(self._stream), c_uint(_STREAM_NON_BLOCKING))

    def to_host(self, copies: Copies) -> None:
        """Queue copies from the device into registered host memory. Raises: TransferFailed."""
        self._device.use_in_this_thread()
        if self.uses_batches and len(copies) >= _BATCH_FROM:
            self._copy_batch(copies[:, 1], copies[:, 0], copies[:, 2])
            return
        copy = self._driver.library.cuMemcpyDtoHAsync_v2
        for device_address, host_address, num_bytes in copies.tolist():
            result = copy(host_address, device_address, num_bytes, self._stream)
            self._driver.check(result, "cuMemcpyDtoHAsync", TransferFailed)

    def to_device(self, copies: Copies) -> None:
        """Queue copies from registered host memory to the device. Raises: TransferFailed."""
        self._device.use_in_this_thread()
        if self.uses_batches and len(copies) >= _BATCH_FROM:
            self._copy_batch(copies[:, 0], copies[:, 1], copies[:, 2])
            return
        copy = self._driver.library.cuMemcpyHtoDAsync_v2
        for device_address, host_address, num_bytes in copies.tolist():
            result = copy(device_address, host_address, num_bytes, self._stream)
            self._driver.check(result, "cuMemcpyHtoDAsync", TransferFailed)

    def between(self, copies: Copies) -> None:
        """Queue copies between devices: rows of (target address, source address, bytes). Raises:
        TransferFailed."""
        self._device.use_in_this_thread()
        if self.uses_batches and len(copies) >= _BATCH_FROM:
            self._copy_batch(copies[:, 0], copies[:, 1], copies[:, 2])
            return
        copy = self._driver.library.cuMemcpyDtoDAsync_v2
        for target, source, num_bytes in copies.tolist():
            result = copy(target, source, num_bytes, self._stream)
            self._driver.check(result, "cuMemcpyDtoDAsync", TransferFailed)

    def mark(self) -> DeviceMark:
        """Record an event after all copies queued until now."""
        self._device.use_in_this_thread()
        return CudaMark(self._device, self._stream)

    def close(self) -> None:
        """Destroy the stream. None of its copies may be under way."""
        if self._stream:
            self._device.use_in_this_thread()
            self._driver.call("cuStreamDestroy_v2", self._stream)
            self._stream = c_void_p()

    def _copy_batch(self, targets: Copies, sources: Copies, sizes: Copies) -> None:
        table = np.ascontiguousarray(np.stack([targets, sources, sizes]))  # alive during the call
        attributes = _Attributes(_SOURCE_ORDER_STREAM, _Location(), _Location(), _HINT_OVERLAP)
        first = c_size_t(0)  # the one set of attributes holds from copy 0 on
        row_bytes = table.strides[0]
        base = table.ctypes.data
        batch = self._driver.batch
        if batch is None:
            raise TransferFailed("cuMemcpyBatchAsync: the driver has none")
        result = batch(
            c_void_p(base),
            c_void_p(base + row_bytes),
            c_void_p(base + 2 * row_bytes),
            c_size_t(table.shape[1]),
            byref(attributes),
            byref(first),
            c_size_t(1),
            self._stream,
        )
        self._driver.check(result, "cuMemcpyBatchAsync", TransferFailed)


class _Driver:
    """The CUDA driver's library: typed entry points, and its errors as ours."""

    def __init__(self) -> None:
        try:
            self.library: Any = ctypes.CDLL(_LIBRARY)
        except OSError as error:
            raise FailedPrecondition(
                f"a CUDA device needs NVIDIA's driver in this process: {error}"
            ) from error
        for name, arguments in _SIGNATURES.items():
            function = getattr(self.library, name)
            function.argtypes, function.restype = arguments, c_int
        self.batch: Any | None = getattr(self.library, "cuMemcpyBatchAsync_v2", None)
        """The form of CUDA 13; that of 12.8 has one argument more and is not used."""
        if self.batch is not None:
            self.batch.restype = c_int
        self.call("cuInit", c_uint(0), error=FailedPrecondition)

    def call(self, name: str, *arguments: Any, error: type[BatonError] = TransferFailed) -> None:
        """Call the driver. Raises: `error` with the driver's name for what went wrong."""
        self.check(getattr(self.library, name)(*arguments), name, error)

    def check(self, result: int, name: str, error: type[BatonError]) -> None:
        """Check the result of a call. Raises: `error` unless it succeeded."""
        if result != 0:
            text = c_char_p()
            self.library.cuGetErrorName(result, byref(text))
            why = (text.value or b"unknown error").decode()
            raise error(f"{name}: {why} ({result})")


_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuGetErrorName": (c_int, c_void_p),
    "cuDeviceGet": (c_void_p, c_int),
    "cuDevicePrimaryCtxRetain": (c_void_p, c_int),
    "cuCtxSetCurrent": (c_void_p,),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
    "cuStreamCreate": (c_void_p, c_uint),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuEventCreate": (c_void_p, c_uint),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventQuery": (c_void_p,),
    "cuEventSynchronize": (c_void_p,),
    "cuStreamWaitEvent": (c_void_p, c_void_p, c_uint),
    "cuEventDestroy_v2": (c_void_p,),
    "cuMemcpyHtoDAsync_v2": (c_ulonglong, c_void_p, c_size_t, c_void_p),
    "cuMemcpyDtoHAsync_v2": (c_void_p, c_ulonglong, c_size_t, c_void_p),
    "cuMemcpyDtoDAsync_v2": (c_ulonglong, c_ulonglong, c_size_t, c_void_p),
    "cuMemGetAddressRange_v2": (c_void_p, c_void_p, c_ulonglong),
    "cuIpcGetMemHandle": (c_void_p, c_ulonglong),
    "cuIpcOpenMemHandle_v2": (c_void_p, _Handle, c_uint),
    "cuIpcCloseMemHandle": (c_ulonglong,),
}

_loading = threading.Lock()


def _driver() -> _Driver:
    with _loading:  # two threads must not initialise it at once
        return _load_driver()


@functools.cache
def _load_driver() -> _Driver:
    return _Driver()
