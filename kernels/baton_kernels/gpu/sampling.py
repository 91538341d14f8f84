"""The Triton kernels of baton_kernels/sampling.py: a row is split over several programs.

    scan        largest logit and its id (greedy ends here: the last program to arrive combines);
                where a row truncates also the largest of groups of tokens, and the mass
    bound       from these: a distance that the edges of top-k and top-p cannot lie beyond. Where
                few tokens are nearer, they are simply all listed; else:
    histogram   tokens and masses by bins of distance
    find_bins   the bins that the edges lie in
    draw        the largest noise - distance of what is nearer than those bins for certain; tokens
                in those bins (or all within the bound) are listed
    resolve     the edges among them, and the winner

bound, find_bins and resolve (gpu/sampling_edges.py) are one program a row. A token costs its random
bits only where noise could make up for its distance, and logarithms only where these bits are high
enough. Maxima carry ids (the lowest among equals), sums that decide are integers: no result depends
on the split or on who arrives when. Arguments were checked by the door. Graph-safe. No state; any
thread.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from baton_kernels import noise as plain
from baton_kernels import sampling as door
from baton_kernels.dispatch import overlap_options
from baton_kernels.gpu.noise import EXACT, gumbel_of, log, masses, may_reach, ranks, row_key
from baton_kernels.gpu.sampling_edges import (
    MAX_MAXIMA,
    MAX_SPLITS,
    NOTHING,
    NUM_BINS,
    bin_of,
    find_bins,
    find_bound,
    id_of,
    is_truncated,
    largest,
    packed,
    resolve,
    value_of,
)

_MASS_END = tl.constexpr(plain.MASS_END)
_NOISE_MAX = tl.constexpr(plain.NOISE_MAX)
_LEAST_MIN_P = tl.constexpr(door.LEAST_MIN_P)
_LOG2_E = tl.constexpr(1.4426950408889634)

LIST_LENGTH = 1024
"""Tokens of the bins in doubt, per row."""

_TILE = 1024
_WARPS = 4
_REGISTERS = 96
"""Most of a thread of `draw`: what it needs now and then must not keep other programs out."""
_GROUPS = ((8, 256), (MAX_SPLITS.value, 32))
"""Up to so many splits: groups of tokens of each, whose largest are kept. Few constants: each is
compiled of its own."""
_EDGE_WARPS = 8
_PROGRAMS = 1024
"""Programs of a launch that keep every multiprocessor busy."""


def num_splits(num_rows: int, num_tokens: int) -> int:
    """Programs that a row is split over: a power of two."""
    wanted = min(MAX_SPLITS.value, _PROGRAMS // num_rows, triton.cdiv(num_tokens, _TILE))
    return max(1, 1 << (wanted - 1).bit_length()) if wanted > 1 else 1


def draw_tokens(
    logits: torch.Tensor,
    rows: door.SamplingRows,
    needs: door.Needs,
    out: door.DrawnTokens,
    counters: torch.Tensor | None = None,
    *,
    splits: int | None = None,
    tile: int = _TILE,
    warps: int = _WARPS,
    registers: int | None = _REGISTERS,
    list_length: int = LIST_LENGTH,
) -> None:
    """See the door.

    Args:
        splits: programs per row, a power of two; tile: tokens that a program has in hand at once, a
            power of two; warps: of a program; registers: most of a thread of `draw`; list_length: a
            power of two. All for measuring and for tests.
    """
    num_rows, num_tokens = logits.shape
    splits = num_splits(num_rows, num_tokens) if splits is None else splits
    unit = max(tile, _TILE)
    chunk = triton.cdiv(triton.cdiv(num_tokens, splits), unit) * unit
    if counters is None:
        counters = torch.zeros(num_rows, dtype=torch.int32, device=logits.device)
    groups = min(tile, next(size for most, size in _GROUPS if splits <= most))
    room = _Room(num_rows, needs == "truncated", list_length, logits.device)
    shape = (num_tokens, logits.stride(0), chunk, splits)
    options = {"num_warps": warps, **overlap_options(logits), **EXACT}
    over_row = {"TILE": tile, **options}
    grid = (splits, num_rows)
    _scan[grid](
        logits, *rows, *out, room.winners, counters, room.bin_counts, room.bin_masses, room.parts,
        room.maxima, *shape, TRUNCATES=room.truncates, GROUPS=groups, **over_row,
    )  # fmt: skip
    if needs == "greedy":
        return
    if room.truncates:
        num_maxima = splits * groups
        _find_edges(logits, rows, room, shape, num_maxima, over_row, options)
    _draw[grid](
        logits, *rows, out.token_ids, room.winners, counters, room.bounds, room.edges,
        room.list_sizes, room.listed_ids, room.listed, *shape, TRUNCATES=room.truncates,
        LIST_LENGTH=room.list_length, maxnreg=registers, **over_row,
    )  # fmt: skip
    if room.truncates:
        resolve[(num_rows,)](
            logits, *rows, out.token_ids, room.winners, room.bounds, room.edges, room.list_sizes,
            room.listed_ids, room.listed, num_tokens, logits.stride(0), splits,
            LIST_LENGTH=room.list_length, **options | {"num_warps": _EDGE_WARPS},
        )  # fmt: skip


def _find_edges(
    logits: torch.Tensor,
    rows: door.SamplingRows,
    room: _Room,
    shape: tuple[int, int, int, int],
    num_maxima: int,
    over_row: dict[str, Any],
    options: dict[str, Any],
) -> None:
    """What `draw` must know of a row that truncates: see the module."""
    num_tokens, _, _, splits = shape
    grid, edge_grid = (splits, len(logits)), (len(logits),)
    edge = options | {"num_warps": _EDGE_WARPS}
    find_bound[edge_grid](
        *rows, room.winners, room.parts, room.maxima, room.bounds, room.edges, room.list_sizes,
        num_tokens, splits, num_maxima, **edge,
    )  # fmt: skip
    _histogram[grid](
        logits, *rows, room.winners, room.bounds, room.bin_counts, room.bin_masses, *shape,
        **over_row,
    )  # fmt: skip
    find_bins[edge_grid](
        *rows, room.winners, room.bounds, room.bin_counts, room.bin_masses, room.edges,
        num_tokens, **edge,
    )  # fmt: skip


class _Room:
    """What one call's launches leave each other. Nothing is filled: each writes before others
    read."""

    def __init__(
        self, num_rows: int, truncates: bool, list_length: int, device: torch.device
    ) -> None:
        def empty(width: int, dtype: Any) -> torch.Tensor:
            size = (num_rows, width) if truncates else (1, 1)
            return torch.empty(size, dtype=dtype, device=device)

        self.truncates, self.list_length = truncates, list_length if truncates else 1
        self.winners = torch.empty(num_rows, MAX_SPLITS.value + 1, dtype=torch.int64, device=device)
        self.bin_counts = empty(NUM_BINS.value, torch.int32)
        self.bin_masses = empty(NUM_BINS.value, torch.int64)
        self.parts = empty(3 * MAX_SPLITS.value, torch.float32)
        self.maxima = empty(MAX_MAXIMA.value, torch.float32)
        self.bounds = empty(4, torch.float32)
        self.edges = empty(8, torch.int64)
        self.list_sizes = empty(1, torch.int32)
        self.listed_ids = empty(list_length, torch.int32)
        self.listed = empty(list_length, torch.float32)


@triton.jit
def _tile(numbers, ids, end):
    """The next tile, asked for while one is worked on: two loads are under way."""
    return tl.load(numbers + ids, mask=ids < end, other=-float("inf"))


@triton.jit
def _arrive(counter, splits):
    """Whether all other programs of the row have left their results. Resets the counter."""
    tl.debug_barrier()
    is_last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == splits - 1
    if is_last:
        tl.store(counter, 0)
    return is_last


@triton.jit(do_not_specialize=["splits"])
def _scan(
    logits, temperatures, seed_keys, positions, top_ks, top_ps, min_ps, token_ids, best_values,
    winners, counters, bin_counts, bin_masses, parts, maxima, num_tokens, stride, chunk, splits,
    TRUNCATES: tl.constexpr, GROUPS: tl.constexpr, TILE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if tl.load(positions + row) < 0:
        if split == 0:
            tl.store(token_ids + row, 0)
            tl.store(best_values + row, 0.0)
    else:
        start = split * chunk
        end = tl.minimum(start + chunk, num_tokens)
        lanes = tl.arange(0, TILE)
        numbers = logits + row * stride
        is_summed = False
        per_unit, origin, unknown = 0.0, 0.0, 0.0
        if TRUNCATES:
            if is_truncated(row, temperatures, top_ks, top_ps, num_tokens):
                _clear_bins(bin_counts + row * NUM_BINS, bin_masses + row * NUM_BINS, split, splits)
                top_k = tl.load(top_ks + row)
                is_summed = (top_k <= 0) | (top_k >= num_tokens)
                per_unit = tl.div_rn(_LOG2_E * 1.0, tl.load(temperatures + row))
                values = tl.load(numbers + start + lanes, mask=start + lanes < end, other=-1e30)
                origin = tl.max(values.to(tl.float32), 0)
                if (origin < -1e29) & (start < end):  # all of it is masked: no scale to sum by
                    origin, unknown = 0.0, float("inf")
        greatest = tl.full([TILE], -float("inf"), tl.float32)
        tiles = tl.full([TILE], 0, tl.int32) + start
        least = tl.full([TILE], float("inf"), tl.float32)
        total = tl.full([TILE], 0.0, tl.float32)
        is_nan = tl.full([TILE], 0, tl.int32)
        coming = _tile(numbers, start + lanes, end)
        while start < end:
            values = coming.to(tl.float32)
            coming = _tile(numbers, start + TILE + lanes, end)
            is_nan = tl.where(values != values, 1, is_nan)
            tiles = tl.where(values > greatest, start, tiles)
            greatest = tl.where(values > greatest, values, greatest)
            if TRUNCATES:
                least = tl.minimum(least, tl.where(start + lanes < end, values, float("inf")))
                if is_summed:
                    total += tl.exp2((values - origin) * per_unit)
            start += TILE
        winner = tl.max(packed(greatest, tiles + lanes), 0)
        if tl.max(is_nan, 0) > 0:
            winner = packed(tl.full([], float("nan"), tl.float32), split * 0)
        base = winners + row * (MAX_SPLITS + 1)
        tl.store(base + split, winner)
        if TRUNCATES:
            of_row = parts + row * 3 * MAX_SPLITS + split
            tl.store(of_row, tl.min(least, 0))
            tl.store(of_row + MAX_SPLITS, origin)
            tl.store(of_row + 2 * MAX_SPLITS, tl.sum(total, 0) + unknown)
            _leave_groups(maxima + row * MAX_MAXIMA + split * GROUPS, greatest, GROUPS, TILE)
        if _arrive(counters + row, splits):
            best = largest(base, splits)
            value = value_of(best)
            tl.store(base + MAX_SPLITS, best)
            tl.store(token_ids + row, tl.where(tl.abs(value) < float("inf"), id_of(best), 0))
            tl.store(best_values + row, value)


@triton.jit
def _leave_groups(maxima, greatest, GROUPS: tl.constexpr, TILE: tl.constexpr):
    """Neighbours lie in different groups: the likely tokens often are such."""
    of_groups = tl.max(tl.reshape(greatest, [TILE // GROUPS, GROUPS]), 0)
    tl.store(maxima + tl.arange(0, GROUPS), of_groups)


@triton.jit
def _clear_bins(counts, of_masses, split, splits):
    """A program's share of them."""
    part = NUM_BINS // splits
    place = split * part
    while place < (split + 1) * part:
        bins = place + tl.arange(0, NUM_BINS // MAX_SPLITS)
        tl.store(counts + bins, 0)
        tl.store(of_masses + bins, 0)
        place += NUM_BINS // MAX_SPLITS


@triton.jit(do_not_specialize=["splits"])
def _histogram(
    logits, temperatures, seed_keys, positions, top_ks, top_ps, min_ps,
    winners, bounds, bin_counts, bin_masses, num_tokens, stride, chunk, splits,
    TILE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    scale = tl.load(bounds + row * 4)
    if scale > 0.0:
        best = value_of(tl.load(winners + row * (MAX_SPLITS + 1) + MAX_SPLITS))
        temperature = tl.load(temperatures + row)
        top_k = tl.load(top_ks + row)
        is_ranked = (top_k > 0) & (top_k < num_tokens)
        is_nucleus = tl.load(top_ps + row) < 1.0
        start = split * chunk
        end = tl.minimum(start + chunk, num_tokens)
        lanes = tl.arange(0, TILE)
        ones = tl.full([TILE], 1, tl.int32)
        numbers = logits + row * stride
        coming = _tile(numbers, start + lanes, end)
        while start < end:
            start += TILE
            distances = tl.div_rn(best - coming.to(tl.float32), temperature)
            coming = _tile(numbers, start + lanes, end)
            bins = row * NUM_BINS + bin_of(distances, scale)
            is_in = distances < _MASS_END
            if is_ranked:
                tl.atomic_add(bin_counts + bins, ones, mask=is_in, sem="relaxed")
            if is_nucleus:
                mass = masses(distances)
                tl.atomic_add(bin_masses + bins, mass, mask=is_in & (mass > 0), sem="relaxed")


@triton.jit
def _list(is_listed, ids, distances, size, listed_ids, listed, LENGTH: tl.constexpr):
    """Append to a row's list, in any order; what there is no room for is counted only."""
    num_listed = tl.sum(is_listed.to(tl.int32), 0)
    if num_listed > 0:
        first = tl.atomic_add(size, num_listed, sem="relaxed")
        places = first + tl.cumsum(is_listed.to(tl.int32), 0) - 1
        has_room = is_listed & (places < LENGTH)
        tl.store(listed_ids + places, ids, mask=has_room)
        tl.store(listed + places, distances, mask=has_room)


@triton.jit(do_not_specialize=["splits"])
def _draw(
    logits, temperatures, seed_keys, positions, top_ks, top_ps, min_ps, token_ids,
    winners, counters, bounds, edges, list_sizes, listed_ids, listed,
    num_tokens, stride, chunk, splits,
    TRUNCATES: tl.constexpr, LIST_LENGTH: tl.constexpr, TILE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    start = split * chunk
    end = tl.minimum(start + chunk, num_tokens)
    lanes = tl.arange(0, TILE)
    numbers = logits + row * stride
    coming = _tile(numbers, start + lanes, end)
    base = winners + row * (MAX_SPLITS + 1)
    of_row = tl.load(base + MAX_SPLITS)
    temperature = tl.load(temperatures + row)
    position = tl.load(positions + row)
    seed_key = tl.load(seed_keys + row)
    min_p = tl.load(min_ps + row)
    best = tl.full([], float("nan"), tl.float32)
    if (position >= 0) & (temperature > 0.0):
        best = value_of(of_row)
    if tl.abs(best) < float("inf"):
        rate = tl.div_rn(1.0 + 0.0 * temperature, temperature)
        key = row_key(seed_key, position)
        # The most probable token is always in: its score bounds the winner's from below.
        reached = gumbel_of(ranks(key, id_of(of_row)))
        limit = float("inf")
        if min_p >= _LEAST_MIN_P:
            limit = -log(min_p)
        near = float("inf")
        scale, first, last, rank_bin = 1.0, NUM_BINS, NUM_BINS, NUM_BINS
        if TRUNCATES:
            if is_truncated(row, temperatures, top_ks, top_ps, num_tokens):
                scale = tl.load(bounds + row * 4)
                near = tl.load(bounds + row * 4 + 2)
                rank_bin = tl.load(edges + row * 8).to(tl.int32)
                first = tl.load(edges + row * 8 + 3).to(tl.int32)
                last = tl.load(edges + row * 8 + 4).to(tl.int32)
        winner = tl.full([], NOTHING, tl.int64)
        while start < end:
            ids = start + lanes
            start += TILE
            gaps = best - coming.to(tl.float32)
            coming = _tile(numbers, start + lanes, end)
            about = gaps * rate
            # By 1e-5 more: `about` is rounded otherwise than the distance.
            most = tl.minimum(limit, reached * -1.0 + _NOISE_MAX) * 1.00001
            if TRUNCATES:
                if first < NUM_BINS:
                    most = near
            if tl.min(about, 0) <= most:
                is_able = about <= most
                if TRUNCATES:
                    if first < NUM_BINS:
                        distances = tl.div_rn(gaps, temperature)
                        bins = bin_of(distances, scale)
                        is_listed = (bins >= first) & (bins <= last) | (bins == rank_bin)
                        is_listed = is_listed & (about <= tl.minimum(near, _MASS_END))
                        _list(
                            is_listed, ids, distances, list_sizes + row,
                            listed_ids + row * LIST_LENGTH, listed + row * LIST_LENGTH, LIST_LENGTH,
                        )  # fmt: skip
                        is_able = is_able & (bins < first)
                if first > 0:
                    rank = ranks(key, ids)
                    is_able = is_able & may_reach(rank, reached + about)
                    if tl.max(is_able.to(tl.int32), 0) > 0:
                        exact = tl.div_rn(gaps, temperature)
                        is_able = is_able & (exact <= limit)
                        scores = tl.where(is_able, gumbel_of(rank) - exact, -float("inf"))
                        found = tl.max(packed(scores, ids), 0)
                        winner = tl.maximum(winner, found)
                        reached = tl.maximum(reached, value_of(found))
        tl.store(base + split, winner)
        if not TRUNCATES:
            if _arrive(counters + row, splits):
                tl.store(token_ids + row, id_of(largest(base, splits)))
