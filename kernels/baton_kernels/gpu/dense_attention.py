"""Kernel of causal attention over dense keys, for Hopper: chunks that begin a sequence, or whose
cached prefix was gathered. Arguments were checked by its callers.

Flash attention as that chip wants it (Shah et al., FlashAttention-3, 2024): one warp has keys and
values copied by the bulk copy engine, two groups of warps compute, each for half of a tile of
queries. A group's softmax of one tile of keys runs beside its own product of weights and values of
the tile before, and beside the other group's products. A tile's rows are the query heads that share
a kv head, of some tokens. Knows no model and no blocks. No state; any thread.
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

_LOG2_E = 1.4426950408889634
_ROWS = 64
"""Of a group of warps: what one matrix instruction takes."""

NUM_KEYS = 128
NUM_STAGES = 2


@gluon.jit
def _copy_keys(
    keys, values, k_tiles, v_tiles, k_ready, k_free, v_ready, v_free, first_key, column, num_tiles,
    N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The copying warp: every tile, as soon as its place is free."""
    for index in range(num_tiles):
        stage = index % STAGES
        is_later = index // STAGES & 1
        mbarrier.wait(k_free.index(stage), is_later ^ 1)
        mbarrier.expect(k_ready.index(stage), N * D * 2)
        tma.async_copy_global_to_shared(
            keys, [first_key + index * N, column], k_ready.index(stage), k_tiles.index(stage)
        )
        mbarrier.wait(v_free.index(stage), is_later ^ 1)
        mbarrier.expect(v_ready.index(stage), N * D * 2)
        tma.async_copy_global_to_shared(
            values, [first_key + index * N, column], v_ready.index(stage), v_tiles.index(stage)
        )


@gluon.jit
def _weigh(scores, row_max, row_sum, row_position, position, factor, is_masked):
    """Softmax of one more tile. Returns the weights, and by what earlier sums fade."""
    if is_masked:
        visible = position[None, :] <= row_position[:, None]
        scores = gl.where(visible, scores, float("-inf"))
    new_max = gl.maximum(row_max, gl.max(scores, 1) * factor)
    fade = gl.exp2(row_max - new_max)
    weights = gl.exp2(scores * factor - new_max[:, None])
    return weights, new_max, row_sum * fade + gl.sum(weights, 1), fade


