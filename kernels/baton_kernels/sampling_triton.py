"""The Triton kernels of baton_kernels/sampling.py: a row is split over several programs.

    scan        largest logit and its id (greedy ends here: the last program to arrive combines);
                where a row truncates also the largest of groups of tokens, and the mass
    find_bound  from these: a distance that the edges of top-k and top-p cannot lie beyond, by the
                largest of many groups of tokens, which are tokens too. Where few tokens are nearer,
                all within are one bin, the first, and all are listed; else:
    histogram   tokens and masses by bins of distance
    find_bins   from counts and masses by bin, the bins that the edges lie in
    draw        the largest noise - distance of what is nearer than those bins for certain; tokens
                in those bins (or all within the bound) are listed
    resolve     from the listed tokens, the edges; and the winner

find_bound, find_bins and resolve are one program a row. A token costs its random bits only where
noise could make up for its distance, and logarithms only where these bits are high enough. Maxima
carry ids (the lowest among equals), sums that decide are integers: no result depends on the split
or on which program arrives when.

The mass of a whole row is known as a float only, within _MASS_SLACK, where the row is not binned.
If the two ends of that span give two winners, or if the list overflows (thousands of tokens in one
bin, as where all logits are equal), the row itself is read, by one program: slow, as exact.

What a row's program leaves in `bounds`: bins per nat (0: one bin), the bound, the distance beyond
which no token matters to `draw`. In `edges`: the bin of the k-th (NUM_BINS: it cuts nothing that
has mass), how many of it are in, the mass before it; first and last bin that the support's edge may
lie in, the mass before the first; the least and the most that the row's mass may be.

Arguments were checked by baton_kernels/sampling.py. Graph-safe. No state; any thread.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from baton_kernels import gumbel_noise as plain
from baton_kernels import sampling as door
from baton_kernels.dispatch import overlap_options
from baton_kernels.gumbel_noise_triton import (
    EXACT,
    gumbel_of,
    log,
    masses,
    may_reach,
    ranks,
    row_key,
)

NUM_BINS = tl.constexpr(2048)
MAX_MAXIMA = tl.constexpr(4096)
"""Most groups of a row's tokens whose largest logit is kept."""
MAX_SPLITS = tl.constexpr(128)
"""Most programs of a row, each with a slot for its result. The actual number is a run-time
argument, since each constant would compile another kernel."""
NOTHING = tl.constexpr(-(1 << 63))
"""Smallest int64, below every result of `packed`."""

_MASS_END = tl.constexpr(plain.MASS_END)
_LEAST_MIN_P = tl.constexpr(door.LEAST_MIN_P)
_LAST_ID = tl.constexpr(0x7FFFFFFF)
_INFINITY_BITS = tl.constexpr(0x7F800000)
_ROW_TILE = tl.constexpr(2048)
_FEW = tl.constexpr(0.25)
"""Greatest share of the group maxima that may lie within a bound for it to be used as the only bin:
then the tokens within it almost always fit the list."""
_MASS_SLACK = tl.constexpr(2e-4)
"""Relative slack for sums of masses, larger than the rounding of float sums of exponentials."""
_MASS_UNIT = tl.constexpr(float(1 << plain.MASS_BITS))
_NOISE_MAX = tl.constexpr(plain.NOISE_MAX)
_LOG2_E = tl.constexpr(1.4426950408889634)

LIST_LENGTH = 1024
"""Most tokens listed per row from the bins that are in doubt."""

_TILE = 1024
_WARPS = 4
_REGISTERS = 96
"""Most registers per thread of `draw`, so that rarely used code does not lower its occupancy."""
_GROUPS = ((8, 256), (MAX_SPLITS.value, 32))
"""Groups of tokens per program whose largest logit is kept, by the number of splits up to which it
holds. Few values, since each constant compiles another kernel."""
_EDGE_WARPS = 8
_PROGRAMS = 1024
"""Programs per launch that keep every multiprocessor busy."""


def num_splits(num_rows: int, num_tokens: int) -> int:
    """Return the number of programs that a row is split over, a power of two."""
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
    """Launch the draw of one token per row; arguments as in `sampling.draw_tokens`, which has
    checked them.

    Args:
        splits: programs per row, a power of two; tile: tokens that a program has in hand at once, a
            power of two; warps: of a program; registers: most of a thread of `draw`; list_length: a
            power of two. These are for benchmarks and tests.
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
    """Launch the kernels that find the bins in which a row's top-k and top-p edges lie."""
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
    """Scratch tensors that the launches of one call pass to each other. None is initialised: each
    is written before it is read."""

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
    """Load the next tile while one is worked on, so that two loads are in flight."""
    return tl.load(numbers + ids, mask=ids < end, other=-float("inf"))


