"""Whole blocks of the cache: into and out of dense staging, one over another, and to zero.

A block is its bytes here: what they mean is the layout's affair, and any dtype will do. A cache may
be a part of each block's record (a rank's heads, a range of layers): columns of a wider one.
Entries of -1 are skipped, so that tables padded to a fixed length serve. No state; any thread.
"""

from __future__ import annotations

import torch

from baton_kernels.dispatch import Backend, runs_triton

SKIPPED = -1
"""An entry that names no block."""


def gather_blocks(
    cache: torch.Tensor,
    block_ids: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    backend: Backend = "auto",
) -> torch.Tensor:
    """Blocks side by side.

    Args:
        cache: [num_blocks, E], each block's part dense.
        block_ids: [n] int32; -1: that row of the result is left as it is.
        out: [n, E], dense rows.
    Returns: [n, E].
    Raises: ValueError naming what does not fit.
    """
    _check_cache("cache", cache)
    _check_ids("block_ids", block_ids, 1)
    if out is None:
        out = cache.new_empty(block_ids.shape[0], cache.shape[1])
    _check_staging("out", out, block_ids.shape[0], cache)
    if not runs_triton(backend, cache):
        live = block_ids >= 0
        out[live] = cache[block_ids[live].long()]
        return out
    from baton_kernels.gpu import block_ops as gpu

    gpu.move(cache, block_ids, out, None)
    return out


def scatter_blocks(
    cache: torch.Tensor,
    block_ids: torch.Tensor,
    staging: torch.Tensor,
    *,
    backend: Backend = "auto",
) -> None:
    """What `gather_blocks` gave, back into blocks.

    Args:
        cache: [num_blocks, E], each block's part dense; written in place.
        block_ids: [n] int32, none twice; -1: that row goes nowhere.
        staging: [n, E], dense rows, the cache's dtype.
    Raises: ValueError naming what does not fit.
    """
    _check_cache("cache", cache)
    _check_ids("block_ids", block_ids, 1)
    _check_staging("staging", staging, block_ids.shape[0], cache)
    if not runs_triton(backend, cache):
        live = block_ids >= 0
        cache[block_ids[live].long()] = staging[live]
        return
    from baton_kernels.gpu import block_ops as gpu

    gpu.move(staging, None, cache, block_ids)


def copy_blocks(cache: torch.Tensor, pairs: torch.Tensor, *, backend: Backend = "auto") -> None:
    """Copy-on-write: blocks over others, all at once.

    Args:
        cache: [num_blocks, E], each block's part dense; written in place.
        pairs: [n, 2] int32: source, target. No target twice, and none is a source. A pair with a -1
            is skipped.
    Raises: ValueError naming what does not fit.
    """
    _check_cache("cache", cache)
    _check_ids("pairs", pairs, 2)
    if pairs.shape[1] != 2:
        raise ValueError(f"pairs is [n, 2], not {tuple(pairs.shape)}")
    if not runs_triton(backend, cache):
        live = pairs[(pairs >= 0).all(dim=1)].long()
        cache[live[:, 1]] = cache[live[:, 0]]
        return
    from baton_kernels.gpu import block_ops as gpu

    gpu.move(cache, pairs[:, 0], cache, pairs[:, 1])


def clear_blocks(
    cache: torch.Tensor, block_ids: torch.Tensor, *, backend: Backend = "auto"
) -> None:
    """Every byte of these blocks' parts to zero.

    Args:
        cache: [num_blocks, E], each block's part dense; written in place.
        block_ids: [n] int32; -1 is skipped.
    Raises: ValueError naming what does not fit.
    """
    _check_cache("cache", cache)
    _check_ids("block_ids", block_ids, 1)
    if not runs_triton(backend, cache):
        cache[block_ids[block_ids >= 0].long()] = 0
        return
    from baton_kernels.gpu import block_ops as gpu

    gpu.move(None, None, cache, block_ids)


def _check_cache(name: str, cache: torch.Tensor) -> None:
    if cache.dim() != 2 or cache.stride(1) != 1:
        raise ValueError(f"{name} is [num_blocks, E] with dense blocks, not {tuple(cache.shape)}")


def _check_ids(name: str, ids: torch.Tensor, dims: int) -> None:
    if ids.dim() != dims or ids.dtype != torch.int32:
        raise ValueError(f"{name}: {dims} dimensions of int32, not {tuple(ids.shape)} {ids.dtype}")


def _check_staging(name: str, staging: torch.Tensor, count: int, cache: torch.Tensor) -> None:
    _check_cache(name, staging)
    if staging.shape != (count, cache.shape[1]) or staging.dtype != cache.dtype:
        raise ValueError(
            f"{name} is [{count}, {cache.shape[1]}] {cache.dtype}, not {tuple(staging.shape)} "
            f"{staging.dtype}"
        )
