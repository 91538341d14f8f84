"""From logits to one token per row. The order of the pipeline is fixed, because replay and resume
depend on it:

    logits -> check -> temperature -> top-k -> top-p -> min-p -> argmax(logit + Gumbel noise)

- check: NaN, +inf, or a row of -inf only is an error of that row.
- greedy rows (temperature 0) end with the argmax of the raw logits; ties go to the lowest token id.
- top-k, top-p, min-p are each a threshold on the scaled logits, so ties at the edge stay in and the
  result depends on no
  sort order: top-k keeps what is >= the k-th largest; top-p the smallest set of the most probable
  tokens (after top-k, renormalised) whose mass reaches p; min-p what has at least min_p times the
  best token's probability.
- the draw is exact, not approximate, though noise is made for few tokens: it is bounded, so a token
  whose logit is more than NOISE_MAX below the best score so far cannot win.

Log probabilities are of the model's own distribution: before temperature and filters. Engine thread
only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine import noise
from engine.errors import EngineError, InvalidLogits
from engine.request import Sampling, TokenLogprobs

_NUCLEUS_SHORTLIST = 1024
"""Tokens sorted first when looking for the nucleus; all of them only if these do not reach top_p. A
guess."""


@dataclass(frozen=True)
class Draw:
    """What to draw in one row: whose parameters, and the place that the token will take."""

    sampling: Sampling
    position: int


@dataclass(frozen=True)
class Drawn:
    """The outcome of one row: a token, or the error that ends its request."""

    token_id: int
    logprobs: TokenLogprobs | None
    error: EngineError | None


WARM_UP = Draw(Sampling(max_tokens=1, temperature=1.0, top_p=0.9), position=0)


@torch.inference_mode()
def draw(logits: torch.Tensor, draws: Sequence[Draw]) -> list[Drawn]:
    """Draw one token per row.

    Args:
        logits: [R, V] in the model's dtype; read only.
        draws: R of them. A row's result depends on its own logits, parameters and position only.
    """
    best, best_ids = logits.max(dim=-1)
    is_valid = torch.isfinite(
        best
    ).tolist()  # NaN wins every max; -inf wins only a row without support
    token_ids = best_ids.tolist()
    sampled = [
        row for row, one in enumerate(draws) if one.sampling.temperature > 0.0 and is_valid[row]
    ]
    if sampled:
        picked = _sample(logits[sampled].float(), [draws[row] for row in sampled])
        for row, token_id in zip(sampled, picked, strict=True):
            token_ids[row] = token_id
    results: list[Drawn] = []
    for row, one in enumerate(draws):
        if not is_valid[row]:
            message = f"the best logit for position {one.position} is {float(best[row])}"
            results.append(Drawn(-1, None, InvalidLogits(message)))
            continue
        count = one.sampling.logprobs
        logprobs = None if count is None else _logprobs(logits[row], token_ids[row], count)
        results.append(Drawn(token_ids[row], logprobs, None))
    return results


def _sample(logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    """[R, V] float32 and R draws with temperature > 0 -> R token ids."""
    device = logits.device
    temperatures = torch.tensor([d.sampling.temperature for d in draws], dtype=torch.float32)
    # Subtracting the maximum first keeps a tiny temperature from overflowing; the order of scores
    # is the same.
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / temperatures.to(device)[:, None]
    thresholds = [_threshold(scaled[row], d.sampling) for row, d in enumerate(draws)]
    keys = torch.tensor(
        [noise.row_key(d.sampling.seed, d.sampling.sample_index, d.position) for d in draws],
        dtype=torch.int64,
        device=device,
    )
    # The most probable token always survives the filters (its scaled logit is 0): its score bounds
    # all others from below.
    first_ids = scaled.argmax(dim=-1)
    bound = noise.gumbel(keys, first_ids) - noise.NOISE_MAX
    floor = torch.maximum(bound, torch.tensor(thresholds, dtype=torch.float32, device=device))
    rows, token_ids = (scaled >= floor[:, None]).nonzero(as_tuple=True)
    scores = scaled[rows, token_ids] + noise.gumbel(keys[rows], token_ids)
    best = torch.full((len(draws),), -math.inf, device=device)
    best = best.scatter_reduce(0, rows, scores, reduce="amax")
    # Equal scores are possible (noise has 2^23 values): the lowest token id wins, on every device.
    num_tokens = logits.shape[-1]
    winners = torch.where(scores == best[rows], token_ids, num_tokens)
    chosen = torch.full((len(draws),), num_tokens, dtype=torch.int64, device=device)
    picked: list[int] = chosen.scatter_reduce(0, rows, winners, reduce="amin").tolist()
    return picked


def _threshold(scaled: torch.Tensor, sampling: Sampling) -> float:
    """The smallest scaled logit that top-k, top-p and min-p let through; -inf when all are off.

    Args:
        scaled: [V] float32, its maximum 0.
    """
    threshold = -math.inf
    if 0 < sampling.top_k < scaled.shape[0]:
        threshold = float(torch.topk(scaled, sampling.top_k).values[-1])
    if sampling.top_p < 1.0:
        threshold = max(threshold, _nucleus_threshold(scaled, threshold, sampling.top_p))
    if sampling.min_p > 0.0:
        threshold = max(threshold, math.log(sampling.min_p))
    return threshold


def _nucleus_threshold(scaled: torch.Tensor, threshold: float, top_p: float) -> float:
    """The scaled logit of the last token of the nucleus, among tokens at or above `threshold`."""
    kept = torch.where(scaled >= threshold, scaled, -math.inf)
    weights = torch.exp(kept)
    wanted = float(weights.sum(dtype=torch.float64)) * top_p
    num_tokens = kept.shape[0]
    for count in (min(_NUCLEUS_SHORTLIST, num_tokens), num_tokens):
        values = torch.topk(kept, count).values  # descending
        mass = torch.exp(values).cumsum(dim=0, dtype=torch.float64)
        index = int(torch.searchsorted(mass, wanted))
        if index < count:
            return float(values[index])
    return threshold  # rounding left the whole mass just below p


def _logprobs(logits: torch.Tensor, token_id: int, count: int) -> TokenLogprobs:
    """The chosen token's log probability and the `count` best, ties by lowest id."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    top: tuple[tuple[int, float], ...] = ()
    if count > 0:
        kth = torch.topk(logprobs, min(count, logprobs.shape[0])).values[-1]
        token_ids = (logprobs >= kth).nonzero()[
            :, 0
        ]  # ascending: a stable sort keeps the lowest id first
        values, order = torch.sort(logprobs[token_ids], descending=True, stable=True)
        pairs = zip(token_ids[order].tolist(), values.tolist(), strict=True)
        top = tuple(pairs)[:count]
    return TokenLogprobs(token_id, float(logprobs[token_id]), top)
