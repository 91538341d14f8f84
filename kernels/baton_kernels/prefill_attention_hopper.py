"""Prefill attention over the paged cache for Hopper GPUs: plain causal attention, written in Gluon
for that chip's own instructions; prefill_attention_triton.py covers all other cases.

Flash attention as that chip wants it (Shah et al., FlashAttention-3, 2024): one warp has blocks of
keys and values copied by the bulk copy engine, two groups of warps compute, each for half of a tile
of queries. A group's softmax of one tile of keys runs beside its own product of weights and values
of the tile before, and beside the other group's products. A tile's rows are the query heads that
share a kv head, of some tokens. Knows no model. No state; any thread.
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

from baton_kernels.block_rows import BlockRows
from baton_kernels.hopper_support import GROUP_ROWS, NUM_KEYS, token_matrix

_LOG2_E = 1.4426950408889634
_NUM_STAGES = 2
"""Number of key tiles, and of value tiles, in flight, which is what shared memory holds."""


@gluon.jit
def _copy_blocks(
    matrix, tiles, ready, table, index, last_block, row_step, first_matrix, pitch, stage,
    N: gl.constexpr, D: gl.constexpr, P: gl.constexpr,
):  # fmt: skip
    """Copy one tile block by block, 64 columns at a time, as the tile lies in shared memory (column
    halves outermost). Beyond the last block that block is copied again, for rows that are
    masked."""
    BLOCKS: gl.constexpr = N // P
    HALVES: gl.constexpr = D // 64
    mbarrier.expect(ready.index(stage), N * D * 2)
    for number in gl.static_range(BLOCKS):
        block = gl.load(table + gl.minimum(index * BLOCKS + number, last_block))
        row = (block * row_step + first_matrix) * pitch
        for half in gl.static_range(HALVES):
            tma.async_copy_global_to_shared(
                matrix, [row, half * 64], ready.index(stage),
                tiles.index((stage * HALVES + half) * BLOCKS + number),
            )  # fmt: skip


@gluon.jit
def _copy_keys(
    keys, values, k_tiles, v_tiles, k_ready, k_free, v_ready, v_free, table, last_block, row_step,
    first_matrix, pitch, num_tiles, N: gl.constexpr, D: gl.constexpr, P: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Copy, in the copying warp, every tile of keys and values as soon as its buffer is free."""
    for index in range(num_tiles):
        stage = index % STAGES
        is_later = index // STAGES & 1
        mbarrier.wait(k_free.index(stage), is_later ^ 1)
        _copy_blocks(
            keys, k_tiles, k_ready, table, index, last_block, row_step, first_matrix, pitch,
            stage, N, D, P,
        )  # fmt: skip
        mbarrier.wait(v_free.index(stage), is_later ^ 1)
        _copy_blocks(
            values, v_tiles, v_ready, table, index, last_block, row_step, first_matrix, pitch,
            stage, N, D, P,
        )  # fmt: skip


