"""rotate_and_attend: a decode step's way from the fused projection to the attention's output, in
one launch: QK-norm, RoPE, the write of the newest keys and values, and decode_attention.

Two launches where one does not do it. Knows no model and no request. No state; any thread, one
Workspace for launches that may overlap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from baton_kernels.attention import decode_attention
from baton_kernels.block_rows import BlockRows
from baton_kernels.dispatch import Backend, runs_triton
from baton_kernels.layer_ops import rotate_and_write

if TYPE_CHECKING:
    from baton_kernels.gpu.attention import Config, Workspace

_MAX_GROUP = 16
"""Query heads of a kv head: more are several programs, none of which could write for the others."""


def rotate_and_attend(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    rows: BlockRows,
    block_tables: torch.Tensor,
    *,
    num_heads: int,
    scaling: float,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    backend: Backend = "auto",
    exact: bool = False,
    workspace: Workspace | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """`rotate_and_write`, then `decode_attention` of the tokens that it wrote.

    On Hopper a launch begins while the one ahead of it ends: `positions` and `block_tables` must
    not be what that one writes.

    Args:
        qkv: [B, (H + 2 K) D], rows dense: the newest token of each sequence.
        positions: [B] int32: where it stands; -1: padding: nothing is written, and it gives zeros.
        cos_sin, rows, num_heads, q_norm, k_norm, norm_eps: see rotate_and_write.
        block_tables: [B, n] int32; entries beyond a sequence's own are never used.
        scaling, window, softcap, sinks, out, exact, workspace, config: see decode_attention.
    Returns: [B, H, D].
    Raises: ValueError naming the argument that does not fit.
    Bytes moved, FLOPs: those of decode_attention; qkv once.
    """
    if not runs_triton(backend, qkv) or exact or not _fits_one_launch(rows, num_heads):
        query = rotate_and_write(
            qkv, positions, cos_sin, rows, block_tables, num_heads=num_heads, q_norm=q_norm,
            k_norm=k_norm, norm_eps=norm_eps, backend=backend,
        )  # fmt: skip
        return decode_attention(
            query, rows, block_tables, positions + 1, scaling=scaling, window=window,
            softcap=softcap, sinks=sinks, out=out, backend=backend, exact=exact,
            workspace=workspace, config=config,
        )  # fmt: skip
    _check(qkv, positions, cos_sin, rows, block_tables, num_heads, q_norm, k_norm)
    shape = (qkv.shape[0], num_heads, rows.v_head_dim)
    if out is None:
        out = qkv.new_empty(shape)
    if out.shape != shape or out.dtype != qkv.dtype or out.stride(2) != 1:
        raise ValueError(f"out is {shape} {qkv.dtype} with dense heads, not {tuple(out.shape)}")
    if sinks is not None and (sinks.shape != (num_heads,) or not sinks.is_contiguous()):
        raise ValueError(f"sinks is [{num_heads}], dense, not {tuple(sinks.shape)}")
    from baton_kernels.gpu import attention as gpu

    gpu.launch(
        qkv.view(qkv.shape[0], -1, rows.k_head_dim), rows, block_tables, positions, out,
        scaling=scaling, window=window, softcap=softcap, sinks=sinks, workspace=workspace,
        config=config, rotation=gpu.Rotation(cos_sin, q_norm, k_norm, norm_eps), is_early=True,
    )  # fmt: skip
    return out


def _fits_one_launch(rows: BlockRows, num_heads: int) -> bool:
    dim = rows.k_head_dim
    return (
        not rows.dtype
        and not rows.is_latent
        and dim == rows.v_head_dim
        and dim >= 16
        and dim & (dim - 1) == 0
        and num_heads <= _MAX_GROUP * rows.num_heads
    )


def _check(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    rows: BlockRows,
    block_tables: torch.Tensor,
    num_heads: int,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
) -> None:
    dim = rows.k_head_dim
    if qkv.dim() != 2 or qkv.stride(1) != 1 or qkv.dtype != rows.keys.dtype:
        raise ValueError(f"qkv is [B, columns] {rows.keys.dtype}, rows dense, not {qkv.dtype}")
    if qkv.shape[1] != (num_heads + 2 * rows.num_heads) * dim or num_heads % rows.num_heads:
        raise ValueError(f"qkv has {qkv.shape[1]} columns for {num_heads} heads of {dim}")
    if positions.shape != qkv.shape[:1] or positions.dtype != torch.int32:
        raise ValueError(f"positions is [{qkv.shape[0]}] int32, not {tuple(positions.shape)}")
    if cos_sin.dtype != torch.float32 or not cos_sin.is_contiguous() or cos_sin.shape[1:] != (dim,):
        raise ValueError(f"cos_sin is [max_pos, {dim}] float32, dense")
    if block_tables.dtype != torch.int32 or block_tables.shape[:1] != qkv.shape[:1]:
        raise ValueError(f"block_tables is [{qkv.shape[0]}, n] int32")
    if block_tables.dim() != 2 or (block_tables.shape[1] > 1 and block_tables.stride(1) != 1):
        raise ValueError("block_tables: rows are dense")
    if (q_norm is None) != (k_norm is None):
        raise ValueError("q_norm and k_norm: both or none")
    for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
        if norm is not None and (norm.shape != (dim,) or not norm.is_contiguous()):
            raise ValueError(f"{name} is [{dim}], dense, not {tuple(norm.shape)}")
