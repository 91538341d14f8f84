"""Checksums of KV blocks on the device: each of the two kernels, and a whole call as a worker makes
it, beside what reading the bytes takes.

    python -m benchmarks.kernels.block_checksums
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import triton
from baton_kernels import block_checksums as door
from baton_kernels.gpu import block_checksums as gpu
from rich.console import Console

from services.worker.device_checksums import DeviceChecksums

BLOCK_BYTES = 2 * 2**20
NUM_BLOCKS = 1024
COUNTS = (1, 16, 128, 512)
_console = Console(width=120, highlight=False)


def seconds(run: Callable[[], object]) -> float:
    """Of the device, the median."""
    found: float = triton.testing.do_bench(run, warmup=20, rep=100, return_mode="median") / 1e3
    return found


def main() -> None:
    cache = torch.randint(0, 256, (NUM_BLOCKS, BLOCK_BYTES), dtype=torch.uint8, device="cuda")
    words = cache.view(torch.int64)
    keys = door.keys(cache.device)
    whole = DeviceChecksums(cache)
    _console.print(f"{torch.cuda.get_device_name()}, blocks of {BLOCK_BYTES} bytes")
    for count in COUNTS:
        ids = torch.randperm(NUM_BLOCKS, device="cuda")[:count].to(torch.int32)
        out = torch.empty(count, dtype=torch.int64, device="cuda")
        sums = torch.empty(door.room(count, BLOCK_BYTES), dtype=torch.int64, device="cuda")
        part = words[:count]
        read_s = seconds(lambda part=part: part.sum())
        sums_s = seconds(lambda: gpu.sum_pieces(words, ids, sums, keys))  # noqa: B023
        chain_s = seconds(lambda: gpu.chain_pieces(words, ids, out, sums, keys))  # noqa: B023
        block_ids = ids.tolist()
        times = []
        for _ in range(20):
            began = time.perf_counter()
            whole.begin(block_ids).result()
            times.append(time.perf_counter() - began)
        tera = count * BLOCK_BYTES / 1e12
        _console.print(
            f"{count:4d} blocks: sums {sums_s * 1e6:7.1f} us ({tera / sums_s:.2f} TB/s; "
            f"torch's sum {tera / read_s:.2f}), chain {chain_s * 1e6:6.1f} us, "
            f"a whole call {statistics.median(times) * 1e6:7.1f} us"
        )


if __name__ == "__main__":
    main()
