"""Backend choice of an operation (`Backend`), and launch options by which kernels overlap
(`overlap_options`)."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Literal

import torch

Backend = Literal["auto", "triton", "reference"]
"""Version of an operation to run. "auto": Triton (or the library where it is faster) for CUDA
tensors, plain torch for others. "triton" and "reference" are for tests and benchmarks; "triton" on
CPU tensors needs Triton's interpreter."""


def runs_triton(backend: Backend, tensor: torch.Tensor) -> bool:
    """Return whether `backend` runs Triton for `tensor`. Raises: ValueError for a name that is no
    Backend."""
    if backend not in ("auto", "triton", "reference"):
        raise ValueError(f"backend {backend!r} is none of auto, triton, reference")
    return backend == "triton" or (backend == "auto" and tensor.is_cuda)


_FIRST_CAPABILITY = (9, 0)


def overlap_options(tensor: torch.Tensor) -> dict[str, Any]:
    """Return launch options for a kernel with a constexpr OVERLAPS on the tensor's device:
    programmatic dependent launch, by which a kernel starts while the one before it in the stream
    ends.

    A kernel compiled with OVERLAPS lets the next one start at once
    (griddepcontrol.launch_dependents) and waits (griddepcontrol.wait) before it reads what a kernel
    of this step wrote, and before it writes at all. Before the wait it may read weights and what
    the step was given: what was written before the first kernel that overlaps. It saves most of the
    gap between two launches. Hopper and later.
    """
    overlaps = tensor.is_cuda and _can_overlap(tensor.device)
    return {"OVERLAPS": True, "launch_pdl": True} if overlaps else {"OVERLAPS": False}


@lru_cache(maxsize=16)
def _can_overlap(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= _FIRST_CAPABILITY
