"""Where a row's support ends, one program a row: the Triton kernels of draw_tokens beside those
that pass over the logits (gpu/sampling.py), and what both share.

find_bound   no edge lies beyond it: by the largest of many groups of tokens, which are tokens too
find_bins    from counts and masses by bin, the bins that the edges lie in
resolve      from the tokens in those bins, the edges; and the winner

A list that overflows (thousands of tokens in one bin, as where all logits are equal) is read from
the row itself: slow, as exact. What a row's program leaves in `bounds`: bins per nat, the bound,
the distance beyond which no token matters to `draw`. In `edges`: the bin of the k-th (NUM_BINS: it
cuts nothing that has mass), how many of it are in, the mass before it; first and last bin that the
support's edge may lie in, the mass before the first. Pure; device code.
"""

from __future__ import annotations

import triton
import triton.language as tl

from baton_kernels import noise as plain
from baton_kernels.gpu.noise import gumbel_of, log, masses, ranks, row_key
from baton_kernels.sampling import LEAST_MIN_P

NUM_BINS = tl.constexpr(2048)
MAX_SPLITS = tl.constexpr(64)
"""Places for the results of a row's programs. How many there are is no constant: each number would
be compiled of its own."""
NOTHING = tl.constexpr(-(1 << 63))
"""Below whatever `packed` gives."""

_MASS_END = tl.constexpr(plain.MASS_END)
_LEAST_MIN_P = tl.constexpr(LEAST_MIN_P)
_LAST_ID = tl.constexpr(0x7FFFFFFF)
_INFINITY_BITS = tl.constexpr(0x7F800000)
_ROW_TILE = tl.constexpr(4096)


@triton.jit
def packed(values, ids):
    """float32, int32 -> int64: the larger value is larger, and among equals the lower id. NaN is
    above all, zeros are equal."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    order = tl.where(values != values, 0x7FFFFFFF, order)
    return (order.to(tl.int64) << 32) | (ids ^ _LAST_ID).to(tl.int64)


@triton.jit
def id_of(both):
    """Of `packed`."""
    return (both & _LAST_ID).to(tl.int32) ^ _LAST_ID


@triton.jit
def value_of(both):
    """Of `packed`; its NaN is NaN."""
    order = (both >> 32).to(tl.int32)
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def largest(results, splits):
    """Of the packed results of a row's programs."""
    places = tl.arange(0, MAX_SPLITS)
    mask = places < splits
    return tl.max(tl.load(results + places, mask=mask, other=NOTHING, cache_modifier=".cg"), 0)


@triton.jit
def is_truncated(row, temperatures, top_ks, top_ps, num_tokens):
    """Whether a row asks for top-k or top-p."""
    top_k = tl.load(top_ks + row)
    is_ranked = (top_k > 0) & (top_k < num_tokens)
    is_nucleus = tl.load(top_ps + row) < 1.0
    return (tl.load(temperatures + row) > 0.0) & (is_ranked | is_nucleus)


@triton.jit
def bin_of(distances, scale):
    """int32 in [0, NUM_BINS), never falling; where the distance is infinite too."""
    places = tl.minimum(distances, _MASS_END) * scale
    return tl.minimum(places, NUM_BINS - 1.0).to(tl.int32)


@triton.jit
def _best_of_truncated(row, positions, temperatures, top_ks, top_ps, winners, num_tokens):
    """The best logit of a row that truncates and is sound; else NaN."""
    best = tl.full([], float("nan"), tl.float32)
    if tl.load(positions + row) >= 0:
        if is_truncated(row, temperatures, top_ks, top_ps, num_tokens):
            best = value_of(tl.load(winners + row * (MAX_SPLITS + 1) + MAX_SPLITS))
    return best


