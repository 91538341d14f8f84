"""From logits to one token per row. The order of the processors is fixed, because replay and resume
depend on it, and documented here:

    raw logits      NaN, +inf, or a row of -inf only: InvalidLogits, that row's alone
     1 repetition_penalty    of every token in prompt and output         penalties.py
     2 presence_penalty      of every token in the output
     3 frequency_penalty     of every token in the output, per occurrence
     4 logit_bias
     5 allowed_token_ids     hard masks: they commute                    masks.py
     6 bad_words
     7 no_repeat_ngram
     8 grammar
     9 min_tokens            end tokens, while fewer are there
    support         nothing left: EmptySupport, that row's alone, naming what was applied
    argmax          temperature 0 ends here; ties go to the lowest token id
    10 temperature
    11 top_k                 thresholds: ties at the edge stay in        truncation.py
    12 top_p                 of what top_k left, renormalised
    13 min_p
    draw            argmax of scaled logit + noise of (seed, sample     choose.py, baton_kernels,
                    index, position, token id); or by what was        engine/speculation/
                    proposed (Draw.proposals)                           rejection_sampler.py

Truncation cannot empty the support: each threshold is at most the best token's own.

Rows are worked on together and by need: a row without a processor takes part in the argmax of the
raw logits and in nothing else. A row's result depends on its own logits and Draw only, never on its
neighbours, to the last bit. Arithmetic is in float32 whatever the model's dtype.

Log probabilities in `Drawn.logprobs` and a trace's raw ones are of the model's own distribution,
before all processors. A trace's processed one is of the distribution that was drawn from, and its
support what then could be drawn; for an argmax, which draws from none, both are of what steps 1 to
9 left.

Logits on a device go the same way by kernels (on_device.py). Engine thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from baton_kernels import noise
from numpy.typing import NDArray

from engine.errors import EngineError
from engine.request import Sampling
from engine.sampling import dense
from engine.sampling.choose import choose
from engine.sampling.copies import bring
from engine.sampling.logprobs import processed_logprobs
from engine.sampling.masks import mask
from engine.sampling.on_device import begin_on_device, warm_up_device
from engine.sampling.outcome import NUM_TRACE_TOP as NUM_TRACE_TOP
from engine.sampling.outcome import Outcome, argmaxes, report, rows_of, unsound
from engine.sampling.penalties import penalise
from engine.sampling.recipe import Row, recipe_of
from engine.sampling.row import Draw as Draw
from engine.sampling.row import Drawn as Drawn
from engine.sampling.truncation import thresholds
from engine.speculation.rejection_sampler import judge

WARM_UP = Draw(Sampling(max_tokens=1, temperature=1.0, top_p=0.9), position=0)


_MANY = 128
"""Rows from which on the draw's kernels split a row otherwise (sampling_triton.py)."""


def warm_up(logits: torch.Tensor, max_rows: int = 1) -> None:
    """Draw once in every way that compiles something of its own.

    Args:
        logits: [1, V], as the model gives them.
        max_rows: most that are ever drawn together.
    """
    if logits.device.type == "cpu":
        draw(logits, [WARM_UP])
        return
    warm_up_device(logits)
    if max_rows >= _MANY:
        warm_up_device(logits.repeat(_MANY, 1))


@torch.inference_mode()
def draw(logits: torch.Tensor, draws: Sequence[Draw]) -> list[Drawn]:
    """Draw one token per row.

    Args:
        logits: [R, V] in the model's dtype; read only.
        draws: R of them.
    """
    if logits.device.type != "cpu":
        return _begin_on_device(logits, draws)()
    values, best_ids = dense.best(logits)
    drawn, is_valid = argmaxes(draws, best_ids.tolist(), values)
    rows = rows_of(draws, is_valid)
    if not rows:
        return drawn
    outcomes: dict[int, Outcome] = {}
    needed = sorted((row for row in rows if _group(row) < _AS_IS), key=_group)
    size = dense.rows_per_pass(logits)
    for start in range(0, len(needed), size):
        part = needed[start : start + size]
        places = [row.place for row in part]
        # A copy of their own, changed in place from here on.
        own = logits.index_select(0, torch.tensor(places, device=logits.device)).float()
        results = _process(own, part, values[places], best_ids[places])
        for row, outcome in zip(part, results, strict=True):
            outcomes[row.place] = outcome
            drawn[row.place] = Drawn(outcome.token_id, error=outcome.error)
    report(logits, rows, outcomes, drawn)
    return drawn


