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
    draw            argmax of scaled logit + noise of (seed, sample     choose.py, engine/noise.py
                    index, position, token id)

Truncation cannot empty the support: each threshold is at most the best token's own.

Rows are worked on together and by need: a row without a processor takes part in the argmax of the
raw logits and in nothing else. A row's result depends on its own logits and Draw only, never on its
neighbours, to the last bit. Arithmetic is in float32 whatever the model's dtype.

Log probabilities in `Drawn.logprobs` and a trace's raw ones are of the model's own distribution,
before all processors. A trace's processed one is of the distribution that was drawn from, and its
support what then could be drawn; for an argmax, which draws from none, both are of what steps 1 to
9 left.

Engine thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from engine import noise
from engine.errors import EmptySupport, EngineError, InvalidLogits
from engine.request import Sampling, StepTrace, TokenLogprobs
from engine.sampling import dense
from engine.sampling.choose import choose
from engine.sampling.logprobs import processed_logprobs, raw_logprobs
from engine.sampling.masks import mask
from engine.sampling.penalties import penalise
from engine.sampling.recipe import Row, masks_ends, recipe_of
from engine.sampling.row import Draw as Draw
from engine.sampling.row import Drawn as Drawn
from engine.sampling.truncation import thresholds

NUM_TRACE_TOP = 5
"""Best tokens in a trace whose request asked for no log probabilities."""

WARM_UP = Draw(Sampling(max_tokens=1, temperature=1.0, top_p=0.9), position=0)


class _Outcome(NamedTuple):
    """What came of a row that took more than an argmax of its raw logits."""

    token_id: int
    error: EngineError | None = None
    processed_logprob: float = 0.0
    support_size: int = 0
    rng_key: int | None = None


@torch.inference_mode()
def draw(logits: torch.Tensor, draws: Sequence[Draw]) -> list[Drawn]:
    """Draw one token per row.

    Args:
        logits: [R, V] in the model's dtype; read only.
        draws: R of them.
    """
    values, best_ids = dense.best(logits)
    drawn = [Drawn(token_id) for token_id in best_ids.tolist()]
    is_valid = np.isfinite(values)
    if not is_valid.all():
        for place in np.flatnonzero(~is_valid).tolist():
            message = f"the best logit for position {draws[place].position} is {values[place]}"
            drawn[place] = Drawn(-1, error=InvalidLogits(message))
    rows = _rows(draws, is_valid)
    if not rows:
        return drawn
    outcomes: dict[int, _Outcome] = {}
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
    _report(logits, rows, outcomes, drawn)
    return drawn


def _rows(draws: Sequence[Draw], is_valid: NDArray[np.bool_]) -> list[Row]:
    """The rows that take more than an argmax."""
    rows: list[Row] = []
    for place, one in enumerate(draws):
        recipe = recipe_of(one.sampling)
        if (not recipe.is_plain or one.bitmask is not None) and is_valid[place]:
            adjusts = recipe.adjusts or one.bitmask is not None or masks_ends(one)
            rows.append(Row(place, one, recipe, adjusts))
    return rows


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
) -> list[_Outcome]:
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
            errors[at] = _unsound(rows[at], float(values[at]))
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
        _Outcome(token_id, rng_key=key) for token_id, key in zip(token_ids, keys, strict=True)
    ]
    traced = [at for at, row in enumerate(rows) if row.draw.sampling.trace]
    if traced:
        index = torch.tensor(traced, device=logits.device)
        logprobs, sizes = processed_logprobs(
            logits.index_select(0, index), floors[index], [token_ids[at] for at in traced]
        )
        for at, logprob, size in zip(traced, logprobs, sizes, strict=True):
            outcomes[at] = _Outcome(token_ids[at], None, logprob, size, keys[at])
    for at, error in errors.items():
        outcomes[at] = _Outcome(-1, error)
    return outcomes


def _unsound(row: Row, value: float) -> EngineError:
    """Why a row whose best logit was finite has none such after steps 1 to 9."""
    names = row.adjusting_names
    if value == -np.inf:
        return EmptySupport(names, row.draw.position)
    return InvalidLogits(
        f"the best logit for position {row.draw.position} is {value} after {', '.join(names)}"
    )


def _sample(
    logits: torch.Tensor,
    rows: Sequence[Row],
    values: NDArray[np.float32],
    best_ids: NDArray[np.int64],
) -> tuple[list[int], list[int], torch.Tensor]:
    """Temperature, truncation, draw; `logits` become the scaled ones.

    Returns: token ids, keys of the noise, and the thresholds [R].
    """
    device = logits.device
    samplings = [row.draw.sampling for row in rows]
    temperatures = torch.tensor([one.temperature for one in samplings], dtype=torch.float32)
    # Subtracting the maximum first keeps a tiny temperature from overflowing; the order of scores
    # is the same.
    logits.sub_(torch.from_numpy(values).to(device)[:, None])
    logits.div_(temperatures.to(device)[:, None])
    floors = thresholds(logits, samplings)
    keys = noise.row_keys(
        [one.seed for one in samplings],
        [row.draw.sample_index for row in rows],
        [row.draw.position for row in rows],
    )
    token_ids = choose(
        logits, torch.from_numpy(best_ids).to(device), torch.from_numpy(keys).to(device), floors
    )
    return token_ids, keys.tolist(), floors


def _report(
    logits: torch.Tensor,
    rows: Sequence[Row],
    outcomes: dict[int, _Outcome],
    drawn: list[Drawn],
) -> None:
    """Put log probabilities and traces into `drawn` where they were asked for."""
    asking = [
        row
        for row in rows
        if (row.draw.sampling.logprobs is not None or row.draw.sampling.trace)
        and drawn[row.place].error is None
    ]
    if not asking:
        return
    counts = [
        max(row.draw.sampling.logprobs or 0, NUM_TRACE_TOP if row.draw.sampling.trace else 0)
        for row in asking
    ]
    places = [row.place for row in asking]
    raws = raw_logprobs(logits, places, [drawn[place].token_id for place in places], counts)
    for row, raw in zip(asking, raws, strict=True):
        sampling, token_id = row.draw.sampling, raw.token_id
        trace = None
        if sampling.trace:
            outcome = outcomes[row.place]
            trace = StepTrace(
                position=row.draw.position,
                token_id=token_id,
                raw_logprob=raw.logprob,
                processed_logprob=outcome.processed_logprob,
                top=raw.top,
                support_size=outcome.support_size,
                processors=row.names,
                rng_key=outcome.rng_key,
            )
        logprobs = None
        if sampling.logprobs is not None:
            logprobs = TokenLogprobs(token_id, raw.logprob, raw.top[: sampling.logprobs])
        drawn[row.place] = Drawn(token_id, logprobs, trace)
