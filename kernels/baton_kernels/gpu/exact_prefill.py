"""Attention of chunks over the paged cache in exact mode: the Triton kernel that gives a token the
same bits whatever the chunk it came in, and those of decode_attention's exact mode.

A program holds BLOCK_M rows (query heads of one kv head, of some tokens of one sequence) and takes
the splits of positions one after the other, each from an empty part, as programs of
gpu/attention_splits.py take one each; see attention_tiles.py for the order. Knows no model. No
state; any thread.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from baton_kernels.block_rows import BlockRows
from baton_kernels.gpu.attention_plan import LOG2_E, config_for, steps, widths
from baton_kernels.gpu.attention_tiles import SPLIT_POSITIONS, finish, merge_parts
from baton_kernels.gpu.attention_walk import walk_positions

_VARYING = ["window", "table_stride", "num_m_blocks"]
_ANYWHERE = ["tables", "query_starts", "starts"]


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_ANYWHERE)
def _attend_chunks(
    query, out, keys, values, tables, query_starts, starts, sinks,
    q_row_stride, q_head_stride, out_row_stride, out_head_stride, table_stride,
    k_block_stride, k_head_stride, v_block_stride, v_head_stride,
    scale, cap, window, num_m_blocks,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, P: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    D0: tl.constexpr, D1: tl.constexpr, DV_WIDTH: tl.constexpr, LATENT: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    # The last tiles see most positions: they begin first.
    head = tl.program_id(0) // num_m_blocks
    m_block = num_m_blocks - 1 - tl.program_id(0) % num_m_blocks
    sequence = tl.program_id(1)
    first_row = tl.load(query_starts + sequence)
    num_tokens = tl.load(query_starts + sequence + 1) - first_row
    if m_block * BLOCK_M >= num_tokens * G:
        return
    start = tl.load(starts + sequence)
    rows = m_block * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = rows < num_tokens * G
    tokens = rows // G
    q_rows = (first_row + tokens).to(tl.int64)
    q_heads = head * G + rows % G
    v_cols = tl.arange(0, DV_WIDTH)
    cols0 = tl.arange(0, D0)
    q_base = query + q_rows * q_row_stride + q_heads * q_head_stride
    q0 = tl.load(
        q_base[:, None] + cols0[None, :],
        mask=is_row[:, None] & (cols0 < D)[None, :],
        other=0.0,
    )
    q1 = q0
    if D > D0:
        cols1 = D0 + tl.arange(0, D1)
        q1 = tl.load(
            q_base[:, None] + cols1[None, :],
            mask=is_row[:, None] & (cols1 < D)[None, :],
            other=0.0,
        )
    high = start + tokens  # the last position that a row sees
    low = rows * 0
    first = 0
    if WINDOW:
        low = high - window + 1
        first = tl.maximum(start + m_block * BLOCK_M // G - window + 1, 0) // BLOCK_N * BLOCK_N
    end = start + tl.minimum((m_block * BLOCK_M + BLOCK_M - 1) // G + 1, num_tokens)
    table = tables + sequence.to(tl.int64) * table_stride
    key_base = keys + head.to(tl.int64) * k_head_stride
    value_base = values + head.to(tl.int64) * v_head_stride
    greatest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    weighted = tl.zeros([BLOCK_M, DV_WIDTH], tl.float32)
    for split in tl.range(first // SPLIT, (end + SPLIT - 1) // SPLIT):
        its_greatest, its_total, its_weighted = walk_positions(
            q0, q1,
            tl.full([BLOCK_M], float("-inf"), tl.float32),
            tl.zeros([BLOCK_M], tl.float32),
            tl.zeros([BLOCK_M, DV_WIDTH], tl.float32),
            tl.maximum(split * SPLIT, first), tl.minimum((split + 1) * SPLIT, end),
            key_base, value_base, key_base, key_base, table, key_base, rows, low, high,
            k_block_stride, v_block_stride, 0, 0, scale, cap,
            D, DV, P, BLOCK_N, D0, D1, DV_WIDTH, 0, False, LATENT, WINDOW, SOFTCAP, 2, True,
        )  # fmt: skip
        greatest, total, weighted = merge_parts(
            greatest, total, weighted, its_greatest, its_total, its_weighted
        )
    its_sinks = tl.zeros([BLOCK_M], tl.float32)
    if SINKS:
        its_sinks = tl.load(sinks + q_heads).to(tl.float32) * 1.4426950408889634
    attention = finish(greatest, total, weighted, its_sinks, SINKS)
    out_rows = out + q_rows * out_row_stride + q_heads * out_head_stride
    tl.store(
        out_rows[:, None] + v_cols[None, :],
        attention.to(out.dtype.element_ty),
        mask=is_row[:, None] & (v_cols < DV)[None, :],
    )


def launch(
    query: torch.Tensor,
    rows: BlockRows,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    starts: torch.Tensor,
    out: torch.Tensor,
    *,
    max_query_len: int,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """prefill_attention in exact mode; arguments were checked by its door. The new tokens' keys and
    values are in the cache. Raises: ValueError for a quantized cache."""
    if rows.dtype:
        raise ValueError(f"rows: exact attention of chunks over a cache of {rows.dtype}")
    num_heads, head_dim = query.shape[1:]
    group = num_heads // rows.num_heads
    config = config_for(rows, group * max_query_len, query.dtype, True)
    num_m_blocks = triton.cdiv(group * max_query_len, config.block_m)
    values = rows.keys if rows.values is None else rows.values
    factor = LOG2_E if softcap is None else 1 / softcap
    d0, d1, dv_width = widths(rows)
    _attend_chunks[(rows.num_heads * num_m_blocks, starts.shape[0])](
        query, out, rows.keys, values, block_tables, query_starts, starts,
        starts if sinks is None else sinks,
        query.stride(0), query.stride(1), out.stride(0), out.stride(1), block_tables.stride(0),
        *steps(rows.keys, rows), *steps(values, rows),
        scaling * factor, 0.0 if softcap is None else softcap * LOG2_E, window or 0, num_m_blocks,
        G=group, D=head_dim, DV=rows.v_head_dim, P=rows.block_size,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, D0=d0, D1=d1, DV_WIDTH=dv_width,
        LATENT=rows.is_latent, WINDOW=window is not None, SOFTCAP=softcap is not None,
        SINKS=sinks is not None, SPLIT=SPLIT_POSITIONS,
        num_warps=config.num_warps, num_stages=config.num_stages, enable_fp_fusion=False,
    )  # fmt: skip
