"""Decode attention by equal shares: a fixed number of programs, each with as many tiles of
positions as any other, whatever the sequence lengths and however many rows of the batch are
padding.

All tiles form one list: sequence by sequence, head by head, first position first. A program's
share of it begins and ends anywhere: it takes the rest of one sequence's head, whole ones, and the
beginning of another. Of those that it does not take whole it leaves a part (paged_walk_triton.py):
two at most. The program that leaves a head's last part merges the parts. Each program computes from
the lengths alone which tiles every program has, so nothing is handed out, and the host need not
know lengths.

Knows no trees, windows or tails, and no order of sums that batch-mates have no say in
(attention_triton.py does). Invariant: counters are found and left at zero.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from baton_kernels.attention_plan import (
    LOG2_E,
    Plan,
    Rotation,
    Workspace,
    own_workspace,
    quantization,
    steps,
)
from baton_kernels.block_rows import BlockRows
from baton_kernels.dispatch import overlap_options
from baton_kernels.paged_walk_triton import (
    finish,
    merge,
    prefetch_blocks,
    rotate_row,
    rotate_rows,
    walk_positions,
)

_VARYING = ["num_sequences", "min_tiles", "table_stride"]
_ANYWHERE = ["tables", "ends", "counters"]


@triton.jit
def _segment(tiles, place, KV_HEADS: tl.constexpr):
    """Find the tile at `place` of the list of all tiles: (sequence, head, first tile, tiles of the
    sequence, where the head's tiles begin in the list). tiles: [ROWS] of each sequence."""
    reached = tl.cumsum(tiles, 0) * KV_HEADS
    is_before = reached <= place
    sequence = tl.sum(is_before.to(tl.int32), 0)
    before = tl.max(tl.where(is_before, reached, 0), 0)
    rows = tl.arange(0, tiles.shape[0])
    num_tiles = tl.sum(tl.where(rows == sequence, tiles, 0), 0)
    head = (place - before) // num_tiles
    its_place = before + head * num_tiles
    return sequence, head, place - its_place, num_tiles, its_place


@triton.jit
def _prefetch(
    keys, values, tables, ends, tiles, place, stop_place, table_stride,
    k_block_stride, k_head_stride, v_block_stride, v_head_stride,
    D: tl.constexpr, DV: tl.constexpr, P: tl.constexpr, BLOCK_N: tl.constexpr,
    LATENT: tl.constexpr, PREFETCH: tl.constexpr, LINE: tl.constexpr, ROTATES: tl.constexpr,
    KV_HEADS: tl.constexpr,
):  # fmt: skip
    """Prefetch the keys and values at the beginning of a share into L2."""
    sequence, head, first, num_tiles, _ = _segment(tiles, place, KV_HEADS)
    end = tl.load(ends + sequence)
    if ROTATES:
        end += 1
    table = tables + sequence.to(tl.int64) * table_stride
    begin = first * BLOCK_N
    stop = tl.minimum(tl.minimum(first + stop_place - place, num_tiles) * BLOCK_N, end)
    key_base = keys + head.to(tl.int64) * k_head_stride
    prefetch_blocks(key_base, table, begin, stop, k_block_stride, P, PREFETCH, P * D, LINE)
    if not LATENT:
        value_base = values + head.to(tl.int64) * v_head_stride
        prefetch_blocks(value_base, table, begin, stop, v_block_stride, P, PREFETCH, P * DV, LINE)


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_ANYWHERE)
def attend_shares(
    query, out, keys, values, k_scales, v_scales, tables, ends, sinks, parts, norms, counters,
    cos_sin, q_norm, k_norm, norm_eps,
    q_row_stride, q_head_stride, out_row_stride, out_head_stride, table_stride,
    k_block_stride, k_head_stride, v_block_stride, v_head_stride,
    ks_block_stride, ks_head_stride, vs_block_stride, vs_head_stride,
    scale, cap, num_sequences, min_tiles,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, P: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr,
    D0: tl.constexpr, D1: tl.constexpr, DV_WIDTH: tl.constexpr, PITCH: tl.constexpr,
    CR: tl.constexpr, ROWS: tl.constexpr, QUANT: tl.constexpr, PER_TOKEN: tl.constexpr,
    LATENT: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
    OVERLAPS: tl.constexpr, EARLY: tl.constexpr, PREFETCH: tl.constexpr, LINE: tl.constexpr,
    ROTATES: tl.constexpr, NORMS: tl.constexpr, KV_HEADS: tl.constexpr,
):  # fmt: skip
    """Compute decode attention by equal shares, as the module describes; the arguments are those of
    `attention_triton.launch`. ROWS: number of sequences, rounded up to a power of two. min_tiles:
    fewest tiles of a share. EARLY, ROTATES: as in `attention_triton.attend`."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
        if not EARLY:
            tl.extra.cuda.gdc_wait()
    program = tl.program_id(0)
    every = tl.arange(0, ROWS)
    lengths = tl.load(ends + every, mask=every < num_sequences, other=-1)
    if ROTATES:
        lengths += 1
    tiles = (tl.maximum(lengths, 0) + BLOCK_N - 1) // BLOCK_N
    num_all = tl.sum(tiles, 0) * KV_HEADS
    share = tl.maximum((num_all + tl.num_programs(0) - 1) // tl.num_programs(0), min_tiles)
    place = program * share
    stop_place = tl.minimum(place + share, num_all)
    rows = tl.arange(0, BLOCK_M)
    v_cols = tl.arange(0, DV_WIDTH)
    cols0 = tl.arange(0, D0)
    is_row = rows < G
    if EARLY:
        if place < stop_place:
            _prefetch(
                keys, values, tables, ends, tiles, place, stop_place, table_stride,
                k_block_stride, k_head_stride, v_block_stride, v_head_stride,
                D, DV, P, BLOCK_N, LATENT, PREFETCH, LINE, ROTATES, KV_HEADS,
            )  # fmt: skip
        tl.extra.cuda.gdc_wait()

    # rows that are no sequences
    for number in tl.range(program, num_sequences * KV_HEADS, tl.num_programs(0)):
        its_end = tl.load(ends + number // KV_HEADS)
        if ROTATES:
            its_end += 1
        its_rows = rows.to(tl.int64) * 0 + number // KV_HEADS
        places = its_rows * out_row_stride + (number % KV_HEADS * G + rows) * out_head_stride
        tl.store(
            out + places[:, None] + v_cols[None, :],
            tl.zeros([BLOCK_M, DV_WIDTH], out.dtype.element_ty),
            mask=is_row[:, None] & (v_cols < DV)[None, :] & (its_end <= 0),
        )

    while place < stop_place:
        sequence, head, first, num_tiles, its_place = _segment(tiles, place, KV_HEADS)
        end = tl.load(ends + sequence)
        if ROTATES:
            end += 1
        last = tl.minimum(first + stop_place - place, num_tiles)
        begin = first * BLOCK_N
        stop = tl.minimum(last * BLOCK_N, end)
        table = tables + sequence.to(tl.int64) * table_stride
        key_base = keys + head.to(tl.int64) * k_head_stride
        value_base = values + head.to(tl.int64) * v_head_stride
        q_heads = head * G + rows
        q_base = query + sequence.to(tl.int64) * q_row_stride + q_heads * q_head_stride
        out_base = out + sequence.to(tl.int64) * out_row_stride
        if ROTATES:
            block_of_newest = tl.load(table + (end - 1) // P).to(tl.int64)
            newest = query + sequence.to(tl.int64) * q_row_stride + (G * KV_HEADS + head) * D
            cos_base = cos_sin + (end - 1).to(tl.int64) * D
            value = tl.load(newest + KV_HEADS * D + v_cols)
            key = rotate_row(newest, cos_base, k_norm, norm_eps, D, NORMS)
            q0 = rotate_rows(q_base, is_row, cos_base, q_norm, norm_eps, D, NORMS).to(
                out.dtype.element_ty
            )
            row_of_newest = (end - 1) % P
            to_key = key_base + block_of_newest * k_block_stride + row_of_newest * D
            to_value = value_base + block_of_newest * v_block_stride + row_of_newest * DV
            is_its_writer = stop == end
            tl.store(
                to_key + cols0, key.to(keys.dtype.element_ty), mask=(cols0 < D) & is_its_writer
            )
            tl.store(to_value + v_cols, value, mask=(v_cols < DV) & is_its_writer)
            tl.debug_barrier()  # the loop below reads what was stored
        else:
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
        greatest, total, weighted = walk_positions(
            q0, q1,
            tl.full([BLOCK_M], float("-inf"), tl.float32),
            tl.zeros([BLOCK_M], tl.float32),
            tl.zeros([BLOCK_M, DV_WIDTH], tl.float32),
            begin, stop, key_base, value_base,
            k_scales + head.to(tl.int64) * ks_head_stride,
            v_scales + head.to(tl.int64) * vs_head_stride,
            table, ends, rows, rows, 0,
            k_block_stride, v_block_stride, ks_block_stride, vs_block_stride, scale, cap,
            D, DV, P, BLOCK_N, D0, D1, DV_WIDTH, QUANT, PER_TOKEN, LATENT, False, SOFTCAP, 0,
            False,
        )  # fmt: skip

        is_out = is_row[:, None] & (v_cols < DV)[None, :]
        if last - first == num_tiles:
            its_sinks = greatest
            if SINKS:
                its_sinks = tl.load(sinks + q_heads, mask=is_row, other=0.0).to(tl.float32)
                its_sinks = its_sinks * 1.4426950408889634
            attention = finish(greatest, total, weighted, its_sinks, SINKS)
            to = out_base + q_heads * out_head_stride
            tl.store(to[:, None] + v_cols[None, :], attention.to(out.dtype.element_ty), mask=is_out)
        else:
            # A program's first part is of a head that others began, its second of one it begins.
            first_program = its_place // share
            part_rows = (2 * program + (first == 0).to(tl.int32)) * PITCH + rows
            tl.store(norms + 2 * part_rows, greatest, mask=is_row)
            tl.store(norms + 2 * part_rows + 1, total, mask=is_row)
            tl.store(parts + part_rows[:, None] * DV + v_cols[None, :], weighted, mask=is_out)
            tl.debug_barrier()  # all threads' stores come before the counter
            num_parts = (its_place + num_tiles - 1) // share - first_program + 1
            counter = counters + sequence * KV_HEADS + head
            if tl.atomic_add(counter, 1, sem="acq_rel") == num_parts - 1:
                tl.store(counter, 0)
                c_rows = tl.arange(0, CR)
                c_heads = head * G + c_rows
                c_sinks = tl.zeros([CR], tl.float32)
                if SINKS:
                    c_sinks = tl.load(sinks + c_heads, mask=c_rows < G, other=0.0).to(tl.float32)
                    c_sinks = c_sinks * 1.4426950408889634
                attention = merge(
                    parts, norms, first_program, num_parts, 0, G, PITCH, c_sinks, v_cols,
                    DV, CR, BLOCK_S, SINKS, False, True,
                )  # fmt: skip
                c_to = out_base + c_heads * out_head_stride
                tl.store(
                    c_to[:, None] + v_cols[None, :],
                    attention.to(out.dtype.element_ty),
                    mask=(c_rows < G)[:, None] & (v_cols < DV)[None, :],
                )
        place += last - first


def launch_shares(
    query: torch.Tensor,
    rows: BlockRows,
    block_tables: torch.Tensor,
    ends: torch.Tensor,
    out: torch.Tensor,
    workspace: Workspace | None,
    plan: Plan,
    *,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
    rotation: Rotation | None,
    is_early: bool,
) -> None:
    """Launch decode attention by equal shares, for a plan with `num_programs`; arguments as in
    `attention_triton.launch`."""
    parts = query.new_empty(2 * plan.num_programs, plan.pitch, rows.v_head_dim, dtype=torch.float32)
    norms = query.new_empty(2 * plan.num_programs, plan.pitch, 2, dtype=torch.float32)
    counters = (workspace or own_workspace(query.device)).counters
    overlaps = overlap_options(query)
    # What an option does not use is given as `ends`: a pointer of a fixed type, never followed.
    values = rows.keys if rows.values is None else rows.values
    k_scales = ends if rows.k_scales is None else rows.k_scales
    v_scales = k_scales if rows.v_scales is None else rows.v_scales
    attend_shares[(plan.num_programs,)](
        query, out, rows.keys, values, k_scales, v_scales, block_tables, ends,
        ends if sinks is None else sinks, parts, norms, counters,
        ends if rotation is None else rotation.cos_sin,
        ends if rotation is None or rotation.q_norm is None else rotation.q_norm,
        ends if rotation is None or rotation.k_norm is None else rotation.k_norm,
        0.0 if rotation is None else rotation.norm_eps,
        query.stride(0), query.stride(1), out.stride(0), out.stride(1), block_tables.stride(0),
        *steps(rows.keys, rows), *steps(values, rows),
        *steps(k_scales, rows), *steps(v_scales, rows),
        scaling * (LOG2_E if softcap is None else 1 / softcap),
        0.0 if softcap is None else softcap * LOG2_E,
        ends.shape[0], -(-plan.min_split // plan.config.block_n),
        G=out.shape[1] // rows.num_heads, D=rows.k_head_dim, DV=rows.v_head_dim,
        P=rows.block_size, BLOCK_M=plan.config.block_m, BLOCK_N=plan.config.block_n,
        BLOCK_S=plan.block_s, D0=plan.d0, D1=plan.d1, DV_WIDTH=plan.dv_width,
        PITCH=plan.pitch, CR=plan.num_merged_rows, ROWS=plan.num_lengths,
        QUANT=quantization(rows), PER_TOKEN=rows.scales_per_row > 1, LATENT=rows.is_latent,
        SOFTCAP=softcap is not None, SINKS=sinks is not None,
        EARLY=is_early and overlaps["OVERLAPS"], PREFETCH=plan.num_prefetched,
        LINE=128 // rows.keys.itemsize, ROTATES=rotation is not None,
        NORMS=rotation is not None and rotation.q_norm is not None, KV_HEADS=rows.num_heads,
        num_warps=plan.config.num_warps, num_stages=plan.config.num_stages,
        **overlaps,
    )  # fmt: skip
