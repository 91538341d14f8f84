"""Timing of kernels for the benchmarks beside it: by CUDA graphs of many launches, against ceilings
measured in the same run.

Each launch of a graph gets the next of several sets of buffers, so that nothing is timed from a
cache that would not hold it in real life.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from rich.console import Console

CONSOLE = Console(width=150, highlight=False)
_CACHE_BYTES = 200 << 20
"""Sets of buffers together are more than this: four times an H100's L2."""


def num_sets(set_bytes: int, most: int = 64) -> int:
    """Sets of buffers that together leave no cache warm."""
    return max(2, min(most, -(-_CACHE_BYTES // max(1, set_bytes))))


def line(us: float, num_bytes: int, ceiling: float, more: str = "") -> str:
    """What a launch took, and how near that is to the ceiling, in GB/s."""
    rate = num_bytes / us / 1e3
    return f"{us:9.2f} us {rate:8.0f} GB/s {100 * rate / ceiling:5.0f} %  {more}".rstrip()


def graph_us(
    launch: Callable[[int], object], num_launches: int = 40, num_replays: int = 7
) -> float:
    """Microseconds of one launch: the median replay of a graph of launch(0), launch(1), ..."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        launch(0)
        launch(1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(num_launches):
            launch(index)
    graph.replay()
    times = []
    for _ in range(num_replays):
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / num_launches)
    return statistics.median(times)


def stream_us(
    launch: Callable[[int], object], num_launches: int = 8, num_repeats: int = 3
) -> float:
    """Microseconds of one launch, without a graph: for long ones, and what cannot be captured."""
    launch(0)
    launch(1)
    torch.cuda.synchronize()
    times = []
    for _ in range(num_repeats):
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        for index in range(num_launches):
            launch(index)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / num_launches)
    return statistics.median(times)


def copy_gb_per_s() -> float:
    """Of a large copy on the device, bytes read and bytes written."""
    source = torch.randn(256 << 20, device="cuda").view(4, -1)
    target = torch.empty_like(source)
    num_bytes = 2 * source[0].numel() * 4
    us = graph_us(lambda index: target[index % 4].copy_(source[index % 4]), 12)
    return num_bytes / us / 1e3


def matmul_tflop_per_s() -> float:
    """Of an 8192 x 8192 x 8192 product in bfloat16."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(a)
    return 2 * 8192**3 / stream_us(lambda _: torch.mm(a, b, out=out), 10) / 1e6


def relative(out: torch.Tensor, truth: torch.Tensor) -> float:
    """Of the norm of the truth."""
    return float((out.double() - truth.double()).norm() / truth.double().norm())


def attempt(name: str, row: Callable[[], str]) -> None:
    """Print one row; one that fails says why and hides no other."""
    try:
        CONSOLE.print(f"{name:<58}{row()}")
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        CONSOLE.print(f"{name:<58}FAILED {type(error).__name__}: {lines[0][:300]}", markup=False)
