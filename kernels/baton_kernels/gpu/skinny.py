"""The skinny matrix product in Triton: few rows of x against a weight that is streamed once.

For decoding: the bytes of the weight are all that counts, so every program owns some rows of the
weight and reads them in long runs along K. The weight's tile is the left operand (its rows are the
many), x the right one, so that eight rows of x cost no padding. Where there are too few tiles to
fill the device, K is split: each program leaves its partial sum in a workspace and the last to
arrive adds them up in the order of the splits, so equal inputs give equal bits. Knows no model and
chooses no tile: gpu/tiles.py does. Launched on the current stream; any thread.

A launch may start before the kernel ahead of it has ended (programmatic dependent launch, sm_90):
it then asks the L2 cache for the head of its weights, and waits before it touches anything else.
"""

from __future__ import annotations

import triton
import triton.language as tl

from baton_kernels.gpu.gate import silu_times


@triton.jit  # type: ignore[untyped-decorator]
def prefetch_rows(  # type: ignore[no-untyped-def]
    base,
    rows,
    stride,
    first,
    end,
    NUM_ELEMENTS: tl.constexpr,
    LINE: tl.constexpr,
):
    """Ask L2 for [rows, first .. first + NUM_ELEMENTS) of a weight; LINE elements are 128 bytes."""
    columns = tl.minimum(first + tl.arange(0, NUM_ELEMENTS // LINE) * LINE, end - 1)
    addresses = base + rows[:, None].to(tl.int64) * stride + columns[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [addresses],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit(do_not_specialize=["M"])  # type: ignore[untyped-decorator]
def skinny_kernel(  # type: ignore[no-untyped-def]
    x,
    weight,
    out,
    bias,
    residual,
    x_scales,
    weight_scales,
    partials,
    counters,
    squares,
    next_weight,
    next_scaled,
    next_squares,
    M,
    N,
    K,
    x_stride,
    weight_stride,
    out_stride,
    residual_stride,
    norm_eps,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    NUM_RUNS: tl.constexpr,
    LEAVES: tl.constexpr,
    IS_GATED: tl.constexpr,
    ROUNDS: tl.constexpr,
    IS_EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    K_WARPS: tl.constexpr,
    GROUP_M: tl.constexpr,
    SPLIT_K: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    NUM_STEPS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,
    LINE: tl.constexpr,
    OVERLAPS: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCASTS: tl.constexpr,
):
    """[M, K] x [N, K] -> [M, N]; with IS_GATED the weight is [2N, K], gate rows then up rows.

    Grid: (tiles of M times tiles of N, SPLIT_K); a program reads NUM_STEPS * BLOCK_K columns, that
    NUM_PARTS times: a sum of parts has the same bits whether they are computed by several programs
    or by one. NUM_RUNS > 0: x's rows are half normed, and `squares` has so many sums of each.
    LEAVES: the result is left half normed, too (half_norm.py). ROUNDS: SwiGLU is of the sums as
    they would be stored. UPCASTS: for Triton's interpreter, whose product takes float32 alone.
    """
    tile = tl.program_id(0)
    split = tl.program_id(1)
    # Neighbours share both their rows of x and their rows of the weight, as far as L2 goes.
    group_size = GROUP_M * tl.cdiv(N, BLOCK_N)
    first_m = tile // group_size * GROUP_M
    height = tl.minimum(tl.cdiv(M, BLOCK_M) - first_m, GROUP_M)
    m = (first_m + tile % group_size % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = (tile % group_size // height) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.minimum(n, N - 1)
    first = split * NUM_STEPS * BLOCK_K
    end = tl.minimum(first + NUM_PARTS * NUM_STEPS * BLOCK_K, K)
    weight_rows = weight + rows[:, None].to(tl.int64) * weight_stride
    up_rows = weight_rows + tl.cast(N, tl.int64) * weight_stride
    x_rows = x + m[:, None].to(tl.int64) * x_stride
    is_row = (m < M)[:, None]
    if K_WARPS > 1:
        WIDTH: tl.constexpr = BLOCK_K // K_WARPS
        warp = tl.arange(0, K_WARPS)[:, None, None]
        k = first + warp * WIDTH + tl.arange(0, WIDTH)[None, None, :]
        weight_rows = weight_rows[None, :, :]
        up_rows = up_rows[None, :, :]
        x_rows = x_rows[None, :, :]
        is_row = is_row[None, :, :]
    else:
        k = first + tl.arange(0, BLOCK_K)[None, :]
    w = weight_rows
    up = up_rows
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
    if NUM_STAGES == 1:  # weights are nobody's result: the first are read before the wait
        w, up = read_weights(weight_rows, up_rows, k, end, IS_GATED, IS_EVEN_K)
    if OVERLAPS:
        if PREFETCH > 0:
            prefetch_rows(weight, rows, weight_stride, first, end, PREFETCH, LINE)
            if IS_GATED:
                prefetch_rows(weight, rows + N, weight_stride, first, end, PREFETCH, LINE)
        tl.extra.cuda.gdc_wait()
    sums = 0.0
    if NUM_RUNS > 0:  # asked for early: they are there when the products are
        sums = read_squares(squares, m, M, NUM_RUNS)
    acc, acc_up = accumulate(
        w, up, weight_rows, up_rows, x_rows, is_row, k, end,
        IS_GATED, IS_EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K, K_WARPS, NUM_STEPS, NUM_STAGES,
        PRECISION, UPCASTS,
    )  # fmt: skip
    for part in tl.range(1, NUM_PARTS, num_stages=1):
        more, more_up = accumulate(
            w, up, weight_rows, up_rows, x_rows, is_row, k + part * NUM_STEPS * BLOCK_K, end,
            IS_GATED, IS_EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K, K_WARPS, NUM_STEPS, NUM_STAGES,
            PRECISION, UPCASTS,
        )  # fmt: skip
        acc += more
        acc_up += more_up

    is_last = True
    if SPLIT_K > 1:
        num_tiles = tl.num_programs(0)
        tile_size: tl.constexpr = BLOCK_N * BLOCK_M
        place = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        own = partials + (tile * SPLIT_K + split).to(tl.int64) * tile_size
        up_base = partials + num_tiles.to(tl.int64) * SPLIT_K * tile_size
        tl.store(own + place, acc)
        if IS_GATED:
            tl.store(up_base + (tile * SPLIT_K + split).to(tl.int64) * tile_size + place, acc_up)
        # All threads' stores are before the one thread's release.
        tl.debug_barrier()
        is_last = tl.atomic_add(counters + tile, 1, sem="acq_rel") == SPLIT_K - 1
        if is_last:
            acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
            acc_up = acc
            for other in tl.static_range(SPLIT_K):
                index = (tile * SPLIT_K + other).to(tl.int64)
                acc += tl.load(partials + index * tile_size + place, cache_modifier=".cg")
                if IS_GATED:
                    acc_up += tl.load(up_base + index * tile_size + place, cache_modifier=".cg")
            tl.store(counters + tile, 0)
    if is_last:
        if NUM_RUNS > 0:
            factor = tl.rsqrt(tl.sum(sums, axis=0) / K + norm_eps)[None, :]
            acc *= factor
            acc_up *= factor
        result = finish(
            acc, acc_up, m, n, out, bias, residual, x_scales, weight_scales,
            M, N, out_stride, residual_stride, HAS_BIAS, HAS_RESIDUAL, HAS_SCALES, IS_GATED, ROUNDS,
        )  # fmt: skip
        if LEAVES:
            run = tile % group_size // height
            leave_half_norm(result, m, n, run, next_weight, next_scaled, next_squares, M, N)


@triton.jit
def read_squares(squares, m, M, NUM_RUNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """[runs, rows], zeros beyond them."""
    PADDED: tl.constexpr = triton.next_power_of_2(NUM_RUNS)
    runs = tl.arange(0, PADDED)[:, None]
    return tl.load(
        squares + runs * M + m[None, :], mask=(runs < NUM_RUNS) & (m < M)[None, :], other=0.0
    )


@triton.jit
def leave_half_norm(  # type: ignore[no-untyped-def]
    result, m, n, run, next_weight, next_scaled, next_squares, M, N
):
    """Of a tile of the result as it was stored: its rows times the next norm's weight, and their
    squares' sums."""
    wide = tl.where((n < N)[:, None], result.to(tl.float32), 0.0)
    scale = tl.load(next_weight + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    inside = (n < N)[:, None] & (m < M)[None, :]
    place = m[None, :].to(tl.int64) * N + n[:, None]
    tl.store(next_scaled + place, (wide * scale).to(next_scaled.dtype.element_ty), mask=inside)
    tl.store(next_squares + run * M + m, tl.sum(wide * wide, axis=0), mask=m < M)


@triton.jit  # type: ignore[untyped-decorator]
def accumulate(  # type: ignore[no-untyped-def]
    w,
    up,
    weight_rows,
    up_rows,
    x_rows,
    is_row,
    k,
    end,
    IS_GATED: tl.constexpr,
    IS_EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    K_WARPS: tl.constexpr,
    NUM_STEPS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCASTS: tl.constexpr,
):
    """One run of columns: (product, product with the up rows).

    NUM_STAGES > 1: steps are on their way into shared memory. 1: none is; the first step's w and up
    are given, and many small programs hide each other's latency.
    """
    if K_WARPS > 1:
        acc = tl.zeros((K_WARPS, BLOCK_N, BLOCK_M), dtype=tl.float32)
    else:
        acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    acc_up = acc
    if NUM_STAGES > 1:
        for step in tl.range(NUM_STEPS, num_stages=NUM_STAGES):
            columns = step * BLOCK_K + k
            gate, inner = read_weights(weight_rows, up_rows, columns, end, IS_GATED, IS_EVEN_K)
            xs = read_x(x_rows, is_row, columns, end, IS_EVEN_K)
            acc, acc_up = add_product(
                gate, inner, xs, acc, acc_up, IS_GATED, K_WARPS, PRECISION, UPCASTS
            )
    else:
        xs = read_x(x_rows, is_row, k, end, IS_EVEN_K)
        acc, acc_up = add_product(w, up, xs, acc, acc_up, IS_GATED, K_WARPS, PRECISION, UPCASTS)
        for step in tl.range(1, NUM_STEPS, num_stages=1):
            columns = step * BLOCK_K + k
            w, up = read_weights(weight_rows, up_rows, columns, end, IS_GATED, IS_EVEN_K)
            xs = read_x(x_rows, is_row, columns, end, IS_EVEN_K)
            acc, acc_up = add_product(w, up, xs, acc, acc_up, IS_GATED, K_WARPS, PRECISION, UPCASTS)
    if K_WARPS > 1:
        acc = tl.sum(acc, axis=0)
        acc_up = tl.sum(acc_up, axis=0)
    return acc, acc_up


@triton.jit
def add_product(  # type: ignore[no-untyped-def]
    w,
    up,
    xs,
    acc,
    acc_up,
    IS_GATED: tl.constexpr,
    K_WARPS: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCASTS: tl.constexpr,
):
    """One step. With K_WARPS each warp multiplies its own columns, as a batch of products: few rows
    of the weight are one matrix instruction high, and every warp would compute all of them."""
    if UPCASTS:
        xs = xs.to(tl.float32)
        w = w.to(tl.float32)
        up = up.to(tl.float32)
    if K_WARPS > 1:
        xs = tl.permute(xs, (0, 2, 1))
    else:
        xs = tl.trans(xs)
    acc = tl.dot(w, xs, acc, input_precision=PRECISION)
    if IS_GATED:
        acc_up = tl.dot(up, xs, acc_up, input_precision=PRECISION)
    return acc, acc_up


@triton.jit  # type: ignore[untyped-decorator]
def read_weights(  # type: ignore[no-untyped-def]
    weight_rows,
    up_rows,
    columns,
    end,
    IS_GATED: tl.constexpr,
    IS_EVEN_K: tl.constexpr,
):
    """(rows by columns, the same of the up rows)."""
    inside = columns < end
    if IS_EVEN_K:
        w = tl.load(weight_rows + columns, eviction_policy="evict_first")
    else:
        w = tl.load(weight_rows + columns, mask=inside, other=0.0, eviction_policy="evict_first")
    up = w
    if IS_GATED:
        if IS_EVEN_K:
            up = tl.load(up_rows + columns, eviction_policy="evict_first")
        else:
            up = tl.load(up_rows + columns, mask=inside, other=0.0, eviction_policy="evict_first")
    return w, up


@triton.jit
def read_x(x_rows, is_row, columns, end, IS_EVEN_K: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows of x by columns, zeros for rows that are not there."""
    if IS_EVEN_K:
        return tl.load(x_rows + columns, mask=is_row, other=0.0)
    return tl.load(x_rows + columns, mask=is_row & (columns < end), other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def finish(  # type: ignore[no-untyped-def]
    acc,
    acc_up,
    m,
    n,
    out,
    bias,
    residual,
    x_scales,
    weight_scales,
    M,
    N,
    out_stride,
    residual_stride,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    IS_GATED: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    """What follows the product, in float32: scales, bias, SiLU, residual; then the
    store. Returns: what was stored."""
    is_n = n < N
    inside = is_n[:, None] & (m < M)[None, :]
    if HAS_SCALES:
        row_scales = tl.load(x_scales + m, mask=m < M, other=0.0)[None, :]
        acc *= row_scales * tl.load(weight_scales + n, mask=is_n, other=0.0)[:, None]
        if IS_GATED:
            acc_up *= row_scales * tl.load(weight_scales + N + n, mask=is_n, other=0.0)[:, None]
    if HAS_BIAS:
        acc += tl.load(bias + n, mask=is_n, other=0.0).to(tl.float32)[:, None]
        if IS_GATED:
            acc_up += tl.load(bias + N + n, mask=is_n, other=0.0).to(tl.float32)[:, None]
    if IS_GATED:
        if ROUNDS:
            acc = acc.to(out.dtype.element_ty).to(tl.float32)
            acc_up = acc_up.to(out.dtype.element_ty).to(tl.float32)
            acc = silu_times(acc, acc_up)
        else:
            acc = acc * tl.sigmoid(acc) * acc_up
    if HAS_RESIDUAL:
        place = m[None, :].to(tl.int64) * residual_stride + n[:, None]
        acc += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    place = m[None, :].to(tl.int64) * out_stride + n[:, None]
    result = acc.to(out.dtype.element_ty)
    tl.store(out + place, result, mask=inside)
    return result
