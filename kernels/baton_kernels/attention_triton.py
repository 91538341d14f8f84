"""Triton kernels of `baton_kernels.attention`, and their launcher. attention.py checks the
arguments.

`launch` takes one of two ways: by splits of each sequence (here), or by equal shares of all
(attention_shares_triton.py).

By splits, a program takes one kv head of one sequence, BLOCK_M of its query rows (all query heads
of that kv head, of all nodes) and one split of its positions. Where a sequence has several splits,
each puts its part into a workspace, and the one that arrives last merges them: no second launch,
and no waste where one split is enough. Large parts have a second kernel. Splits are cut by a
sequence's length.

A launch may begin while the kernel before it ends (dispatch.overlap_options): until it waits, a
program reads its sequence's length and blocks, and asks L2 for its first keys and values.

Invariant: graph-safe; no load depends on a table entry beyond a sequence's own. A Workspace serves
one launch at a time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from baton_kernels.attention_plan import (
    LOG2_E,
    SPLIT_POSITIONS,
    Config,
    Plan,
    Rotation,
    Tree,
    Workspace,
    own_workspace,
    plan_launch,
    quantization,
    steps,
)
from baton_kernels.attention_shares_triton import launch_shares
from baton_kernels.block_rows import BlockRows, Tails
from baton_kernels.dispatch import overlap_options
from baton_kernels.paged_walk_triton import (
    extent,
    finish,
    merge,
    merge_parts,
    merge_sizes,
    merge_splits,
    prefetch_blocks,
    rotate_row,
    rotate_rows,
    walk_positions,
)


def launch(
    query: torch.Tensor,
    rows: BlockRows,
    block_tables: torch.Tensor,
    ends: torch.Tensor,
    out: torch.Tensor,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    tails: Tails | None = None,
    tree: Tree | None = None,
    max_num_nodes: int = 1,
    num_splits: int | None = None,
    exact: bool = False,
    workspace: Workspace | None = None,
    config: Config | None = None,
    rotation: Rotation | None = None,
    is_early: bool = False,
) -> None:
    """Launch attention of a batch; attention.py has checked the arguments.

    Args:
        ends: [B] int32; number of cached positions where `tree`.
        max_num_nodes: most nodes of a sequence.
        rotation: `query` is [B, (H + 2 K), D] before rotation, `ends` are positions (-1: padding),
            and the newest tokens' keys and values are written first. One part of the kernel.
        is_early: block_tables and ends were written by no kernel of the step.
        config, num_splits: None: chosen by attention_plan.py.
    """
    group = out.shape[1] // rows.num_heads
    plan = plan_launch(
        rows, block_tables, ends.shape[0], group, max_num_nodes, query.dtype,
        window=window, exact=exact, is_tree=tree is not None, has_tails=tails is not None,
        config=config, num_splits=num_splits,
    )  # fmt: skip
    if plan.num_programs:
        launch_shares(
            query, rows, block_tables, ends, out, workspace, plan,
            scaling=scaling, softcap=softcap, sinks=sinks, rotation=rotation, is_early=is_early,
        )  # fmt: skip
        return
    launch_splits(
        query, rows, block_tables, ends, out, workspace, plan,
        scaling=scaling, window=window, softcap=softcap, sinks=sinks, tails=tails, tree=tree,
        exact=exact, rotation=rotation, is_early=is_early,
    )  # fmt: skip


# Numbers and addresses that differ from step to step must not compile anew.
_VARYING = [
    "num_m_blocks",
    "num_splits",
    "num_equal",
    "min_split",
    "max_split",
    "window",
    "table_stride",
    "visible_stride",
]
_ANYWHERE = [
    "tables",
    "ends",
    "node_starts",
    "depths",
    "visible",
    "tail_slots",
    "counters",
]


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_ANYWHERE)
def attend(
    query, out, keys, values, k_scales, v_scales, tail_keys, tail_values, tail_slots,
    tables, ends, node_starts, depths, visible, sinks, parts, norms, counters,
    cos_sin, q_norm, k_norm, norm_eps,
    q_row_stride, q_head_stride, out_row_stride, out_head_stride, table_stride, visible_stride,
    k_block_stride, k_head_stride, v_block_stride, v_head_stride,
    ks_block_stride, ks_head_stride, vs_block_stride, vs_head_stride,
    tk_block_stride, tk_head_stride, tv_block_stride, tv_head_stride,
    scale, cap, window, num_m_blocks, num_splits, num_equal, min_split, max_split,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, P: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr, TAIL_N: tl.constexpr,
    D0: tl.constexpr, D1: tl.constexpr, DV_WIDTH: tl.constexpr, PITCH: tl.constexpr,
    CR: tl.constexpr, QUANT: tl.constexpr, PER_TOKEN: tl.constexpr, LATENT: tl.constexpr,
    TAILS: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
    TREE: tl.constexpr, EXACT: tl.constexpr, SPLIT: tl.constexpr, MERGES: tl.constexpr,
    SERIAL: tl.constexpr, OVERLAPS: tl.constexpr, EARLY: tl.constexpr,
    PREFETCH: tl.constexpr, LINE: tl.constexpr,
    ROTATES: tl.constexpr, NORMS: tl.constexpr, KV_HEADS: tl.constexpr,
):  # fmt: skip
    """Compute attention by splits, as the module describes; the arguments are those of `launch`, in
    the same order. MERGES 0: no sequence has several splits; 1: the last program of a sequence
    merges; 2: `merge_splits` merges. SERIAL: a program computes all exact splits of its sequence,
    one after the other. EARLY: lengths and tables may be read before the wait for the kernel ahead.
    ROTATES: `query` holds all heads before their rotation, `ends` are positions, and the newest
    token's key and value are written here."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
        if not EARLY:
            tl.extra.cuda.gdc_wait()
    head = tl.program_id(0) // num_m_blocks
    m_block = tl.program_id(0) % num_m_blocks
    sequence = tl.program_id(1)
    split = tl.program_id(2)
    rows = m_block * BLOCK_M + tl.arange(0, BLOCK_M)
    end = tl.load(ends + sequence)
    if ROTATES:
        end += 1
    q_heads = head * G + rows % G
    num_cached = end
    if TREE:
        first_node = tl.load(node_starts + sequence)
        num_nodes = tl.load(node_starts + sequence + 1) - first_node
        if m_block * BLOCK_M >= num_nodes * G:
            if EARLY:
                tl.extra.cuda.gdc_wait()  # some program must, or the next kernel waits for nobody
            return
        is_row = rows < num_nodes * G
        q_rows = first_node + rows // G
        end = num_cached + num_nodes
    else:
        is_row = rows < G
        q_rows = sequence + rows * 0
    v_cols = tl.arange(0, DV_WIDTH)
    out_rows = out + q_rows.to(tl.int64) * out_row_stride + q_heads * out_head_stride
    is_out = is_row[:, None] & (v_cols < DV)[None, :]
    out_places = out_rows[:, None] + v_cols[None, :]
    if end <= 0:
        if split == 0:
            if EARLY:
                tl.extra.cuda.gdc_wait()
            tl.store(
                out_places,
                tl.zeros([BLOCK_M, DV_WIDTH], out.dtype.element_ty),
                mask=is_out,
            )
        return

    # which positions are this program's
    low = rows * 0
    if WINDOW:
        low = low + (end - window)
        if TREE:
            low = num_cached + tl.load(depths + q_rows, mask=is_row, other=0) - window + 1
    first, span, first_split, num_used = extent(
        end,
        num_cached,
        num_equal,
        min_split,
        max_split,
        window,
        BLOCK_N,
        WINDOW,
        TREE,
        EXACT,
        SPLIT,
    )
    index = split - first_split
    begin = first + split * span
    if SERIAL:
        index = 0
        begin = first
    elif EXACT:
        begin = tl.maximum(split * span, first)
    if index < 0 or begin >= end:
        return
    stop = tl.minimum(begin + span, end)
    if SERIAL:
        stop = end
    elif EXACT:
        stop = tl.minimum((split + 1) * span, end)

    table = tables + sequence.to(tl.int64) * table_stride
    key_base = keys + head.to(tl.int64) * k_head_stride
    value_base = values + head.to(tl.int64) * v_head_stride
    ks_base = k_scales + head.to(tl.int64) * ks_head_stride
    vs_base = v_scales + head.to(tl.int64) * vs_head_stride
    if ROTATES:
        block_of_newest = tl.load(table + (end - 1) // P).to(tl.int64)
    if EARLY:
        prefetch_blocks(key_base, table, begin, stop, k_block_stride, P, PREFETCH, P * D, LINE)
        if not LATENT:
            prefetch_blocks(
                value_base, table, begin, stop, v_block_stride, P, PREFETCH, P * DV, LINE
            )
        tl.extra.cuda.gdc_wait()

    # queries
    q_base = query + q_rows.to(tl.int64) * q_row_stride + q_heads * q_head_stride
    cols0 = tl.arange(0, D0)
    if ROTATES:
        # Every program loads the newest key and value, and one stores them: no branch, so that
        # these loads wait together with the queries'.
        newest = query + sequence.to(tl.int64) * q_row_stride + (G * KV_HEADS + head) * D
        cos_base = cos_sin + (end - 1).to(tl.int64) * D
        value = tl.load(newest + KV_HEADS * D + v_cols)
        key = rotate_row(newest, cos_base, k_norm, norm_eps, D, NORMS).to(keys.dtype.element_ty)
        q0 = rotate_rows(q_base, is_row, cos_base, q_norm, norm_eps, D, NORMS).to(
            out.dtype.element_ty
        )
        row_of_newest = (end - 1) % P
        to_key = key_base + block_of_newest * k_block_stride + row_of_newest * D
        to_value = value_base + block_of_newest * v_block_stride + row_of_newest * DV
        is_its_writer = stop == end
        tl.store(to_key + cols0, key, mask=(cols0 < D) & is_its_writer)
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
    greatest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    weighted = tl.zeros([BLOCK_M, DV_WIDTH], tl.float32)

    # positions
    body = stop
    slot = -1
    tail_start = end
    if TAILS:
        slot = tl.load(tail_slots + sequence)
        if slot >= 0:
            tail_start = (end - 1) // P * P
        body = tl.minimum(stop, tail_start)
    plain = body
    if TREE:
        plain = tl.minimum(body, tl.maximum(num_cached // BLOCK_N * BLOCK_N, begin))
    line_starts = tl.where(is_row, q_rows * visible_stride, 0)
    if SERIAL:
        for number in tl.range(begin // SPLIT, (stop + SPLIT - 1) // SPLIT):
            its_greatest, its_total, its_weighted = walk_positions(
                q0, q1,
                tl.full([BLOCK_M], float("-inf"), tl.float32),
                tl.zeros([BLOCK_M], tl.float32),
                tl.zeros([BLOCK_M, DV_WIDTH], tl.float32),
                tl.maximum(number * SPLIT, begin), tl.minimum((number + 1) * SPLIT, stop),
                key_base, value_base, ks_base, vs_base, table, visible, line_starts, low,
                num_cached,
                k_block_stride, v_block_stride, ks_block_stride, vs_block_stride, scale, cap,
                D, DV, P, BLOCK_N, D0, D1, DV_WIDTH, QUANT, PER_TOKEN, LATENT, WINDOW, SOFTCAP, 0,
                EXACT,
            )  # fmt: skip
            greatest, total, weighted = merge_parts(
                greatest, total, weighted, its_greatest, its_total, its_weighted
            )
    else:
        greatest, total, weighted = walk_positions(
            q0, q1, greatest, total, weighted, begin, plain,
            key_base, value_base, ks_base, vs_base, table, visible, line_starts, low, num_cached,
            k_block_stride, v_block_stride, ks_block_stride, vs_block_stride, scale, cap,
            D, DV, P, BLOCK_N, D0, D1, DV_WIDTH, QUANT, PER_TOKEN, LATENT, WINDOW, SOFTCAP, 0,
            EXACT,
        )  # fmt: skip
    if TREE:
        greatest, total, weighted = walk_positions(
            q0, q1, greatest, total, weighted, plain, body,
            key_base, value_base, ks_base, vs_base, table, visible, line_starts, low, num_cached,
            k_block_stride, v_block_stride, ks_block_stride, vs_block_stride, scale, cap,
            D, DV, P, BLOCK_N, D0, D1, DV_WIDTH, QUANT, PER_TOKEN, LATENT, WINDOW, SOFTCAP, 1,
            EXACT,
        )  # fmt: skip
    if TAILS:
        # The tail as a table of one block, whose positions are counted from its start.
        tail_begin = tl.where(stop == end, 0, P)
        tail_stop = end - tail_start
        greatest, total, weighted = walk_positions(
            q0, q1, greatest, total, weighted, tail_begin, tl.maximum(tail_stop, 0),
            tail_keys + head.to(tl.int64) * tk_head_stride,
            tail_values + head.to(tl.int64) * tv_head_stride,
            ks_base, vs_base, tail_slots + sequence, visible, line_starts, low - tail_start,
            num_cached,
            tk_block_stride, tv_block_stride, ks_block_stride, vs_block_stride, scale, cap,
            D, DV, P, TAIL_N, D0, D1, DV_WIDTH, 0, False, LATENT, WINDOW, SOFTCAP, 0, EXACT,
        )  # fmt: skip

    # the end: alone, or with the others' parts
    if MERGES == 0 or num_used == 1:
        if EXACT and not SERIAL:  # as the first of several: that it is the only one must not show
            greatest, total, weighted = merge_parts(
                tl.full([BLOCK_M], float("-inf"), tl.float32),
                tl.zeros([BLOCK_M], tl.float32),
                tl.zeros([BLOCK_M, DV_WIDTH], tl.float32),
                greatest, total, weighted,
            )  # fmt: skip
        its_sinks = greatest
        if SINKS:
            its_sinks = tl.load(sinks + q_heads).to(tl.float32) * 1.4426950408889634
        attention = finish(greatest, total, weighted, its_sinks, SINKS)
        tl.store(out_places, attention.to(out.dtype.element_ty), mask=is_out)
        return
    pair = (sequence * tl.num_programs(0) + tl.program_id(0)).to(tl.int64)
    part_rows = (pair * num_splits + index) * PITCH + tl.arange(0, BLOCK_M)
    tl.store(norms + 2 * part_rows, greatest, mask=is_row)
    tl.store(norms + 2 * part_rows + 1, total, mask=is_row)
    tl.store(parts + part_rows[:, None] * DV + v_cols[None, :], weighted, mask=is_out)
    if MERGES == 1:
        tl.debug_barrier()  # all threads' stores come before the counter
        arrived = tl.atomic_add(counters + pair, 1, sem="acq_rel")
        if arrived != num_used - 1:
            return
        tl.store(counters + pair, 0)
        c_rows = m_block * BLOCK_M + tl.arange(0, CR)
        c_heads = head * G + c_rows % G
        c_sinks = tl.zeros([CR], tl.float32)
        if SINKS:
            c_sinks = tl.load(sinks + c_heads).to(tl.float32) * 1.4426950408889634
        num_rows = G
        if TREE:
            num_rows = num_nodes * G
        attention = merge(
            parts, norms, pair * num_splits, num_used, 0, num_rows - m_block * BLOCK_M, PITCH,
            c_sinks, v_cols,
            DV, CR, BLOCK_S, SINKS, EXACT, False,
        )  # fmt: skip
        c_q_rows = sequence + c_rows * 0
        if TREE:
            c_q_rows = first_node + c_rows // G
        c_out = out + c_q_rows.to(tl.int64) * out_row_stride + c_heads * out_head_stride
        tl.store(
            c_out[:, None] + v_cols[None, :],
            attention.to(out.dtype.element_ty),
            mask=(c_rows < num_rows)[:, None] & (v_cols < DV)[None, :],
        )


def launch_splits(
    query: torch.Tensor,
    rows: BlockRows,
    block_tables: torch.Tensor,
    ends: torch.Tensor,
    out: torch.Tensor,
    workspace: Workspace | None,
    plan: Plan,
    *,
    scaling: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    tails: Tails | None,
    tree: Tree | None,
    exact: bool,
    rotation: Rotation | None,
    is_early: bool,
) -> None:
    """Launch attention by splits, for a plan without `num_programs`; arguments as in `launch`."""
    group = out.shape[1] // rows.num_heads
    parts = norms = torch.empty(0, device=query.device)
    counters = ends
    if plan.num_splits > 1:
        places = (plan.num_pairs * plan.num_splits, plan.pitch)
        parts = query.new_empty(*places, rows.v_head_dim, dtype=torch.float32)
        norms = query.new_empty(*places, 2, dtype=torch.float32)
    if plan.merges == 1:
        counters = (workspace or own_workspace(query.device)).counters
    overlaps = overlap_options(query)
    # What an option does not use is given as `ends`: a pointer of a fixed type, never followed.
    values = rows.keys if rows.values is None else rows.values
    k_scales = ends if rows.k_scales is None else rows.k_scales
    v_scales = k_scales if rows.v_scales is None else rows.v_scales
    tail_rows = rows if tails is None else tails.rows
    tail_values = tail_rows.keys if tail_rows.values is None else tail_rows.values
    factor = LOG2_E if softcap is None else 1 / softcap
    attend[plan.grid](
        query, out, rows.keys, values, k_scales, v_scales,
        tail_rows.keys, tail_values, ends if tails is None else tails.slots,
        block_tables, ends,
        ends if tree is None else tree.node_starts,
        ends if tree is None else tree.depths,
        ends if tree is None else tree.visible,
        ends if sinks is None else sinks, parts, norms, counters,
        ends if rotation is None else rotation.cos_sin,
        ends if rotation is None or rotation.q_norm is None else rotation.q_norm,
        ends if rotation is None or rotation.k_norm is None else rotation.k_norm,
        0.0 if rotation is None else rotation.norm_eps,
        query.stride(0), query.stride(1), out.stride(0), out.stride(1),
        block_tables.stride(0), 0 if tree is None else tree.visible.stride(0),
        *steps(rows.keys, rows), *steps(values, rows),
        *steps(k_scales, rows), *steps(v_scales, rows),
        *steps(tail_rows.keys, tail_rows), *steps(tail_values, tail_rows),
        scaling * factor, 0.0 if softcap is None else softcap * LOG2_E, window or 0,
        plan.num_m_blocks, plan.num_splits, plan.num_equal, plan.min_split, plan.max_split,
        G=group, D=rows.k_head_dim, DV=rows.v_head_dim,
        P=rows.block_size, BLOCK_M=plan.config.block_m, BLOCK_N=plan.config.block_n,
        BLOCK_S=plan.block_s, TAIL_N=plan.tail_n, D0=plan.d0, D1=plan.d1, DV_WIDTH=plan.dv_width,
        PITCH=plan.pitch, CR=plan.num_merged_rows,
        QUANT=quantization(rows), PER_TOKEN=rows.scales_per_row > 1,
        LATENT=rows.is_latent, TAILS=tails is not None, WINDOW=window is not None,
        SOFTCAP=softcap is not None, SINKS=sinks is not None, TREE=tree is not None,
        EXACT=exact, SPLIT=SPLIT_POSITIONS, MERGES=plan.merges, SERIAL=plan.is_serial,
        num_warps=plan.config.num_warps, num_stages=plan.config.num_stages,
        enable_fp_fusion=not exact,
        PREFETCH=plan.num_prefetched, LINE=128 // rows.keys.itemsize,
        EARLY=is_early and overlaps["OVERLAPS"], ROTATES=rotation is not None,
        NORMS=rotation is not None and rotation.q_norm is not None, KV_HEADS=rows.num_heads,
        **overlaps,
    )  # fmt: skip
    if plan.merges == 2:
        sizes = merge_sizes(plan.dv_width)
        merge_splits[(plan.grid[0], plan.grid[1], -(-plan.pitch // sizes.rows))](
            out, ends, ends if tree is None else tree.node_starts, ends if sinks is None else sinks,
            parts, norms, out.stride(0), out.stride(1), window or 0,
            plan.num_m_blocks, plan.num_splits, plan.num_equal, plan.min_split, plan.max_split,
            G=group, DV=rows.v_head_dim, BLOCK_M=plan.config.block_m, BLOCK_N=plan.config.block_n,
            BLOCK_S=sizes.parts, DV_WIDTH=plan.dv_width, PITCH=plan.pitch,
            WINDOW=window is not None, SINKS=sinks is not None, TREE=tree is not None,
            EXACT=exact, SPLIT=SPLIT_POSITIONS, ROWS=sizes.rows, num_warps=sizes.num_warps,
            enable_fp_fusion=not exact, EARLY=is_early and overlaps["OVERLAPS"], **overlaps,
        )  # fmt: skip
