"""Runner: one planned step: the model's input, its forward pass, the draws, and the events that
come of them. Masks of grammars are filled while the model runs. Schedules nothing, books nothing
itself. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Values
from typing import NamedTuple

import torch

from engine.booking import Booking
from engine.constraints import Constraints, masked
from engine.errors import IntegrityError
from engine.kv.memory import KvMemory
from engine.models.interface import LoadedModel
from engine.request import RequestEvent, State
from engine.sampling import pipeline
from engine.schedule.order import Key
from engine.sequence import Sequence
from engine.step_builder import Step, build


class Result(NamedTuple):
    """What a step did."""

    events: list[RequestEvent]
    num_prefill_tokens: int
    num_decode_tokens: int


class Runner:
    """See the module.

    Args:
        clock: of the metrics.
    """

    def __init__(
        self,
        model: LoadedModel,
        kv: KvMemory,
        constraints: Constraints,
        booking: Booking,
        *,
        eos_token_ids: frozenset[int],
        clock: Callable[[], float],
    ) -> None:
        self._model = model
        self._kv = kv
        self._constraints = constraints
        self._booking = booking
        self._eos_token_ids = eos_token_ids
        self._clock = clock

    def run(self, plan: Mapping[Key, int], running: Mapping[Key, Sequence]) -> Result:
        """Compute a plan that is not empty; its sequences have their blocks.

        An exception of the model leaves every sequence as it was.
        """
        planned = [(running[key], num_tokens) for key, num_tokens in plan.items()]
        step = build(planned, self._kv, self._eos_token_ids)
        logits, drawn = self._draw(step)
        num_decodes = step.num_decode_tokens
        events = self._book(planned, drawn)
        if step.has_beams:
            events += self._book_beams(step, logits)
        return Result(events, len(step.batch.token_ids) - num_decodes, num_decodes)

    def _draw(self, step: Step) -> tuple[torch.Tensor, list[pipeline.Drawn]]:
        """Logits [R, V] of all rows, and what was drawn from those that are not beams'."""
        fill = self._constraints.begin_fill(step.samples)
        try:
            logits = self._model.forward(step.batch)
        except BaseException:
            if fill is not None:
                fill.result()  # it works on states that the next step will touch
            raise
        draws: Values[pipeline.Draw] = step.draws
        if not draws:
            return logits, []
        if fill is not None:
            draws = masked(draws, step.rows, step.samples, fill)
        rows = logits if step.is_plain else logits[list(step.rows)]
        return logits, pipeline.draw(rows, draws)

    def _book(
        self, planned: list[tuple[Sequence, int]], drawn: list[pipeline.Drawn]
    ) -> list[RequestEvent]:
        events: list[RequestEvent] = []
        first = 0
        now = self._clock()
        for sequence, num_tokens in planned:
            group = sequence.group
            own: list[pipeline.Drawn] = []
            is_whole = sequence.num_computed_tokens + num_tokens == len(sequence.token_ids)
            if is_whole and not group.is_continued:
                if sequence.request.beam is not None:
                    continue  # all beams of a request at once, in _book_beams
                own = drawn[first : first + group.num_places]
                first += len(own)
            if group.samples.get(sequence.sample_index) is not sequence:
                continue  # a sibling's error ended it
            if own and sequence.state is State.RUNNING:
                events.append(self._booking.decode(sequence, num_tokens, own[0], now))
            else:
                events += self._booking.advance(sequence, num_tokens, own, now)
        return events

    def _book_beams(self, step: Step, logits: torch.Tensor) -> list[RequestEvent]:
        rows: dict[str, list[int]] = {}
        for row, sample in enumerate(step.samples):
            if sample.request.beam is not None:
                rows.setdefault(sample.request.request_id, []).append(row)
        events: list[RequestEvent] = []
        for own in rows.values():
            group = step.samples[own[0]].group
            if len(own) != len(group.samples):
                raise IntegrityError(f"{len(own)} of {len(group.samples)} beams were in a step")
            own.sort(key=lambda row: step.samples[row].sample_index)
            events += self._booking.advance_beams(group, logits[own], self._clock())
        return events
