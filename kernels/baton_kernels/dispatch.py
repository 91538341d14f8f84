"""Backend: which of an operation's two versions runs. Knows no operation. A pure function; any
thread.
"""

from __future__ import annotations

from typing import Literal

import torch

Backend = Literal["auto", "triton", "reference"]
""""auto": Triton (or the library that is faster) for CUDA tensors, plain torch for others. The
other two are for tests and benchmarks; "triton" on CPU tensors needs Triton's interpreter."""


def runs_triton(backend: Backend, tensor: torch.Tensor) -> bool:
    """Raises: ValueError for a name that is no Backend."""
    if backend not in ("auto", "triton", "reference"):
        raise ValueError(f"backend {backend!r} is none of auto, triton, reference")
    return backend == "triton" or (backend == "auto" and tensor.is_cuda)
