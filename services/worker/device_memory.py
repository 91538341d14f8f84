"""The engine's KV cache as kvstore's transports see it, wherever it lies. A value made once, at
start; knows no store."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.transport.base import BlockMemory
from kvstore.transport.cuda_device import CudaDevice
from kvstore.transport.device import wait_for
from process.errors import FailedPrecondition
from services.worker.engine_port import KvMemoryPort


def block_memory(kv: KvMemoryPort) -> BlockMemory:
    """Raises: FailedPrecondition for a device that nothing here can copy from or to, or without its
    driver."""
    kind, _, number = kv.device.partition(":")
    if kind == "cpu":
        return BlockMemory.of(kv.host_view)
    if kind != "cuda":
        raise FailedPrecondition(
            f"engine.device: KV on {kv.device} cannot be moved to a store; use cpu or cuda, or "
            "leave store_address empty"
        )
    device = CudaDevice.open(int(number or 0))
    return BlockMemory.on_device(device, kv.address, kv.layout.block_bytes, kv.num_blocks)


def kernel_wait(memory: BlockMemory | None) -> Callable[[], None]:
    """Returns: what waits until all kernels that the engine started are over; nothing, where no
    transport copies beside them."""
    device = memory.device if memory is not None else None
    if device is None:
        return lambda: None
    compute_mark = device.compute_mark

    def wait() -> None:
        wait_for(compute_mark())  # as unbounded as a kernel: the engine itself waits like that

    return wait
