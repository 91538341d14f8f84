"""Runner: one planned step: the model's input, its forward pass, the draws, and the events that
come of them. Masks of grammars are filled while the model runs, and hashes are made that later work
needs (engine/foresight.py). Schedules nothing, books nothing itself. Engine thread only.

Where the model can (DecodesAhead), a step is launched, and the next one too, before the first is
read: the device computes while the host books and plans. A step that was launched is the next one
for those who are in it; who joins meanwhile takes part in the one after: in the next launch if it
has a token and its cache, or the model takes prompts, too, else in a plain step. Each sample's
events are those of plain steps. Where somebody guesses, decode steps are launched while nobody
would be asked anyway (Speculator.rests): when that ends, nothing follows what is in flight, and the
step after it is a plain one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Values
from typing import NamedTuple

import torch

from engine.booking import Booking
from engine.constraints import Constraints, masked
from engine.decode_rows import DecodeRows
from engine.errors import IntegrityError
from engine.foresight import Foresight
from engine.in_flight import InFlight, Planned, Taken
from engine.kv.memory import KvMemory
from engine.models.interface import LoadedModel
from engine.outlook import Following
from engine.request import State
from engine.sampling import pipeline
from engine.schedule.order import Key
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from engine.speculation.drafter import Guess
from engine.speculation.heads.hidden import Wants
from engine.speculation.speculator import Speculator
from engine.step_builder import Step, build
from engine.step_output import RequestEvent


class Result(NamedTuple):
    """What a step did."""

    events: list[RequestEvent]
    num_prefill_tokens: int
    num_decode_tokens: int
    """Those that were known, and guesses that were kept."""
    num_guessed_tokens: int = 0
    """Kept or not."""
    num_kept_tokens: int = 0
    """Of the guessed ones."""


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
        in_flight: InFlight,
        rows: DecodeRows,
        foresight: Foresight,
        speculator: Speculator | None,
        *,
        eos_token_ids: frozenset[int],
        clock: Callable[[], float],
    ) -> None:
        self._model = model
        self._kv = kv
        self._constraints = constraints
        self._booking = booking
        self._in_flight = in_flight
        self._rows = rows
        self._foresight = foresight
        self._speculator = speculator
        self._eos_token_ids = eos_token_ids
        self._clock = clock
        self.is_device_behind = False
        """See engine/loop.py:Engine.is_device_behind."""

    @property
    def has_begun(self) -> bool:
        """The next step was launched already."""
        return self._in_flight.is_live

    def run(
        self, plan: Mapping[Key, int], scheduler: Scheduler, *, is_admitting: bool = True
    ) -> Result:
        """Compute a plan that is not empty, and whose sequences have their blocks; or what
        `has_begun`, if something has: then there is no plan.

        An exception of the model leaves every sequence as it was.

        Args:
            scheduler: asked for the step after the one that is in flight.
            is_admitting: as of its `plan_after`.
        """
        running = scheduler.running
        speculator, is_first = self._speculator, not self._in_flight.is_live
        planned = [(running[key], num_tokens) for key, num_tokens in plan.items()]
        if speculator is not None:
            if not is_first:
                live = self._in_flight.live().values()
                planned = [(sequence, row.num_tokens) for sequence, row in live]
            speculator.begin(planned)
        if is_first:
            is_resting = speculator is None or speculator.rests(planned)
            rows = self._rows.of_plan(planned) if is_resting else None
            if rows is None:
                return self._compute(planned, running)
            self._in_flight.launch(rows)
            # Others were let in just now: there is room for more only where the next step is one
            # with prompts, too.
            is_admitting = is_admitting and self._rows.takes_prompts
        result = self._land(scheduler, is_admitting=is_admitting)
        if speculator is not None:
            num_rows = result.num_prefill_tokens + result.num_decode_tokens
            is_last = not self._in_flight.is_live
            speculator.pass_by(num_rows, running, is_first=is_first, is_last=is_last)
        return result

    def _land(self, scheduler: Scheduler, *, is_admitting: bool) -> Result:
        """The step that is in flight, when the next one is, too."""
        live = self._in_flight.live()
        takes_prompts = self._rows.takes_prompts
        following = scheduler.plan_after(
            live, is_admitting=is_admitting, takes_prompts=takes_prompts
        )
        rows = None
        if self._goes_on(live, following):
            rows = self._rows.after(live, following, has_prompts=scheduler.has_prompts)
        if rows is not None:
            self._in_flight.launch(rows)
        taken = self._take()
        # All that was queued before this launch is over, and nothing is for one that was not made;
        # what was copied since then may not be over.
        self.is_device_behind, self._in_flight.has_copied = self._in_flight.has_copied, False
        num_prefills = num_decodes = 0
        for sequence, num_tokens in taken.planned:
            if sequence.state is State.RUNNING:
                num_decodes += num_tokens
            else:
                num_prefills += num_tokens
        return Result(self._book(*taken), num_prefills, num_decodes)

    def _take(self) -> Taken:
        """What is in flight; a long step is not waited for idly."""
        planned = self._in_flight.next_planned()
        if planned:
            try:
                self._foresight.use_wait(planned)
            except BaseException:
                self._in_flight.abandon()  # two launches, and neither is booked
                raise
        return self._in_flight.take()

    def _goes_on(self, live: Mapping[Key, Planned], following: Following) -> bool:
        """Nobody would be asked in the step after the one that is in flight."""
        if self._speculator is None:
            return True
        staying = [(sequence, 1) for sequence, _ in live.values()]
        joining = [one for one in following.planned if one[0].key not in live]
        return self._speculator.rests(staying + joining, num_unread=1)

    def _compute(
        self, planned: list[tuple[Sequence, int]], running: Mapping[Key, Sequence]
    ) -> Result:
        """A plain step."""
        speculator = self._speculator
        guesses = {} if speculator is None else speculator.guess(planned, running)
        try:
            step = build(
                planned,
                self._kv,
                self._eos_token_ids,
                guesses,
                clears_entered=self._model.reads_unwritten,
                wants_hidden=Wants.NONE if speculator is None else speculator.readers.wants,
                wants_layers=() if speculator is None else speculator.readers.layers,
            )
            self.is_device_behind = True
            logits, drawn = self._draw(step, planned, guesses)
        except BaseException:
            if self._speculator is not None:
                self._speculator.take_back(planned, guesses)
            raise
        self._in_flight.settle()  # rows that were left over: over by now, and nothing is booked yet
        self.is_device_behind = not step.draws  # a draw waits for all that was queued before it
        self._in_flight.has_copied = False
        embeddings = self._embeddings(step) if step.batch.wants_hidden else {}
        num_kept: dict[Key, int] = {}
        events = self._book(planned, drawn, guesses, num_kept)
        self.is_device_behind |= self._in_flight.has_copied
        num_guessed = sum(len(guess.tree) for guess in guesses.values())
        num_decodes = step.num_decode_tokens
        num_prefills = len(step.batch.token_ids) - num_decodes - num_guessed
        if self._speculator is not None:
            seen_s = self._speculator.readers.see(step, planned, guesses, self._model)
            num_rows = len(step.batch.token_ids)
            self._speculator.learn(events, num_kept, num_rows=num_rows, seen_s=seen_s)
        if embeddings:
            events = [_with_embedding(event, embeddings) for event in events]
        if step.has_beams:
            events += self._book_beams(step, logits)
        num_all_kept = sum(num_kept.values())
        return Result(events, num_prefills, num_decodes + num_all_kept, num_guessed, num_all_kept)

    def _draw(
        self, step: Step, planned: list[tuple[Sequence, int]], guesses: Mapping[Key, Guess]
    ) -> tuple[torch.Tensor, list[pipeline.Drawn]]:
        """Logits [R, V] of all rows, and what was drawn from those that are not beams'."""
        fill = self._constraints.begin_fill(step.grammars) if step.has_grammars else None
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
            draws = masked(draws, step.rows, step.grammars, fill)
        drawing = pipeline.begin(logits, draws, None if step.is_plain else step.rows)
        self._foresight.use_wait(planned)
        if self._speculator is not None:
            self._speculator.use_wait(guesses)
        return logits, drawing()

    def _embeddings(self, step: Step) -> dict[str, tuple[float, ...]]:
        """By request, of those that asked and whose prompt ended in this step."""
        rows = {
            sample.request.request_id: row
            for row, sample in enumerate(step.samples)
            if sample.gives_embedding
        }
        if not rows:
            return {}
        hidden = self._model.hidden()[list(rows.values())].float()
        values = torch.nn.functional.normalize(hidden, dim=-1).tolist()
        return {name: tuple(one) for name, one in zip(rows, values, strict=True)}

    def _book(
        self,
        planned: list[tuple[Sequence, int]],
        drawn: list[pipeline.Drawn],
        guesses: Mapping[Key, Guess] | None = None,
        num_kept: dict[Key, int] | None = None,
    ) -> list[RequestEvent]:
        """`num_kept`: takes how many nodes of each guess were."""
        events: list[RequestEvent] = []
        guesses = guesses or {}
        first = 0
        now = self._clock()
        for sequence, num_tokens in planned:
            group = sequence.group
            own: list[pipeline.Drawn] = []
            is_whole = sequence.num_computed_tokens + num_tokens == len(sequence.token_ids)
            if is_whole and not group.is_continued:
                if sequence.request.beam is not None:
                    continue  # all beams of a request at once, in _book_beams
                num_draws = group.num_places
                if guesses and sequence.key in guesses:
                    num_draws += len(guesses[sequence.key].tree)
                own = drawn[first : first + num_draws]
                first += num_draws
            if group.samples.get(sequence.sample_index) is not sequence:
                continue  # a sibling's error ended it
            if num_kept is not None and sequence.key in guesses:
                tree = guesses[sequence.key].tree
                told, num_kept[sequence.key] = self._booking.decode_tree(
                    sequence, num_tokens, tree, own, now
                )
                events += told
            elif own and sequence.state is State.RUNNING:
                events.append(self._booking.decode(sequence, num_tokens, own[0], now))
            else:
                events += self._booking.advance(sequence, num_tokens, own, now)
        self._booking.move_kept()
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


def _with_embedding(
    event: RequestEvent, embeddings: Mapping[str, tuple[float, ...]]
) -> RequestEvent:
    embedding = embeddings.get(event.request_id)
    if embedding is None or event.error is not None:
        return event
    return event._replace(embedding=embedding)
