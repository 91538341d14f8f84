"""Kernels that say something else than the host are refused at the start. What they say on a
device: tests/kernels/test_block_checksums.py, tests/conformance/test_cuda_ipc.py."""

from __future__ import annotations

import pytest
import torch

from process.rpc_errors import FailedPrecondition
from services.worker import device_checksums
from services.worker.device_checksums import captured_sizes, check_kernels


def test_kernels_are_compared_with_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    check_kernels(5000, cpu)
    real = device_checksums.block_checksums

    def wrong(blocks: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return real(blocks, ids) ^ torch.tensor([0, 1])

    monkeypatch.setattr(device_checksums, "block_checksums", wrong)
    with pytest.raises(FailedPrecondition, match="checksums of blocks on cpu are not those of the"):
        check_kernels(5000, cpu)


@pytest.mark.parametrize("batch_size", [1, 15, 16, 17, 64, 512, 16_384])
def test_every_batch_has_a_size_that_is_not_much_larger(batch_size: int) -> None:
    sizes = captured_sizes(batch_size)
    assert sizes == sorted(set(sizes)) and sizes[-1] == batch_size and len(sizes) < 40
    for count in range(1, batch_size + 1):
        size = next(size for size in sizes if size >= count)
        assert size <= min(batch_size, max(count * 1.25, count) + 16)
