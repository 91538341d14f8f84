"""Shapes and GPUs that prefill_attention_hopper.py and gated_linear_hopper.py support. Imports
nothing that another GPU, or another Triton version, lacks.

Those kernels are written in Gluon, Triton's lower language, whose names still change: they run
under the Triton that they were tested with. No state; any thread.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from baton_kernels.block_rows import BlockRows

TRITON_VERSIONS = ("3.6.",)
"""Triton versions that the Gluon kernels were tested with."""

NUM_KEYS = 128
"""Positions per tile of keys, a whole number of blocks."""

GROUP_ROWS = 64
"""Query rows per warp group: the row count of one matrix instruction."""

GATED_ROWS, GATED_COLUMNS, GATED_DEPTH = 128, 128, 64
"""Tile of gated_linear_hopper.py: rows of x, columns of the result, and columns of x per step."""


def can_gate(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> bool:
    """Return whether gated_linear_hopper.py can compute this product: a Hopper GPU, bfloat16, and
    whole tiles except along the rows of x."""
    return (
        x.is_cuda
        and x.dtype == torch.bfloat16
        and out.shape[1] % GATED_COLUMNS == 0
        and x.shape[1] % GATED_DEPTH == 0
        and all(one.stride(0) % 8 == 0 and one.data_ptr() % 16 == 0 for one in (x, weight, out))
        and _is_hopper(x.device)
    )


def can_run(query: torch.Tensor, rows: BlockRows) -> bool:
    """Return whether prefill_attention_hopper.py supports this GPU, dtype, head width and cache
    layout."""
    size, dim = rows.block_size, rows.k_head_dim
    return (
        query.is_cuda
        and query.dtype == torch.bfloat16
        and rows.values is not None
        and rows.v_head_dim == dim
        and dim in (64, 128)
        and size % 8 == 0  # a swizzled tile is made of eight rows
        and NUM_KEYS % size == 0
        and rows.keys.stride(0) == rows.values.stride(0)
        and rows.keys.stride(0) % dim == 0
        and rows.keys.shape[0] * (rows.keys.stride(0) // dim) < 1 << 31
        and rows.keys.data_ptr() % 16 == rows.values.data_ptr() % 16 == 0
        and query.shape[1] // rows.num_heads <= GROUP_ROWS
        and _is_hopper(query.device)
    )


def token_matrix(matrices: torch.Tensor) -> tuple[int, int]:
    """View rows of blocks [R, P, D] as one matrix of tokens [N, D] that begins at the same address.

    Returns: (tokens from one row of blocks to the next, N): token t of row r has index t + r *
    pitch, the first of the two.
    """
    pitch = matrices.stride(0) // matrices.shape[2]
    return pitch, (matrices.shape[0] - 1) * pitch + matrices.shape[1]


@lru_cache(maxsize=16)
def _is_hopper(device: torch.device) -> bool:
    import triton

    is_tested = triton.__version__.startswith(TRITON_VERSIONS)
    return is_tested and torch.cuda.get_device_capability(device) == (9, 0)
