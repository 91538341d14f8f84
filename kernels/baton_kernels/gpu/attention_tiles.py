"""Attention over one tile of positions, and the merging of parts, as Triton functions: what decode
and prefill kernels share, so that one token has the same bits in both.

Scores are in units of log2 (scaling * log2(e) is folded in). A part is what some positions give a
row: its greatest score, the total of its weights 2^(score - greatest), and the weighted sum of the
values. Knows no cache and no causality.

The order of an exact kernel, which is what makes bits equal: positions are cut at multiples of
SPLIT_POSITIONS; within a split, tiles of TILE_POSITIONS are taken in order from an empty part
(`take_tile`); splits are merged in order, from an empty part (`merge_parts`); then `finish`. Tiles
of scores are [EXACT_ROWS, TILE_POSITIONS], by EXACT_WARPS warps, compiled with
enable_fp_fusion=False: no product is contracted in one kernel and rounded in the other. Tiles and
splits that a row sees nothing of leave its part as it was, bit for bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

SPLIT_POSITIONS = 512
TILE_POSITIONS = 64
EXACT_ROWS = 64
EXACT_WARPS = 4


@triton.jit
def score_tile(
    q0, q1, k0, k1, scale, cap, bias,
    SPLIT_DIM: tl.constexpr, SOFTCAP: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """[M, N] float32 scores in log2 units.

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
    """A part with one more tile: online softmax (Milakov and Gimelshein, 2018).

    scores [M, N] float32, -inf where not seen; values [N, Dv], finite (0) where not seen;
    value_scales [N] float32, of account where SCALED. The part: greatest [M], total [M],
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
    """Two parts of the same rows as one. Elementwise: the same bits in any layout."""
    reached = tl.maximum(greatest, its_greatest)
    base = tl.where(reached == float("-inf"), 0.0, reached)
    shrink = tl.exp2(greatest - base)
    its_shrink = tl.exp2(its_greatest - base)
    total = total * shrink + its_total * its_shrink
    weighted = weighted * shrink[:, None] + its_weighted * its_shrink[:, None]
    return reached, total, weighted


@triton.jit
def finish(greatest, total, weighted, sinks, SINKS: tl.constexpr):
    """[M, Dv] float32: the attention; zeros for a row that saw nothing. sinks: [M] float32, in
    log2 units: one more score that takes weight and gives no value."""
    if SINKS:
        reached = tl.maximum(greatest, sinks)
        base = tl.where(reached == float("-inf"), 0.0, reached)
        shrink = tl.exp2(greatest - base)
        total = total * shrink + tl.exp2(sinks - base)
        weighted = weighted * shrink[:, None]
    return weighted / tl.where(total == 0.0, 1.0, total)[:, None]
