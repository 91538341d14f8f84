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
def _block_ids(table, positions, stop, P: tl.constexpr):
    """[N] int64; block 0 for positions from `stop` on."""
    return tl.load(table + positions // P, mask=positions < stop, other=0).to(tl.int64)


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


@triton.jit
def _numbers(tile, like, QUANT: tl.constexpr):
    """A tile as numbers of `like`'s dtype, without its scales. QUANT 0: it is; 1: int8; 2: e4m3;
    3: e4m3, by PTX where bfloat16 is wanted."""
    if QUANT == 3 and like.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            _E4M3_TO_BFLOAT16, "=r,=r,r", [tile], dtype=tl.bfloat16, is_pure=True, pack=4
        )
    if QUANT >= 2:
        return tile.to(tl.float8e4nv, bitcast=True).to(like.dtype)
    return tile.to(like.dtype)


@triton.jit
def _scales(
    base,
    blocks,
    positions,
    is_read,
    block_stride,
    P: tl.constexpr,
    PER_TOKEN: tl.constexpr,
):
    """[N] float32: each position's scale."""
    offsets = blocks * block_stride
    if PER_TOKEN:
        offsets += positions % P
    return tl.load(base + offsets, mask=is_read, other=0.0)


@triton.jit
def walk_positions(
    q0, q1, greatest, total, weighted, begin, stop,
    keys, values, k_scales, v_scales, table, visible, line_starts, low, high,
    k_block_stride, v_block_stride, ks_block_stride, vs_block_stride, scale, cap,
    D: tl.constexpr, DV: tl.constexpr, P: tl.constexpr, BLOCK_N: tl.constexpr,
    D0: tl.constexpr, D1: tl.constexpr, DV_WIDTH: tl.constexpr,
    QUANT: tl.constexpr, PER_TOKEN: tl.constexpr, LATENT: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SEES: tl.constexpr,
):  # fmt: skip
    """A part with the positions [begin, stop), tile by tile.

    low: [M] the first position that each row sees, of account where WINDOW. SEES 0: all from there
    on; 1: positions from `high` on are nodes, and line_starts [M] int32 is where each row's line
    begins in `visible` (uint8); 2: up to high [M].
    """
    cols0 = tl.arange(0, D0)
    v_cols = tl.arange(0, DV_WIDTH)
    # One tile ahead: a tile's loads must not wait for its block ids.
    next_blocks = _block_ids(table, begin + tl.arange(0, BLOCK_N), stop, P)
    for start in tl.range(begin, stop, BLOCK_N):
        positions = start + tl.arange(0, BLOCK_N)
        is_read = positions < stop
        blocks = next_blocks
        next_blocks = _block_ids(table, positions + BLOCK_N, stop, P)
        slots = positions % P
        offsets = blocks * k_block_stride + slots * D
        k0 = _numbers(_load_tile(keys, offsets, cols0, is_read, D, D0), q0, QUANT)
        k1 = k0
        if D > D0:
            cols1 = D0 + tl.arange(0, D1)
            k1 = _numbers(_load_tile(keys, offsets, cols1, is_read, D, D0 + D1), q0, QUANT)
        value_scales = total  # of no account where not quantized
        key_scale = scale
        if QUANT:
            value_scales = _scales(
                k_scales, blocks, positions, is_read, ks_block_stride, P, PER_TOKEN
            )
            key_scale = (value_scales * scale)[None, :]
        scores = score_tile(q0, q1, k0, k1, key_scale, cap, D > D0, SOFTCAP)
        is_seen = is_read[None, :]
        if WINDOW:
            is_seen = is_seen & (positions[None, :] >= low[:, None])
        if SEES == 2:
            is_seen = is_seen & (positions[None, :] <= high[:, None])
        if SEES == 1:
            nodes = positions - high
            is_node = is_read & (nodes >= 0)
            places = line_starts[:, None] + nodes[None, :]
            is_visible = tl.load(visible + places, mask=is_node[None, :], other=1)
            is_seen = is_seen & (is_visible != 0)
        scores = tl.where(is_seen, scores, float("-inf"))
        if LATENT and DV == D0:
            v = k0
        elif LATENT:
            v = _numbers(_load_tile(keys, offsets, v_cols, is_read, DV, DV_WIDTH), q0, QUANT)
        else:
            v_offsets = blocks * v_block_stride + slots * DV
            v = _numbers(_load_tile(values, v_offsets, v_cols, is_read, DV, DV_WIDTH), q0, QUANT)
            if QUANT:
                value_scales = _scales(
                    v_scales, blocks, positions, is_read, vs_block_stride, P, PER_TOKEN
                )
        greatest, total, weighted = take_tile(
            scores, v, value_scales, greatest, total, weighted, QUANT != 0
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
