"""GraphSet: one computation, captured as a CUDA graph for each of several shapes. Without CUDA it
runs directly.

A graph replays its launches with the addresses with which they were captured: the computation's
inputs and outputs are tensors that are allocated once. It knows neither rows nor models. Invariant:
a captured computation is not run by the capture (a warm-up run before it is, with inputs that
change nothing). One thread at a time.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Generic, Protocol, TypeVar

import torch

from engine.errors import IntegrityError, LoadError

Shape = TypeVar("Shape", bound=Hashable)


class GraphMemory:
    """The memory pool and stream that all graphs of a device share, since no two run at the same
    time. For the current device."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        # The allocator gives memory back to the stream that it was taken on. What is captured on a
        # stream of higher priority goes before what other threads give the device meanwhile:
        # checksums of blocks that come, for a prompt that can wait.
        self.stream = torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]


class GraphSet(Generic[Shape]):
    """The CUDA graphs of one computation.

    Args:
        compute: launches all work for a shape, without data-dependent shapes or waiting.
        uses_graphs: False: `run` calls `compute` directly.
    """

    def __init__(self, compute: Callable[[Shape], None], *, uses_graphs: bool) -> None:
        self._compute = compute
        self._uses_graphs = uses_graphs
        self._graphs: dict[Shape, torch.cuda.CUDAGraph] = {}

    @torch.inference_mode()
    def capture(
        self,
        shapes: Iterable[Shape],
        *,
        memory: GraphMemory | None = None,
        on_captured: Callable[[], None] | None = None,
    ) -> None:
        """Compile and capture every shape.

        Args:
            shapes: the largest first: its capture allocates the memory that the others reuse.
            memory: memory shared with another set; None: its own.
            on_captured: called after each capture.
        """
        if not self._uses_graphs:
            for shape in shapes:
                self._compute(shape)
                if on_captured is not None:
                    on_captured()
            return
        memory = memory or GraphMemory()
        torch.cuda.synchronize()
        gc.collect()  # a tensor freed by the collector within a capture would spoil it
        gc.disable()
        try:
            with torch.cuda.stream(memory.stream):
                for shape in shapes:
                    self._graphs[shape] = self._capture(shape, memory)
                    if on_captured is not None:
                        on_captured()
        finally:
            gc.enable()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # what the runs on that stream took, and nobody else gets

    def forget(self) -> None:
        """Free the graphs and their references: NCCL closes connections to other ranks only after
        the last graph that uses them is freed. No run may follow."""
        self._graphs.clear()

    def _capture(self, shape: Shape, memory: GraphMemory) -> torch.cuda.CUDAGraph:
        # Once as it is: a kernel's first launch compiles and loads it, which no capture may do.
        self._compute(shape)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile; this one launches nothing else.
        graph.capture_begin(pool=memory.pool, capture_error_mode="thread_local")
        try:
            self._compute(shape)
        finally:
            graph.capture_end()
        return graph

    def run(self, shape: Shape) -> None:
        """Compute a shape on the current stream. Raises: IntegrityError if it was not captured."""
        if not self._uses_graphs:
            with torch.inference_mode():
                self._compute(shape)
            return
        graph = self._graphs.get(shape)
        if graph is None:
            raise IntegrityError(f"no graph of {shape} was captured")
        graph.replay()


class Captured(Protocol):
    """Protocol of an object that has CUDA graphs to capture."""

    @property
    def num_shapes(self) -> int: ...

    def capture(
        self, *, memory: GraphMemory | None, on_captured: Callable[[], None] | None
    ) -> None: ...


def capture_all(
    sets: Sequence[Captured],
    device: torch.device,
    progress: Callable[[str, int, int], None] | None = None,
) -> None:
    """Capture the graphs of several sets in one memory.

    Args: sets: those with the most rows first.
    Raises: LoadError if the device lacks the memory.
    """
    total = sum(one.num_shapes for one in sets)
    done = 0

    def tell() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress("graphs", done, total)

    is_cuda = device.type == "cuda"
    with torch.cuda.device(device) if is_cuda else contextlib.nullcontext():
        memory = GraphMemory() if is_cuda else None
        try:
            for one in sets:
                one.capture(memory=memory, on_captured=tell)
        except torch.OutOfMemoryError as error:
            raise LoadError(
                f"no memory on {device} for {total} CUDA graphs beside the KV cache: lower "
                "memory_share (or kv_bytes, num_blocks), or max_num_running"
            ) from error
