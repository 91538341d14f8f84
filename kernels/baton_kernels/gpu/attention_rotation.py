"""QK-norm and RoPE of the heads that an attention program needs, as Triton functions: what
layer_ops' rotate_and_write does, inside the attention.

Half-split rotation; float32, rounded once by the caller. Knows no cache.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rotate_rows(base, is_row, cos_sin, norm, norm_eps, D: tl.constexpr, NORMS: tl.constexpr):
    """[M, D] float32: the heads that base [M] points at, 0 where not `is_row`. cos_sin: the
    position's line. D is a power of two."""
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
    """[D] float32: as rotate_rows, of one head."""
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
