"""Device functions that walk over the paged KV cache, shared by the attention kernels (decode,
trees, exact prefill), so that one token has the same bits in each of them.

Four groups, in this order: attention over one tile of positions; reading tiles of a paged cache;
cutting a sequence into splits and merging their parts; QK-norm and RoPE of the heads that a program
needs (half-split rotation, float32, rounded once by the caller, as in layer_ops.rotate_and_write).

Scores are in units of log2 (scaling * log2(e) is folded in). A part is what some positions give a
row: its greatest score, the total of its weights 2^(score - greatest), and the weighted sum of the
values. In a workspace it is three numbers of each row: `norms` [parts, rows, 2] float32, the
greatest score and the total of weights, and `parts` [parts, rows, Dv] float32.

The order of an exact kernel, which is what makes bits equal: positions are cut at multiples of
SPLIT_POSITIONS; within a split, tiles of TILE_POSITIONS are taken in order from an empty part
(`take_tile`); splits are merged in order, from an empty part (`merge_parts`); then `finish`. Tiles
of scores are [EXACT_ROWS, TILE_POSITIONS], by EXACT_WARPS warps (all four: attention_plan.py),
compiled with enable_fp_fusion=False: no product is contracted in one kernel and rounded in the
other. Tiles and splits that a row sees nothing of leave its part as it was, bit for bit.

Knows how numbers lie in blocks and how they are quantized; knows no sequence's length. Invariants:
no table entry is read for a position from `stop` on, and what is not read counts as 0; splits that
a sequence does not use are never read.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl


@triton.jit
def score_tile(
    q0, q1, k0, k1, scale, cap, bias,
    SPLIT_DIM: tl.constexpr, SOFTCAP: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """Compute a tile of scores, [M, N] float32, in log2 units.

    q0 [M, D0], k0 [N, D0]: the first columns; q1, k1: the rest, where SPLIT_DIM (D is no power of
    two). scale: scaling * log2(e); with SOFTCAP scaling / softcap, and cap softcap * log2(e). bias
    [M, N] float32, where BIASED: 0, or -inf where not seen.
    """
    if BIASED:
        scores = tl.dot(q0, tl.trans(k0), bias, input_precision="ieee")
    else:
        scores = tl.dot(q0, tl.trans(k0), input_precision="ieee")
    if SPLIT_DIM:
        scores = tl.dot(q1, tl.trans(k1), scores, input_precision="ieee")
    scores = scores * scale
    if SOFTCAP:
        # tanh(x) = 1 - 2 / (e^2x + 1): exact enough, and right at both infinities
        capped = cap * (1.0 - 2.0 / (tl.exp2(scores * 2.8853900817779268) + 1.0))
        scores = tl.where(scores == float("-inf"), scores, capped) if BIASED else capped
    return scores


@triton.jit
def take_tile(
    scores, values, value_scales, greatest, total, weighted,
    SCALED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Add one tile to a partial result by online softmax (Milakov and Gimelshein, 2018).

    scores [M, N] float32, -inf where not seen; values [N, Dv], finite (0) where not seen;
    value_scales [N] float32, used where SCALED. The part: greatest [M], total [M],
    weighted [M, Dv], float32. EXACT: the order of sums must not depend on how the compiler lays out
    the tile. A bfloat16 product leaves scores in the matrix unit's layout, and all kernels sum them
    there; a float32 one in whichever suits the kernel, so weights are added up by a product, too.
    """
    reached = tl.maximum(greatest, tl.max(scores, 1))
    # A row that has seen nothing yet must not compute -inf - -inf.
    base = tl.where(reached == float("-inf"), 0.0, reached)
    shrink = tl.exp2(greatest - base)
    weights = tl.exp2(scores - base[:, None])
    if EXACT and values.dtype == tl.float32:
        ones = tl.full([scores.shape[1], 16], 1.0, tl.float32)
        sums = tl.dot(weights, ones, input_precision="ieee")
        total = total * shrink + tl.max(sums, 1)  # of equal columns
    else:
        total = total * shrink + tl.sum(weights, 1)
    weighted = weighted * shrink[:, None]
    if SCALED:
        weights = weights * value_scales[None, :]
    weighted = tl.dot(weights.to(values.dtype), values, weighted, input_precision="ieee")
    return reached, total, weighted


@triton.jit
def merge_parts(greatest, total, weighted, its_greatest, its_total, its_weighted):
    """Merge two partial results of the same rows. Elementwise: the same bits in any layout."""
    reached = tl.maximum(greatest, its_greatest)
    base = tl.where(reached == float("-inf"), 0.0, reached)
    shrink = tl.exp2(greatest - base)
    its_shrink = tl.exp2(its_greatest - base)
    total = total * shrink + its_total * its_shrink
    weighted = weighted * shrink[:, None] + its_weighted * its_shrink[:, None]
    return reached, total, weighted


