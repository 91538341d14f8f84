"""Triton kernels of `baton_kernels.linear` for few rows, and their launcher, which provides the
workspace of split sums. linear.py and fp8_linear.py check the arguments; linear_tiles.py says how a
product is cut.

For decoding the bytes of the weight are all that counts. `skinny_kernel`: every program owns some
rows of the weight and reads them in long runs along K. The weight's tile is the left operand (its
rows are the many), x the right one, so that eight rows of x cost no padding. Where there are too
few tiles to fill the device, K is split: each program leaves its partial sum in a workspace and the
last to arrive adds them up in the order of the splits, so equal inputs give equal bits.

`row_kernel` is for one row of x and uses no matrix unit: every program multiplies and adds in
float32 where it read its rows of the weight; threads add up at the end. Its first columns are read
into registers before it waits for the kernel ahead, the next ones into L2: what is left after the
wait is the latency of x alone.

A launch may start before the kernel ahead of it has ended (dispatch.overlap_options): it then asks
L2 for the head of its weights, and waits before it touches anything else.

Knows no model. Invariant: a launch takes counters that no other launch in flight has (a ring, far
longer than what can be in flight), and its last program leaves them zero. Engine thread only, per
device.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from baton_kernels.dispatch import overlap_options
from baton_kernels.layer_ops_triton import silu_times
from baton_kernels.linear import HalfNorm
from baton_kernels.linear_tiles import Product, Tile, cut

_NUM_COUNTERS = 1 << 20


class _Counters:
    """A ring of zeroed counters on one device."""

    def __init__(self, device: torch.device) -> None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("run one linear on this device before a graph is captured")
        self._ring = torch.zeros(_NUM_COUNTERS, dtype=torch.int32, device=device)
        self._next = 0

    def take(self, number: int) -> torch.Tensor:
        """Return `number` adjacent counters, all zero."""
        if number > _NUM_COUNTERS:
            raise ValueError(f"{number} tiles with split K, room for {_NUM_COUNTERS}")
        if self._next + number > _NUM_COUNTERS:
            self._next = 0
        first = self._next
        self._next += -(-number // 4) * 4  # pointers stay aligned to 16 bytes
        return self._ring[first : first + number]


@lru_cache(maxsize=16)
def _counters(device: torch.device) -> _Counters:
    return _Counters(device)


def launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    tile: Tile,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 0.0,
    x_scales: torch.Tensor | None = None,
    weight_scales: torch.Tensor | None = None,
    half_norm: HalfNorm | None = None,
    leaves: HalfNorm | None = None,
    is_gated: bool = False,
    rounds: bool = False,
) -> torch.Tensor:
    """Launch one product with operands as in `linear` and `fp8_linear`, which have checked them.
    Scales are float32, both or none. A tile for one row may have an RMSNorm, the others half-done
    ones: `half_norm` is that of x, and `leaves` is filled. rounds: SwiGLU has the bits of a product
    that is stored first."""
    num_rows, depth = x.shape
    product = Product(num_rows, weight.shape[0], depth, weight.element_size(), is_gated)
    plan = cut(tile, product)
    flags = {
        "HAS_BIAS": bias is not None,
        "HAS_RESIDUAL": residual is not None,
        "HAS_SCALES": x_scales is not None,
        **overlap_options(x),
    }
    if tile.is_row:
        if half_norm is not None or leaves is not None:
            raise ValueError("half_norm, leaves: for tiles of several rows")
        row_kernel[plan.grid](
            x, weight, out, bias, residual, norm_weight, x_scales, weight_scales,
            product.width, depth, weight.stride(0), norm_eps,
            HAS_NORM=norm_weight is not None, **flags, **plan.constants,
        )  # fmt: skip
        return out
    if half_norm is not None:
        x, norm_eps = half_norm.scaled, half_norm.eps
    partials = counters = None
    if plan.num_partials:
        partials = torch.empty(plan.num_partials, dtype=torch.float32, device=x.device)
        counters = _counters(x.device).take(plan.num_tiles)
    skinny_kernel[plan.grid](
        x, weight, out, bias, residual, x_scales, weight_scales, partials, counters,
        None if half_norm is None else half_norm.squares,
        None if leaves is None else leaves.weight,
        None if leaves is None else leaves.scaled,
        None if leaves is None else leaves.squares,
        num_rows, product.width, depth, x.stride(0), weight.stride(0), out.stride(0),
        residual.stride(0) if residual is not None else 0, norm_eps,
        NUM_RUNS=0 if half_norm is None else half_norm.squares.shape[0],
        LEAVES=leaves is not None,
        ROUNDS=rounds, UPCASTS=not x.is_cuda,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        **flags, **plan.constants,
    )  # fmt: skip
    return out


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
    """Prefetch [rows, first .. first + NUM_ELEMENTS) of a weight into L2; LINE elements are 128
    bytes."""
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
    """Compute [M, K] x [N, K] -> [M, N]; with IS_GATED the weight is [2N, K], gate rows then up
    rows.

    Grid: (tiles of M times tiles of N, SPLIT_K); a program reads NUM_STEPS * BLOCK_K columns, that
    NUM_PARTS times: a sum of parts has the same bits whether they are computed by several programs
    or by one. NUM_RUNS > 0: x's rows are half normed, and `squares` has so many sums of each.
    LEAVES: the result is left half normed, too (HalfNorm). ROUNDS: SwiGLU is of the sums as
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
    """Load the sums of squares [runs, rows], with zeros beyond them."""
    PADDED: tl.constexpr = triton.next_power_of_2(NUM_RUNS)
    runs = tl.arange(0, PADDED)[:, None]
    return tl.load(
        squares + runs * M + m[None, :], mask=(runs < NUM_RUNS) & (m < M)[None, :], other=0.0
    )


@triton.jit
def leave_half_norm(  # type: ignore[no-untyped-def]
    result, m, n, run, next_weight, next_scaled, next_squares, M, N
):
    """Write what the next product needs to finish the RMSNorm of a result tile: the stored rows
    times the next norm's weight, and the sums of their squares."""
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
    """Sum one run of columns. Returns: (product, product with the up rows).

    NUM_STAGES > 1: steps are pipelined into shared memory. 1: none is; the first step's w and up
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
    """Add the product of one step to the accumulators. With K_WARPS each warp multiplies its own
    columns, as a batch of products: few rows of the weight are one matrix instruction high, and
    otherwise every warp would compute all of them."""
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
    """Load a tile of weight rows by columns, and the same of the up rows."""
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
    """Load rows of x by columns, with zeros for rows that do not exist."""
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
    """Apply scales, bias, SiLU and residual to the product in float32, and store the result.
    Returns: the stored values."""
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
    """Compute [K] x [N, K] -> [N]; with IS_GATED the weight is [2N, K], gate rows then up rows. The
    norm's factor (x's inverse root mean square) is one number, applied after the product."""
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
    """Load what may be read before the kernel ahead has ended: (rows, up rows, the norm's
    weights)."""
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
    """Add the products of x and the weight rows over `columns` to each thread's sums. Returns: the
    sums."""
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
