"""KV cache memory of the engine as kvstore's transports address it, on one device or several."""

from __future__ import annotations

from collections.abc import Callable

from baton_kernels.block_checksums import fits

from kvstore.transport.base import CUDA_IPC, BlockMemory
from kvstore.transport.cuda_device import CudaDevice
from process.errors import FailedPrecondition
from services.worker.device_checksums import DeviceChecksums
from services.worker.engine_port import KvMemoryPort
from services.worker.sharded_device import BASE, DevicePart, RecordRun, ShardedDevice


def block_memory(kv: KvMemoryPort) -> BlockMemory:
    """Return the transport's view of the KV cache. Raises: FailedPrecondition for a device that has
    no transport, or whose driver is missing."""
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
    """Return a sharded view of the caches of several ranks, each with its part of every block on
    its own device."""
    if not kv.parts:
        raise FailedPrecondition(
            "engine.tensor_parallel, engine.pipeline_parallel: the other ranks' KV cannot be "
            "reached from this process (CUDA IPC; the log says why): leave store_address empty"
        )
    parts = [
        DevicePart(
            CudaDevice.open(part.device_id),
            part.address,
            part.record_bytes,
            tuple(RecordRun(*run) for run in part.runs),
        )
        for part in kv.parts
    ]
    block_bytes = kv.layout.block_bytes
    device = ShardedDevice(parts, block_bytes)
    return BlockMemory.on_device(device, BASE, block_bytes, kv.num_blocks)


def check_transports(kv: KvMemoryPort, *transports: str) -> None:
    """Check that the transport supports the cache. Raises: FailedPrecondition for NIXL and CUDA IPC
    where blocks are spread over devices, and for CUDA IPC without CUDA."""
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
    """Return a function that waits until all kernels that the engine started have finished; it does
    nothing where no transport copies beside them.

    Args:
        settle: waits likewise for the engine's other processes.
    """
    device = memory.device if memory is not None else None
    if device is None:
        return lambda: None
    compute_mark = device.compute_mark

    def wait() -> None:
        settle()
        compute_mark().wait()  # as unbounded as a kernel: the engine itself waits like that

    return wait