@gluon.jit
def _attend_rows(
    query, out, q_tile, k_tiles, v_tiles, k_ready, k_free, v_ready, v_free,
    first_row, num_tokens, start, first, line_offset, kv_head, num_tiles, num_open_tiles,
    query_stride, query_head_stride, out_stride, out_head_stride, factor,
    G: gl.constexpr, N: gl.constexpr, D: gl.constexpr, ROWS: gl.constexpr, TOKENS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """A computing group: ROWS of the tile's rows, over all its tiles of keys."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16]
    )
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16]
    )
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O_LAYOUT, k_width=2)
    LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (D // 8), D // 8], [4, 1], [1, 0])
    O_ROW: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)

    line = line_offset + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LOAD))
    token = first + line // G
    live = (line < TOKENS * G) & (token < num_tokens)
    dim = gl.arange(0, D, layout=gl.SliceLayout(0, LOAD))
    place = (first_row + token).to(gl.int64) * query_stride + (
        kv_head * G + line % G
    ) * query_head_stride
    q = gl.load(query + place[:, None] + dim[None, :], mask=live[:, None], other=0.0)
    q_tile.store(q)
    fence_async_shared()

    row = line_offset + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S_LAYOUT))
    row_position = start + gl.minimum(first + row // G, num_tokens - 1)
    column = gl.arange(0, N, layout=gl.SliceLayout(0, S_LAYOUT))
    row_max = gl.full([ROWS], float("-inf"), gl.float32, layout=gl.SliceLayout(1, S_LAYOUT))
    row_sum = gl.full([ROWS], 0.0, gl.float32, layout=gl.SliceLayout(1, S_LAYOUT))
    nothing = gl.zeros([ROWS, N], gl.float32, layout=S_LAYOUT)
    acc = gl.zeros([ROWS, D], gl.float32, layout=O_LAYOUT)

    mbarrier.wait(k_ready.index(0), 0)
    scores = warpgroup_mma(
        q_tile, k_tiles.index(0).permute((1, 0)), nothing, use_acc=False, is_async=True
    )
    scores = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(k_free.index(0), count=1)
    weights, row_max, row_sum, fade = _weigh(
        scores, row_max, row_sum, row_position, column, factor, num_open_tiles < 1
    )
    p = gl.convert_layout(weights.to(gl.bfloat16), P_LAYOUT)
    mbarrier.wait(k_ready.index(1 % STAGES), 1 // STAGES & 1, pred=num_tiles > 1)
    for index in range(1, num_tiles):
        stage = index % STAGES
        before = (index - 1) % STAGES
        after = (index + 1) % STAGES
        scores = warpgroup_mma(
            q_tile, k_tiles.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True
        )
        mbarrier.wait(v_ready.index(before), (index - 1) // STAGES & 1)
        acc = warpgroup_mma(p, v_tiles.index(before), acc, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[scores])
        mbarrier.arrive(k_free.index(stage), count=1)
        weights, row_max, row_sum, fade = _weigh(
            scores, row_max, row_sum, row_position, index * N + column, factor,
            index >= num_open_tiles,
        )  # fmt: skip
        # Here, not where its keys are wanted: the assembler would not let the product before this
        # run beside the softmax if nothing but arithmetic stood between them and its end.
        mbarrier.wait(k_ready.index(after), (index + 1) // STAGES & 1, pred=index + 1 < num_tiles)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(v_free.index(before), count=1)
        acc = acc * gl.convert_layout(fade, O_ROW)[:, None]
        p = gl.convert_layout(weights.to(gl.bfloat16), P_LAYOUT)
    last = (num_tiles - 1) % STAGES
    mbarrier.wait(v_ready.index(last), (num_tiles - 1) // STAGES & 1)
    acc = warpgroup_mma(p, v_tiles.index(last), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(v_free.index(last), count=1)

    result = (acc / gl.convert_layout(row_sum, O_ROW)[:, None]).to(gl.bfloat16)
    result = gl.convert_layout(result, LOAD)
    target = (first_row + token).to(gl.int64) * out_stride + (
        kv_head * G + line % G
    ) * out_head_stride
    gl.store(out + target[:, None] + dim[None, :], result, mask=live[:, None])


@gluon.jit(do_not_specialize_on_alignment=["query_starts", "starts", "key_starts"])
def _attend_dense(
    query, keys, values, out, query_starts, starts, key_starts,
    query_stride, query_head_stride, out_stride, out_head_stride, factor,
    G: gl.constexpr, D: gl.constexpr, N: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    TOKENS: gl.constexpr = 2 * ROWS // G
    kv_head = gl.program_id(0)
    # The last tile sees most keys: the longest programs begin first.
    tile = gl.num_programs(1) - 1 - gl.program_id(1)
    sequence = gl.program_id(2)
    first_row = gl.load(query_starts + sequence)
    num_tokens = gl.load(query_starts + sequence + 1) - first_row
    first = tile * TOKENS
    if first < num_tokens:
        start = gl.load(starts + sequence)
        first_key = gl.load(key_starts + sequence)
        end = start + gl.minimum(first + TOKENS, num_tokens)
        num_tiles = (end + N - 1) // N
        num_open_tiles = (start + first + 1) // N
        q_tiles = gl.allocate_shared_memory(
            gl.bfloat16, [2, ROWS, D], gl.NVMMASharedLayout.get_default_for([ROWS, D], gl.bfloat16)
        )
        k_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, N, D], keys.layout)
        v_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, N, D], values.layout)
        k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for stage in gl.static_range(STAGES):
            mbarrier.init(k_ready.index(stage), count=1)
            mbarrier.init(v_ready.index(stage), count=1)
            mbarrier.init(k_free.index(stage), count=2)
            mbarrier.init(v_free.index(stage), count=2)
        fence_async_shared()
        gl.warp_specialize(
            [
                (_attend_rows, (
                    query, out, q_tiles.index(0), k_tiles, v_tiles, k_ready, k_free, v_ready,
                    v_free, first_row, num_tokens, start, first, 0, kv_head, num_tiles,
                    num_open_tiles, query_stride, query_head_stride, out_stride, out_head_stride,
                    factor, G, N, D, ROWS, TOKENS, STAGES,
                )),
                (_attend_rows, (
                    query, out, q_tiles.index(1), k_tiles, v_tiles, k_ready, k_free, v_ready,
                    v_free, first_row, num_tokens, start, first, ROWS, kv_head, num_tiles,
                    num_open_tiles, query_stride, query_head_stride, out_stride, out_head_stride,
                    factor, G, N, D, ROWS, TOKENS, STAGES,
                )),
                (_copy_keys, (
                    keys, values, k_tiles, v_tiles, k_ready, k_free, v_ready, v_free, first_key,
                    kv_head * D, num_tiles, N, D, STAGES,
                )),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip


def attend_dense(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    query_starts: torch.Tensor,
    starts: torch.Tensor,
    key_starts: torch.Tensor,
    max_query_len: int,
    scaling: float,
    out: torch.Tensor,
    *,
    num_stages: int = NUM_STAGES,
    num_keys: int = NUM_KEYS,
) -> None:
    """Causal attention of chunks over dense keys.

    Args:
        query: [T, H, D] bfloat16, D 64 or 128.
        keys, values: [S, K, D], heads dense: sequence b's from row key_starts[b] on.
        query_starts [B + 1], starts [B], key_starts [B]: int32.
        out: [T, H, D].
    """
    num_heads, dim = query.shape[1:]
    num_kv_heads = keys.shape[1]
    group = num_heads // num_kv_heads
    block = [num_keys, dim]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)
    described = [
        TensorDescriptor(x, [x.shape[0], num_kv_heads * dim], [x.stride(0), 1], block, layout)
        for x in (keys, values)
    ]
    tiles = -(-max_query_len // (2 * _ROWS // group))
    _attend_dense[(num_kv_heads, tiles, starts.shape[0])](
        query, *described, out, query_starts, starts, key_starts, query.stride(0),
        query.stride(1), out.stride(0), out.stride(1), scaling * _LOG2_E, G=group, D=dim,
        N=num_keys, ROWS=_ROWS, STAGES=num_stages, num_warps=4,
    )  # fmt: skip