@triton.jit
def finish(greatest, total, weighted, sinks, SINKS: tl.constexpr):
    """Compute the attention output [M, Dv] float32 from a partial result; zeros for a row that saw
    no position. sinks: [M] float32, in log2 units: one more score that takes weight and gives no
    value."""
    if SINKS:
        reached = tl.maximum(greatest, sinks)
        base = tl.where(reached == float("-inf"), 0.0, reached)
        shrink = tl.exp2(greatest - base)
        total = total * shrink + tl.exp2(sinks - base)
        weighted = weighted * shrink[:, None]
    return weighted / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit
def _block_ids(table, start, stop, P: tl.constexpr, BLOCK_N: tl.constexpr):
    """Look up the blocks of a tile in the block table: one block id, int32, where the tile lies in
    one block; both ids where it lies in two; else the id of each position, [N]. (The second value
    is used only for two blocks.) Block 0 stands for positions from `stop` on. A scalar costs a
    thread one load, whatever rows it has."""
    if P % BLOCK_N == 0 or BLOCK_N == 2 * P:
        found = tl.load(table + start // P, mask=start < stop, other=0)
    else:
        positions = start + tl.arange(0, BLOCK_N)
        found = tl.load(table + positions // P, mask=positions < stop, other=0)
    second = found
    if BLOCK_N == 2 * P:
        second = tl.load(table + start // P + 1, mask=start + P < stop, other=0)
    return found, second


@triton.jit
def _row_places(
    blocks, second, start, block_stride,
    P: tl.constexpr, BLOCK_N: tl.constexpr, ELEMENTS: tl.constexpr,
):  # fmt: skip
    """Compute where a tile begins, from head 0 of block 0 (int64), and where each of its rows
    begins, from there ([N]). ELEMENTS: of one position."""
    tile = blocks.to(tl.int64) * block_stride
    if P % BLOCK_N == 0:
        tile += start % P * ELEMENTS
        rows = tl.arange(0, BLOCK_N) * ELEMENTS
    elif BLOCK_N == 2 * P:
        row = tl.arange(0, BLOCK_N)
        rows = tl.where(row < P, tile, second.to(tl.int64) * block_stride) + row % P * ELEMENTS
        tile = start * 0
    else:
        rows = tile + (start + tl.arange(0, BLOCK_N)) % P * ELEMENTS
        tile = start * 0
    return tile, rows


@triton.jit
def _load_tile(base, offsets, cols, is_read, D: tl.constexpr, WIDTH: tl.constexpr):
    """Load a tile [N, WIDTH]; columns from D on, and rows that are not read, are 0."""
    mask = is_read[:, None]
    if WIDTH != D:
        mask = mask & (cols < D)[None, :]
    return tl.load(base + offsets[:, None] + cols[None, :], mask=mask, other=0)


# Four bytes of e4m3 to bfloat16: sign and the seven other bits in their places, which makes the
# exponent 120 too small; a product mends it. The conversions of the instruction set go by way of
# float16 and float32, at a sixteenth of the speed.
_E4M3_TO_BFLOAT16 = tl.constexpr(
    """{
    .reg .b32 low, high, bits, factor, zero;
    mov.b32 factor, 0x7B807B80;
    mov.b32 zero, 0x80008000;
    prmt.b32 low, $2, 0, 0x1404;
    prmt.b32 high, $2, 0, 0x3424;
    shr.u32 bits, low, 4;
    and.b32 bits, bits, 0x07f007f0;
    lop3.b32 bits, low, 0x80008000, bits, 0xEA;
    fma.rn.bf16x2 $0, bits, factor, zero;
    shr.u32 bits, high, 4;
    and.b32 bits, bits, 0x07f007f0;
    lop3.b32 bits, high, 0x80008000, bits, 0xEA;
    fma.rn.bf16x2 $1, bits, factor, zero;
    }"""
)


# Four bytes of int8: 128 + its lower seven bits, less 128 or, by its sign, 256: all exact.
_INT8_TO_BFLOAT16 = tl.constexpr(
    """{
    .reg .b32 lanes, bits, base, minus;
    mov.b32 minus, 0xBF80BF80;
    mov.b32 base, 0x43434343;
    prmt.b32 lanes, $2, base, 0x4140;
    and.b32 bits, lanes, 0xff7fff7f;
    and.b32 lanes, lanes, 0xff80ff80;
    fma.rn.bf16x2 $0, lanes, minus, bits;
    prmt.b32 lanes, $2, base, 0x4342;
    and.b32 bits, lanes, 0xff7fff7f;
    and.b32 lanes, lanes, 0xff80ff80;
    fma.rn.bf16x2 $1, lanes, minus, bits;
    }"""
)


@triton.jit
def _numbers(tile, like, QUANT: tl.constexpr, STAYS: tl.constexpr):
    """Convert a tile to `like`'s dtype, without applying its scales. QUANT 0: not quantized; 1:
    int8; 2: e4m3; 3, 4: the same, by PTX where bfloat16 is wanted. STAYS: keep the layout of the
    load, where the compiler would otherwise gather single bytes in the layout of a product's
    operand."""
    if QUANT >= 3 and like.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            _INT8_TO_BFLOAT16 if QUANT == 3 else _E4M3_TO_BFLOAT16,
            "=r,=r,r",
            [tile],
            dtype=tl.bfloat16,
            is_pure=not STAYS,
            pack=4,
        )
    if QUANT == 2 or QUANT == 4:
        return tile.to(tl.float8e4nv, bitcast=True).to(like.dtype)
    return tile.to(like.dtype)


@triton.jit
def _scales(
    base, blocks, second, start, is_read, block_stride,
    P: tl.constexpr, BLOCK_N: tl.constexpr, PER_TOKEN: tl.constexpr,
):  # fmt: skip
    """Load the scale of each position, [N] float32."""
    tile, rows = _row_places(blocks, second, start, block_stride, P, BLOCK_N, 1 if PER_TOKEN else 0)
    return tl.load(base + tile + rows, mask=is_read, other=0.0)


@triton.jit
def walk_positions(
    q0, q1, greatest, total, weighted, begin, stop,
    keys, values, k_scales, v_scales, table, visible, line_starts, low, high,
    k_block_stride, v_block_stride, ks_block_stride, vs_block_stride, scale, cap,
    D: tl.constexpr, DV: tl.constexpr, P: tl.constexpr, BLOCK_N: tl.constexpr,
    D0: tl.constexpr, D1: tl.constexpr, DV_WIDTH: tl.constexpr,
    QUANT: tl.constexpr, PER_TOKEN: tl.constexpr, LATENT: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SEES: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Add the positions [begin, stop) to a partial result, tile by tile.

    low: [M] the first position that each row sees, used where WINDOW. SEES 0: all from there
    on; 1: positions from `high` on are nodes, and line_starts [M] int32 is where each row's line
    begins in `visible` (uint8); 2: up to high [M].
    """
    cols0 = tl.arange(0, D0)
    v_cols = tl.arange(0, DV_WIDTH)
    # One tile ahead: a tile's loads must not wait for its block ids.
    next_blocks, next_second = _block_ids(table, begin, stop, P, BLOCK_N)
    for start in tl.range(begin, stop, BLOCK_N):
        positions = start + tl.arange(0, BLOCK_N)
        is_read = positions < stop
        blocks = next_blocks
        second = next_second
        next_blocks, next_second = _block_ids(table, start + BLOCK_N, stop, P, BLOCK_N)
        tile, offsets = _row_places(blocks, second, start, k_block_stride, P, BLOCK_N, D)
        k0 = _numbers(_load_tile(keys + tile, offsets, cols0, is_read, D, D0), q0, QUANT, LATENT)
        k1 = k0
        if D > D0:
            cols1 = D0 + tl.arange(0, D1)
            k1 = _numbers(
                _load_tile(keys + tile, offsets, cols1, is_read, D, D0 + D1), q0, QUANT, False
            )
        value_scales = total  # of no account where not quantized
        key_scale = scale
        if QUANT:
            value_scales = _scales(
                k_scales, blocks, second, start, is_read, ks_block_stride, P, BLOCK_N, PER_TOKEN
            )
            key_scale = (value_scales * scale)[None, :]
        bias = 0.0
        if SEES == 1:
            nodes = positions - high
            is_node = is_read & (nodes >= 0)
            places = line_starts[:, None] + nodes[None, :]
            is_visible = tl.load(visible + places, mask=is_node[None, :], other=1) != 0
            # Given to the product, not applied to its result: a tile that was loaded would impose
            # its layout on the scores, whose sums would then have another order than elsewhere.
            bias = tl.where(is_visible, 0.0, float("-inf"))
        scores = score_tile(q0, q1, k0, k1, key_scale, cap, bias, D > D0, SOFTCAP, SEES == 1)
        is_seen = is_read[None, :]
        if WINDOW:
            is_seen = is_seen & (positions[None, :] >= low[:, None])
        if SEES == 2:
            is_seen = is_seen & (positions[None, :] <= high[:, None])
        scores = tl.where(is_seen, scores, float("-inf"))
        if LATENT and DV == D0:
            v = k0
        elif LATENT:
            v = _numbers(
                _load_tile(keys + tile, offsets, v_cols, is_read, DV, DV_WIDTH), q0, QUANT, True
            )
        else:
            v_tile, v_offsets = _row_places(blocks, second, start, v_block_stride, P, BLOCK_N, DV)
            v = _numbers(
                _load_tile(values + v_tile, v_offsets, v_cols, is_read, DV, DV_WIDTH),
                q0,
                QUANT,
                True,
            )
            if QUANT:
                value_scales = _scales(
                    v_scales,
                    blocks,
                    second,
                    start,
                    is_read,
                    vs_block_stride,
                    P,
                    BLOCK_N,
                    PER_TOKEN,
                )
        greatest, total, weighted = take_tile(
            scores, v, value_scales, greatest, total, weighted, QUANT != 0, EXACT
        )
    return greatest, total, weighted


@triton.jit
def prefetch_blocks(
    matrices, table, begin, stop, block_stride,
    P: tl.constexpr, BLOCKS: tl.constexpr, ELEMENTS: tl.constexpr, LINE: tl.constexpr,
):  # fmt: skip
    """Prefetch into L2 the matrices of the positions [begin, stop), at most BLOCKS blocks; each has
    ELEMENTS numbers, of which LINE are 128 bytes. Safe while they are being written, since all
    multiprocessors share L2."""
    columns = tl.minimum(begin // P + tl.arange(0, BLOCKS), (stop - 1) // P)
    blocks = tl.load(table + columns).to(tl.int64)
    LINES: tl.constexpr = triton.next_power_of_2((ELEMENTS + LINE - 1) // LINE)
    places = tl.minimum(tl.arange(0, LINES) * LINE, ELEMENTS - 1)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [matrices + (blocks * block_stride)[:, None] + places[None, :]],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


# Numbers and addresses that differ from step to step must not compile anew.
_VARYING = ["num_m_blocks", "num_splits", "num_equal", "min_split", "max_split", "window"]
_ANYWHERE = ["ends", "node_starts"]


class MergeSizes(NamedTuple):
    """Tile sizes of a program of `merge_splits`."""

    rows: int
    parts: int
    """Number of partial results that are loaded at a time."""
    num_warps: int


def merge_sizes(dv_width: int) -> MergeSizes:
    """Choose the sizes for `merge_splits` by the padded number of value columns.

    There are many rows with little work each, so programs of one warp are fastest. (The 8B
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
    """Compute how a sequence is cut: its first tile's position, the positions of one split, its
    first split's number, and its number of splits. Without EXACT the splits are equal up to whole
    tiles: `num_equal` of them, or as many as make none longer than `max_split` and none shorter
    than `min_split`."""
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
    """Merge partial results first .. first + count for rows row .. row + ROWS, into [ROWS,
    columns]. SHARES: merge the second partial result of program `first` and the first ones of the
    programs that follow it (attention_shares_triton.py).

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
    """Merge the partial results that `attend` stored where these are large; a program merges ROWS
    rows. EARLY: lengths may be read before the wait for `attend`."""
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


@triton.jit
def rotate_rows(base, is_row, cos_sin, norm, norm_eps, D: tl.constexpr, NORMS: tl.constexpr):
    """Load and rotate heads, [M, D] float32, that base [M] points at, 0 where not `is_row`.
    cos_sin: the cosines and sines of the position. D is a power of two."""
    cols = tl.arange(0, D)
    others = (cols + D // 2) % D  # the column that each is turned with
    mask = is_row[:, None] & (cols < D)[None, :]
    own = tl.load(base[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    other = tl.load(base[:, None] + others[None, :], mask=mask, other=0.0).to(tl.float32)
    if NORMS:
        scale = tl.rsqrt(tl.sum(own * own, 1) / D + norm_eps)[:, None]
        own = own * scale * tl.load(norm + cols).to(tl.float32)[None, :]
        other = other * scale * tl.load(norm + others).to(tl.float32)[None, :]
    cos = tl.load(cos_sin + cols % (D // 2))
    sin = tl.load(cos_sin + D // 2 + cols % (D // 2))
    sin = tl.where(cols < D // 2, -sin, sin)
    return own * cos[None, :] + other * sin[None, :]


@triton.jit
def rotate_row(base, cos_sin, norm, norm_eps, D: tl.constexpr, NORMS: tl.constexpr):
    """Load and rotate one head, [D] float32, as `rotate_rows` does."""
    cols = tl.arange(0, D)
    others = (cols + D // 2) % D
    own = tl.load(base + cols).to(tl.float32)
    other = tl.load(base + others).to(tl.float32)
    if NORMS:
        scale = tl.rsqrt(tl.sum(own * own, 0) / D + norm_eps)
        own = own * scale * tl.load(norm + cols).to(tl.float32)
        other = other * scale * tl.load(norm + others).to(tl.float32)
    cos = tl.load(cos_sin + cols % (D // 2))
    sin = tl.load(cos_sin + D // 2 + cols % (D // 2))
    return own * cos + other * tl.where(cols < D // 2, -sin, sin)