def begin(
    logits: torch.Tensor,
    draws: Sequence[Draw],
    rows: Sequence[int] | None = None,
    *,
    into: torch.Tensor | None = None,
) -> Callable[[], list[Drawn]]:
    """`draw`, but the device is not waited for: its part is queued behind what made the logits.

    Args:
        logits: [R, V] as of `draw`; they must hold until the result was taken.
        rows: the row of each draw; None: row i is draw i's.
        into: [number of draws] int32 beside the logits: takes the token ids, where no draw changes
            a logit, and none was proposed; anything for an error. The logits are done with then.
    Returns: what waits for the draws and gives them; to be called once. On CPU all is done there,
        but for draws `into` something.
    """
    if rows is not None:
        places = bring(np.array(rows, dtype=np.int64), logits.device)
        logits = logits.index_select(0, places)
    if logits.device.type != "cpu":
        return _begin_on_device(logits, draws, into)
    if into is None:
        return partial(draw, logits, draws)
    drawn = draw(logits, draws)
    into.copy_(torch.tensor([one.token_id for one in drawn], dtype=torch.int32))
    return partial(list, drawn)


def _begin_on_device(
    logits: torch.Tensor, draws: Sequence[Draw], into: torch.Tensor | None = None
) -> Callable[[], list[Drawn]]:
    """What was proposed is judged on the host."""
    finish = begin_on_device(logits, draws, into)
    judged = [place for place, one in enumerate(draws) if one.proposals is not None]
    if not judged:
        return finish
    own = logits.index_select(0, bring(np.array(judged, dtype=np.int64), logits.device))

    def finish_all() -> list[Drawn]:
        drawn = finish()
        of_judged = draw(own.cpu(), [draws[place] for place in judged])
        for place, one in zip(judged, of_judged, strict=True):
            drawn[place] = one
        return drawn

    return finish_all


@torch.inference_mode()
def distributions(logits: torch.Tensor, draws: Sequence[Draw]) -> NDArray[np.float64]:
    """[R, V], what `draw` would draw from; NaN where it would give an error.

    Args:
        logits: [R, V] in the model's dtype, on any device; read only.
        draws: R of them, all with a temperature.
    """
    found = np.empty(tuple(logits.shape), dtype=np.float64)
    # Piece by piece: a row's passes take several times what its result does.
    size = dense.rows_per_pass(torch.empty(0, logits.shape[-1]))
    for start in range(0, len(draws), size):
        part = slice(start, start + size)
        found[part] = _distributions(logits[part].to("cpu", torch.float32, copy=True), draws[part])
    return found


def _distributions(own: torch.Tensor, draws: Sequence[Draw]) -> NDArray[np.float64]:
    """`distributions` of some rows.

    Args:
        own: [R, V] float32 on CPU; changed.
    """
    recipes = [recipe_of(one.sampling) for one in draws]
    rows = [
        Row(place, one, recipe, adjusts=True)
        for place, (one, recipe) in enumerate(zip(draws, recipes, strict=True))
    ]
    penalise(own, rows)
    mask(own, rows)
    values, _ = dense.best(own)
    is_valid = np.isfinite(values)
    own[torch.from_numpy(~is_valid)] = 0.0
    floors = _scale(own, rows, np.where(is_valid, values, np.float32(0.0)))
    found = _shares(own, floors)
    found[~is_valid] = np.nan
    return found


# Rows are sorted by these, so that those of each step lie side by side.
_TRACED, _GREEDY, _ADJUSTED_SAMPLE, _SAMPLE, _AS_IS = range(5)


def _group(row: Row) -> int:
    if row.recipe.is_sampled:
        return _ADJUSTED_SAMPLE if row.adjusts else _SAMPLE
    if row.adjusts:
        return _GREEDY
    return _TRACED if row.draw.sampling.trace else _AS_IS


