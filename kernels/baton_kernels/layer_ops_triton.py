"""Triton kernels of `baton_kernels.layer_ops`, and their launchers. layer_ops.py checks the
arguments.

Memory-bound, all of them: one pass, one program per row or per token and a few heads. How a row
(or a head) is spread over the threads of a warp depends on its width alone, never on the number of
rows, so its sums are added in one order always. Knows no model. No state; any thread.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from baton_kernels.block_rows import BlockRows
from baton_kernels.dispatch import overlap_options


@triton.jit
def silu_times(gate, up):  # type: ignore[no-untyped-def]
    """Compute silu(gate) * up in float32."""
    power = tl.exp(-tl.abs(gate))  # at most 1: no overflow
    return tl.where(gate >= 0, gate, gate * power) / (1.0 + power) * up


_FEWEST_TOKENS = 16
"""Most tokens for which rotate_and_write is bound by latency and uses small programs."""

_FEW_TOKENS = 128
"""Most tokens for which rotate_and_write starts before the kernel ahead ends; with more, that slows
down the kernel that still runs."""

_COLUMNS_PER_PROGRAM = 1024
"""Columns per program of silu_mul."""


def rotation_config(num_tokens: int) -> tuple[int, int]:
    """Return (heads per program, warps) of rotate_and_write. Each warp has four heads in every
    configuration and no multiply-add is fused, so that a head has the same bits in each."""
    return (4, 1) if num_tokens <= _FEWEST_TOKENS else (16, 4)


def norm_config(num_columns: int) -> tuple[int, int]:
    """Return (rows per program, warps) of rms_norm for rows of `num_columns`: about 16 numbers per
    thread."""
    if num_columns <= 256:
        return 4, 4
    if num_columns <= 1024:
        return 1, 2
    if num_columns <= 2048:
        return 1, 4
    return 1, 8 if num_columns <= 8192 else 16


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _norm_rows(  # type: ignore[no-untyped-def]
    x, weight, out, num_rows, x_stride, out_stride, eps,
    N: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row < num_rows)[:, None] & (column < N)[None, :]
    row = row.to(tl.int64)[:, None]
    scale = tl.load(weight + column, mask=column < N, other=0.0).to(tl.float32)
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
    numbers = tl.load(x + row * x_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(numbers * numbers, axis=1) / N
    normed = numbers * tl.rsqrt(mean + eps)[:, None] * scale[None, :]
    tl.store(out + row * out_stride + column[None, :], normed.to(out.dtype.element_ty), mask=mask)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    *,
    config: tuple[int, int] | None = None,
) -> None:
    """Launch RMSNorm of x [T, N] into out [T, N]; layer_ops.py has checked the arguments.

    Args:
        config: (rows per program, warps); None: by norm_config.
    """
    num_rows, num_columns = x.shape
    if num_rows == 0:
        return
    rows_each, num_warps = config or norm_config(num_columns)
    _norm_rows[(triton.cdiv(num_rows, rows_each),)](
        x, weight, out, num_rows, x.stride(0), out.stride(0), eps,
        N=num_columns, BLOCK=triton.next_power_of_2(num_columns), ROWS=rows_each,
        num_warps=num_warps, **overlap_options(x),
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _silu_mul(  # type: ignore[no-untyped-def]
    gate_up, out, gate_up_stride, out_stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    place = gate_up + row * gate_up_stride + column
    gate = tl.load(place, mask=column < WIDTH, other=0.0).to(tl.float32)
    up = tl.load(place + WIDTH, mask=column < WIDTH, other=0.0).to(tl.float32)
    product = silu_times(gate, up)
    tl.store(out + row * out_stride + column, product.to(out.dtype.element_ty), mask=column < WIDTH)


def silu_mul(
    gate_up: torch.Tensor, out: torch.Tensor, *, config: tuple[int, int] | None = None
) -> None:
    """Launch silu(gate) * up of gate_up [T, 2 I] into out [T, I]; layer_ops.py has checked the
    arguments.

    Args:
        config: (columns per program, warps), for benchmarks; None: chosen here.
    """
    num_rows, num_columns = out.shape
    if num_rows == 0 or num_columns == 0:
        return
    block, num_warps = config or (_COLUMNS_PER_PROGRAM, 4)
    block = min(block, triton.next_power_of_2(num_columns))
    _silu_mul[(num_rows, triton.cdiv(num_columns, block))](
        gate_up, out, gate_up.stride(0), out.stride(0),
        WIDTH=num_columns, BLOCK=block, num_warps=num_warps, **overlap_options(gate_up),
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["positions", "block_tables", "sequence_ids", "slots"],
)  # type: ignore[untyped-decorator]
def _rotate_and_write(  # type: ignore[no-untyped-def]
    qkv, positions, cos_sin, q_norm, k_norm, out_q, out_k, out_v,
    keys, values, block_tables, sequence_ids, slots,
    qkv_stride, key_stride, value_stride, table_stride, rows_per_block, head_step, eps,
    H: tl.constexpr, K: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr,
    P: tl.constexpr, HEADS: tl.constexpr, NORMS: tl.constexpr, WRITES: tl.constexpr,
    GIVES_K: tl.constexpr, GIVES_V: tl.constexpr, HAS_IDS: tl.constexpr, HAS_SLOTS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    D: tl.constexpr = 2 * HALF
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dim = tl.arange(0, HALF_BLOCK)
    mask = (head < H + 2 * K)[:, None] & (dim < HALF)[None, :]
    is_q = head < H
    is_k = (head >= H) & (head < H + K)
    is_v = (head >= H + K) & (head < H + 2 * K)

    # Nothing up to the wait was written by the kernel before: positions and tables are the step's.
    position = tl.load(positions + token)
    is_live = position >= 0
    place = tl.maximum(position, 0).to(tl.int64)
    cos = tl.load(cos_sin + place * D + dim, mask=dim < HALF, other=0.0)[None, :]
    sin = tl.load(cos_sin + place * D + HALF + dim, mask=dim < HALF, other=0.0)[None, :]
    if WRITES:
        sequence = token
        if HAS_IDS:
            sequence = tl.load(sequence_ids + token).to(tl.int64)
        if HAS_SLOTS:
            place = tl.maximum(tl.load(slots + token), 0).to(tl.int64)
        block = tl.load(
            block_tables + sequence * table_stride + place // P, mask=is_live, other=0
        ).to(tl.int64)
    if NORMS:
        is_key = is_k[:, None]
        q_low = tl.load(q_norm + dim, mask=dim < HALF, other=0.0).to(tl.float32)[None, :]
        q_high = tl.load(q_norm + HALF + dim, mask=dim < HALF, other=0.0).to(tl.float32)[None, :]
        k_low = tl.load(k_norm + dim, mask=dim < HALF, other=0.0).to(tl.float32)[None, :]
        k_high = tl.load(k_norm + HALF + dim, mask=dim < HALF, other=0.0).to(tl.float32)[None, :]
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()

    source = qkv + token * qkv_stride + head[:, None] * D + dim[None, :]
    low = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
    rotates = (is_q | is_k)[:, None]
    if NORMS:
        mean = tl.sum(low * low + high * high, axis=1) / D
        scale = tl.rsqrt(mean + eps)[:, None]
        low = tl.where(rotates, low * scale * tl.where(is_key, k_low, q_low), low)
        high = tl.where(rotates, high * scale * tl.where(is_key, k_high, q_high), high)
    turned_low = tl.where(rotates, low * cos - high * sin, low)
    turned_high = tl.where(rotates, high * cos + low * sin, high)
    dtype = out_q.dtype.element_ty
    low = tl.where(is_live, turned_low, 0.0).to(dtype)
    high = tl.where(is_live, turned_high, 0.0).to(dtype)

    q_mask = is_q[:, None] & mask
    k_mask = is_k[:, None] & mask
    v_mask = is_v[:, None] & mask
    to_q = out_q + (token * H + head)[:, None] * D + dim[None, :]
    tl.store(to_q, low, mask=q_mask)
    tl.store(to_q + HALF, high, mask=q_mask)
    if GIVES_K:
        to_k = out_k + (token * K + head - H)[:, None] * D + dim[None, :]
        tl.store(to_k, low, mask=k_mask)
        tl.store(to_k + HALF, high, mask=k_mask)
    if GIVES_V:
        to_v = out_v + (token * K + head - H - K)[:, None] * D + dim[None, :]
        tl.store(to_v, low, mask=v_mask)
        tl.store(to_v + HALF, high, mask=v_mask)
    if WRITES:
        kept = keys.dtype.element_ty
        slot = (place % P) * D + dim[None, :]
        first = block * rows_per_block
        to_k = keys + (first + (head - H) * head_step)[:, None] * key_stride + slot
        tl.store(to_k, low.to(kept), mask=k_mask & is_live)
        tl.store(to_k + HALF, high.to(kept), mask=k_mask & is_live)
        to_v = values + (first + (head - H - K) * head_step)[:, None] * value_stride + slot
        tl.store(to_v, low.to(kept), mask=v_mask & is_live)
        tl.store(to_v + HALF, high.to(kept), mask=v_mask & is_live)


def rotate_and_write(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    rows: BlockRows | None,
    block_tables: torch.Tensor | None,
    sequence_ids: torch.Tensor | None,
    slots: torch.Tensor | None,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    norm_eps: float,
    out_q: torch.Tensor,
    out_k: torch.Tensor | None,
    out_v: torch.Tensor | None,
    *,
    config: tuple[int, int] | None = None,
) -> None:
    """Launch QK-norm, RoPE and the write into the cache; arguments as in
    `layer_ops.rotate_and_write`, which has checked them.

    Args:
        config: (heads per program, warps); None: by rotation_config.
    """
    num_tokens, num_heads, head_dim = out_q.shape
    if num_tokens == 0:
        return
    heads_each, num_warps = config or rotation_config(num_tokens)
    overlap = overlap_options(qkv) if num_tokens <= _FEW_TOKENS else {"OVERLAPS": False}
    num_all = qkv.shape[1] // head_dim
    cache: dict[str, Any] = {"rows_per_block": 0, "head_step": 0}
    keys = values = out_q
    table = positions
    if rows is not None and rows.values is not None and block_tables is not None:
        keys, values, table = rows.keys, rows.values, block_tables
        cache = {"rows_per_block": rows.rows_per_block, "head_step": rows.head_step}
    _rotate_and_write[(num_tokens, triton.cdiv(num_all, heads_each))](
        qkv, positions, cos_sin, q_norm if q_norm is not None else cos_sin,
        k_norm if k_norm is not None else cos_sin, out_q,
        out_k if out_k is not None else out_q, out_v if out_v is not None else out_q,
        keys, values, table, sequence_ids if sequence_ids is not None else positions,
        slots if slots is not None else positions,
        qkv.stride(0), keys.stride(0), values.stride(0), table.stride(0), **cache, eps=norm_eps,
        H=num_heads, K=(num_all - num_heads) // 2, HALF=head_dim // 2,
        HALF_BLOCK=triton.next_power_of_2(head_dim // 2),
        P=1 if rows is None else rows.block_size, HEADS=heads_each, NORMS=q_norm is not None,
        WRITES=rows is not None, GIVES_K=out_k is not None, GIVES_V=out_v is not None,
        HAS_IDS=sequence_ids is not None, HAS_SLOTS=slots is not None,
        num_warps=num_warps, enable_fp_fusion=False, **overlap,
    )  # fmt: skip
