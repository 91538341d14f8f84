"""The product of one row of x with a weight, in Triton: no matrix unit, for one request that
decodes.

Every program owns a few rows of the weight and multiplies and adds in float32 where it read them;
threads add up at the end. Its first columns are read into registers before it waits for the kernel
ahead (programmatic dependent launch; weights are nobody's result), the next ones into L2: what is
left after the wait is the latency of x alone. Knows no model; gpu/tiles.py chooses its sizes.
Launched on the current stream; any thread.
"""

from __future__ import annotations

import triton
import triton.language as tl

from baton_kernels.gpu.skinny import prefetch_rows


@triton.jit  # type: ignore[untyped-decorator]
def row_kernel(  # type: ignore[no-untyped-def]
    x,
    weight,
    out,
    bias,
    residual,
    norm_weight,
    x_scales,
    weight_scales,
    N,
    K,
    weight_stride,
    norm_eps,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_EVEN_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STEPS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,
    LINE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """[K] x [N, K] -> [N]; with IS_GATED the weight is [2N, K], gate rows then up rows. The norm's
    factor (x's inverse root mean square) is one number: it is applied after the product."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.minimum(n, N - 1).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    gate_rows = weight + rows[:, None] * weight_stride
    up_rows = gate_rows + tl.cast(N, tl.int64) * weight_stride
    w, up, factors = read_columns(
        gate_rows, up_rows, norm_weight, k, K, HAS_NORM, IS_GATED, IS_EVEN_K
    )
    if OVERLAPS:
        if PREFETCH > 0:
            prefetch_rows(weight, rows, weight_stride, BLOCK_K, K, PREFETCH, LINE)
            if IS_GATED:
                prefetch_rows(weight, rows + N, weight_stride, BLOCK_K, K, PREFETCH, LINE)
        tl.extra.cuda.gdc_wait()
    sums = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    sums_up = sums
    squares = tl.zeros((BLOCK_K,), dtype=tl.float32)
    sums, sums_up, squares = add_products(
        x, w, up, factors, k, K, sums, sums_up, squares, HAS_NORM, IS_GATED, IS_EVEN_K
    )
    if HAS_RESIDUAL:  # asked for early: it is there when the sums are
        added = tl.load(residual + n, mask=n < N, other=0.0).to(tl.float32)
    for step in tl.range(1, NUM_STEPS, num_stages=NUM_STAGES):
        columns = step * BLOCK_K + k
        w, up, factors = read_columns(
            gate_rows, up_rows, norm_weight, columns, K, HAS_NORM, IS_GATED, IS_EVEN_K
        )
        sums, sums_up, squares = add_products(
            x, w, up, factors, columns, K, sums, sums_up, squares, HAS_NORM, IS_GATED, IS_EVEN_K
        )
    result = tl.sum(sums, axis=1)
    inner = tl.sum(sums_up, axis=1)
    if HAS_NORM:
        factor = tl.rsqrt(tl.sum(squares, axis=0) / K + norm_eps)
        result *= factor
        inner *= factor
    if HAS_SCALES:
        factor = tl.load(x_scales)
        result *= factor * tl.load(weight_scales + n, mask=n < N, other=0.0)
        if IS_GATED:
            inner *= factor * tl.load(weight_scales + N + n, mask=n < N, other=0.0)
    if HAS_BIAS:
        result += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
        if IS_GATED:
            inner += tl.load(bias + N + n, mask=n < N, other=0.0).to(tl.float32)
    if IS_GATED:
        result = result * tl.sigmoid(result) * inner
    if HAS_RESIDUAL:
        result += added
    tl.store(out + n, result.to(out.dtype.element_ty), mask=n < N)


@triton.jit  # type: ignore[untyped-decorator]
def read_columns(  # type: ignore[no-untyped-def]
    gate_rows,
    up_rows,
    norm_weight,
    columns,
    K,
    HAS_NORM: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_EVEN_K: tl.constexpr,
):
    """What can be read before the kernel ahead has ended: (rows, up rows, the norm's weights)."""
    factors = columns
    inside = columns < K
    if IS_EVEN_K:
        w = tl.load(gate_rows + columns[None, :], eviction_policy="evict_first")
        up = w
        if IS_GATED:
            up = tl.load(up_rows + columns[None, :], eviction_policy="evict_first")
        if HAS_NORM:
            factors = tl.load(norm_weight + columns)
    else:
        w = tl.load(gate_rows + columns[None, :], mask=inside[None, :], other=0.0)
        up = w
        if IS_GATED:
            up = tl.load(up_rows + columns[None, :], mask=inside[None, :], other=0.0)
        if HAS_NORM:
            factors = tl.load(norm_weight + columns, mask=inside, other=0.0)
    return w, up, factors


@triton.jit
def add_products(  # type: ignore[no-untyped-def]
    x,
    w,
    up,
    factors,
    columns,
    K,
    sums,
    sums_up,
    squares,
    HAS_NORM: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_EVEN_K: tl.constexpr,
):
    """Each thread's sums with the products of these columns."""
    if IS_EVEN_K:
        numbers = tl.load(x + columns).to(tl.float32)
    else:
        numbers = tl.load(x + columns, mask=columns < K, other=0.0).to(tl.float32)
    if HAS_NORM:
        squares += numbers * numbers
        numbers *= factors.to(tl.float32)
    sums += w.to(tl.float32) * numbers[None, :]
    if IS_GATED:
        sums_up += up.to(tl.float32) * numbers[None, :]
    return sums, sums_up, squares
