"""Top-k, top-p and min-p, each as a threshold on a row's scaled logits: a token stays if its own is
at least the threshold. So ties at the edge stay in, and no result depends on the order of a sort.

    top-k   the k-th largest
    top-p   the last of the smallest set of most probable tokens whose mass reaches p, among what
            top-k left, renormalised (Holtzman et al., The Curious Case of Neural Text Degeneration,
            2020, section 3.1)
    min-p   the best + log(min_p): as probable as min_p times the best (Nguyen et al., Turning Up
            the Heat, 2024, section 3)

Rows that ask for top-k or top-p share one partial sort; those that it was too short for share a
full one. The result is the same either way, to the last bit: masses are summed in float64 from the
largest on, so the sums over a shortlist are the first of the sums over all.

On CPU; baton_kernels' draw_tokens has the same definitions for a device. Pure; engine thread only
for its memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from engine.request import Sampling
from engine.sampling import dense

SHORTLIST = 1024
"""Tokens sorted first where it cannot be known how many make up the nucleus. A guess."""


def thresholds(
    scaled: torch.Tensor, samplings: Sequence[Sampling], *, most_short: int = SHORTLIST
) -> torch.Tensor:
    """[R] float32, -inf where all three are off.

    Args:
        scaled: [R, V] float32, each row's maximum 0.
        samplings: R of them.
        most_short: values of a row that are sorted first; how many changes no result.
    """
    num_tokens = scaled.shape[-1]
    found = np.full(len(samplings), -np.inf, dtype=np.float32)
    for row, one in enumerate(samplings):
        if one.min_p > 0.0:
            found[row] = math.log(one.min_p)
    result = torch.from_numpy(found)
    ranks = [one.top_k if 0 < one.top_k < num_tokens else num_tokens for one in samplings]
    short: dict[int, int] = {}
    """Row -> how many of its largest values to look at first."""
    full: list[int] = []
    for row, one in enumerate(samplings):
        is_nucleus = one.top_p < 1.0
        if not is_nucleus and ranks[row] == num_tokens:
            continue
        shortlist = min(most_short, num_tokens) if is_nucleus else ranks[row]
        if shortlist <= most_short and (ranks[row] <= shortlist or ranks[row] == num_tokens):
            short[row] = shortlist
        else:
            full.append(row)
    if short:
        full += _settle(scaled, samplings, ranks, list(short), max(short.values()), result)
    if full:
        left = _settle(scaled, samplings, ranks, sorted(full), num_tokens, result)
        assert not left, "a full sort settles every row"
    return result


def _settle(
    scaled: torch.Tensor,
    samplings: Sequence[Sampling],
    ranks: Sequence[int],
    rows: list[int],
    count: int,
    result: torch.Tensor,
) -> list[int]:
    """Raise `result` for `rows` by what their `count` largest values show. Returns the rows that
    they were too few for, of which nothing was changed.

    Args:
        rows: ascending.
    """
    num_tokens = scaled.shape[-1]
    index = torch.tensor(rows)
    own = scaled if len(rows) == len(scaled) else scaled.index_select(0, index)
    values = dense.largest(own, count)
    rank = torch.tensor([ranks[row] for row in rows])
    top_p = torch.tensor([samplings[row].top_p for row in rows], dtype=torch.float64)
    is_ranked, is_nucleus = rank < num_tokens, top_p < 1.0
    floor = values.gather(1, (rank - 1).clamp(max=count - 1)[:, None])[:, 0]
    floor = torch.where(is_ranked, floor, -torch.inf)
    is_settled = torch.ones_like(is_nucleus)
    nucleus = [local for local, row in enumerate(rows) if samplings[row].top_p < 1.0]
    if nucleus:
        mass = torch.exp(values).double().cumsum(dim=-1)
        # Ties with the k-th are kept, so more than k may be; if they fill the shortlist there may
        # be others beyond it.
        num_kept = (values >= floor[:, None]).sum(dim=-1)
        total = mass.gather(1, (num_kept - 1).clamp(min=0)[:, None])[:, 0]
        unranked = [local for local in nucleus if ranks[rows[local]] == num_tokens]
        if unranked:
            places = torch.tensor(unranked)
            total[places] = dense.row_sums(torch.exp(own.index_select(0, places)))
        num_below = (mass < (total * top_p)[:, None]).sum(dim=-1)
        is_known = (num_kept < count) | ~is_ranked
        is_settled = ~is_nucleus | (count == num_tokens) | (is_known & (num_below < count))
        edge = values.gather(1, num_below.clamp(max=count - 1)[:, None])[:, 0]
        # Beyond the last only by rounding: then the whole of it is the nucleus.
        is_cut = is_nucleus & (num_below < count)
        floor = torch.where(is_cut, torch.maximum(floor, edge), floor)
    raised = torch.maximum(result[index], floor)
    result[index] = torch.where(is_settled, raised, result[index])
    if bool(is_settled.all()):
        return []
    return [row for row, done in zip(rows, is_settled.tolist(), strict=True) if not done]
