"""Triton kernels of `baton_kernels.block_checksums`, and their launcher. block_checksums.py checks
the arguments.

Two kernels: `_sums` reads every byte, once, and leaves 64 bytes for each piece of 1,024; `_chain`
goes through those in order, four blocks a program. The chain of a block of 2 MB is 2,048 steps
long, whatever the number of blocks. No state; any thread.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from baton_kernels import block_checksums as door

_PIECES = 32
"""Pieces of 1,024 bytes per program of `_sums`: 32 KiB."""

_BLOCKS = 4
"""Blocks per program of `_chain`: one warp, 8 numbers a block."""

_AHEAD = 8
"""Number of pieces whose sums are read before the chain goes through them."""


@triton.jit  # type: ignore[untyped-decorator]
def _added(  # type: ignore[no-untyped-def]
    own, keys, pieces, num_pieces, num_rest_stripes,
    PIECES: tl.constexpr, STRIPES: tl.constexpr, LANES: tl.constexpr, HAS_END: tl.constexpr,
):  # fmt: skip
    """Sum what the stripes of these pieces add to the accumulators. A thread goes through the
    stripes of its own pieces, so nothing is summed between threads."""
    lanes = tl.arange(0, LANES)
    products = tl.zeros((PIECES, LANES), tl.uint64)
    plain = tl.zeros((PIECES, LANES), tl.uint64)
    for stripe in tl.static_range(STRIPES):
        key = tl.load(keys + stripe + lanes).to(tl.uint64, bitcast=True)
        if HAS_END:
            is_rest = (pieces == num_pieces) & (stripe < num_rest_stripes)
            live = ((pieces < num_pieces) | is_rest)[:, None] & (lanes >= 0)[None, :]
            numbers = tl.load(own + stripe * LANES, mask=live, other=0).to(tl.uint64, bitcast=True)
            mixed = tl.where(live, numbers ^ key[None, :], 0)
        else:
            numbers = tl.load(own + stripe * LANES).to(tl.uint64, bitcast=True)
            mixed = numbers ^ key[None, :]
        low = mixed.to(tl.uint32).to(tl.uint64)
        high = (mixed >> 32).to(tl.uint32).to(tl.uint64)
        products += low * high
        plain += numbers
    even, odd = tl.split(tl.reshape(plain, (PIECES, LANES // 2, 2)))
    return products + tl.reshape(tl.join(odd, even), (PIECES, LANES))


@triton.jit(
    do_not_specialize=["num_pieces", "num_rest_stripes"],
    do_not_specialize_on_alignment=["block_ids"],
)  # type: ignore[untyped-decorator]
def _sums(  # type: ignore[no-untyped-def]
    words, block_ids, keys, sums, stride, num_pieces, num_rest_stripes,
    PIECES: tl.constexpr, STRIPES: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    block_id = tl.load(block_ids + row).to(tl.int64)
    pieces = tl.program_id(1) * PIECES + tl.arange(0, PIECES)
    lanes = tl.arange(0, LANES)
    in_range = (pieces <= num_pieces)[:, None] & (lanes >= 0)[None, :]
    own = words + block_id * stride + pieces[:, None] * (STRIPES * LANES) + lanes[None, :]
    if (tl.program_id(1) + 1) * PIECES <= num_pieces:
        total = _added(own, keys, pieces, num_pieces, 0, PIECES, STRIPES, LANES, False)
    else:
        total = _added(
            own, keys, pieces, num_pieces, num_rest_stripes, PIECES, STRIPES, LANES, True
        )
    target = (row * (num_pieces + 1) + pieces)[:, None] * LANES + lanes[None, :]
    tl.store(sums + target, total.to(tl.int64, bitcast=True), mask=in_range)


@triton.jit  # type: ignore[untyped-decorator]
def _one_sum(sums, piece, num_pieces, live):  # type: ignore[no-untyped-def]
    mask = live & (piece < num_pieces)
    return tl.load(sums + piece * 8, mask=mask, other=0).to(tl.uint64, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _link(state, added, key, is_there, PRIME: tl.constexpr):  # type: ignore[no-untyped-def]
    state = state + added
    scrambled = (state ^ (state >> 47) ^ key) * PRIME
    return tl.where(is_there, scrambled, state)


@triton.jit(
    do_not_specialize=["num_blocks", "num_words", "num_pieces", "stride"],
    do_not_specialize_on_alignment=["block_ids"],
)  # type: ignore[untyped-decorator]
def _chain(  # type: ignore[no-untyped-def]
    words, block_ids, keys, sums, out, num_blocks, stride, num_words, num_pieces, length,
    BLOCKS: tl.constexpr, LANES: tl.constexpr, AHEAD: tl.constexpr, PRIME32: tl.constexpr,
    PRIME_END: tl.constexpr, SCRAMBLE: tl.constexpr, LAST: tl.constexpr, MERGE: tl.constexpr,
    S0: tl.constexpr, S1: tl.constexpr, S2: tl.constexpr, S3: tl.constexpr, S4: tl.constexpr,
    S5: tl.constexpr, S6: tl.constexpr, S7: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    lanes = tl.arange(0, LANES)
    live = (rows < num_blocks)[:, None] & (lanes >= 0)[None, :]
    own = sums + rows.to(tl.int64)[:, None] * ((num_pieces + 1) * LANES) + lanes[None, :]
    key = tl.load(keys + SCRAMBLE + lanes).to(tl.uint64, bitcast=True)[None, :]
    lane = lanes + tl.zeros((BLOCKS, LANES), tl.int32)
    state = tl.full((BLOCKS, LANES), S0, tl.uint64)
    state = tl.where(lane == 1, tl.full((BLOCKS, LANES), S1, tl.uint64), state)
    state = tl.where(lane == 2, tl.full((BLOCKS, LANES), S2, tl.uint64), state)
    state = tl.where(lane == 3, tl.full((BLOCKS, LANES), S3, tl.uint64), state)
    state = tl.where(lane == 4, tl.full((BLOCKS, LANES), S4, tl.uint64), state)
    state = tl.where(lane == 5, tl.full((BLOCKS, LANES), S5, tl.uint64), state)
    state = tl.where(lane == 6, tl.full((BLOCKS, LANES), S6, tl.uint64), state)
    state = tl.where(lane == 7, tl.full((BLOCKS, LANES), S7, tl.uint64), state)
    a0 = _one_sum(own, 0, num_pieces, live)
    a1 = _one_sum(own, 1, num_pieces, live)
    a2 = _one_sum(own, 2, num_pieces, live)
    a3 = _one_sum(own, 3, num_pieces, live)
    a4 = _one_sum(own, 4, num_pieces, live)
    a5 = _one_sum(own, 5, num_pieces, live)
    a6 = _one_sum(own, 6, num_pieces, live)
    a7 = _one_sum(own, 7, num_pieces, live)
    for piece in range(0, num_pieces, AHEAD):
        # The next ones are on their way while the chain goes through these.
        b0 = _one_sum(own, piece + 8, num_pieces, live)
        b1 = _one_sum(own, piece + 9, num_pieces, live)
        b2 = _one_sum(own, piece + 10, num_pieces, live)
        b3 = _one_sum(own, piece + 11, num_pieces, live)
        b4 = _one_sum(own, piece + 12, num_pieces, live)
        b5 = _one_sum(own, piece + 13, num_pieces, live)
        b6 = _one_sum(own, piece + 14, num_pieces, live)
        b7 = _one_sum(own, piece + 15, num_pieces, live)
        state = _link(state, a0, key, piece < num_pieces, PRIME32)
        state = _link(state, a1, key, piece + 1 < num_pieces, PRIME32)
        state = _link(state, a2, key, piece + 2 < num_pieces, PRIME32)
        state = _link(state, a3, key, piece + 3 < num_pieces, PRIME32)
        state = _link(state, a4, key, piece + 4 < num_pieces, PRIME32)
        state = _link(state, a5, key, piece + 5 < num_pieces, PRIME32)
        state = _link(state, a6, key, piece + 6 < num_pieces, PRIME32)
        state = _link(state, a7, key, piece + 7 < num_pieces, PRIME32)
        a0, a1, a2, a3, a4, a5, a6, a7 = b0, b1, b2, b3, b4, b5, b6, b7
    rest = tl.load(own + num_pieces * LANES, mask=live, other=0).to(tl.uint64, bitcast=True)
    block_ids = tl.load(block_ids + rows, mask=rows < num_blocks, other=0).to(tl.int64)
    last = words + block_ids[:, None] * stride + (num_words - LANES) + lanes[None, :]
    swapped = words + block_ids[:, None] * stride + (num_words - LANES) + (lanes ^ 1)[None, :]
    numbers = tl.load(last, mask=live, other=0).to(tl.uint64, bitcast=True)
    added = tl.load(swapped, mask=live, other=0).to(tl.uint64, bitcast=True)
    mixed = numbers ^ tl.load(keys + LAST + lanes).to(tl.uint64, bitcast=True)[None, :]
    low = mixed.to(tl.uint32).to(tl.uint64)
    high = (mixed >> 32).to(tl.uint32).to(tl.uint64)
    state = state + rest + added + low * high
    state = state ^ tl.load(keys + MERGE + lanes).to(tl.uint64, bitcast=True)[None, :]
    one, other = tl.split(tl.reshape(state, (BLOCKS, LANES // 2, 2)))
    folded = (one * other) ^ tl.umulhi(one, other)
    start = tl.load(length).to(tl.uint64, bitcast=True)
    end = tl.sum(folded, axis=1) + start
    end = (end ^ (end >> 37)) * tl.full((BLOCKS,), PRIME_END, tl.uint64)
    end = end ^ (end >> 32)
    tl.store(out + rows, end.to(tl.int64, bitcast=True), mask=rows < num_blocks)


def checksums(
    words: torch.Tensor,
    block_ids: torch.Tensor,
    out: torch.Tensor,
    sums: torch.Tensor,
    keys: torch.Tensor,
) -> None:
    """Write the checksums of blocks `block_ids` of `words` [num_blocks, words] int64 into `out`."""
    sum_pieces(words, block_ids, sums, keys)
    chain_pieces(words, block_ids, out, sums, keys)


def sum_pieces(
    words: torch.Tensor, block_ids: torch.Tensor, sums: torch.Tensor, keys: torch.Tensor
) -> None:
    """Write the sums of each 1,024-byte piece of each block into `sums`."""
    num_words = words.shape[1]
    num_pieces = door.num_pieces(num_words)
    _sums[(block_ids.shape[0], triton.cdiv(num_pieces + 1, _PIECES))](
        words, block_ids, keys, sums, words.stride(0), num_pieces,
        door.num_rest_stripes(num_words), PIECES=_PIECES, STRIPES=door.STRIPES,
        LANES=door.LANES, num_warps=4,
    )  # fmt: skip


def chain_pieces(
    words: torch.Tensor,
    block_ids: torch.Tensor,
    out: torch.Tensor,
    sums: torch.Tensor,
    keys: torch.Tensor,
) -> None:
    """Combine the pieces' `sums` of each block, in order, into its checksum in `out`."""
    num_blocks, num_words = block_ids.shape[0], words.shape[1]
    _chain[(triton.cdiv(num_blocks, _BLOCKS),)](
        words, block_ids, keys, sums, out, num_blocks, words.stride(0), num_words,
        door.num_pieces(num_words), door.length_term(num_words, words.device), BLOCKS=_BLOCKS,
        LANES=door.LANES, AHEAD=_AHEAD, PRIME32=door.PRIME32, PRIME_END=door.PRIME_END,
        SCRAMBLE=door.SCRAMBLE_KEYS, LAST=door.LAST_KEYS, MERGE=door.MERGE_KEYS,
        **{f"S{lane}": start for lane, start in enumerate(door.STARTS)}, num_warps=1,
    )  # fmt: skip
