"""The copies of a transport between two GPUs, and nothing else of a read: what the bytes alone
take, by how they are given."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from kvstore.transport import mapped
from kvstore.transport.cuda import CudaQueue
from kvstore.transport.cuda_ipc import CudaIpcTransport
from kvstore.transport.device import wait_for


def median_s(run: Callable[[], object], repeats: int) -> float:
    """Of one run, after two that are not counted."""
    seconds = []
    for _ in range(repeats + 2):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[2:])


def copies_of(transport: CudaIpcTransport, sources: Any, targets: Any) -> Any:
    """As the transport gives them."""
    edges = np.flatnonzero(mapped._breaks(sources, targets))  # noqa: SLF001
    return transport._copies_between(edges, sources, targets)  # noqa: SLF001


def copies_alone(
    transport: CudaIpcTransport, where: tuple[list[int], list[int]], num_bytes: int, repeats: int
) -> float:
    """bytes/s of the copies that the transport gives its device, and nothing else."""
    sources, targets = (np.array(ids, dtype=np.int64) for ids in where)

    def move() -> None:
        transport._pipeline.run(  # noqa: SLF001  a part of what is measured as a whole beside it
            len(sources),
            lambda queue, part: queue.between(copies_of(transport, sources[part], targets[part])),
            lambda: False,
        )

    return num_bytes / median_s(move, repeats)


def ways_to_copy(
    transport: CudaIpcTransport, where: tuple[list[int], list[int]], num_bytes: int, repeats: int
) -> dict[str, float]:
    """bytes/s by how the same copies are given: on how many queues, one by one or in batches."""
    sources, targets = (np.array(ids, dtype=np.int64) for ids in where)
    copies = copies_of(transport, sources, targets)
    device = transport._device  # noqa: SLF001
    found = {}
    for num_queues in (1, 2, 4):
        queues = [device.new_queue() for _ in range(num_queues)]
        parts = np.array_split(copies, num_queues) if len(copies) >= num_queues else [copies]
        has_batches = isinstance(queues[0], CudaQueue) and queues[0].uses_batches
        for name, batches in (("one by one", False), ("batched", True)):
            if batches and not has_batches:
                continue
            for queue in queues:
                queue.uses_batches = batches  # type: ignore[attr-defined]

            def move(queues: Any = queues, parts: Any = parts) -> None:
                for queue, part in zip(queues, parts, strict=False):
                    queue.between(part)
                for queue in queues:
                    wait_for(queue.mark())

            found[f"{num_queues} queues, {name}"] = num_bytes / median_s(move, repeats)
        for queue in queues:
            queue.close()
    return found
