"""The engine's KV cache as kvstore's transports see it, wherever it lies. A value made once, at
start; knows no store."""

from __future__ import annotations

from collections.abc import Callable

from baton_kernels.block_checksums import fits

from kvstore.transport.base import CUDA_IPC, BlockMemory
from kvstore.transport.cuda_device import CudaDevice
from process.errors import FailedPrecondition
from services.worker.device_checksums import DeviceChecksums
from services.worker.engine_port import KvMemoryPort
from services.worker.sharded_device import BASE, Part, Run, ShardedDevice


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
    if not kv.is_whole:
        return _spread(kv)
    device = CudaDevice.open(int(number or 0))
    block_bytes = kv.layout.block_bytes
    checksums = DeviceChecksums(kv.cache) if fits(block_bytes) else None
    return BlockMemory.on_device(device, kv.address, block_bytes, kv.num_blocks, checksums)


def _spread(kv: KvMemoryPort) -> BlockMemory:
    """Of an engine of several ranks, each with its part of every block on a device of its own."""
    if not kv.parts:
        raise FailedPrecondition(
            "engine.tensor_parallel, engine.pipeline_parallel: the other ranks' KV cannot be "
            "reached from this process (CUDA IPC; the log says why): leave store_address empty"
        )
    parts = [
        Part(
            CudaDevice.open(part.device_id),
            part.address,
            part.record_bytes,
            tuple(Run(*run) for run in part.runs),
        )
        for part in kv.parts
    ]
    block_bytes = kv.layout.block_bytes
    device = ShardedDevice(parts, block_bytes)
    return BlockMemory.on_device(device, BASE, block_bytes, kv.num_blocks)


def check_transports(kv: KvMemoryPort, *transports: str) -> None:
    """Raises: FailedPrecondition for NIXL and CUDA IPC, where blocks are spread over devices: they
    move what lies together; and for CUDA IPC without CUDA."""
    for name in ("nixl", CUDA_IPC):
        if not kv.is_whole and name in transports:
            raise FailedPrecondition(
                f"transport {name}: each block of several ranks lies on several devices, where it "
                "does not reach; set transport to shm or grpc, and remote_transport and "
                "direct_transport to grpc"
            )
    if CUDA_IPC in transports and kv.device.partition(":")[0] != "cuda":
        raise FailedPrecondition(
            f"direct_transport cuda_ipc: this worker's KV is on {kv.device}, and only CUDA devices "
            "can map one another's; set direct_transport to nixl or grpc"
        )


def kernel_wait(
    memory: BlockMemory | None, settle: Callable[[], None] = lambda: None
) -> Callable[[], None]:
    """Returns: what waits until all kernels that the engine started are over; nothing, where no
    transport copies beside them.

    Args:
        settle: the same for what the engine asked other processes for.
    """
    device = memory.device if memory is not None else None
    if device is None:
        return lambda: None
    compute_mark = device.compute_mark

    def wait() -> None:
        settle()
        compute_mark().wait()  # as unbounded as a kernel: the engine itself waits like that

    return wait
