"""What copies of a cache's blocks can take at best: DMA as a transport gives it, checksums on the
host, and torch's own copies. For benchmarks.device_worker; needs torch with CUDA.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from kvstore import block_hash
from kvstore.transport.base import BlockMemory
from kvstore.transport.cuda import CudaDevice, CudaQueue
from kvstore.transport.device import wait_for


def dma(
    device: CudaDevice, memory: BlockMemory, block_ids: list[int], repeats: int
) -> dict[str, Any]:
    """Copies alone between the cache and page-locked memory, as the transport gives them:
    bytes/s each way, by one call a copy and by batches."""
    num_bytes = len(block_ids) * memory.block_bytes
    host = torch.empty(num_bytes, dtype=torch.uint8)
    host.fill_(1)
    device.register(host.data_ptr(), num_bytes)
    copies = np.empty((len(block_ids), 3), dtype=np.uint64)
    ids = np.asarray(block_ids, dtype=np.uint64)
    copies[:, 0] = memory.address + ids * memory.block_bytes
    copies[:, 1] = host.data_ptr() + np.arange(len(ids)) * memory.block_bytes
    copies[:, 2] = memory.block_bytes
    queue = CudaQueue(device)
    found: dict[str, Any] = {"has_batches": queue.uses_batches}
    for name, batches in (("one_by_one", False), ("batched", queue.uses_batches)):
        queue.uses_batches = batches
        for way, start in (("to_host", queue.to_host), ("to_device", queue.to_device)):

            def copy(start: Callable[[Any], None] = start) -> None:
                start(copies)
                wait_for(queue.mark())

            found[f"{name}_{way}"] = num_bytes / _median_s(copy, repeats)
    queue.close()
    device.unregister(host.data_ptr())
    pages = host.numpy()
    with ThreadPoolExecutor(4) as pool:
        step = max(memory.block_bytes, num_bytes // 64)
        for num_threads in (1, 4):
            views = [pages[at : at + step] for at in range(0, num_bytes, step)]

            def hash_all(views: list[Any] = views, num_threads: int = num_threads) -> None:
                apply = map if num_threads == 1 else pool.map
                list(apply(block_hash.checksum, views))

            found[f"checksums_{num_threads}_threads"] = num_bytes / _median_s(hash_all, repeats)
    return found


def torch_copies(device_id: int, num_bytes: int, repeats: int) -> dict[str, Any]:
    """torch's own copies, in bytes/s: device and pinned host memory, device to its peer (or
    within it, if there is none)."""
    own = f"cuda:{device_id}"
    one = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device=own)
    pinned = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    pageable = torch.ones(num_bytes, dtype=torch.uint8)
    has_peer = torch.cuda.device_count() > 1
    other = f"cuda:{(device_id + 1) % torch.cuda.device_count()}"
    peer = torch.zeros(num_bytes, dtype=torch.uint8, device=other)

    def rate(copy: Callable[[], Any]) -> float:
        def whole() -> None:
            copy()
            torch.cuda.synchronize(own)
            torch.cuda.synchronize(other)

        return num_bytes / _median_s(whole, repeats)

    return {
        "has_peer": has_peer,
        "peer_copy": rate(lambda: peer.copy_(one)),
        "to_pinned_host": rate(lambda: pinned.copy_(one)),
        "from_pinned_host": rate(lambda: one.copy_(pinned)),
        "to_pageable_host": rate(lambda: pageable.copy_(one)),
    }


def _median_s(work: Callable[[], None], repeats: int) -> float:
    work()
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)
