"""SharedCache: a CUDA allocation of one process as other processes open it (CUDA IPC), through the
driver's library. Rank 0 uses it to transfer whole blocks, whose parts lie on the ranks' devices.
The owner must keep the memory as long as another process uses it; here both live equally long.
It knows no blocks, and importing it loads no library. Any thread: the current context is not
changed."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

import msgspec

from engine.errors import LoadError

_HANDLE_BYTES = 64
_ENABLE_PEER_ACCESS = 1


class SharedCache(msgspec.Struct, frozen=True):
    """The place of a rank's KV cache."""

    device_id: int
    """Index of the device, as every rank counts devices."""

    handle: bytes
    """IPC handle of the allocation that contains the cache; empty: it cannot be opened by other
    processes."""

    offset_bytes: int
    """Offset of the cache from the start of the allocation."""


class _Handle(ctypes.Structure):
    """CUipcMemHandle, passed by value."""

    _fields_ = (("reserved", ctypes.c_char * _HANDLE_BYTES),)


def share(device_id: int, address: int) -> SharedCache:
    """Create the SharedCache of memory of this process. Raises: LoadError if the driver cannot
    share it."""
    handle, base, size = _Handle(), c_uint64(), c_size_t()
    with _context(device_id) as library:
        _check(
            library, library.cuMemGetAddressRange_v2(byref(base), byref(size), c_uint64(address))
        )
        _check(library, library.cuIpcGetMemHandle(byref(handle), base))
    return SharedCache(device_id, bytes(handle), address - base.value)


def open_cache(cache: SharedCache) -> int:
    """Map a shared cache. Returns: its address in this process, in the primary context of its
    device. Raises: LoadError."""
    base = c_uint64()
    handle = _Handle.from_buffer_copy(cache.handle)
    with _context(cache.device_id) as library:
        result = library.cuIpcOpenMemHandle_v2(byref(base), handle, c_uint(_ENABLE_PEER_ACCESS))
        _check(library, result)
    return base.value + cache.offset_bytes


def close_cache(cache: SharedCache, address: int) -> None:
    """Unmap a cache that `open_cache` mapped; also if its owner has ended."""
    with _context(cache.device_id) as library:
        library.cuIpcCloseMemHandle(c_uint64(address - cache.offset_bytes))


@contextlib.contextmanager
def _context(device_id: int) -> Iterator[Any]:
    library = _library()
    popped = c_void_p()
    _check(library, library.cuCtxPushCurrent_v2(_primary_context(device_id)))
    try:
        yield library
    finally:
        library.cuCtxPopCurrent_v2(byref(popped))


@functools.cache
def _primary_context(device_id: int) -> c_void_p:
    """Return the device's primary context, which torch uses, too; retained as long as the process
    lives."""
    library = _library()
    device, context = c_int(), c_void_p()
    _check(library, library.cuDeviceGet(byref(device), c_int(device_id)))
    _check(library, library.cuDevicePrimaryCtxRetain(byref(context), device))
    return context


@functools.cache
def _library() -> Any:
    try:
        library: Any = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise LoadError(f"several ranks on CUDA need NVIDIA's driver: {error}") from error
    library.cuIpcOpenMemHandle_v2.argtypes = (POINTER(c_uint64), _Handle, c_uint)
    _check(library, library.cuInit(c_uint(0)))
    return library


def _check(library: Any, result: int) -> None:
    if result != 0:
        text = c_char_p()
        library.cuGetErrorName(c_int(result), byref(text))
        why = (text.value or b"unknown error").decode()
        raise LoadError(f"a rank's cache cannot be reached from another process: {why} ({result})")
