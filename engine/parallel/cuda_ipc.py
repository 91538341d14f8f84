"""SharedCache: a CUDA allocation of one process as another one can reach it (CUDA IPC), through the
driver's own library: what rank 0 needs to move whole blocks, whose parts lie on the ranks' devices.

Who shares keeps the memory as long as anybody reads it; here that is for as long as both live.
Knows no blocks. Importing this loads nothing. Any thread: the current context is left as it was.
"""

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
    """Where a rank's cache is."""

    device_id: int
    """As every rank counts devices."""

    handle: bytes
    """Of the allocation that holds it; empty: nobody else can reach it."""

    offset_bytes: int
    """From the allocation's start to the cache."""


class _Handle(ctypes.Structure):
    """CUipcMemHandle; by value."""

    _fields_ = (("reserved", ctypes.c_char * _HANDLE_BYTES),)


def share(device_id: int, address: int) -> SharedCache:
    """Of memory of this process. Raises: LoadError, where the driver cannot share it."""
    handle, base, size = _Handle(), c_uint64(), c_size_t()
    with _context(device_id) as library:
        _check(
            library, library.cuMemGetAddressRange_v2(byref(base), byref(size), c_uint64(address))
        )
        _check(library, library.cuIpcGetMemHandle(byref(handle), base))
    return SharedCache(device_id, bytes(handle), address - base.value)


def open_cache(cache: SharedCache) -> int:
    """Its address in this process, in the primary context of its device. Raises: LoadError."""
    base = c_uint64()
    handle = _Handle.from_buffer_copy(cache.handle)
    with _context(cache.device_id) as library:
        result = library.cuIpcOpenMemHandle_v2(byref(base), handle, c_uint(_ENABLE_PEER_ACCESS))
        _check(library, result)
    return base.value + cache.offset_bytes


def close_cache(cache: SharedCache, address: int) -> None:
    """Give back what `open_cache` gave; also where its owner is gone."""
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
    """Torch's, too; kept as long as the process lives."""
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
