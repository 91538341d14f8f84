"""GraphSet: one computation, captured as a CUDA graph for each of the shapes that it is asked for
in. Without CUDA it runs as it is.

A graph replays its launches with the addresses that they were captured with: what the computation
reads and leaves lies in tensors that are made once. Knows neither rows nor models. Invariant: what
is captured is not computed (the run before it is: with inputs that change nothing). One thread at a
time.
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
    """What graphs need between their first launch and their last, shared by all of them: no two run
    at the same time. On the current device."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        # The allocator gives memory back to the stream that it was taken on. What is captured on a
        # stream of higher priority goes before what other threads give the device meanwhile:
        # checksums of blocks that come, for a prompt that can wait.
        self.stream = torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]


class GraphSet(Generic[Shape]):
    """See the module.

    Args:
        compute: launches everything for a shape; no data-dependent shapes, no waiting.
        uses_graphs: False: `run` computes.
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
        """Compile what is not compiled, and capture every shape.

        Args:
            shapes: the largest first: its capture takes as much memory as any needs, and the others
                find theirs in it.
            memory: shared with another set; None: of its own.
            on_captured: called after each.
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
        """Let the graphs go, and what they hold on to: NCCL parts with no other rank before the
        last graph that speaks to it is gone. Nothing runs after it."""
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
        """Compute a shape on the current stream.

        Raises: IntegrityError where it was not captured: a capture now would compute it twice.
        """
        if not self._uses_graphs:
            with torch.inference_mode():
                self._compute(shape)
            return
        graph = self._graphs.get(shape)
        if graph is None:
            raise IntegrityError(f"no graph of {shape} was captured")
        graph.replay()


class Captured(Protocol):
    """Whoever has graphs to capture."""

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
    """Capture what several have, in one memory.

    Args:
        sets: whoever has the most rows first.
    Raises: LoadError where the device has no memory for it.
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