@triton.jit
def _arrive(counter, splits):
    """Count this program's arrival. Returns: whether all other programs of the row have stored
    their results; then the counter is reset."""
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
    """Store the largest logit of each group of tokens. Neighbours lie in different groups, since
    likely tokens often are neighbours."""
    of_groups = tl.max(tl.reshape(greatest, [TILE // GROUPS, GROUPS]), 0)
    tl.store(maxima + tl.arange(0, GROUPS), of_groups)


@triton.jit
def _clear_bins(counts, of_masses, split, splits):
    """Zero a program's share of the row's bins."""
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
    """Append tokens to a row's list, in any order; those that do not fit are counted only."""
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


@triton.jit
def packed(values, ids):
    """Pack float32 values and int32 token ids into int64, whose maximum is the largest value and,
    among equals, the lowest id. NaN ranks above all; -0 equals 0."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    order = tl.where(values != values, 0x7FFFFFFF, order)
    return (order.to(tl.int64) << 32) | (ids ^ _LAST_ID).to(tl.int64)


@triton.jit
def id_of(both):
    """Extract the token ids from int64 numbers made by `packed`."""
    return (both & _LAST_ID).to(tl.int32) ^ _LAST_ID


@triton.jit
def value_of(both):
    """Extract the float32 values from int64 numbers made by `packed`; NaN stays NaN."""
    order = (both >> 32).to(tl.int32)
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def largest(results, splits):
    """Return the largest of the packed results of a row's programs."""
    places = tl.arange(0, MAX_SPLITS)
    mask = places < splits
    return tl.max(tl.load(results + places, mask=mask, other=NOTHING, cache_modifier=".cg"), 0)


@triton.jit
def is_truncated(row, temperatures, top_ks, top_ps, num_tokens):
    """Return whether a row needs top-k or top-p."""
    top_k = tl.load(top_ks + row)
    is_ranked = (top_k > 0) & (top_k < num_tokens)
    is_nucleus = tl.load(top_ps + row) < 1.0
    return (tl.load(temperatures + row) > 0.0) & (is_ranked | is_nucleus)


@triton.jit
def bin_of(distances, scale):
    """Return the bin of each distance, int32 in [0, NUM_BINS): monotonic, infinite distances
    included."""
    places = tl.minimum(distances, _MASS_END) * scale
    return tl.minimum(places, NUM_BINS - 1.0).to(tl.int32)


@triton.jit
def _best_of_truncated(row, positions, temperatures, top_ks, top_ps, winners, num_tokens):
    """Return the best logit of a row that truncates and whose logits are sound; else NaN."""
    best = tl.full([], float("nan"), tl.float32)
    if tl.load(positions + row) >= 0:
        if is_truncated(row, temperatures, top_ks, top_ps, num_tokens):
            best = value_of(tl.load(winners + row * (MAX_SPLITS + 1) + MAX_SPLITS))
    return best


@triton.jit
def _bound_of(distances, weights, wanted):
    """Return a distance up to which the weights sum to `wanted`, rounded up; infinite if there is
    none."""
    bound = tl.full([], float("inf"), tl.float32)
    if tl.sum(weights, 0) >= wanted:
        # By the upper half of the bits, which are in the distances' order.
        halves = distances.to(tl.int32, bitcast=True) >> 15
        low, high = tl.full([], 0, tl.int32), tl.full([], _INFINITY_BITS >> 15, tl.int32)
        while low < high:
            middle = (low + high) // 2
            if tl.sum(tl.where(halves <= middle, weights, 0.0), 0) >= wanted:
                high = middle
            else:
                low = middle + 1
        bound = ((low << 15) | 0x7FFF).to(tl.float32, bitcast=True)
        bound = tl.where(bound == bound, bound, float("inf"))
    return bound


@triton.jit(do_not_specialize=["splits", "num_maxima", "num_tokens"])
def find_bound(
    temperatures, seed_keys, positions, top_ks, top_ps, min_ps,
    winners, parts, maxima, bounds, edges, list_sizes, num_tokens, splits, num_maxima,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    best = _best_of_truncated(row, positions, temperatures, top_ks, top_ps, winners, num_tokens)
    scale = tl.full([], 0.0, tl.float32)
    if tl.abs(best) < float("inf"):
        temperature = tl.load(temperatures + row)
        top_k = tl.load(top_ks + row)
        is_ranked = (top_k > 0) & (top_k < num_tokens)
        splits_in = tl.arange(0, MAX_SPLITS)
        of_row = parts + row * 3 * MAX_SPLITS + splits_in
        mask = splits_in < splits
        groups = tl.arange(0, MAX_MAXIMA)
        values = tl.load(
            maxima + row * MAX_MAXIMA + groups, mask=groups < num_maxima, other=-float("inf")
        )
        distances = tl.div_rn(best - values, temperature)
        weights = tl.full([MAX_MAXIMA], 1.0, tl.float32)
        wanted = top_k.to(tl.float32)
        total = wanted * 0.0
        if not is_ranked:
            origins = tl.load(of_row + MAX_SPLITS, mask=mask, other=0.0)
            sums = tl.load(of_row + 2 * MAX_SPLITS, mask=mask, other=0.0)
            total = tl.sum(sums * tl.exp(tl.div_rn(origins - best, temperature)), 0)
            weights = tl.exp(-distances)
            wanted = tl.load(top_ps + row) * total * 1.01
        weights = tl.where(distances < float("inf"), weights, 0.0)
        bound = _bound_of(distances, weights, wanted)
        num_near = tl.sum(tl.where(distances <= bound, 1.0, 0.0), 0)
        if (bound < _MASS_END) & (num_near <= num_maxima * _FEW):
            bounds_of = bounds + row * 4
            tl.store(bounds_of + 2, bound * 1.00001)
            edges_of = edges + row * 8
            tl.store(edges_of, tl.where(is_ranked, 0, NUM_BINS).to(tl.int64))
            tl.store(edges_of + 1, top_k.to(tl.int64))
            places = tl.arange(0, 4)  # the mass before, first, last, the mass before the first
            tl.store(edges_of + 2 + places, tl.full([4], 0, tl.int64))
            mass = total * _MASS_UNIT
            tl.store(edges_of + 6, (mass * (1.0 - _MASS_SLACK)).to(tl.int64))
            tl.store(edges_of + 7, (mass * (1.0 + _MASS_SLACK)).to(tl.int64))
        else:
            leasts = tl.load(of_row, mask=mask, other=float("inf"))
            reach = tl.div_rn(best - tl.min(leasts, 0), temperature)
            reach = tl.maximum(tl.minimum(reach, _MASS_END), 1e-6)
            scale = tl.div_rn(reach * 0.0 + NUM_BINS, reach)
        tl.store(list_sizes + row, 0)
    tl.store(bounds + row * 4, scale)


@triton.jit
def _wanted(total, top_p):
    """Return the mass that a nucleus must reach, given the total mass and top-p."""
    part = tl.ceil(total.to(tl.float64) * top_p.to(tl.float64)).to(tl.int64)
    return tl.maximum(tl.minimum(part, total), 1)


@triton.jit(do_not_specialize=["num_tokens"])
def find_bins(
    temperatures, seed_keys, positions, top_ks, top_ps, min_ps,
    winners, bounds, bin_counts, bin_masses, edges, num_tokens, OVERLAPS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    scale = tl.load(bounds + row * 4)
    if scale > 0.0:
        top_k = tl.load(top_ks + row)
        top_p = tl.load(top_ps + row)
        bins = tl.arange(0, NUM_BINS)
        mass = tl.load(bin_masses + row * NUM_BINS + bins)
        rank_bin = tl.full([], NUM_BINS, tl.int32)
        num_in = tl.full([], 0, tl.int32)
        if (top_k > 0) & (top_k < num_tokens):
            counts = tl.load(bin_counts + row * NUM_BINS + bins)
            rank_bin = tl.min(tl.where(tl.cumsum(counts, 0) >= top_k, bins, NUM_BINS), 0)
            num_in = top_k - tl.sum(tl.where(bins < rank_bin, counts, 0), 0)
        before = tl.sum(tl.where(bins < rank_bin, mass, 0), 0)
        upto = before + tl.sum(tl.where(bins == rank_bin, mass, 0), 0)
        first, last, before_first = rank_bin, rank_bin, before
        if top_p < 1.0:
            reached = tl.cumsum(mass, 0)
            first = tl.min(tl.where(reached >= _wanted(before, top_p), bins, NUM_BINS), 0)
            last = tl.min(tl.where(reached >= _wanted(upto, top_p), bins, NUM_BINS), 0)
            before_first = tl.sum(tl.where(bins < first, mass, 0), 0)
        farthest = last
        if rank_bin < NUM_BINS:
            farthest = tl.maximum(last, rank_bin)
        near = tl.div_rn((farthest + 1).to(tl.float32), scale) * 1.00001
        # The last bin has all that lies beyond, too.
        near = tl.where(farthest + 1 >= NUM_BINS, float("inf"), near)
        tl.store(bounds + row * 4 + 2, near)
        edges_of = edges + row * 8
        tl.store(edges_of, rank_bin.to(tl.int64))
        tl.store(edges_of + 1, num_in.to(tl.int64))
        tl.store(edges_of + 2, before)
        tl.store(edges_of + 3, first.to(tl.int64))
        tl.store(edges_of + 4, last.to(tl.int64))
        tl.store(edges_of + 5, before_first)
        tl.store(edges_of + 6, before)
        tl.store(edges_of + 7, before)


@triton.jit(do_not_specialize=["splits", "num_tokens", "stride"])
def resolve(
    logits, temperatures, seed_keys, positions, top_ks, top_ps, min_ps, token_ids,
    winners, bounds, edges, list_sizes, listed_ids, listed, num_tokens, stride, splits,
    LIST_LENGTH: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    temperature = tl.load(temperatures + row)
    of_row = winners + row * (MAX_SPLITS + 1)
    if (tl.load(positions + row) >= 0) & (temperature > 0.0):
        best = value_of(tl.load(of_row + MAX_SPLITS))
        if tl.abs(best) < float("inf"):
            winner = largest(of_row, splits)
            if is_truncated(row, temperatures, top_ks, top_ps, num_tokens):
                key = row_key(tl.load(seed_keys + row), tl.load(positions + row))
                min_p = tl.load(min_ps + row)
                limit = float("inf")
                if min_p >= _LEAST_MIN_P:
                    limit = -log(min_p)
                num_listed = tl.load(list_sizes + row)
                scale = tl.load(bounds + row * 4)
                top_p = tl.load(top_ps + row)
                ids_of, listed_of = listed_ids + row * LIST_LENGTH, listed + row * LIST_LENGTH
                edges_of = edges + row * 8
                found, is_sure = tl.full([], NOTHING, tl.int64), False
                if num_listed <= LIST_LENGTH:
                    found, is_sure = _best_listed(
                        ids_of, listed_of, num_listed, scale, edges_of, top_p, limit, key,
                        LIST_LENGTH,
                    )  # fmt: skip
                if not is_sure:
                    found = _best_of_row(
                        logits + row * stride, num_tokens, best, temperature, scale, edges_of,
                        top_p, limit, key,
                    )  # fmt: skip
                winner = tl.maximum(winner, found)
            tl.store(token_ids + row, id_of(winner))


@triton.jit
def _best_listed(
    listed_ids, listed, num_listed, scale, edges, top_p, limit, key, LENGTH: tl.constexpr
):  # fmt: skip
    """Find the best of the listed tokens that are inside the edges, packed, and whether that is
    certain."""
    places = tl.arange(0, LENGTH)
    mask = places < num_listed
    ids = tl.load(listed_ids + places, mask=mask, other=0)
    distances = tl.load(listed + places, mask=mask, other=float("inf"))
    bits = distances.to(tl.int32, bitcast=True)
    bins = tl.where(mask, bin_of(distances, scale), -1)
    rank_bin = tl.load(edges).to(tl.int32)
    first = tl.load(edges + 3).to(tl.int32)
    last = tl.load(edges + 4).to(tl.int32)
    scores = packed(gumbel_of(ranks(key, ids)) - distances, ids)
    is_in = (bins >= first) & (bins <= last)
    rank_edge = tl.full([], _INFINITY_BITS, tl.int32)
    if rank_bin < NUM_BINS:
        is_ranked = bins == rank_bin
        rank_edge = _least_reaching(bits, is_ranked, is_ranked.to(tl.int64), tl.load(edges + 1))
    is_in = is_in & (bits <= rank_edge) & (distances <= limit)
    is_sure = tl.full([], True, tl.int1)
    found = tl.max(tl.where(is_in, scores, NOTHING), 0)
    if top_p < 1.0:
        mass = masses(distances)
        least = tl.load(edges + 6)
        most = tl.load(edges + 7)
        if rank_bin < NUM_BINS:
            is_ranked = (bins == rank_bin) & (bits <= rank_edge)
            least = tl.load(edges + 2) + tl.sum(tl.where(is_ranked, mass, 0), 0)
            most = least
        is_nucleus = (bins >= first) & (bins <= last)
        before = tl.load(edges + 5)
        edge = _least_reaching(bits, is_nucleus, mass, _wanted(least, top_p) - before)
        found = tl.max(tl.where(is_in & (bits <= edge), scores, NOTHING), 0)
        if most > least:
            edge = _least_reaching(bits, is_nucleus, mass, _wanted(most, top_p) - before)
            is_sure = tl.max(tl.where(is_in & (bits <= edge), scores, NOTHING), 0) == found
    return found, is_sure


@triton.jit
def _least_reaching(bits, is_in, weights, wanted):
    """Return the least bits up to which the weights of the tokens that are in sum to `wanted`; bits
    are in the order of distances."""
    low = tl.min(tl.where(is_in, bits, _INFINITY_BITS), 0)
    high = tl.max(tl.where(is_in, bits, 0), 0)
    while low < high:
        middle = low + (high - low) // 2
        if tl.sum(tl.where(is_in & (bits <= middle), weights, 0), 0) >= wanted:
            high = middle
        else:
            low = middle + 1
    return low


@triton.jit
def _tile_of_row(numbers, offset, num_tokens, best, temperature, scale):
    """Load a tile of a row: ids, distances and bins; the bin is -1 where a token has no mass."""
    ids = offset + tl.arange(0, _ROW_TILE)
    values = tl.load(numbers + ids, mask=ids < num_tokens, other=-float("inf")).to(tl.float32)
    distances = tl.div_rn(best - values, temperature)
    return ids, distances, tl.where(distances < _MASS_END, bin_of(distances, scale), -1)


@triton.jit
def _best_of_row(
    numbers, num_tokens, best, temperature, scale, edges, top_p, limit, key
):  # fmt: skip
    """Find what `_best_listed` would if the list held all tokens of the bins, by reading the row
    itself.

    In three rounds of one loop, so that its code is there once: the edge of top-k, the mass of what
    is left, the edge of top-p.
    """
    rank_bin = tl.load(edges).to(tl.int32)
    first = tl.load(edges + 3).to(tl.int32)
    last = tl.load(edges + 4).to(tl.int32)
    total = tl.load(edges + 2)
    from_bin, to_bin, wanted = rank_bin, rank_bin, tl.load(edges + 1)
    edge = tl.full([], _INFINITY_BITS, tl.int32)
    kind = 1  # 0: the edge of top-k. 1: the mass. 2: the edge of top-p. 3: none.
    if rank_bin < NUM_BINS:
        kind = 0
    else:
        from_bin, to_bin, total = 0, NUM_BINS, total * 0
        kind = 1
    while kind < 3:
        # Of all bits there are: one round of the search for the mass up to an edge that is known.
        low, high = tl.full([], 0, tl.int32), edge
        if kind == 1:
            low = high
        is_searching = True
        while is_searching:
            middle = low + (high - low) // 2
            weight = _weight_of_row(
                numbers, num_tokens, best, temperature, scale, from_bin, to_bin, middle, kind == 0
            )
            if kind == 1:
                total += weight
                is_searching = False
            else:
                if weight >= wanted:
                    high = middle
                else:
                    low = middle + 1
                is_searching = low < high
        if kind != 1:
            edge = low
            limit = tl.minimum(limit, edge.to(tl.float32, bitcast=True))
        kind += 1
        if top_p >= 1.0:
            kind = 3
        if kind == 2:
            from_bin, to_bin, wanted = first, last, _wanted(total, top_p) - tl.load(edges + 5)
            edge = tl.full([], _INFINITY_BITS, tl.int32)
    winner = tl.full([], NOTHING, tl.int64)
    offset = 0
    while offset < num_tokens:
        ids, distances, bins = _tile_of_row(numbers, offset, num_tokens, best, temperature, scale)
        is_in = (bins >= first) & (bins <= last) & (distances <= limit)
        scores = gumbel_of(ranks(key, ids)) - distances
        winner = tl.maximum(winner, tl.max(tl.where(is_in, packed(scores, ids), NOTHING), 0))
        offset += _ROW_TILE
    return winner


@triton.jit
def _weight_of_row(
    numbers, num_tokens, best, temperature, scale, first, last, edge, counts
):  # fmt: skip
    """Sum, over tokens of bins first to last with bits up to `edge`, their number or their mass."""
    weight = tl.full([], 0, tl.int64)
    offset = 0
    while offset < num_tokens:
        _, distances, bins = _tile_of_row(numbers, offset, num_tokens, best, temperature, scale)
        is_in = (bins >= first) & (bins <= last) & (distances.to(tl.int32, bitcast=True) <= edge)
        each = masses(distances)
        if counts:
            each = each * 0 + 1
        weight += tl.sum(tl.where(is_in, each, 0), 0)
        offset += _ROW_TILE
    return weight
