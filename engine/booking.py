"""Booking: what one step did, written into the sequences and told as events: tokens computed and
drawn, blocks filled, samples forked, held or ended. Why one ends is growth's (growth.py); schedules
nothing. Engine thread only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Values
from dataclasses import replace

import torch

from engine.accounts import Totals
from engine.beam import Beams
from engine.constraints import Constraints
from engine.errors import EngineError, InvalidRequest
from engine.group import Group
from engine.growth import Growth
from engine.holdings import Holdings
from engine.lora.registry import Adapters
from engine.metrics import EngineMetrics
from engine.outputs import FilledBlock, RequestOutput, SampleTrace, TokenLogprobs, make_output
from engine.preemptor import Preemptor
from engine.request import FinishReason, State, StopPolicy
from engine.sampling.row import LATE, Drawn
from engine.scheduler import Scheduler
from engine.sequence import Sequence, should_hold
from engine.speculation.tree import ROOT, TokenTree


class Booking:
    """See the module.

    Args:
        groups: the live requests by id; those that end are taken out.
    """

    def __init__(
        self,
        groups: dict[str, Group],
        holdings: Holdings,
        scheduler: Scheduler,
        preemptor: Preemptor,
        constraints: Constraints,
        adapters: Adapters,
        metrics: EngineMetrics,
        totals: Totals,
        *,
        eos_token_ids: frozenset[int],
        stop_policy: StopPolicy | None,
    ) -> None:
        self._groups = groups
        self._holdings = holdings
        self._scheduler = scheduler
        self._preemptor = preemptor
        self._constraints = constraints
        self._growth = Growth(constraints, eos_token_ids=eos_token_ids, stop_policy=stop_policy)
        self._adapters = adapters
        self._metrics = metrics
        self._totals = totals
        self._now = 0.0
        self.beams = Beams(
            holdings, scheduler, eos_token_ids=eos_token_ids, end=self.end, tell=self._tell
        )

    # -- a step

    def advance(
        self, sequence: Sequence, num_tokens: int, drawn: Values[Drawn], now: float
    ) -> list[RequestOutput]:
        """Book what the step computed for one sequence, and its draws: none, one, or one for each
        sample of a prompt that forks here.

        Args:
            now: the metrics' clock.
        """
        if sequence.state is State.WAITING:
            sequence.move(State.PREFILLING)
            self._metrics.on_first_scheduled(sequence.request.request_id)
        if drawn and sequence.group.is_forked:
            return [self.decode(sequence, num_tokens, drawn[0], now)]
        if drawn and drawn[0] is LATE:  # samples that part here share one mask
            return [self._draw_later(sequence, num_tokens)]
        error: EngineError | None = None
        for one in drawn:
            error = error or one.error
        if sequence.grammar is not None and sequence.grammar.error is not None:
            error = sequence.grammar.error  # the cause of an empty mask
        if error is not None:
            return [self.fail(sequence, error)]
        sequence.num_computed_tokens += num_tokens
        filled = self._holdings.cache_full_blocks(sequence)
        if not drawn:
            group = sequence.group
            if group.is_continued and sequence.num_pending_tokens == 0:
                try:
                    return self.go_on(group, now, filled)
                except EngineError as problem:
                    return [self.fail(sequence, problem)]
            return [make_output(sequence, filled=filled)]
        events: list[RequestOutput] = []
        for sample, one in zip(self.fork(sequence.group), drawn, strict=True):
            events.append(self._take(sample, one, filled if sample is sequence else (), now))
            if events[-1].error is not None:
                return events  # it ended the others, too
        self._drop_unwanted(sequence.group)
        if sequence.request.request_id not in self._groups:
            events[-1] = events[-1]._replace(is_request_over=True)
        return events

    def decode(
        self, sequence: Sequence, num_tokens: int, drawn: Drawn, now: float
    ) -> RequestOutput:
        """`advance` for one sample of its own with one draw: most rows of most steps."""
        if drawn is LATE:
            return self._draw_later(sequence, num_tokens)
        error = drawn.error
        if sequence.grammar is not None:
            error = sequence.grammar.error or error  # the cause of an empty mask
        if error is not None:
            return self.fail(sequence, error)
        sequence.num_computed_tokens += num_tokens
        return self._take(sequence, drawn, self._holdings.cache_full_blocks(sequence), now)

    def _draw_later(self, sequence: Sequence, num_tokens: int) -> RequestOutput:
        """The mask of its draw was late: the next step computes its last token again."""
        sequence.num_computed_tokens += num_tokens - 1
        return make_output(sequence, filled=self._holdings.cache_full_blocks(sequence))

    def decode_tree(
        self,
        sequence: Sequence,
        num_tokens: int,
        tree: TokenTree,
        drawn: Values[Drawn],
        now: float,
    ) -> tuple[list[RequestOutput], int]:
        """`decode` for a sample with guesses: the path through them that was drawn token by token,
        and the token after it. `move_kept` must follow before the events are told, and
        `shrink` unless the next step's guesses take the blocks of this one's.

        Args:
            drawn: after its last token, then after each node.
        Returns: its events, and how many nodes were kept.
        """
        first_error = drawn[0].error if len(tree) else None
        if first_error is not None and (sequence.grammar is None or not sequence.grammar.error):
            # A guess whose KV is no number spoils its neighbours' sums: once more, without any.
            sequence.takes_guesses = False
            self._holdings.forget_guesses(sequence)
            return [make_output(sequence)], 0
        if drawn[0] is LATE:
            return [self._draw_later(sequence, num_tokens)], 0
        num_before = len(sequence.token_ids)
        taken: list[tuple[Drawn, int]] = []  # and how many tokens there are with it
        path: list[int] = []
        node: int | None = ROOT
        reason: FinishReason | None = None
        error: EngineError | None = None
        children = tree.children
        while node is not None:
            one = drawn[1 + node]
            if one is LATE:
                break  # the last token taken is computed by the next step
            error = one.error
            if sequence.grammar is not None:
                error = sequence.grammar.error or error
            if error is None:
                try:
                    reason = self._growth.accept(sequence, one)
                except EngineError as problem:
                    error = problem
            if error is not None:
                break
            num_known = len(sequence.token_ids)
            taken.append((one, num_known))
            node = None
            if reason is None and num_known == num_before + len(path) + 1:  # nothing was forced
                below = children.get(path[-1] if path else ROOT)
                node = None if below is None else below.get(sequence.token_ids[-1])
            if node is not None:
                path.append(node)
        if error is not None and not taken:
            return [self.fail(sequence, error)], 0
        del sequence.token_ids[taken[-1][1] :]  # of a draw that failed
        sequence.num_computed_tokens += num_tokens
        # The last token that is known is computed by the next step, also if it was guessed.
        num_kept = min(len(path), len(sequence.token_ids) - num_before - 1)
        kept = path[:num_kept]
        self._holdings.kept_paths.keep(sequence.block_ids, sequence.num_computed_tokens, kept)
        sequence.num_computed_tokens += num_kept
        filled = self._holdings.cache_full_blocks(sequence)
        events = [self._told(sequence, taken, num_before, reason, filled, now)]
        if error is not None:
            events.append(self.fail(sequence, error))
        return events, num_kept

    def move_kept(self) -> None:
        """See decode_tree."""
        self._holdings.kept_paths.move()

    def shrink(self, sequence: Sequence) -> None:
        """See decode_tree; also for one that is over by now."""
        self._holdings.shrink(sequence)

    def advance_beams(self, group: Group, logits: torch.Tensor, now: float) -> list[RequestOutput]:
        """Book a step of all open beams of a request, each of which computed all its tokens; or of
        its prompt.

        Args:
            logits: [number of open beams, V], a row for each in their order.
        """
        self._now = now
        filled: tuple[FilledBlock, ...] = ()
        for sequence in group.samples.values():
            if sequence.state is State.WAITING:
                sequence.move(State.PREFILLING)
                self._metrics.on_first_scheduled(group.request.request_id)
            sequence.num_computed_tokens = len(sequence.token_ids)
            filled += self._holdings.cache_full_blocks(sequence)
        try:
            return self.beams.advance(group, logits, filled)
        except EngineError as error:
            return [self.fail(next(iter(group.samples.values())), error)]

    def _tell(self, event: RequestOutput) -> None:
        name, rank = event.request_id, event.sample_index
        self._totals.num_output_tokens += len(event.token_ids)
        self._metrics.on_tokens(name, len(event.token_ids), sample_index=rank, now=self._now)
        if event.finish_reason is not None:
            self._metrics.on_finish(name, event.finish_reason, sample_index=rank)

    def fail(self, sequence: Sequence, error: EngineError) -> RequestOutput:
        """An error of its own ends the request, all samples of it."""
        group = sequence.group
        for sample in group.samples.values():
            self._holdings.distrust(sample)
        event = make_output(sequence, error=error, is_request_over=True)
        self.end(group, State.ABORTED, type(error).__name__)
        return event

    def _take(
        self, sequence: Sequence, drawn: Drawn, filled: tuple[FilledBlock, ...], now: float
    ) -> RequestOutput:
        """One drawn token, and those that a grammar forces with it."""
        num_before = len(sequence.token_ids)
        try:
            reason = self._growth.accept(sequence, drawn)
        except EngineError as error:
            return self.fail(sequence, error)
        taken = ((drawn, len(sequence.token_ids)),)
        return self._told(sequence, taken, num_before, reason, filled, now)

    def _told(
        self,
        sequence: Sequence,
        taken: Values[tuple[Drawn, int]],
        num_before: int,
        reason: FinishReason | None,
        filled: tuple[FilledBlock, ...],
        now: float,
    ) -> RequestOutput:
        """The event of what was accepted, and what follows from it for the sample.

        Args:
            taken: each draw, and how many tokens the sample had with it.
            num_before: how many it had before all of them.
        """
        group = sequence.group
        name, index = sequence.key
        token_ids = tuple(sequence.token_ids[num_before:])
        num_computed = sequence.num_computed_tokens
        self._totals.num_output_tokens += len(token_ids)
        self._metrics.on_tokens(name, len(token_ids), sample_index=index, now=now)
        if reason is not None:
            self._metrics.on_finish(name, reason, sample_index=index)
        is_holding = group.request.hold_after is not None
        if is_holding and (reason is not None or should_hold(sequence)):
            self._scheduler.remove(sequence)
            sequence.move(State.HOLDING)
        elif reason is not None:
            self._end_sample(sequence)
        elif sequence.state is State.PREFILLING:
            sequence.move(State.RUNNING)
        # Positional, as it is made for every row of every step: a third of the price by name.
        return RequestOutput(
            name,
            token_ids,
            None if taken[0][0].logprobs is None else _get_logprobs(taken),
            filled,
            num_computed,
            reason,
            token_ids[-1] if reason is not None and reason.is_token else None,
            None,
            index,
            None if taken[0][0].trace is None else _make_traces(taken, token_ids, num_before),
            (reason is not None or is_holding) and self._is_over(group),
        )

    def _is_over(self, group: Group) -> bool:
        """Every sample has finished, or holds."""
        return all(sample.state is State.HOLDING for sample in group.samples.values())

    # -- forks

    def fork(self, group: Group) -> list[Sequence]:
        """One sequence for each sample, from the one that has computed the prompt."""
        sequence = group.prompt
        samples = [sequence]
        group.is_forked = True
        for index in range(1, group.num_rows):
            twin = self._holdings.fork(sequence, index)
            group.samples[index] = twin
            self._scheduler.add_fork(sequence, twin)
            samples.append(twin)
        return samples

    def go_on(
        self, group: Group, now: float, filled: tuple[FilledBlock, ...] | None = None
    ) -> list[RequestOutput]:
        """The prompt is computed; what follows was drawn by an earlier leg.

        Args:
            filled: by the step that computed its last token; None: no step did.
        Raises: EngineError.
        """
        sequence = group.prompt
        if not group.beam_start:
            events = [] if filled is None else [make_output(sequence, filled=filled)]
            if filled is None:
                self._scheduler.add(sequence)
            self._fork_outputs(group)
            return events
        if sequence.state is State.WAITING:
            sequence.move(State.PREFILLING)
            self._metrics.on_first_scheduled(group.request.request_id)
        self._now = now
        candidates, group.beam_start = group.beam_start, ()
        return self.beams.begin(group, candidates, filled or ())

    def _fork_outputs(self, group: Group) -> None:
        """Fork with the tokens that an earlier leg drew; a sample that they end is over.

        Raises: EngineError where they are not in the request's grammar.
        """
        outputs, group.first_outputs = group.first_outputs, ()
        for sample, token_ids in zip(self.fork(group), outputs, strict=True):
            if self._growth.add(sample, token_ids) is not None:
                group.unwanted.add(sample.sample_index)
        if group.unwanted >= set(group.samples):  # a grammar's end, which `start` cannot see
            raise InvalidRequest("outputs", "every sample has ended already")
        self._drop_unwanted(group)

    # -- ends

    def finish_sample(self, group: Group, sample_index: int) -> None:
        """Nobody wants more of this sample; the last one ends the request."""
        if not group.is_forked or group.request.beam is not None:
            group.unwanted.add(sample_index)
            if len(group.unwanted) == group.request.num_samples:
                self.end(group, State.ABORTED, "aborted")
        elif set(group.samples) == {sample_index}:
            self.end(group, State.ABORTED, "aborted")
        elif sample_index in group.samples:
            sample = group.samples[sample_index]
            sample.move(State.ABORTED)
            self._drop_sample(sample)
            self._holdings.give_back_spare(group)

    def _drop_unwanted(self, group: Group) -> None:
        unwanted, group.unwanted = group.unwanted, set()
        for index in sorted(unwanted):
            if group.request.request_id in self._groups:
                self.finish_sample(group, index)

    def _end_sample(self, sequence: Sequence) -> None:
        group = sequence.group
        if len(group.samples) == 1:
            self.end(group, State.FINISHED, "finished")
            return
        sequence.move(State.FINISHED)
        self._drop_sample(sequence)
        self._holdings.give_back_spare(group)

    def _drop_sample(self, sequence: Sequence) -> None:
        """Its blocks go back, the tail of the chain to be evicted first."""
        self._scheduler.remove(sequence)
        self._preemptor.forget(sequence)
        self._holdings.give_back(sequence)
        del sequence.group.samples[sequence.sample_index]

    def end(self, group: Group, state: State, outcome: str) -> None:
        """FINISHED or ABORTED: give back all that the request has, and forget it.

        Args:
            outcome: for the metrics: "finished", "aborted", or an error's name.
        """
        for sequence in list(group.samples.values()):
            sequence.move(state)
            self._drop_sample(sequence)
        self._holdings.give_back_spare(group)
        self._constraints.forget(group)
        self._adapters.release(group.request.adapter)
        del self._groups[group.request.request_id]
        self._metrics.on_end(group.request.request_id, outcome)


def _get_logprobs(taken: Values[tuple[Drawn, int]]) -> tuple[TokenLogprobs, ...]:
    """The log probabilities of each sampled token that has some."""
    return tuple(one.logprobs for one, _ in taken if one.logprobs is not None)


def _make_traces(
    taken: Values[tuple[Drawn, int]], token_ids: tuple[int, ...], num_before: int
) -> tuple[SampleTrace, ...]:
    """The trace of each token that a step appended, in order."""
    traces: tuple[SampleTrace, ...] = ()
    for one, num_known in taken:
        if one.trace is not None:
            traces += _add_forced(one.trace, token_ids[len(traces) : num_known - num_before])
    return traces


def _add_forced(trace: SampleTrace, token_ids: tuple[int, ...]) -> tuple[SampleTrace, ...]:
    """A trace for each token: the first token replaces the sampled one, whose text begins with it;
    the grammar forced the others."""
    first = replace(trace, token_id=token_ids[0], is_forced=token_ids[0] != trace.token_id)
    forced = [
        SampleTrace(
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
