"""Runner: runs planned steps: the model's input, its forward pass, the sampling, and the outputs.
Masks of grammars are filled while the model runs, and chain hashes are computed that later work
needs (Scheduler.precompute_block_hashes). It does not schedule, and OutputProcessor applies the
results. Engine thread only.

If the model supports it (DecodesAhead), a step is launched, and the next one too, before the first
is read: the device computes while the host processes outputs and plans. A launched step is the next
one of its sequences; a sequence that joins meanwhile takes part in the step after it: in the next
launch if it has one token to compute and its cached KV, or the model launches prompts, too, else in
a plain step. Each sample's outputs are those of plain steps. With speculation, decode steps are
launched while no proposer would be called anyway (SpeculationManager.is_idle); when a proposer is
to be called, nothing is launched after the steps in flight, and a plain step follows.

If a proposer is called, the next step depends on the sampled tokens of this one, and the device
waits for the host. So the next step is begun in the same call that applies the results of this one,
before its outputs are returned, if no request waits and all sequences decode: it is the step that
the next call would begin, unless a sequence is removed in between (engine/in_flight.py). A request
that arrives during a step waits for the next one, too. A step is not begun early where that would
delay outputs: if the model takes long to launch it (LoadedModel.queues_step), with grammars, whose
masks take time, with proposers that are slow or have no state of some sequence yet, and with
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
from engine.in_flight import FinishedLaunch, InFlight, Planned
from engine.models.interface import LoadedModel
from engine.output_processor import OutputProcessor
from engine.outputs import PositionLogprobs, RequestOutput
from engine.request import RequestState
from engine.sampling.logprobs import raw_logprobs
from engine.sampling.metadata import SamplerOutput
from engine.scheduler import NextPlan, Scheduler
from engine.sequence import Key, Sequence
from engine.speculation.manager import SpeculationManager
from engine.speculation.proposer import DraftTokens, HiddenStateScope
from engine.step_builder import Step
from engine.step_start import PlainSteps

log = logging.getLogger(__name__)

_NOTHING: Mapping[Key, tuple[PositionLogprobs, ...] | InvalidLogits] = MappingProxyType({})


class Result(NamedTuple):
    """The result of a step."""

    events: list[RequestOutput]
    num_prefill_tokens: int
    num_decode_tokens: int
    """Number of tokens computed for output tokens after the first, accepted draft tokens
    included."""
    num_guessed_tokens: int = 0
    """Number of draft tokens, accepted or not."""
    num_kept_tokens: int = 0
    """Number of accepted draft tokens."""


class Runner:
    """Runs planned steps of the model.

    Args:
        begins_early: begin a step that may have drafts in the call before.
        clock: returns the time in seconds, for the metrics.
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
        """The step that was begun in the call before; in flight unless it was given up."""
        self._failure: tuple[Exception, tuple[Sequence, ...]] | None = None
        """The error of a step that was to be begun early, and its sequences; raised by the call
        that the step is for."""
        self._clock = clock
        self.is_device_behind = False
        """Whether the device may still write blocks that an output named or that are free
        (LLMEngine.is_device_behind)."""

    @property
    def has_begun(self) -> bool:
        """Whether the next step was launched or begun already."""
        return self._in_flight.is_live

    def run(
        self,
        plan: Mapping[Key, int],
        *,
        is_admitting: bool = True,
        is_settled: bool = False,
    ) -> Result:
        """Run a plan that is not empty, and whose sequences have their blocks; or, if `has_begun`,
        the step in flight, with an empty plan. An exception of the model leaves every sequence
        as it was.

        Args:
            is_admitting: as in Scheduler.plan_after.
            is_settled: no request waits outside of the scheduler.
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
        """Raise the error of the step that was to be begun in the call before, if one of its
        sequences is live. Otherwise it is only logged, since the next forward pass of other
        sequences may succeed."""
        if self._failure is None:
            return
        (failure, planned), self._failure = self._failure, None
        if any(running.get(one.key) is one for one in planned):
            raise failure
        log.warning("a step failed that was begun early, and nobody is left of it: %s", failure)

    def _land(self, *, is_admitting: bool) -> Result:
        """Launch the step after the one in flight, if possible, and return the result of the
        latter."""
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
            if sequence.state is RequestState.RUNNING:
                num_decodes += num_tokens
            else:
                num_prefills += num_tokens
        return Result(self._book(*taken), num_prefills, num_decodes)

    def _take(self) -> FinishedLaunch:
        """Wait for the oldest launch; chain hashes of a long step are computed meanwhile."""
        planned = self._in_flight.next_planned()
        if planned:
            try:
                self._scheduler.precompute_block_hashes(planned)
            except BaseException:
                self._in_flight.abandon()  # two launches, and neither is booked
                raise
        return self._in_flight.take()

    def _goes_on(self, live: Mapping[Key, Planned], following: NextPlan) -> bool:
        """Return whether no proposer would be called in the step after the one in flight."""
        if self._speculation is None:
            return True
        staying = [(sequence, 1) for sequence, _ in live.values()]
        joining = [one for one in following.planned if one[0].key not in live]
        return self._speculation.is_idle(staying + joining, num_unread=1)

    def _compute(self, planned: list[tuple[Sequence, int]], *, is_early: bool) -> Result:
        """Run a plain step."""
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
        """Finish the plain step in flight, for its live sequences."""
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
        """Apply the samples of a plain step, and begin the next one early if `is_early`. Plan,
        samples and drafts are those of live sequences."""
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
        """Begin the step after the one that was just applied, if its sequences are known and it may
        have drafts. Returns: None if it is not begun.

        Args: last: the step just applied. If it took the host long, the next one probably does,
            too, and no proposer is called.
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
        """Queue the sampling of a step, and do other work while the device computes."""
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
        scored: Mapping[Key, tuple[PositionLogprobs, ...] | InvalidLogits] = _NOTHING,
    ) -> list[RequestOutput]:
        """Apply the samples of one step. Returns: the outputs.

        Args:
            num_kept: filled with the number of accepted draft nodes by sequence.
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
            elif own and sequence.state is RequestState.RUNNING:
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
        logprobs: tuple[PositionLogprobs, ...] | InvalidLogits,
        now: float,
    ) -> list[RequestOutput]:
        """Apply the samples of a sequence whose prompt is scored; its first output contains the log
        probabilities."""
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
) -> dict[Key, tuple[PositionLogprobs, ...] | InvalidLogits]:
    """Log probabilities of prompt tokens that a step computed, by sequence; an InvalidLogits where
    one is no number. Called before the step's tokens are added to `num_computed_tokens`.

    Args:
        logits: [R, V], which has the rows of `step.scored`.
    """
    by_sequence: dict[Key, tuple[PositionLogprobs, ...] | InvalidLogits] = {}
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
            found.insert(0, PositionLogprobs(sequence.token_ids[0], math.nan, ()))
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
    """Return `output` with its request's embedding, if there is one and no error."""
    embedding = embeddings.get(output.request_id)
    if embedding is None or output.error is not None:
        return output
    return output._replace(embedding=embedding)
