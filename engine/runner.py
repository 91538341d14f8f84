"""Runner: one planned step: the model's input, its forward pass, the draws, and the events that
come of them. Masks of grammars are filled while the model runs, and hashes are made that later work
needs (Scheduler.precompute_block_hashes). Schedules nothing, books nothing itself. Engine thread
only.

Where the model can (DecodesAhead), a step is launched, and the next one too, before the first is
read: the device computes while the host books and plans. A step that was launched is the next one
for those who are in it; who joins meanwhile takes part in the one after: in the next launch if it
has a token and its cache, or the model takes prompts, too, else in a plain step. Each sample's
events are those of plain steps. With speculation, decode steps are launched while no proposer would
be called anyway (SpeculationManager.is_idle): when that ends, nothing follows what is in flight,
and the step after it is a plain one.

Where a proposer is called, the next step depends on what this one has drawn, and the device waits
for the host. So that step is begun in the very call that has booked this one, before its events are
told, if no request waits and nothing but decodes is to come: then it is the step that the next call
would begin, unless a sequence is taken out of it in between (engine/in_flight.py), and a request
that comes during a step waits for the next one, too. Not where that would keep the events back:
where the model takes long to launch it (LoadedModel.queues_step), with grammars, whose masks take
their time, and with proposers that take theirs, or that do not know some sequence yet; nor with
proposers that need hidden states.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Values
from types import MappingProxyType
from typing import NamedTuple

import torch

from engine.begun import BegunStep, may_be_early
from engine.decode_rows import DecodeRows
from engine.errors import IntegrityError, InvalidLogits
from engine.in_flight import InFlight, Planned, Taken
from engine.models.interface import LoadedModel
from engine.output_processor import OutputProcessor
from engine.outputs import RequestOutput, TokenLogprobs
from engine.plain_steps import PlainSteps
from engine.request import State
from engine.sampling.logprobs import raw_logprobs
from engine.sampling.metadata import SamplerOutput
from engine.scheduler import NextPlan, Scheduler
from engine.sequence import Key, Sequence
from engine.speculation.manager import SpeculationManager
from engine.speculation.proposer import DraftTokens, HiddenStateScope
from engine.step_builder import Step

log = logging.getLogger(__name__)

_NOTHING: Mapping[Key, tuple[TokenLogprobs, ...] | InvalidLogits] = MappingProxyType({})


class Result(NamedTuple):
    """What a step did."""

    events: list[RequestOutput]
    num_prefill_tokens: int
    num_decode_tokens: int
    """Those that were known, and accepted draft tokens."""
    num_guessed_tokens: int = 0
    """Draft tokens, accepted or not."""
    num_kept_tokens: int = 0
    """Accepted draft tokens."""


class Runner:
    """See the module.

    Args:
        begins_early: a step that may have drafts is begun in the call before.
        clock: of the metrics.
    """

    def __init__(
        self,
        model: LoadedModel,
        plain: PlainSteps,
        output_processor: OutputProcessor,
        in_flight: InFlight,
        rows: DecodeRows,
        scheduler: Scheduler,
        speculation: SpeculationManager | None,
        *,
        begins_early: bool,
        clock: Callable[[], float],
    ) -> None:
        self._model = model
        self._plain = plain
        self._output_processor = output_processor
        self._in_flight = in_flight
        self._rows = rows
        self._scheduler = scheduler
        self._speculation = speculation
        self._begins_early = begins_early and speculation is not None
        self._begun: BegunStep | None = None
        """In the call before, and in flight unless it was given up."""
        self._failure: tuple[Exception, tuple[Sequence, ...]] | None = None
        """Of a step that was to be begun then, and whose: told by the call that it is for."""
        self._clock = clock
        self.is_device_behind = False
        """See engine/engine.py:LLMEngine.is_device_behind."""

    @property
    def has_begun(self) -> bool:
        """The next step was launched or begun already."""
        return self._in_flight.is_live

    def run(
        self,
        plan: Mapping[Key, int],
        *,
        is_admitting: bool = True,
        is_settled: bool = False,
    ) -> Result:
        """Compute a plan that is not empty, and whose sequences have their blocks; or what
        `has_begun`, if something has: then there is no plan.

        An exception of the model leaves every sequence as it was.

        Args:
            is_admitting: as of its `plan_after`.
            is_settled: nobody is known who is not the scheduler's matter yet.
        """
        running = self._scheduler.running
        is_early = self._begins_early and is_settled
        begun, self._begun = self._begun, None
        if begun is not None:
            if self._in_flight.is_live:
                return self._end_begun(begun, is_early=is_early)
            self._plain.discard(begun.planned, begun.drafts)
        self._tell_failure(running)
        speculation, is_first = self._speculation, not self._in_flight.is_live
        planned = [(running[key], num_tokens) for key, num_tokens in plan.items()]
        if speculation is not None:
            if not is_first:
                live = self._in_flight.live().values()
                planned = [(sequence, row.num_tokens) for sequence, row in live]
            speculation.begin_step(planned)
        if is_first:
            is_idle = speculation is None or speculation.is_idle(planned)
            rows = self._rows.of_plan(planned) if is_idle else None
            if rows is None:
                return self._compute(planned, is_early=is_early)
            self._in_flight.launch(rows)
            # Others were let in just now: there is room for more only where the next step is one
            # with prompts, too.
            is_admitting = is_admitting and self._rows.takes_prompts
        result = self._land(is_admitting=is_admitting)
        if speculation is not None:
            num_rows = result.num_prefill_tokens + result.num_decode_tokens
            is_last = not self._in_flight.is_live
            speculation.on_launched_step(num_rows, running, is_first=is_first, is_last=is_last)
        return result

    def _tell_failure(self, running: Mapping[Key, Sequence]) -> None:
        """Of the step that was to be begun in the call before, if it was for anybody who is left:
        others' next pass may well be sound, and says so itself if it is not."""
        if self._failure is None:
            return
        (failure, planned), self._failure = self._failure, None
        if any(running.get(one.key) is one for one in planned):
            raise failure
        log.warning("a step failed that was begun early, and nobody is left of it: %s", failure)

    def _land(self, *, is_admitting: bool) -> Result:
        """The step that is in flight, when the next one is, too."""
        live = self._in_flight.live()
        takes_prompts = self._rows.takes_prompts
        following = self._scheduler.plan_after(
            live, is_admitting=is_admitting, takes_prompts=takes_prompts
        )
        rows = None
        if self._goes_on(live, following):
            rows = self._rows.after(live, following, has_prompts=self._scheduler.has_prompts)
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
                self._scheduler.precompute_block_hashes(planned)
            except BaseException:
                self._in_flight.abandon()  # two launches, and neither is booked
                raise
        return self._in_flight.take()

    def _goes_on(self, live: Mapping[Key, Planned], following: NextPlan) -> bool:
        """Whether no proposer would be called in the step after the one that is in flight."""
        if self._speculation is None:
            return True
        staying = [(sequence, 1) for sequence, _ in live.values()]
        joining = [one for one in following.planned if one[0].key not in live]
        return self._speculation.is_idle(staying + joining, num_unread=1)

    def _compute(self, planned: list[tuple[Sequence, int]], *, is_early: bool) -> Result:
        """A plain step."""
        self.is_device_behind = True
        begun = self._plain.begin(planned, self._scheduler.running)
        try:
            self._overlap_host_work(begun)
            drawn = begun.draws()
        except BaseException:
            self._plain.discard(begun.planned, begun.drafts)
            raise
        self._in_flight.settle()  # rows that were left over: over by now, and nothing is booked yet
        # A draw waits for all that was queued before it.
        self.is_device_behind = not begun.step.draws
        self._in_flight.has_copied = False
        return self._end(begun, planned, drawn, begun.drafts, is_early=is_early)

    def _end_begun(self, begun: BegunStep, *, is_early: bool) -> Result:
        """A plain step that is in flight, for those who are live still."""
        try:
            self._overlap_host_work(begun)
            drawn, live = self._in_flight.take_step()
        except BaseException:
            self._in_flight.abandon()
            self._plain.discard(begun.planned, begun.drafts)
            raise
        self.is_device_behind = False  # draws are queued when they are asked for
        planned, own, drafts = begun.of_live(drawn, live)
        return self._end(begun, planned, own, drafts, is_early=is_early)

    def _end(
        self,
        begun: BegunStep,
        planned: list[tuple[Sequence, int]],
        drawn: list[SamplerOutput],
        drafts: Mapping[Key, DraftTokens],
        *,
        is_early: bool,
    ) -> Result:
        """Book what a plain step has drawn, and begin the next one if that `is_early`. Plan, draws
        and drafts are the step's as far as they are wanted."""
        step, speculation = begun.step, self._speculation
        embeddings = _compute_embeddings(step, self._model) if step.batch.wants_hidden else {}
        scored = _compute_prompt_logprobs(planned, step, begun.all_logits) if step.scored else {}
        num_kept: dict[Key, int] = {}
        events = self._book(planned, drawn, drafts, num_kept, scored)
        if speculation is not None:
            speculation.feed_hidden_states(step, planned, drafts, self._model)
            speculation.on_accepted(events, num_kept, num_rows=len(step.batch.token_ids))
        following = self._begin_next(step) if is_early else None
        # Most of the next step's drafts take as many blocks, and the device waits for it.
        taken_over = {} if following is None else following.drafts
        for sequence, _ in planned:
            if sequence.key in drafts and sequence.key not in taken_over:
                self._output_processor.free_draft_blocks(sequence)
        if following is not None:
            following.wait_for_copies()  # or who is told now would wait for that step, too
            self.is_device_behind = self._in_flight.has_copied = False
        self.is_device_behind |= self._in_flight.has_copied
        num_decodes = step.num_decode_tokens - len(begun.planned) + len(planned)
        num_prefills = len(step.batch.token_ids) - step.num_decode_tokens
        num_prefills -= sum(len(draft.tree) for draft in begun.drafts.values())
        if embeddings:
            events = [_add_embedding(event, embeddings) for event in events]
        if step.has_beams:
            events += self._book_beams(step, begun.logits)
        num_guessed = sum(len(draft.tree) for draft in drafts.values())
        num_all_kept = sum(num_kept.values())
        return Result(events, num_prefills, num_decodes + num_all_kept, num_guessed, num_all_kept)

    def _begin_next(self, last: Step) -> BegunStep | None:
        """The step after the one that was just booked, if it is known whose that is, and it may
        have drafts.

        Args:
            last: that one. If the host was long at it, the next one is taken for another such, and
                no proposer is called to find out.
        """
        speculation, running = self._speculation, self._scheduler.running
        if speculation is None or not running or not self._scheduler.is_settled:
            return None
        can_be = speculation.hidden_state_scope is HiddenStateScope.NONE and speculation.is_quick(
            running
        )
        can_be = can_be and self._model.queues_step(last.batch)
        if not (can_be and may_be_early(running.values())):
            return None
        planned = [(sequence, 1) for sequence in running.values()]
        try:
            speculation.begin_step(planned)
            if speculation.is_idle(planned) or not self._rows.grow_by_one(running.values()):
                return None
            begun = self._plain.begin_queued(planned, running)
        except Exception as failure:
            self._failure = failure, tuple(running.values())
            return None
        if begun is None:
            return None
        self._in_flight.begin(begun.rows(), begun)
        self._begun = begun
        return begun

    def _overlap_host_work(self, begun: BegunStep) -> None:
        """Its draws are queued, and not waited for idly."""
        begun.begin_draws()
        if begun.step.draws:
            self._scheduler.precompute_block_hashes(begun.planned)
            if self._speculation is not None:
                self._speculation.overlap_host_work(begun.drafts)

    def _book(
        self,
        planned: list[tuple[Sequence, int]],
        drawn: list[SamplerOutput],
        drafts: Mapping[Key, DraftTokens] | None = None,
        num_kept: dict[Key, int] | None = None,
        scored: Mapping[Key, tuple[TokenLogprobs, ...] | InvalidLogits] = _NOTHING,
    ) -> list[RequestOutput]:
        """Book one step.

        Args:
            num_kept: filled here with the number of draft nodes accepted, by sequence.
            scored: the log probabilities of prompt tokens (_compute_prompt_logprobs).
        """
        events: list[RequestOutput] = []
        drafts = drafts or {}
        first = 0
        now = self._clock()
        for sequence, num_tokens in planned:
            group = sequence.group
            own: list[SamplerOutput] = []
            is_whole = sequence.num_computed_tokens + num_tokens == len(sequence.token_ids)
            if is_whole and not group.is_continued:
                if sequence.request.beam is not None:
                    continue  # all beams of a request at once, in _book_beams
                num_draws = group.num_places
                if drafts and sequence.key in drafts:
                    num_draws += len(drafts[sequence.key].tree)
                own = drawn[first : first + num_draws]
                first += num_draws
            if group.samples.get(sequence.sample_index) is not sequence:
                continue  # a sibling's error ended it
            if num_kept is not None and sequence.key in drafts:
                tree = drafts[sequence.key].tree
                told, num_kept[sequence.key] = self._output_processor.decode_tree(
                    sequence, num_tokens, tree, own, now
                )
                events += told
            elif sequence.key in scored:
                events += self._book_scored(sequence, num_tokens, own, scored[sequence.key], now)
            elif own and sequence.state is State.RUNNING:
                events.append(self._output_processor.decode(sequence, num_tokens, own[0], now))
            else:
                events += self._output_processor.advance(sequence, num_tokens, own, now)
        self._output_processor.compact_accepted_kv()
        return events

    def _book_scored(
        self,
        sequence: Sequence,
        num_tokens: int,
        drawn: list[SamplerOutput],
        logprobs: tuple[TokenLogprobs, ...] | InvalidLogits,
        now: float,
    ) -> list[RequestOutput]:
        """The first event tells them."""
        if isinstance(logprobs, InvalidLogits):
            return [self._output_processor.fail(sequence, logprobs)]
        sequence.num_scored_tokens += len(logprobs)  # samples that part now are forks of it
        first, *others = self._output_processor.advance(sequence, num_tokens, drawn, now)
        return [first if first.error else first._replace(prompt_logprobs=logprobs), *others]

    def _book_beams(self, step: Step, logits: torch.Tensor) -> list[RequestOutput]:
        rows: dict[str, list[int]] = {}
        for row, sample in enumerate(step.samples):
            if sample.request.beam is not None:
                rows.setdefault(sample.request.request_id, []).append(row)
        events: list[RequestOutput] = []
        for own in rows.values():
            group = step.samples[own[0]].group
            if len(own) != len(group.samples):
                raise IntegrityError(f"{len(own)} of {len(group.samples)} beams were in a step")
            own.sort(key=lambda row: step.samples[row].sample_index)
            events += self._output_processor.advance_beams(group, logits[own], self._clock())
        return events


