"""Merging the parts of a sequence's splits, as Triton functions; and how a sequence is cut into
them, on the device.

A part is three numbers of each row (attention_tiles.py) in a workspace: `norms` [parts, rows, 2]
float32, the greatest score and the total of weights, and `parts` [parts, rows, Dv] float32. Knows
no cache. Invariant: splits that a sequence does not use are never read.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from baton_kernels.gpu.attention_tiles import finish, merge_parts

# Numbers and addresses that differ from step to step must not compile anew.
_VARYING = ["num_m_blocks", "num_splits", "num_equal", "min_split", "max_split", "window"]
_ANYWHERE = ["ends", "node_starts"]


class MergeSizes(NamedTuple):
    """Of a program of `merge_splits`."""

    rows: int
    parts: int
    """That are loaded at a time."""
    num_warps: int


def merge_sizes(dv_width: int) -> MergeSizes:
    """By the columns of values, padded.

    There are many rows, and little to do for each: programs of one warp are there sooner. (The 8B
    shape verifying 32 nodes on an H100, ms a step: by four warps, a row and 32 parts at a time 6.19
    to 6.25; by one, 16 parts 6.15, and two rows 6.14, four 6.23; 8 parts 6.18 to 6.19, 4 6.17 to
    6.23; by two warps 6.17.) Wider ones were not tried.
    """
    if dv_width <= 128:
        return MergeSizes(rows=2, parts=16, num_warps=1)
    return MergeSizes(rows=1, parts=max(1, 4096 // dv_width), num_warps=4)


@triton.jit
def extent(
    end, num_cached, num_equal, min_split, max_split, window,
    BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, TREE: tl.constexpr,
    EXACT: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Of a sequence: its first tile's position, the positions of one split, its first split's
    number, and how many it has. Without EXACT these are equal but for whole tiles: `num_equal`, or
    as many as make none longer than `max_split`, and none shorter than `min_split`."""
    first = 0
    if WINDOW:
        seen_from = end - window
        if TREE:  # by the root
            seen_from = num_cached + 1 - window
        first = tl.maximum(seen_from, 0) // BLOCK_N * BLOCK_N
    if EXACT:
        span = SPLIT
        first_split = first // SPLIT
        num_used = (end - 1) // SPLIT + 1 - first_split
    else:
        num_tiles = (end - first + BLOCK_N - 1) // BLOCK_N
        wanted = tl.maximum(num_equal, (end - first + max_split - 1) // max_split)
        span = tl.maximum((num_tiles + wanted - 1) // wanted * BLOCK_N, min_split)
        first_split = 0
        num_used = (end - first + span - 1) // span
    return first, span, first_split, num_used


@triton.jit
def merge(
    parts, norms, first, count, row, num_rows, pitch, sinks, v_cols,
    DV: tl.constexpr, ROWS: tl.constexpr, BLOCK_S: tl.constexpr, SINKS: tl.constexpr,
    EXACT: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    """[ROWS, columns]: rows row .. row + ROWS of parts first .. first + count. SHARES: of the
    second part of program `first` and the first ones of those that follow (attention_shares.py).

    Each part has room for `pitch` rows, of which num_rows were written. EXACT: one after the
    other; else BLOCK_S at a time, whose loads wait together.
    """
    rows = row + tl.arange(0, ROWS)
    is_row = rows < num_rows
    is_col = v_cols < DV
    greatest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    weighted = tl.zeros([ROWS, v_cols.shape[0]], tl.float32)
    if EXACT:
        for index in tl.range(0, count):
            places = (first + index) * pitch + rows
            its_greatest = tl.load(
                norms + 2 * places,
                mask=is_row,
                other=float("-inf"),
                cache_modifier=".cg",
            )
            its_total = tl.load(
                norms + 2 * places + 1, mask=is_row, other=0.0, cache_modifier=".cg"
            )
            its_weighted = tl.load(
                parts + places[:, None] * DV + v_cols[None, :],
                mask=is_row[:, None] & is_col[None, :],
                other=0.0,
                cache_modifier=".cg",
            )
            greatest, total, weighted = merge_parts(
                greatest, total, weighted, its_greatest, its_total, its_weighted
            )
    else:
        for begin in tl.range(0, count, BLOCK_S):
            splits = begin + tl.arange(0, BLOCK_S)
            numbers = first + splits
            if SHARES:
                numbers = 2 * numbers + (splits == 0).to(tl.int32)
            places = numbers[:, None] * pitch + rows[None, :]
            is_part = (splits < count)[:, None] & is_row[None, :]
            its_greatest = tl.load(
                norms + 2 * places,
                mask=is_part,
                other=float("-inf"),
                cache_modifier=".cg",
            )
            its_total = tl.load(
                norms + 2 * places + 1, mask=is_part, other=0.0, cache_modifier=".cg"
            )
            its_weighted = tl.load(
                parts + places[:, :, None] * DV + v_cols[None, None, :],
                mask=is_part[:, :, None] & is_col[None, None, :],
                other=0.0,
                cache_modifier=".cg",
            )
            reached = tl.max(its_greatest, 0)
            base = tl.where(reached == float("-inf"), 0.0, reached)
            shrink = tl.exp2(its_greatest - base[None, :])
            its_total = tl.sum(its_total * shrink, 0)
            its_weighted = tl.sum(its_weighted * shrink[:, :, None], 0)
            greatest, total, weighted = merge_parts(
                greatest, total, weighted, reached, its_total, its_weighted
            )
    return finish(greatest, total, weighted, sinks, SINKS)


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_ANYWHERE)
def merge_splits(
    out, ends, node_starts, sinks, parts, norms, out_row_stride, out_head_stride, window,
    num_m_blocks, num_splits, num_equal, min_split, max_split,
    G: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr, DV_WIDTH: tl.constexpr, PITCH: tl.constexpr, WINDOW: tl.constexpr,
    SINKS: tl.constexpr, TREE: tl.constexpr, EXACT: tl.constexpr, SPLIT: tl.constexpr,
    OVERLAPS: tl.constexpr, EARLY: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """What `attend` left in parts, where these are large: a program merges ROWS rows. EARLY:
    lengths may be read before the wait for it."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
        if not EARLY:
            tl.extra.cuda.gdc_wait()
    sequence = tl.program_id(1)
    row = tl.program_id(2) * ROWS
    head = tl.program_id(0) // num_m_blocks
    m_row = tl.program_id(0) % num_m_blocks * BLOCK_M
    num_cached = tl.load(ends + sequence)
    end = num_cached
    num_rows = G
    first_node = sequence
    if TREE:
        first_node = tl.load(node_starts + sequence)
        num_nodes = tl.load(node_starts + sequence + 1) - first_node
        end = num_cached + num_nodes
        num_rows = num_nodes * G
    is_there = (m_row + row < num_rows) & (end > 0)
    if EARLY:
        tl.extra.cuda.gdc_wait()  # all do: the next kernel waits for this one alone
    if not is_there:
        return
    _, _, _, num_used = extent(
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
    if num_used == 1:
        return
    rows = m_row + row + tl.arange(0, ROWS)
    q_heads = head * G + rows % G
    v_cols = tl.arange(0, DV_WIDTH)
    its_sinks = tl.zeros([ROWS], tl.float32)
    if SINKS:
        its_sinks += tl.load(sinks + q_heads).to(tl.float32) * 1.4426950408889634
    pair = (sequence * tl.num_programs(0) + tl.program_id(0)).to(tl.int64)
    attention = merge(
        parts, norms, pair * num_splits, num_used, row, num_rows - m_row, PITCH, its_sinks, v_cols,
        DV, ROWS, BLOCK_S, SINKS, EXACT, False,
    )  # fmt: skip
    q_rows = first_node + rows * 0
    if TREE:
        q_rows += rows // G
    places = q_rows.to(tl.int64) * out_row_stride + q_heads * out_head_stride
    tl.store(
        out + places[:, None] + v_cols[None, :],
        attention.to(out.dtype.element_ty),
        mask=(rows < num_rows)[:, None] & (v_cols < DV)[None, :],
    )
