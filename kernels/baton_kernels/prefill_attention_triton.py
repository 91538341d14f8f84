"""Triton kernels of `baton_kernels.prefill_attention`, and their launchers. prefill_attention.py
checks the arguments.

`prefill_attention` is flash attention (Dao, 2023) over the paged cache: a program holds the query
heads that share a kv head, of some tokens of one sequence, and walks over the blocks that these may
see. `exact_prefill_attention` gives a token the same bits whatever the chunk it came in, and those
of decode_attention's exact mode: a program holds BLOCK_M rows (query heads of one kv head, of some
tokens of one sequence) and takes the splits of positions one after the other, each from an empty
part, as programs of attention_triton.py take one each (paged_walk_triton.py has the order). Knows
no model. No state; any thread.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from baton_kernels.attention_plan import LOG2_E, SPLIT_POSITIONS, config_for, steps, widths
from baton_kernels.block_rows import BlockRows
from baton_kernels.paged_walk_triton import finish, merge_parts, walk_positions

_LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class TileConfig:
    """Tile sizes and pipeline depth of the prefill kernel."""

    num_queries: int
    """Rows per tile: tokens times query heads per kv head."""

    num_keys: int
    """Positions per tile."""

    num_warps: int

    num_stages: int
    """Number of tiles of keys and values in flight."""


def tile_config(head_dim: int, dtype: torch.dtype) -> TileConfig:
    """Choose the tile sizes for heads of width `head_dim` and queries of `dtype`."""
    if dtype == torch.float32 or head_dim > 256:
        return TileConfig(16, 32, 4, 2)  # exact float32 products use no matrix unit: small tiles
    if head_dim > 128:
        return TileConfig(64, 64, 4, 2)
    return TileConfig(64, 64, 4, 3)


@triton.jit  # type: ignore[untyped-decorator]
def _walk(  # type: ignore[no-untyped-def]
    acc, row_max, row_sum, q, q_rest, low, high, end, row_position,
    k_base, v_base, k_step, v_step, table, rows_per_block, score_scale, factor, window,
    P: tl.constexpr, D: tl.constexpr, V_STRIDE: tl.constexpr, DV: tl.constexpr,
    DV_BLOCK: tl.constexpr, MAIN: tl.constexpr, REST_BLOCK: tl.constexpr, N: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr, WIDENS: tl.constexpr,
):  # fmt: skip
    """Process tiles of keys from position `low` (a multiple of N) up to `high`; positions from
    `end` on do not exist. Not MASKED: every row sees all of them."""
    dim = tl.arange(0, MAIN)[None, :]
    v_dim = tl.arange(0, DV_BLOCK)[None, :]
    for first in tl.range(low, high, N):
        position = first + tl.arange(0, N)
        slot = position % P
        if MASKED:
            inside = (position < end)[:, None]
            block = tl.load(table + position // P, mask=position < end, other=0).to(tl.int64)
        else:
            block = tl.load(table + position // P).to(tl.int64)
        row = block * rows_per_block
        k_place = (k_base + row * k_step + slot * D)[:, None] + dim
        if MASKED:
            k = tl.load(k_place, mask=inside, other=0.0)
        else:
            k = tl.load(k_place)
        if WIDENS:
            k = k.to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if MAIN < D:
            rest_dim = MAIN + tl.arange(0, REST_BLOCK)[None, :]
            rest_place = (k_base + row * k_step + slot * D)[:, None] + rest_dim
            k_rest = tl.load(rest_place, mask=(rest_dim < D) & (position < end)[:, None], other=0.0)
            if WIDENS:
                k_rest = k_rest.to(tl.float32)
            scores = tl.dot(q_rest, tl.trans(k_rest), scores, input_precision=PRECISION)
        if HAS_CAP:  # tanh, by a power that cannot overflow
            power = tl.exp2(tl.abs(scores * score_scale) * -2.885390081777927)
            tanh = (1.0 - power) / (1.0 + power)
            scores = tl.where(scores < 0, -tanh, tanh)
        if MASKED:
            visible = position[None, :] <= row_position[:, None]
            if HAS_WINDOW:
                visible = visible & (position[None, :] > row_position[:, None] - window)
            scores = tl.where(visible, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1) * factor)
        # A row that has seen nothing yet keeps -inf; 0 stands for it, or -inf - -inf were NaN.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(tl.fma(scores, factor, -shift[:, None]))
        fade = tl.exp2(row_max - shift)
        row_sum = row_sum * fade + tl.sum(weights, 1)
        acc = acc * fade[:, None]
        v_place = (v_base + row * v_step + slot * V_STRIDE)[:, None] + v_dim
        if MASKED:
            v = tl.load(v_place, mask=inside & (v_dim < DV), other=0.0)
        elif DV < DV_BLOCK:
            v = tl.load(v_place, mask=v_dim < DV, other=0.0)
        else:
            v = tl.load(v_place)
        if WIDENS:
            v = v.to(tl.float32)
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
        row_max = new_max
    return acc, row_max, row_sum


@triton.jit(
    do_not_specialize=["table_stride", "window"],
    do_not_specialize_on_alignment=["block_tables", "query_starts", "starts"],
)  # type: ignore[untyped-decorator]
def _prefill(  # type: ignore[no-untyped-def]
    query, keys, values, out, sinks, block_tables, query_starts, starts,
    query_stride, query_head_stride, out_stride, out_head_stride, k_step, v_step, table_stride,
    rows_per_block, head_step, score_scale, factor, window,
    G: tl.constexpr, P: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, V_STRIDE: tl.constexpr,
    MAIN: tl.constexpr, REST_BLOCK: tl.constexpr, DV_BLOCK: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr, PRECISION: tl.constexpr, WIDENS: tl.constexpr,
):  # fmt: skip
    TOKENS: tl.constexpr = M // G
    kv_head = tl.program_id(0)
    # The last tile sees most keys: the longest programs begin first.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    sequence = tl.program_id(2)
    first_row = tl.load(query_starts + sequence)
    num_tokens = tl.load(query_starts + sequence + 1) - first_row
    start = tl.load(starts + sequence)
    first = tile * TOKENS
    if first >= num_tokens:
        return
    line = tl.arange(0, M)
    token = first + line // G
    head = kv_head * G + line % G
    live = (line < TOKENS * G) & (token < num_tokens)
    row_position = start + tl.minimum(token, num_tokens - 1)
    end = start + tl.minimum(first + TOKENS, num_tokens)

    row = (first_row + token).to(tl.int64)
    dim = tl.arange(0, MAIN)[None, :]
    place = (query + row * query_stride + head * query_head_stride)[:, None]
    q = tl.load(place + dim, mask=live[:, None], other=0.0)
    q_rest = q
    if MAIN < D:
        rest_dim = MAIN + tl.arange(0, REST_BLOCK)[None, :]
        q_rest = tl.load(place + rest_dim, mask=live[:, None] & (rest_dim < D), other=0.0)
    if WIDENS:
        q = q.to(tl.float32)
        q_rest = q_rest.to(tl.float32)
    row_max = tl.full((M,), float("-inf"), tl.float32)
    row_sum = tl.zeros((M,), tl.float32)
    if HAS_SINKS:
        row_max = tl.load(sinks + head, mask=live, other=0.0).to(tl.float32) * 1.4426950408889634
        row_sum += 1.0
    acc = tl.zeros((M, DV_BLOCK), tl.float32)

    table = block_tables + sequence.to(tl.int64) * table_stride
    k_base = keys + kv_head.to(tl.int64) * head_step * k_step
    v_base = values + kv_head.to(tl.int64) * head_step * v_step
    low = 0
    seen_by_all = (start + first + 1) // N * N
    if HAS_WINDOW:
        low = tl.maximum(start + first - window + 1, 0) // N * N
        seen_by_all = low  # at both ends some rows see less: masks throughout
    acc, row_max, row_sum = _walk(
        acc, row_max, row_sum, q, q_rest, low, seen_by_all, end, row_position,
        k_base, v_base, k_step, v_step, table, rows_per_block, score_scale, factor, window,
        P, D, V_STRIDE, DV, DV_BLOCK, MAIN, REST_BLOCK, N, HAS_CAP, HAS_WINDOW, False, PRECISION,
        WIDENS,
    )  # fmt: skip
    acc, row_max, row_sum = _walk(
        acc, row_max, row_sum, q, q_rest, seen_by_all, end, end, row_position,
        k_base, v_base, k_step, v_step, table, rows_per_block, score_scale, factor, window,
        P, D, V_STRIDE, DV, DV_BLOCK, MAIN, REST_BLOCK, N, HAS_CAP, HAS_WINDOW, True, PRECISION,
        WIDENS,
    )  # fmt: skip
    v_dim = tl.arange(0, DV_BLOCK)[None, :]
    target = (out + row * out_stride + head * out_head_stride)[:, None] + v_dim
    result = (acc / row_sum[:, None]).to(out.dtype.element_ty)
    tl.store(target, result, mask=live[:, None] & (v_dim < DV))


def prefill_attention(
    query: torch.Tensor,
    rows: BlockRows,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    starts: torch.Tensor,
    max_query_len: int,
    scaling: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    *,
    config: TileConfig | None = None,
) -> None:
    """Launch causal attention of new tokens; arguments as in `prefill_attention.prefill_attention`,
    which has checked them.

    Args:
        config: tile sizes, for benchmarks; None: by tile_config.
    """
    num_heads, head_dim = query.shape[1:]
    num_sequences, group = starts.shape[0], num_heads // rows.num_heads
    if num_sequences == 0 or max_query_len == 0:
        return
    config = config or tile_config(head_dim, query.dtype)
    num_queries = max(config.num_queries, triton.next_power_of_2(group))
    main = 1 << (head_dim.bit_length() - 1)
    if main < 16:
        main = head_dim  # too narrow for a matrix product in two parts
    values = rows.keys if rows.values is None else rows.values
    score_scale, factor = 1.0, scaling * _LOG2_E
    if softcap is not None:
        score_scale, factor = scaling / softcap, softcap * _LOG2_E
    tiles = triton.cdiv(max_query_len, num_queries // group)
    _prefill[(rows.num_heads, tiles, num_sequences)](
        query, rows.keys, values, out, sinks if sinks is not None else query, block_tables,
        query_starts, starts, query.stride(0), query.stride(1), out.stride(0), out.stride(1),
        rows.keys.stride(0), values.stride(0), block_tables.stride(0), rows.rows_per_block,
        rows.head_step, score_scale, factor, window or 0,
        G=group, P=rows.block_size, D=head_dim, DV=rows.v_head_dim, V_STRIDE=values.shape[2],
        MAIN=main, REST_BLOCK=max(16, triton.next_power_of_2(max(1, head_dim - main))),
        DV_BLOCK=max(16, triton.next_power_of_2(rows.v_head_dim)), M=num_queries,
        N=config.num_keys, HAS_SINKS=sinks is not None, HAS_CAP=softcap is not None,
        HAS_WINDOW=window is not None,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        # The interpreter would multiply bfloat16 as the integers that it keeps them in.
        WIDENS=triton.knobs.runtime.interpret and query.dtype == torch.bfloat16,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip


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


def exact_prefill_attention(
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
    """Launch prefill attention in exact mode; arguments as in
    `prefill_attention.prefill_attention`, which has checked them. The new tokens' keys and values
    are in the cache. Raises: ValueError for a quantized cache."""
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