def _compute_prompt_logprobs(
    planned: Values[tuple[Sequence, int]], step: Step, logits: torch.Tensor
) -> dict[Key, tuple[TokenLogprobs, ...] | InvalidLogits]:
    """Log probabilities of prompt tokens that a step computed, by sequence; an InvalidLogits where
    one is no number. Called before the step's tokens are added to `num_computed_tokens`.

    Args:
        logits: [R, V], which has the rows of `step.scored`.
    """
    by_sequence: dict[Key, tuple[TokenLogprobs, ...] | InvalidLogits] = {}
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
            by_sequence[sequence.key] = InvalidLogits(
                f"the log probability of prompt token {places.start + 1 + bad} is no number"
            )
            continue
        if sequence.num_scored_tokens == 0:
            found.insert(0, TokenLogprobs(sequence.token_ids[0], math.nan, ()))
        by_sequence[sequence.key] = tuple(found)
    return by_sequence


def _compute_embeddings(step: Step, model: LoadedModel) -> dict[str, tuple[float, ...]]:
    """Embeddings by request id, of those requests that ask for one and whose prompt ended in
    `step`, which must be the model's last forward pass."""
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


def _add_embedding(
    output: RequestOutput, embeddings: Mapping[str, tuple[float, ...]]
) -> RequestOutput:
    """`output` with its request's embedding, if there is one and no error."""
    embedding = embeddings.get(output.request_id)
    if embedding is None or output.error is not None:
        return output
    return output._replace(embedding=embedding)
