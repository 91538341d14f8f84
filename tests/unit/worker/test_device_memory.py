"""The engine's cache as transports see it: where it lies decides, and nothing is guessed."""

from __future__ import annotations

from ctypes.util import find_library
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engine.kv.memory import ByteRun, RankPart
from kvstore.transport.base import BlockMemory
from kvstore.transport.cuda_device import CudaDevice
from process.rpc_errors import FailedPrecondition
from services.worker.device_memory import block_memory, check_transports, kernel_wait


def _kv(device: str) -> Any:
    view = np.zeros((3, 64), dtype=np.uint8)
    return SimpleNamespace(
        device=device,
        host_view=view,
        address=int(view.ctypes.data),
        num_blocks=3,
        layout=SimpleNamespace(block_bytes=64),
        is_whole=True,
        parts=(),
    )


def test_host_memory_is_shared() -> None:
    kv = _kv("cpu")
    memory = block_memory(kv)
    assert memory.view is kv.host_view and memory.device is None
    kernel_wait(memory)()
    kernel_wait(None)()


def test_cuda_ipc_is_refused_where_it_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FailedPrecondition, match=r"direct_transport cuda_ipc: .* is on cpu"):
        check_transports(_kv("cpu"), "shm", "grpc", "cuda_ipc")
    with pytest.raises(FailedPrecondition, match=r"transport cuda_ipc: .*several devices"):
        check_transports(_spread(monkeypatch), "shm", "grpc", "cuda_ipc")
    check_transports(_kv("cuda:1"), "shm", "grpc", "cuda_ipc")


def test_another_kind_of_device_is_refused_by_name() -> None:
    with pytest.raises(FailedPrecondition, match=r"engine\.device: KV on xpu:0"):
        block_memory(_kv("xpu:0"))


@pytest.mark.skipif(find_library("cuda") is not None, reason="this machine has NVIDIA's driver")
def test_cuda_without_a_driver_is_refused_by_name() -> None:
    with pytest.raises(FailedPrecondition, match="needs NVIDIA's driver"):
        block_memory(_kv("cuda:0"))


def _spread(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Blocks of 64 bytes, of which one rank has the first 40 and another one the rest."""
    kv = _kv("cuda:2")
    kv.is_whole = False
    kv.parts = (
        RankPart(2, 4096, 40, (ByteRun(0, 0, 40),)),
        RankPart(3, 8192, 24, (ByteRun(40, 0, 24),)),
    )
    monkeypatch.setattr(CudaDevice, "open", lambda number: SimpleNamespace(device_id=number))
    return kv


def test_blocks_of_several_ranks_are_one_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = block_memory(_spread(monkeypatch))
    assert (memory.block_bytes, memory.num_blocks) == (64, 3)
    device: Any = memory.device
    assert [part.device.device_id for part in device.parts] == [2, 3]
    copies = np.array([(memory.address + 64 + 30, 1000, 20)], dtype=np.uint64)
    assert [each.tolist() for each in device.deal(copies)] == [
        [[4096 + 40 + 30, 1000, 10]],
        [[8192 + 24, 1010, 10]],
    ]


def test_blocks_of_ranks_that_cannot_be_reached_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kv = _spread(monkeypatch)
    kv.parts = ()
    with pytest.raises(FailedPrecondition, match=r"engine\.tensor_parallel.*store_address empty"):
        block_memory(kv)


def test_nixl_is_refused_where_blocks_are_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    check_transports(_kv("cuda:0"), "nixl", "nixl")
    kv = _spread(monkeypatch)
    check_transports(kv, "shm", "grpc")
    for transports in (("nixl", "grpc"), ("shm", "nixl")):
        with pytest.raises(FailedPrecondition, match="set transport to shm or grpc"):
            check_transports(kv, *transports)


class _Device:
    device_id, memory = 0, "VRAM"

    def __init__(self) -> None:
        self.num_waits = 0

    def compute_mark(self) -> _Device:
        return self

    def wait(self) -> None:
        self.num_waits += 1


def test_kernels_are_waited_for() -> None:
    """And before them, what other processes were asked for."""
    device: Any = _Device()
    memory = BlockMemory.on_device(device, 4096, 64, 3)
    settled: list[int] = []
    kernel_wait(memory, lambda: settled.append(device.num_waits))()
    assert settled == [0]
    assert device.num_waits == 1
    with pytest.raises(TypeError, match="no host view"):
        memory.view.sum()
