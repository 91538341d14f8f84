"""Where a row's support ends, one program a row: the Triton kernels of draw_tokens beside those
that pass over the logits (gpu/sampling.py), and what both share.

find_bound   no edge lies beyond it: by the largest of many groups of tokens, which are tokens too.
             Where it is near, all tokens within are one bin, the first, and all are listed
find_bins    else: from counts and masses by bin, the bins that the edges lie in
resolve      from the listed tokens, the edges; and the winner

The mass of a whole row is known as a float only, within _MASS_SLACK, where the row is not binned.
If the two ends of that span give two winners, or if the list overflows (thousands of tokens in one
bin, as where all logits are equal), the row itself is read, by one program: slow, as exact.

What a row's program leaves in `bounds`: bins per nat (0: one bin), the bound, the distance beyond
which no token matters to `draw`. In `edges`: the bin of the k-th (NUM_BINS: it cuts nothing that
has mass), how many of it are in, the mass before it; first and last bin that the support's edge may
lie in, the mass before the first; the least and the most that the row's mass may be. Pure; device
code.
"""

from __future__ import annotations

import triton
import triton.language as tl

from baton_kernels import noise as plain
from baton_kernels.gpu.noise import gumbel_of, log, masses, ranks, row_key
from baton_kernels.sampling import LEAST_MIN_P

NUM_BINS = tl.constexpr(2048)
MAX_MAXIMA = tl.constexpr(4096)
"""Groups of a row's tokens whose largest is known."""
MAX_SPLITS = tl.constexpr(128)
"""Places for the results of a row's programs. How many there are is no constant: each number would
be compiled of its own."""
NOTHING = tl.constexpr(-(1 << 63))
"""Below whatever `packed` gives."""

_MASS_END = tl.constexpr(plain.MASS_END)
_LEAST_MIN_P = tl.constexpr(LEAST_MIN_P)
_LAST_ID = tl.constexpr(0x7FFFFFFF)
_INFINITY_BITS = tl.constexpr(0x7F800000)
_ROW_TILE = tl.constexpr(2048)
_FEW = tl.constexpr(0.25)
"""A bound that fewer of the groups' largest lie within: hardly ever are more tokens nearer than a
list has room for."""
_MASS_SLACK = tl.constexpr(2e-4)
"""More than the rounding of float sums of exponentials."""
_MASS_UNIT = tl.constexpr(float(1 << plain.MASS_BITS))


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


@triton.jit
def _bound_of(distances, weights, wanted):
    """A distance up to which the weights come to `wanted`, rounded up; infinite if none is."""
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
    """The mass that a nucleus reaches, of a total."""
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
    """The best of the listed tokens that turn out to be in, packed; and whether that is sure."""
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
def _best_of_row(
    numbers, num_tokens, best, temperature, scale, edges, top_p, limit, key
):  # fmt: skip
    """What `_best_listed` finds if the list has all of the bins' tokens, from the row itself.

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
    """How many tokens of bins first to last have bits up to `edge`, or their mass."""
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
