"""The engine's cache as transports see it: where it lies decides, and nothing is guessed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvstore.transport import cuda_device
from kvstore.transport.base import BlockMemory
from process.errors import FailedPrecondition
from services.worker.device_memory import block_memory, kernel_wait


def _kv(device: str) -> Any:
    view = np.zeros((3, 64), dtype=np.uint8)
    return SimpleNamespace(
        device=device,
        host_view=view,
        address=int(view.ctypes.data),
        num_blocks=3,
        layout=SimpleNamespace(block_bytes=64),
    )


def test_host_memory_is_shared() -> None:
    kv = _kv("cpu")
    memory = block_memory(kv)
    assert memory.view is kv.host_view and memory.device is None
    kernel_wait(memory)()
    kernel_wait(None)()


def test_another_kind_of_device_is_refused_by_name() -> None:
    with pytest.raises(FailedPrecondition, match=r"engine\.device: KV on xpu:0"):
        block_memory(_kv("xpu:0"))


def test_cuda_without_a_driver_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda_device._load_driver.cache_clear()
    monkeypatch.setattr(cuda_device, "_LIBRARY", "libcuda-that-is-not-there.so.1")
    with pytest.raises(FailedPrecondition, match="needs NVIDIA's driver"):
        block_memory(_kv("cuda:0"))


class _Device:
    device_id, memory = 0, "VRAM"

    def __init__(self) -> None:
        self.looks_left = 50

    def compute_mark(self) -> _Device:
        return self

    def is_over(self) -> bool:
        self.looks_left -= 1
        return self.looks_left < 0


def test_kernels_are_waited_for() -> None:
    device: Any = _Device()
    memory = BlockMemory.on_device(device, 4096, 64, 3)
    kernel_wait(memory)()
    assert device.looks_left < 0
    with pytest.raises(TypeError, match="no host view"):
        memory.view.sum()