@triton.jit(do_not_specialize=["splits", "num_maxima"])
def find_bound(
    temperatures, seed_keys, positions, top_ks, top_ps, min_ps,
    winners, parts, maxima, bounds, list_sizes, num_tokens, splits, num_maxima,
    MAXIMA: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    best = _best_of_truncated(row, positions, temperatures, top_ks, top_ps, winners, num_tokens)
    if tl.abs(best) < float("inf"):
        temperature = tl.load(temperatures + row)
        top_k = tl.load(top_ks + row)
        is_ranked = (top_k > 0) & (top_k < num_tokens)
        splits_in = tl.arange(0, MAX_SPLITS)
        of_row = parts + row * 3 * MAX_SPLITS + splits_in
        mask = splits_in < splits
        leasts = tl.load(of_row, mask=mask, other=float("inf"))
        groups = tl.arange(0, MAXIMA)
        values = tl.load(
            maxima + row * MAXIMA + groups, mask=groups < num_maxima, other=-float("inf")
        )
        distances = tl.div_rn(best - values, temperature)
        weights = tl.full([MAXIMA], 1.0, tl.float32)
        wanted = top_k.to(tl.float32)
        if not is_ranked:
            # More than all the mass there is, by the roundings of what was summed in floats.
            origins = tl.load(of_row + MAX_SPLITS, mask=mask, other=0.0)
            sums = tl.load(of_row + 2 * MAX_SPLITS, mask=mask, other=0.0)
            total = tl.sum(sums * tl.exp(tl.div_rn(origins - best, temperature)), 0)
            weights = tl.exp(-distances)
            wanted = tl.load(top_ps + row) * total * 1.01
        weights = tl.where(distances < float("inf"), weights, 0.0)
        bound = float("inf")
        if tl.sum(weights, 0) >= wanted:
            # By the upper half of the bits, which are in the distances' order; rounded up.
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
        reach = tl.div_rn(best - tl.min(leasts, 0), temperature)
        reach = tl.maximum(tl.minimum(tl.minimum(reach, bound), _MASS_END), 1e-6)
        tl.store(bounds + row * 4, tl.div_rn(reach * 0.0 + NUM_BINS, reach))
        tl.store(bounds + row * 4 + 1, bound)
        tl.store(list_sizes + row, 0)


@triton.jit
def _wanted(total, top_p):
    """The mass that a nucleus reaches, of a total."""
    part = tl.ceil(total.to(tl.float64) * top_p.to(tl.float64)).to(tl.int64)
    return tl.maximum(tl.minimum(part, total), 1)


@triton.jit(do_not_specialize=["splits"])
def find_bins(
    temperatures, seed_keys, positions, top_ks, top_ps, min_ps,
    winners, bounds, bin_counts, bin_masses, edges, num_tokens, splits, OVERLAPS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    best = _best_of_truncated(row, positions, temperatures, top_ks, top_ps, winners, num_tokens)
    if tl.abs(best) < float("inf"):
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
        first, last, before_first = rank_bin, rank_bin, before
        if top_p < 1.0:
            if rank_bin == NUM_BINS:
                # Of all tokens: what lay beyond the bound was summed program by program.
                places = tl.arange(0, MAX_SPLITS)
                rests = winners + row * (MAX_SPLITS + 1) + places
                before += tl.sum(tl.load(rests, mask=places < splits, other=0), 0)
            upto = before + tl.sum(tl.where(bins == rank_bin, mass, 0), 0)
            reached = tl.cumsum(mass, 0)
            first = tl.min(tl.where(reached >= _wanted(before, top_p), bins, NUM_BINS), 0)
            last = tl.min(tl.where(reached >= _wanted(upto, top_p), bins, NUM_BINS), 0)
            before_first = tl.sum(tl.where(bins < first, mass, 0), 0)
        farthest = last
        if rank_bin < NUM_BINS:
            farthest = tl.maximum(last, rank_bin)
        near = tl.div_rn((farthest + 1).to(tl.float32), tl.load(bounds + row * 4))
        # The last bin has all that lies beyond, too; none of that matters beyond the bound.
        near = tl.where(farthest + 1 >= NUM_BINS, float("inf"), near)
        near = tl.minimum(near, tl.load(bounds + row * 4 + 1)) * 1.00001
        tl.store(bounds + row * 4 + 2, near)
        tl.store(edges + row * 8, rank_bin.to(tl.int64))
        tl.store(edges + row * 8 + 1, num_in.to(tl.int64))
        tl.store(edges + row * 8 + 2, before)
        tl.store(edges + row * 8 + 3, first.to(tl.int64))
        tl.store(edges + row * 8 + 4, last.to(tl.int64))
        tl.store(edges + row * 8 + 5, before_first)


@triton.jit(do_not_specialize=["splits"])
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
                if num_listed <= LIST_LENGTH:
                    found = _best_listed(
                        listed_ids + row * LIST_LENGTH, listed + row * LIST_LENGTH, num_listed,
                        tl.load(bounds + row * 4), edges + row * 8, tl.load(top_ps + row), limit,
                        key, LIST_LENGTH,
                    )  # fmt: skip
                else:
                    found = _best_of_row(
                        logits + row * stride, num_tokens, best, temperature,
                        tl.load(bounds + row * 4), edges + row * 8, tl.load(top_ps + row), limit,
                        key,
                    )  # fmt: skip
                winner = tl.maximum(winner, found)
            tl.store(token_ids + row, id_of(winner))


@triton.jit
def _best_listed(
    listed_ids, listed, num_listed, scale, edges, top_p, limit, key, LENGTH: tl.constexpr
):  # fmt: skip
    """The best of the listed tokens that turn out to be in, packed."""
    places = tl.arange(0, LENGTH)
    mask = places < num_listed
    ids = tl.load(listed_ids + places, mask=mask, other=0)
    distances = tl.load(listed + places, mask=mask, other=float("inf"))
    bits = distances.to(tl.int32, bitcast=True)
    bins = tl.where(mask, bin_of(distances, scale), -1)
    mass = masses(distances)
    rank_bin = tl.load(edges).to(tl.int32)
    total = tl.load(edges + 2)
    first = tl.load(edges + 3).to(tl.int32)
    last = tl.load(edges + 4).to(tl.int32)
    if rank_bin < NUM_BINS:
        is_in = bins == rank_bin
        edge = _least_reaching(bits, is_in, is_in.to(tl.int64), tl.load(edges + 1))
        total += tl.sum(tl.where(is_in & (bits <= edge), mass, 0), 0)
        limit = tl.minimum(limit, edge.to(tl.float32, bitcast=True))
    is_in = (bins >= first) & (bins <= last)
    if top_p < 1.0:
        wanted = _wanted(total, top_p) - tl.load(edges + 5)
        edge = _least_reaching(bits, is_in, mass, wanted)
        limit = tl.minimum(limit, edge.to(tl.float32, bitcast=True))
    scores = gumbel_of(ranks(key, ids)) - distances
    return tl.max(tl.where(is_in & (distances <= limit), packed(scores, ids), NOTHING), 0)


@triton.jit
def _least_reaching(bits, is_in, weights, wanted):
    """The least bits up to which the weights of those that are in come to `wanted`: bits are in the
    distances' order."""
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
    """ids, distances, bins; where there is nothing that has mass, the bin is -1."""
    ids = offset + tl.arange(0, _ROW_TILE)
    values = tl.load(numbers + ids, mask=ids < num_tokens, other=-float("inf")).to(tl.float32)
    distances = tl.div_rn(best - values, temperature)
    return ids, distances, tl.where(distances < _MASS_END, bin_of(distances, scale), -1)


@triton.jit
def _best_of_row(numbers, num_tokens, best, temperature, scale, edges, top_p, limit, key):
    """`_best_listed` of all tokens of the row, tile by tile."""
    rank_bin = tl.load(edges).to(tl.int32)
    total = tl.load(edges + 2)
    first = tl.load(edges + 3).to(tl.int32)
    last = tl.load(edges + 4).to(tl.int32)
    if rank_bin < NUM_BINS:
        edge = _least_of_row(
            numbers, num_tokens, best, temperature, scale, rank_bin, rank_bin, tl.load(edges + 1),
            True,
        )  # fmt: skip
        limit = tl.minimum(limit, edge.to(tl.float32, bitcast=True))
        if top_p < 1.0:
            total += _weight_of_row(
                numbers, num_tokens, best, temperature, scale, rank_bin, rank_bin, edge, False
            )
    if top_p < 1.0:
        edge = _least_of_row(
            numbers, num_tokens, best, temperature, scale, first, last,
            _wanted(total, top_p) - tl.load(edges + 5), False,
        )  # fmt: skip
        limit = tl.minimum(limit, edge.to(tl.float32, bitcast=True))
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
    numbers, num_tokens, best, temperature, scale, first, last, edge, COUNTS: tl.constexpr
):  # fmt: skip
    """How many tokens of bins first to last have bits up to `edge`, or their mass."""
    weight = tl.full([], 0, tl.int64)
    offset = 0
    while offset < num_tokens:
        _, distances, bins = _tile_of_row(numbers, offset, num_tokens, best, temperature, scale)
        is_in = (bins >= first) & (bins <= last) & (distances.to(tl.int32, bitcast=True) <= edge)
        if COUNTS:
            weight += tl.sum(is_in.to(tl.int32), 0).to(tl.int64)
        else:
            weight += tl.sum(tl.where(is_in, masses(distances), 0), 0)
        offset += _ROW_TILE
    return weight


@triton.jit
def _least_of_row(
    numbers, num_tokens, best, temperature, scale, first, last, wanted, COUNTS: tl.constexpr
):  # fmt: skip
    """`_least_reaching` of all tokens of the row."""
    low = tl.full([], _INFINITY_BITS, tl.int32)
    high = tl.full([], 0, tl.int32)
    offset = 0
    while offset < num_tokens:
        _, distances, bins = _tile_of_row(numbers, offset, num_tokens, best, temperature, scale)
        bits = distances.to(tl.int32, bitcast=True)
        is_in = (bins >= first) & (bins <= last)
        low = tl.minimum(low, tl.min(tl.where(is_in, bits, _INFINITY_BITS), 0))
        high = tl.maximum(high, tl.max(tl.where(is_in, bits, 0), 0))
        offset += _ROW_TILE
    while low < high:
        middle = low + (high - low) // 2
        weight = _weight_of_row(
            numbers, num_tokens, best, temperature, scale, first, last, middle, COUNTS
        )
        if weight >= wanted:
            high = middle
        else:
            low = middle + 1
    return low
