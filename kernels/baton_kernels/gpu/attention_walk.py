"""Walking over the positions of a paged cache, tile by tile, as a Triton function: what the
kernels of decode, trees and exact prefill share.

Knows how numbers lie in blocks and how they are quantized; knows no sequence's length. Invariant:
no table entry is read for a position from `stop` on, and what is not read counts as 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from baton_kernels.gpu.attention_tiles import score_tile, take_tile


@triton.jit
def _block_ids(table, start, stop, P: tl.constexpr, BLOCK_N: tl.constexpr):
    """The block of a tile that lies in one, int32; of one that lies in two, both; else [N], of
    each position (the second value is of no account but for two). Block 0 for positions from
    `stop` on. Scalars cost a thread one load, whatever rows it has."""
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
    """(where a tile begins, from head 0 of block 0: int64; where each of its rows does, from
    there: [N]). ELEMENTS: of one position."""
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
    """[N, WIDTH]; columns from D on, and rows that are not read, are 0."""
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
    """A tile as numbers of `like`'s dtype, without its scales. QUANT 0: it is; 1: int8; 2: e4m3;
    3, 4: the same, by PTX where bfloat16 is wanted. STAYS: in the layout it was loaded in, where
    the compiler would rather gather single bytes in the layout of a product's operand."""
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
    """[N] float32: each position's scale."""
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
    """A part with the positions [begin, stop), tile by tile.

    low: [M] the first position that each row sees, of account where WINDOW. SEES 0: all from there
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
    """Ask L2 for the matrices of the positions [begin, stop), of BLOCKS blocks at most; each has
    ELEMENTS numbers, of which LINE are 128 bytes. Safe while they are being written: L2 is where
    all see the same."""
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
