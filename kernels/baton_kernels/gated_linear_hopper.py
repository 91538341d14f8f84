"""SwiGLU of many rows in one launch, for Hopper: the product with gate rows and up rows of a
weight, then silu(gate) * up on the accumulators. The library's product would write twice the
columns to memory, and a second launch would read them back.

Persistent programs, one a multiprocessor. One warp has tiles copied by the bulk copy engine (TMA),
two warp groups multiply, each half of the rows; while they finish a tile, the next one's first
columns are being copied. Tiles that run at a time are near one another, so that L2 serves most of
them. Knows no model. No state; any thread.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from baton_kernels.hopper_support import GATED_COLUMNS, GATED_DEPTH, GATED_ROWS

_NUM_STAGES = 4
"""Number of tiles along K that are in flight, which is what shared memory holds."""

_GROUP_M = 16
"""Number of row tiles that run together and share columns of the weight while these are in L2."""


@gluon.jit
def _place(tile, num_m, num_n, GROUP_M: gl.constexpr):
    """Return the row tile and the column tile of a tile number."""
    group = tile // (GROUP_M * num_n)
    first = group * GROUP_M
    height = gl.minimum(num_m - first, GROUP_M)
    within = tile % (GROUP_M * num_n)
    return first + within % height, within // height


@gluon.jit
def _copy_tiles(
    x, weight, x_tiles, both_tiles, ready, free, num_m, num_n, num_steps, width,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
):  # fmt: skip
    """Copy, in the copying warp, every K step of every tile into shared memory as soon as its
    buffer is free."""
    count = 0
    for tile in range(gl.program_id(0), num_m * num_n, gl.num_programs(0)):
        m, n = _place(tile, num_m, num_n, GROUP_M)
        for step in range(num_steps):
            stage = count % STAGES
            mbarrier.wait(free.index(stage), (count // STAGES & 1) ^ 1)
            bar = ready.index(stage)
            mbarrier.expect(bar, (BM + 2 * BN) * BK * 2)
            column = step * BK
            tma.async_copy_global_to_shared(x, [m * BM, column], bar, x_tiles.index(stage))
            tma.async_copy_global_to_shared(
                weight, [n * BN, column], bar, both_tiles.index(2 * stage)
            )
            tma.async_copy_global_to_shared(
                weight, [width + n * BN, column], bar, both_tiles.index(2 * stage + 1)
            )
            count += 1


@gluon.jit
def _multiply(
    out, x_halves, weight_tiles, out_half, ready, free, num_m, num_n, num_steps,
    PART: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
    GROUP_M: gl.constexpr, OUT_PARTS: gl.constexpr,
):  # fmt: skip
    """Multiply and gate, in a computing warp group, half of each tile's rows; gate and up columns
    by one instruction."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 2 * BN, 16]
    )
    HALF: gl.constexpr = BM // 2
    out_parts = out_half._reinterpret(gl.bfloat16, [BN // 64, HALF, 64], OUT_PARTS)  # noqa: SLF001
    count = 0
    for tile in range(gl.program_id(0), num_m * num_n, gl.num_programs(0)):
        m, n = _place(tile, num_m, num_n, GROUP_M)
        sums = gl.zeros([HALF, 2 * BN], gl.float32, layout=LAYOUT)
        stage = count % STAGES
        mbarrier.wait(ready.index(stage), count // STAGES & 1)
        rows = x_halves.index(stage * 2 + PART)
        sums = warpgroup_mma(
            rows, weight_tiles.index(stage).permute((1, 0)), sums, use_acc=False, is_async=True
        )
        sums = warpgroup_mma_wait(1, deps=[sums])
        count += 1
        for _ in range(1, num_steps):
            stage = count % STAGES
            mbarrier.wait(ready.index(stage), count // STAGES & 1)
            rows = x_halves.index(stage * 2 + PART)
            sums = warpgroup_mma(
                rows, weight_tiles.index(stage).permute((1, 0)), sums, is_async=True
            )
            sums = warpgroup_mma_wait(1, deps=[sums])  # that of the step before is over
            mbarrier.arrive(free.index((count - 1) % STAGES), count=1)
            count += 1
        sums = warpgroup_mma_wait(0, deps=[sums])
        mbarrier.arrive(free.index((count - 1) % STAGES), count=1)
        gate, up = gl.split(gl.permute(gl.reshape(sums, [HALF, 2, BN]), (0, 2, 1)))
        result = gate / (1.0 + gl.exp2(gate * -1.4426950408889634)) * up
        tma.store_wait(0)  # the tile before has left
        out_half.store(result.to(gl.bfloat16))
        fence_async_shared()
        for part in gl.static_range(BN // 64):
            tma.async_copy_shared_to_global(
                out, [m * BM + PART * HALF, n * BN + part * 64], out_parts.index(part)
            )
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_m"])
def gated_product(
    x, weight, out, num_m, num_n, num_steps, width,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
):  # fmt: skip
    """Compute silu(gate) * up of [M, K] x [2 N, K] -> [M, N] with persistent programs."""
    HALF: gl.constexpr = BM // 2
    HALVES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, BK], gl.bfloat16)
    OUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, BN], gl.bfloat16)
    OUT_PARTS: gl.constexpr = out.layout
    # One memory, seen as what is copied at once, and as what is multiplied at once.
    x_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BM, BK], x.layout)
    x_halves = x_tiles._reinterpret(gl.bfloat16, [STAGES * 2, HALF, BK], HALVES)  # noqa: SLF001
    both_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES * 2, BN, BK], weight.layout)
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([2 * BN, BK], gl.bfloat16)
    weight_tiles = both_tiles._reinterpret(gl.bfloat16, [STAGES, 2 * BN, BK], WEIGHTS)  # noqa: SLF001
    out_tiles = gl.allocate_shared_memory(gl.bfloat16, [2, HALF, BN], OUT)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (
                out, x_halves, weight_tiles, out_tiles.index(0), ready, free, num_m, num_n,
                num_steps, 0, BM, BN, STAGES, GROUP_M, OUT_PARTS,
            )),
            (_multiply, (
                out, x_halves, weight_tiles, out_tiles.index(1), ready, free, num_m, num_n,
                num_steps, 1, BM, BN, STAGES, GROUP_M, OUT_PARTS,
            )),
            (_copy_tiles, (
                x, weight, x_tiles, both_tiles, ready, free, num_m, num_n, num_steps, width,
                BM, BN, BK, STAGES, GROUP_M,
            )),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