@gluon.jit
def _weigh(scores, row_max, row_sum, row_position, position, factor, is_masked):
    """Add one tile of scores to the softmax. Returns: the weights, and the factor by which earlier
    sums are scaled down."""
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
    first_row, num_tokens, start, first, line_offset, kv_head, num_tiles, num_open_tiles, end,
    query_stride, query_head_stride, out_stride, out_head_stride, factor,
    G: gl.constexpr, N: gl.constexpr, D: gl.constexpr, ROWS: gl.constexpr, TOKENS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Attend, in a computing warp group, for ROWS of the tile's rows over all its tiles of keys."""
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
    if num_tiles * N > end:
        # Slots of nobody: no weight is theirs, but NaN times nothing were NaN. Both groups do it.
        V_LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (D // 8), D // 8], [4, 1], [1, 0])
        position = (num_tiles - 1) * N + gl.arange(0, N, layout=gl.SliceLayout(1, V_LOAD))
        v = v_tiles.index(last).load(V_LOAD)
        v_tiles.index(last).store(gl.where((position < end)[:, None], v, gl.zeros_like(v)))
        fence_async_shared()
    acc = warpgroup_mma(p, v_tiles.index(last), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(v_free.index(last), count=1)

    result = (acc / gl.convert_layout(row_sum, O_ROW)[:, None]).to(gl.bfloat16)
    result = gl.convert_layout(result, LOAD)
    target = (first_row + token).to(gl.int64) * out_stride + (
        kv_head * G + line % G
    ) * out_head_stride
    gl.store(out + target[:, None] + dim[None, :], result, mask=live[:, None])


@gluon.jit
def _find(query_starts, num_sequences, TOKENS: gl.constexpr):
    """Find the tile of this program: sequences have tiles one after the other, as many as each
    needs. Returns: (sequence, its first row, its number of tokens, tile); tile -1: there are no
    more."""
    place = gl.program_id(1)
    before = 0
    sequence = 0
    first_row = 0
    num_tokens = 0
    tile = -1
    begin = gl.load(query_starts)
    for number in range(num_sequences):
        end = gl.load(query_starts + number + 1)
        after = before + (end - begin + TOKENS - 1) // TOKENS
        is_it = (before <= place) & (place < after)
        sequence = gl.where(is_it, number, sequence)
        first_row = gl.where(is_it, begin, first_row)
        num_tokens = gl.where(is_it, end - begin, num_tokens)
        # The last tile sees most keys: the longest programs begin first.
        tile = gl.where(is_it, after - 1 - place, tile)
        before = after
        begin = end
    return sequence, first_row, num_tokens, tile


@gluon.jit(
    do_not_specialize=["table_stride", "num_sequences"],
    do_not_specialize_on_alignment=["block_tables", "query_starts", "starts"],
)
def _attend_paged(
    query, keys, values, out, block_tables, query_starts, starts,
    query_stride, query_head_stride, out_stride, out_head_stride, table_stride,
    rows_per_block, head_step, pitch, factor, num_sequences,
    G: gl.constexpr, D: gl.constexpr, N: gl.constexpr, P: gl.constexpr, ROWS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    TOKENS: gl.constexpr = 2 * ROWS // G
    TILES: gl.constexpr = STAGES * (D // 64) * (N // P)
    kv_head = gl.program_id(0)
    sequence, first_row, num_tokens, tile = _find(query_starts, num_sequences, TOKENS)
    first = tile * TOKENS
    if tile >= 0:
        start = gl.load(starts + sequence)
        end = start + gl.minimum(first + TOKENS, num_tokens)
        num_tiles = (end + N - 1) // N
        num_open_tiles = (start + first + 1) // N
        table = block_tables + sequence.to(gl.int64) * table_stride
        q_tiles = gl.allocate_shared_memory(
            gl.bfloat16, [2, ROWS, D], gl.NVMMASharedLayout.get_default_for([ROWS, D], gl.bfloat16)
        )
        # One memory, seen as what is copied at once, and as what is multiplied at once.
        TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([N, D], gl.bfloat16)
        k_parts = gl.allocate_shared_memory(gl.bfloat16, [TILES, P, 64], keys.layout)
        v_parts = gl.allocate_shared_memory(gl.bfloat16, [TILES, P, 64], values.layout)
        k_tiles = k_parts._reinterpret(gl.bfloat16, [STAGES, N, D], TILE)  # noqa: SLF001
        v_tiles = v_parts._reinterpret(gl.bfloat16, [STAGES, N, D], TILE)  # noqa: SLF001
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
                    num_open_tiles, end, query_stride, query_head_stride, out_stride,
                    out_head_stride, factor, G, N, D, ROWS, TOKENS, STAGES,
                )),
                (_attend_rows, (
                    query, out, q_tiles.index(1), k_tiles, v_tiles, k_ready, k_free, v_ready,
                    v_free, first_row, num_tokens, start, first, ROWS, kv_head, num_tiles,
                    num_open_tiles, end, query_stride, query_head_stride, out_stride,
                    out_head_stride, factor, G, N, D, ROWS, TOKENS, STAGES,
                )),
                (_copy_keys, (
                    keys, values, k_parts, v_parts, k_ready, k_free, v_ready, v_free, table,
                    (end - 1) // P, rows_per_block, kv_head * head_step, pitch, num_tiles, N, D, P,
                    STAGES,
                )),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip


def prefill_attention(
    query: torch.Tensor,
    rows: BlockRows,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    starts: torch.Tensor,
    max_query_len: int,
    scaling: float,
    out: torch.Tensor,
) -> None:
    """Launch plain causal attention, where `hopper.can_run`; arguments as in
    `prefill_attention.prefill_attention`, which has checked them. A sequence without tokens costs
    nothing."""
    if starts.shape[0] == 0 or max_query_len == 0 or rows.values is None:
        return
    num_heads, dim = query.shape[1:]
    group = num_heads // rows.num_heads
    size = rows.block_size
    # With rows as a third dimension of the copies the whole was 15 % slower (one run of each).
    pitch, num_tokens = token_matrix(rows.keys)
    block = [size, 64]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)
    described = [
        TensorDescriptor(x, [num_tokens, dim], [dim, 1], block, layout)
        for x in (rows.keys, rows.values)
    ]
    # As many as all rows fill, and one that is not full for each sequence.
    tiles = query.shape[0] // (2 * GROUP_ROWS // group) + starts.shape[0]
    _attend_paged[(rows.num_heads, tiles)](
        query, *described, out, block_tables, query_starts, starts, query.stride(0),
        query.stride(1), out.stride(0), out.stride(1), block_tables.stride(0),
        rows.rows_per_block, rows.head_step, pitch, scaling * _LOG2_E, starts.shape[0],
        G=group, D=dim, N=NUM_KEYS, P=size, ROWS=GROUP_ROWS, STAGES=_NUM_STAGES, num_warps=4,
    )  # fmt: skip
