"""Kernels that say something else than the host are refused at the start. What they say on a
device: tests/kernels/test_block_checksums.py, tests/conformance/test_cuda_ipc.py."""

from __future__ import annotations

import pytest
import torch

from process.errors import FailedPrecondition
from services.worker import device_checksums
from services.worker.device_checksums import check_kernels


def test_kernels_are_compared_with_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    check_kernels(5000, cpu)
    real = device_checksums.block_checksums

    def wrong(blocks: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return real(blocks, ids) ^ torch.tensor([0, 1])

    monkeypatch.setattr(device_checksums, "block_checksums", wrong)
    with pytest.raises(FailedPrecondition, match="checksums of blocks on cpu are not those of the"):
        check_kernels(5000, cpu)
