"""Outcome: what came of a row that took more than an argmax, and what is told of it: shared by the
pipeline's two ways, on CPU and on a device.

Knows no arithmetic of a draw. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import repeat
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from engine.errors import EmptySupport, EngineError, InvalidLogits
from engine.outputs import SampleTrace, TokenLogprobs
from engine.sampling.logprobs import raw_logprobs
from engine.sampling.recipe import Row, masks_ends, recipe_of
from engine.sampling.row import Draw, Drawn

_new_drawn: Callable[[Iterable[object]], Drawn] = partial(tuple.__new__, Drawn)

NUM_TRACE_TOP = 5
"""Best tokens in a trace whose request asked for no log probabilities."""


class Outcome(NamedTuple):
    """What came of a row that took more than an argmax of its raw logits."""

    token_id: int
    error: EngineError | None = None
    processed_logprob: float = 0.0
    support_size: int = 0
    rng_key: int | None = None


def argmaxes(
    draws: Sequence[Draw], token_ids: list[int], values: NDArray[np.float32]
) -> tuple[list[Drawn], NDArray[np.bool_]]:
    """What was drawn if all rows want is the best of the raw logits; and which rows have one.

    Args:
        token_ids, values: of each row's best.
    """
    # Without a call to Python each: the device waits for what comes of it.
    nones = repeat(None)
    drawn = list(map(_new_drawn, zip(token_ids, nones, nones, nones, strict=False)))
    is_valid = np.isfinite(values)
    if False in is_valid.tolist():  # half as long as to ask numpy
        for place in np.flatnonzero(~is_valid).tolist():
            message = f"the best logit for position {draws[place].position} is {values[place]}"
            drawn[place] = Drawn(-1, error=InvalidLogits(message))
    return drawn, is_valid


def rows_of(draws: Sequence[Draw], is_valid: NDArray[np.bool_]) -> list[Row]:
    """The rows that take more than an argmax."""
    rows: list[Row] = []
    for place, one in enumerate(draws):
        recipe = recipe_of(one.sampling)
        if (not recipe.is_plain or one.bitmask is not None) and is_valid[place]:
            adjusts = recipe.adjusts or one.bitmask is not None or masks_ends(one)
            rows.append(Row(place, one, recipe, adjusts))
    return rows


def unsound(row: Row, value: float) -> EngineError:
    """Why a row whose best logit was finite has none such after steps 1 to 9."""
    names = row.adjusting_names
    if value == -np.inf:
        return EmptySupport(names, row.draw.position)
    return InvalidLogits(
        f"the best logit for position {row.draw.position} is {value} after {', '.join(names)}"
    )


def report(
    logits: torch.Tensor,
    rows: Sequence[Row],
    outcomes: dict[int, Outcome],
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
            trace = SampleTrace(
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