def _process(
    logits: torch.Tensor,
    rows: Sequence[Row],
    values: NDArray[np.float32],
    best_ids: NDArray[np.int64],
) -> list[Outcome]:
    """Steps 1 to the draw.

    Args:
        logits: [R, V] float32; changed.
        rows: R of them, sorted by `_group`.
        values, best_ids: [R], the best of each row; changed.
    """
    groups = [_group(row) for row in rows]
    first_adjusted = sum(group < _GREEDY for group in groups)
    first_sampled = sum(group < _ADJUSTED_SAMPLE for group in groups)
    first_unadjusted = sum(group < _SAMPLE for group in groups)
    errors: dict[int, EngineError] = {}
    if first_adjusted < first_unadjusted:
        span = slice(first_adjusted, first_unadjusted)
        penalise(logits[span], rows[span])
        mask(logits[span], rows[span])
        values[span], best_ids[span] = dense.best(logits[span])
        for local in np.flatnonzero(~np.isfinite(values[span])).tolist():
            at = first_adjusted + local
            errors[at] = unsound(rows[at], float(values[at]))
            logits[at], values[at] = 0.0, 0.0  # what is drawn from it is thrown away
    token_ids = best_ids.tolist()
    floors = torch.full((len(rows),), -torch.inf, device=logits.device)
    keys: list[int | None] = [None] * len(rows)
    if first_sampled < len(rows):
        span = slice(first_sampled, len(rows))
        token_ids[span], keys[span], floors[span] = _sample(
            logits[span], rows[span], values[span], best_ids[span]
        )
    outcomes = [
        Outcome(token_id, rng_key=key) for token_id, key in zip(token_ids, keys, strict=True)
    ]
    traced = [at for at, row in enumerate(rows) if row.draw.sampling.trace]
    if traced:
        index = torch.tensor(traced, device=logits.device)
        logprobs, sizes = processed_logprobs(
            logits.index_select(0, index), floors[index], [token_ids[at] for at in traced]
        )
        for at, logprob, size in zip(traced, logprobs, sizes, strict=True):
            outcomes[at] = Outcome(token_ids[at], None, logprob, size, keys[at])
    for at, error in errors.items():
        outcomes[at] = Outcome(-1, error)
    return outcomes


def _sample(
    logits: torch.Tensor,
    rows: Sequence[Row],
    values: NDArray[np.float32],
    best_ids: NDArray[np.int64],
) -> tuple[list[int], list[int | None], torch.Tensor]:
    """Temperature, truncation, draw; `logits` become the scaled ones.

    Returns: token ids, keys of the noise, and the thresholds [R].
    """
    device = logits.device
    samplings = [row.draw.sampling for row in rows]
    floors = _scale(logits, rows, values)
    keys = noise.row_keys(
        [one.seed for one in samplings],
        [row.draw.sample_index for row in rows],
        [row.draw.position for row in rows],
    )
    token_ids = choose(
        logits, torch.from_numpy(best_ids).to(device), torch.from_numpy(keys).to(device), floors
    )
    row_keys: list[int | None] = keys.tolist()
    proposed = {
        at: row.draw.proposals for at, row in enumerate(rows) if row.draw.proposals is not None
    }
    if proposed:
        shares = _shares(logits[list(proposed)], floors[list(proposed)])
        for own, (at, proposals) in zip(shares, proposed.items(), strict=True):
            token_ids[at], row_keys[at] = judge(own, proposals), None
    return token_ids, row_keys, floors


def _scale(logits: torch.Tensor, rows: Sequence[Row], values: NDArray[np.float32]) -> torch.Tensor:
    """By temperature, in place. Returns: the thresholds [R]."""
    samplings = [row.draw.sampling for row in rows]
    temperatures = torch.tensor([one.temperature for one in samplings], dtype=torch.float32)
    # Subtracting the maximum first keeps a tiny temperature from overflowing; the order of scores
    # is the same.
    logits.sub_(torch.from_numpy(values).to(logits.device)[:, None])
    logits.div_(temperatures.to(logits.device)[:, None])
    return thresholds(logits, samplings)


def _shares(scaled: torch.Tensor, floors: torch.Tensor) -> NDArray[np.float64]:
    """[R, V], the softmax of what reaches its threshold; on CPU.

    Args:
        scaled, floors: [R, V], [R].
    """
    scores = scaled.numpy().astype(np.float64)
    shares: NDArray[np.float64] = np.where(scores >= floors.numpy()[:, None], np.exp(scores), 0.0)
    shares /= shares.sum(axis=1, keepdims=True)
    return shares
