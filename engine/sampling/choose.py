"""The draw: argmax of scaled logit + Gumbel noise over what the thresholds let through, which is a
draw from the softmax (Gumbel, 1954; Maddison et al., A* Sampling, 2014, section 2).

Exact, though noise is made for few tokens. No token can win whose scaled logit plus the noise that
it could have at most is below a score that is already known, so, from cheap to dear:

1. the best token's own score drops all that lie more than NOISE_MAX below it;
2. the scores of every 32nd of the others raise what must be reached;
3. of the rest the random bits are made, but the logarithms only where these bits are high enough
   for what the token lacks.

On CPU; a device draws by baton_kernels' draw_tokens (on_device.py). Knows no parameters. Pure.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
from baton_kernels import noise

from engine.sampling import dense

_MANY = 1 << 13
"""Candidates from which on steps 2 and 3 pay."""
_STRIDE = 32
_CPU_BLOCK = 1 << 16
"""Candidates whose bits are made at once: they stay in cache."""
_GRID_SHARE = 0.3
"""Share of all tokens that must be candidates for making the bits of all to be cheaper. Measured:
4 ns a token against 11 a candidate."""
_MOST_LACK = 17
"""Above NOISE_MAX."""
_LEAST_LACK = -3
"""Below NOISE_MIN."""
_SLACK = 1e-3
"""More than the rounding of a score."""


def choose(
    scaled: torch.Tensor, first_ids: torch.Tensor, keys: torch.Tensor, floors: torch.Tensor
) -> list[int]:
    """One token id per row.

    Args:
        scaled: [R, V] float32, contiguous, each row's maximum 0.
        first_ids: [R] int64, where it lies.
        keys: [R] int64, noise.row_keys.
        floors: [R] float32, at most 0: tokens below are out.
    """
    num_rows, num_tokens = scaled.shape
    # The most probable token is always in: its score bounds the winner's from below.
    reached = noise.gumbel(keys, first_ids)
    floors = torch.maximum(reached - noise.NOISE_MAX, floors)
    places = dense.at_least(scaled, floors)
    if len(places) > _MANY:
        reached = _sampled(scaled, keys, reached, floors)
        if len(places) > _GRID_SHARE * scaled.numel():
            places = _able_of_all(scaled, keys, reached, floors)
        else:
            places = _able(scaled, keys, reached, places)
    rows = places // num_tokens
    token_ids = places - rows * num_tokens
    scores = scaled.view(-1).index_select(0, places)
    scores += noise.gumbel(keys.index_select(0, rows), token_ids)
    best = torch.full((num_rows,), -math.inf)
    best = best.scatter_reduce(0, rows, scores, reduce="amax")
    # Equal scores are possible (noise has 2^23 values): the lowest token id wins.
    winners = torch.where(scores == best.index_select(0, rows), token_ids, num_tokens)
    chosen = torch.full((num_rows,), num_tokens, dtype=torch.int64)
    picked: list[int] = chosen.scatter_reduce(0, rows, winners, reduce="amin").tolist()
    return picked


def _sampled(
    scaled: torch.Tensor, keys: torch.Tensor, reached: torch.Tensor, floors: torch.Tensor
) -> torch.Tensor:
    """[R] `reached`, raised to the best score among every 32nd token, of those that are in."""
    some = scaled[:, ::_STRIDE]
    token_ids = torch.arange(0, scaled.shape[-1], _STRIDE)
    scores = some + noise.gumbel(keys[:, None], token_ids[None])
    scores = torch.where(some >= floors[:, None], scores, -math.inf)
    return torch.maximum(reached, scores.amax(dim=-1))


def _able(
    scaled: torch.Tensor, keys: torch.Tensor, reached: torch.Tensor, places: torch.Tensor
) -> torch.Tensor:
    """Those of the places whose noise may make up for what they lack. The winner is one of them."""
    num_rows, num_tokens = scaled.shape
    needed = _needed_ranks()
    starts = torch.arange(num_rows + 1) * num_tokens
    counts = torch.searchsorted(places, starts).diff()
    rows = torch.repeat_interleave(torch.arange(num_rows), counts)
    found: list[torch.Tensor] = []
    for start in range(0, len(places), _CPU_BLOCK):
        block = slice(start, start + _CPU_BLOCK)
        place, row = places[block], rows[block]
        words = noise.words(keys.index_select(0, row), place - row * num_tokens)
        lack = reached.index_select(0, row) - scaled.view(-1).index_select(0, place)
        steps = lack.clamp_(_LEAST_LACK, _MOST_LACK).sub_(_LEAST_LACK).int()
        found.append(place[noise.ranks(words) >= needed.index_select(0, steps)])
    return torch.cat(found)


def _able_of_all(
    scaled: torch.Tensor, keys: torch.Tensor, reached: torch.Tensor, floors: torch.Tensor
) -> torch.Tensor:
    """What `_able` finds, by making the bits of every token of every row."""
    num_rows, num_tokens = scaled.shape
    needed = _needed_ranks().numpy().astype(np.uint64)
    values, key, reach = scaled.numpy(), keys.numpy(), reached.numpy()[:, None]
    found = []
    size = max(1, _CPU_BLOCK // num_tokens)
    for start in range(0, num_rows, size):
        block = slice(start, start + size)
        lack = reach[block] - values[block]
        np.clip(lack, _LEAST_LACK, _MOST_LACK, out=lack)
        lack -= _LEAST_LACK
        ranks = noise.rank_grid(key[block], num_tokens)
        enough = ranks >= needed.take(lack.astype(np.int64))
        found.append(np.flatnonzero(enough) + start * num_tokens)
    places = torch.from_numpy(np.concatenate(found))
    is_in = scaled.view(-1).index_select(0, places) >= floors.index_select(0, places // num_tokens)
    return places[is_in]


@functools.lru_cache
def _needed_ranks() -> torch.Tensor:
    """Entry i: the least rank with which a token could win that lacks _LEAST_LACK + i or more."""
    lacks = range(_LEAST_LACK, _MOST_LACK + 1)
    return torch.tensor([noise.least_rank(lack - _SLACK) for lack in lacks])