def silu_gated(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *, group_m: int = _GROUP_M
) -> torch.Tensor:
    """Compute silu(x @ gate.T) * (x @ up.T) for x [M, K] and weight [2N, K] (gate rows, then up
    rows) into out [M, N], where `hopper.can_gate`.

    Args:
        group_m: row tiles that share columns; for benchmarks.
    """
    num_rows, depth = x.shape
    width = out.shape[1]
    blocks = ([GATED_ROWS, GATED_DEPTH], [GATED_COLUMNS, GATED_DEPTH], [GATED_ROWS // 2, 64])
    described = [
        TensorDescriptor(
            tensor,
            list(tensor.shape),
            [tensor.stride(0), 1],
            block,
            gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16),
        )
        for tensor, block in zip((x, weight, out), blocks, strict=True)
    ]
    num_m, num_n = -(-num_rows // GATED_ROWS), width // GATED_COLUMNS
    num_programs = min(num_m * num_n, _num_multiprocessors(x.device))
    gated_product[(num_programs,)](
        *described, num_m, num_n, depth // GATED_DEPTH, width, BM=GATED_ROWS, BN=GATED_COLUMNS,
        BK=GATED_DEPTH, STAGES=_NUM_STAGES, GROUP_M=group_m, num_warps=4,
    )  # fmt: skip
    return out


def _num_multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
