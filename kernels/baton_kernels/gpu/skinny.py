"""The skinny matrix product in Triton: few rows of x against a weight that is streamed once.

For decoding: the bytes of the weight are all that counts, so every program owns some rows of the
weight and reads them in long runs along K. The weight's tile is the left operand (its rows are the
many), x the right one, so that eight rows of x cost no padding. Where there are too few tiles to
fill the device, K is split: each program leaves its partial sum in a workspace and the last to
arrive adds them up in the order of the splits, so equal inputs give equal bits. Knows no model and
chooses no tile: gpu/linear.py does. Launched on the current stream; any thread.

A launch may start before the kernel ahead of it has ended (programmatic dependent launch, sm_90):
it then asks the L2 cache for the head of its weights, and waits before it touches anything else.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
    M,
    N,
    K,
    x_stride,
    weight_stride,
    out_stride,
    residual_stride,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    IS_GATED: tl.constexpr,
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
    TRIGGERS_FIRST: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCASTS: tl.constexpr,
):
    """[M, K] x [N, K] -> [M, N]; with IS_GATED the weight is [2N, K], gate rows then up rows.

    Grid: (tiles of M times tiles of N, SPLIT_K); a program reads NUM_STEPS * BLOCK_K columns, that
    NUM_PARTS times: a sum of parts has the same bits whether they are computed by several programs
    or by one. UPCASTS: for Triton's interpreter, whose product takes float32 alone.
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
    k = tl.arange(0, BLOCK_K)
    weight_rows = weight + rows[:, None].to(tl.int64) * weight_stride
    up_rows = weight_rows + tl.cast(N, tl.int64) * weight_stride
    x_rows = x + m[:, None].to(tl.int64) * x_stride
    if OVERLAPS:
        if TRIGGERS_FIRST:
            tl.extra.cuda.gdc_launch_dependents()
    if NUM_STAGES == 1:  # weights are nobody's result: the first are read before the wait
        w, up = read_weights(weight_rows, up_rows, first + k, end, IS_GATED, IS_EVEN_K)
    if OVERLAPS:
        if PREFETCH > 0:
            prefetch_rows(weight, rows, weight_stride, first, end, PREFETCH, LINE)
            if IS_GATED:
                prefetch_rows(weight, rows + N, weight_stride, first, end, PREFETCH, LINE)
        tl.extra.cuda.gdc_wait()
        if not TRIGGERS_FIRST:
            tl.extra.cuda.gdc_launch_dependents()

    if NUM_STAGES == 1:
        acc, acc_up = accumulate_in_registers(
            w, up, weight_rows, up_rows, x_rows, m < M, first + k, end,
            IS_GATED, IS_EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K, NUM_STEPS, PRECISION, UPCASTS,
        )  # fmt: skip
    elif K_WARPS > 1:
        acc, acc_up = accumulate_by_warps(
            weight_rows, up_rows, x_rows, m < M, first, end,
            IS_GATED, IS_EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K, K_WARPS, NUM_STEPS, NUM_STAGES,
            PRECISION, UPCASTS,
        )  # fmt: skip
    else:
        acc, acc_up = accumulate(
            weight_rows, up_rows, x_rows, m < M, first + k, end,
            IS_GATED, IS_EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K, NUM_STEPS, NUM_STAGES,
            PRECISION, UPCASTS,
        )  # fmt: skip
    for part in tl.range(1, NUM_PARTS, num_stages=1):
        more, more_up = accumulate(
            weight_rows, up_rows, x_rows, m < M, first + part * NUM_STEPS * BLOCK_K + k, end,
            IS_GATED, IS_EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K, NUM_STEPS, NUM_STAGES,
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
        finish(
            acc, acc_up, m, n, out, bias, residual, x_scales, weight_scales,
            M, N, out_stride, residual_stride, HAS_BIAS, HAS_RESIDUAL, HAS_SCALES, IS_GATED,
        )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def accumulate(  # type: ignore[no-untyped-def]
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
    NUM_STEPS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCASTS: tl.constexpr,
):
    """One run of columns from k [BLOCK_K] on: (product, product with the up rows)."""
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    acc_up = acc
    for step in tl.range(NUM_STEPS, num_stages=NUM_STAGES):
        columns = step * BLOCK_K + k
        w, up = read_weights(weight_rows, up_rows, columns, end, IS_GATED, IS_EVEN_K)
        xs = read_x(x_rows, is_row, columns, end, IS_EVEN_K)
        if UPCASTS:
            xs = xs.to(tl.float32)
            w = w.to(tl.float32)
        acc = tl.dot(w, tl.trans(xs), acc, input_precision=PRECISION)
        if IS_GATED:
            if UPCASTS:
                up = up.to(tl.float32)
            acc_up = tl.dot(up, tl.trans(xs), acc_up, input_precision=PRECISION)
    return acc, acc_up


@triton.jit  # type: ignore[untyped-decorator]
def accumulate_in_registers(  # type: ignore[no-untyped-def]
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
    NUM_STEPS: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCASTS: tl.constexpr,
):
    """`accumulate` without stages in shared memory: while one step is multiplied, the next is on
    its way into registers. Small programs, many of them on a multiprocessor."""
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    acc_up = acc
    xs = read_x(x_rows, is_row, k, end, IS_EVEN_K)
    for step in tl.range(1, NUM_STEPS + 1, num_stages=1):
        columns = step * BLOCK_K + k
        stop = tl.where(step < NUM_STEPS, end, 0)  # behind the last step nothing is read
        next_w, next_up = read_weights(weight_rows, up_rows, columns, stop, IS_GATED, False)
        next_xs = read_x(x_rows, is_row, columns, stop, False)
        if UPCASTS:
            xs = xs.to(tl.float32)
            w = w.to(tl.float32)
            up = up.to(tl.float32)
        acc = tl.dot(w, tl.trans(xs), acc, input_precision=PRECISION)
        if IS_GATED:
            acc_up = tl.dot(up, tl.trans(xs), acc_up, input_precision=PRECISION)
        w = next_w
        up = next_up
        xs = next_xs
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
    """([rows, columns], the same of the up rows)."""
    inside = columns[None, :] < end
    if IS_EVEN_K:
        w = tl.load(weight_rows + columns[None, :], eviction_policy="evict_first")
    else:
        w = tl.load(
            weight_rows + columns[None, :], mask=inside, other=0.0, eviction_policy="evict_first"
        )
    up = w
    if IS_GATED:
        if IS_EVEN_K:
            up = tl.load(up_rows + columns[None, :], eviction_policy="evict_first")
        else:
            up = tl.load(
                up_rows + columns[None, :], mask=inside, other=0.0, eviction_policy="evict_first"
            )
    return w, up


@triton.jit
def read_x(x_rows, is_row, columns, end, IS_EVEN_K: tl.constexpr):  # type: ignore[no-untyped-def]
    """[rows of x, columns], zeros for rows that are not there."""
    if IS_EVEN_K:
        return tl.load(x_rows + columns[None, :], mask=is_row[:, None], other=0.0)
    inside = is_row[:, None] & (columns[None, :] < end)
    return tl.load(x_rows + columns[None, :], mask=inside, other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def accumulate_by_warps(  # type: ignore[no-untyped-def]
    weight_rows,
    up_rows,
    x_rows,
    is_row,
    first,
    end,
    IS_GATED: tl.constexpr,
    IS_EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_WARPS: tl.constexpr,
    NUM_STEPS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCASTS: tl.constexpr,
):
    """`accumulate` with BLOCK_K dealt out to the warps, as a batch of products: few rows of the
    weight are one matrix instruction high, and every warp would compute all of them."""
    WIDTH: tl.constexpr = BLOCK_K // NUM_WARPS
    acc = tl.zeros((NUM_WARPS, BLOCK_N, BLOCK_M), dtype=tl.float32)
    acc_up = acc
    warp = tl.arange(0, NUM_WARPS)[:, None, None]
    k = first + warp * WIDTH + tl.arange(0, WIDTH)[None, None, :]
    weight_rows = weight_rows[None, :, :]
    up_rows = up_rows[None, :, :]
    x_rows = x_rows[None, :, :]
    for step in tl.range(NUM_STEPS, num_stages=NUM_STAGES):
        columns = step * BLOCK_K + k
        if IS_EVEN_K:
            w = tl.load(weight_rows + columns, eviction_policy="evict_first")
            xs = tl.load(x_rows + columns, mask=is_row[None, :, None], other=0.0)
            if IS_GATED:
                up = tl.load(up_rows + columns, eviction_policy="evict_first")
        else:
            inside = columns < end
            w = tl.load(weight_rows + columns, mask=inside, other=0.0)
            xs = tl.load(x_rows + columns, mask=is_row[None, :, None] & inside, other=0.0)
            if IS_GATED:
                up = tl.load(up_rows + columns, mask=inside, other=0.0)
        if UPCASTS:
            xs = xs.to(tl.float32)
            w = w.to(tl.float32)
        xs = tl.permute(xs, (0, 2, 1))
        acc = tl.dot(w, xs, acc, input_precision=PRECISION)
        if IS_GATED:
            if UPCASTS:
                up = up.to(tl.float32)
            acc_up = tl.dot(up, xs, acc_up, input_precision=PRECISION)
    return tl.sum(acc, axis=0), tl.sum(acc_up, axis=0)


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
):
    """What follows the product, in float32: scales, bias, SiLU, residual; then the
    store."""
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
        acc = acc * tl.sigmoid(acc) * acc_up
    if HAS_RESIDUAL:
        place = m[None, :].to(tl.int64) * residual_stride + n[:, None]
        acc += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    place = m[None, :].to(tl.int64) * out_stride + n[:, None]
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=inside)
