"""A store's slab, mapped in a worker and page-locked for a device.

Locking takes long for a large slab (every page is touched and pinned), longer than one attempt to
attach may take. So an attempt that runs out of time leaves the work going on, and the next one to
the same life of a store takes its result; what nobody takes within KEEP_S is given back. One
asyncio loop.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from kvstore.slab import Slab
from kvstore.transport.device import Device
from process.errors import FailedPrecondition

KEEP_S = 60.0
"""A worker tries to attach every few seconds."""

_Key = tuple[int, Device, str, bytes]
_opening: dict[_Key, asyncio.Task[Slab]] = {}


async def open_registered(
    device: Device, path: Path, incarnation: bytes, *, keep_s: float = KEEP_S
) -> Slab:
    """Map and page-lock it; the caller ends it by `close_registered`.

    Args: keep_s: how long it waits to be taken, if this attempt ends before.

    Raises: FailedPrecondition when it cannot be mapped here, or the device cannot use it.
    """
    key = (id(asyncio.get_running_loop()), device, str(path), incarnation)
    while True:
        task = _opening.get(key)
        if task is None:
            task = asyncio.create_task(asyncio.to_thread(_open, device, path, incarnation))
            _opening[key] = task
            task.add_done_callback(lambda done: _expire(key, done, device, keep_s))
        try:
            slab = await asyncio.shield(task)
        except BaseException:
            if task.done() and not task.cancelled() and task.exception() is not None:
                _forget(key, task)
            raise
        if _forget(key, task):
            return slab
        # Several waited for this one and another has it: on to one of our own, by the same way, so
        # that it is kept, or given back, if we do not live to take it.


def close_registered(device: Device, slab: Slab) -> None:
    """Nothing may copy any more. Blocks."""
    try:
        device.unregister(slab.frames_address)
    finally:
        slab.close()


def _open(device: Device, path: Path, incarnation: bytes) -> Slab:
    slab = Slab.open(path, incarnation)
    try:
        device.register(slab.frames_address, slab.frames.nbytes)
    except BaseException as error:
        slab.close()
        if not isinstance(error, FailedPrecondition):
            raise
        raise FailedPrecondition(
            f"transport shm: the store's slab cannot be page-locked for device {device.device_id} "
            f"({error}), and without that copies are many times slower; let the process lock "
            f"{slab.frames.nbytes} bytes (ulimit -l, the container's memory limit), lower the "
            "store's capacity_bytes, or set transport to grpc"
        ) from error
    return slab


def _forget(key: _Key, task: asyncio.Task[Slab]) -> bool:
    """Whether the task's result was still there to take; it is not from now on."""
    if _opening.get(key) is not task:
        return False
    del _opening[key]
    return True


def _expire(key: _Key, task: asyncio.Task[Slab], device: Device, keep_s: float) -> None:
    if _opening.get(key) is task:
        task.get_loop().call_later(keep_s, _drop, key, task, device)


def _drop(key: _Key, task: asyncio.Task[Slab], device: Device) -> None:
    if _forget(key, task) and not task.cancelled() and task.exception() is None:
        task.get_loop().run_in_executor(None, close_registered, device, task.result())
