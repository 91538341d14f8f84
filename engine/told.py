"""Told: what an event says of a sample's step beside its tokens: logprobs, traces, an
embedding; and the event without any token. Functions that change nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Values
from dataclasses import replace

import torch

from engine.errors import EngineError, InvalidLogits
from engine.models.interface import LoadedModel
from engine.sampling.logprobs import raw_logprobs
from engine.sampling.row import Drawn
from engine.schedule.order import Key
from engine.sequence import Sequence
from engine.step_builder import Step
from engine.step_output import FilledBlock, RequestEvent, StepTrace, TokenLogprobs


def logprobs_of(taken: Values[tuple[Drawn, int]]) -> tuple[TokenLogprobs, ...]:
    """Of each draw that has some."""
    return tuple(one.logprobs for one, _ in taken if one.logprobs is not None)


def traces_of(
    taken: Values[tuple[Drawn, int]], token_ids: tuple[int, ...], num_before: int
) -> tuple[StepTrace, ...]:
    """Of each token of a step, in order."""
    traces: tuple[StepTrace, ...] = ()
    for one, num_known in taken:
        if one.trace is not None:
            traces += _traces(one.trace, token_ids[len(traces) : num_known - num_before])
    return traces


def _traces(trace: StepTrace, token_ids: tuple[int, ...]) -> tuple[StepTrace, ...]:
    """One for each token: the first stands for the one that was drawn, whose text begins with it;
    the others were forced."""
    first = replace(trace, token_id=token_ids[0], is_forced=token_ids[0] != trace.token_id)
    forced = [
        StepTrace(
            position=trace.position + offset,
            token_id=token_id,
            raw_logprob=math.nan,
            processed_logprob=math.nan,
            top=(),
            support_size=1,
            processors=("grammar",),
            rng_key=None,
            is_forced=True,
        )
        for offset, token_id in enumerate(token_ids[1:], 1)
    ]
    return (first, *forced)


def event_without_tokens(
    sequence: Sequence,
    *,
    filled: tuple[FilledBlock, ...] = (),
    error: EngineError | None = None,
    is_request_over: bool = False,
) -> RequestEvent:
    """An event without tokens."""
    return RequestEvent(
        request_id=sequence.request.request_id,
        token_ids=(),
        logprobs=None,
        filled=filled,
        num_computed_tokens=sequence.num_computed_tokens,
        finish_reason=None,
        stop_token_id=None,
        error=error,
        sample_index=sequence.sample_index,
        is_request_over=is_request_over,
    )


def prompt_logprobs_of(
    planned: Values[tuple[Sequence, int]], step: Step, logits: torch.Tensor
) -> dict[Key, tuple[TokenLogprobs, ...] | InvalidLogits]:
    """What a step that is not booked yet tells of scored prompts.

    Args:
        logits: [R, V], with their rows.
    """
    told: dict[Key, tuple[TokenLogprobs, ...] | InvalidLogits] = {}
    for sequence, num_tokens in planned:
        if sequence.key not in step.scored:
            continue
        places = sequence.scored_places(sequence.num_computed_tokens + num_tokens)
        token_ids = sequence.token_ids[places.start + 1 : places.stop + 1]
        found = raw_logprobs(
            logits,
            step.scored[sequence.key],
            token_ids,
            [sequence.request.prompt_logprobs or 0] * len(token_ids),
        )
        bad = next((place for place, one in enumerate(found) if math.isnan(one.logprob)), None)
        if bad is not None:
            told[sequence.key] = InvalidLogits(
                f"the log probability of prompt token {places.start + 1 + bad} is no number"
            )
            continue
        if sequence.num_scored_tokens == 0:
            found.insert(0, TokenLogprobs(sequence.token_ids[0], math.nan, ()))
        told[sequence.key] = tuple(found)
    return told


def embeddings_of(step: Step, model: LoadedModel) -> dict[str, tuple[float, ...]]:
    """By request, of those that asked and whose prompt ended in `step`, the last forward pass."""
    rows = {
        sample.request.request_id: row
        for row, sample in enumerate(step.samples)
        if sample.gives_embedding
    }
    if not rows:
        return {}
    hidden = step.drawn_of(model.hidden())[list(rows.values())].float()
    values = torch.nn.functional.normalize(hidden, dim=-1).tolist()
    return {name: tuple(one) for name, one in zip(rows, values, strict=True)}


def with_embedding(
    event: RequestEvent, embeddings: Mapping[str, tuple[float, ...]]
) -> RequestEvent:
    """The event, and its request's embedding if there is one."""
    embedding = embeddings.get(event.request_id)
    if embedding is None or event.error is not None:
        return event
    return event._replace(embedding=embedding)
