"""OutputProcessor: applies the results of a step to the sequences. It counts computed tokens, puts
full blocks into the prefix cache, appends sampled tokens, checks stop conditions, forks samples,
frees finished sequences and makes the RequestOutputs.

It schedules nothing. Engine thread only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Values
from dataclasses import replace

import torch

from engine.errors import EngineError, IntegrityError, InvalidRequest, PolicyFailed
from engine.grammar_constraints import Constraints
from engine.kv.cache_manager import KVCacheManager
from engine.lora.manager import LoraManager
from engine.metrics import EngineMetrics, EngineTotals
from engine.open_beams import Beams
from engine.outputs import FilledBlock, PositionLogprobs, RequestOutput, SampleTrace, make_output
from engine.preemption import Preemptor
from engine.request import FinishReason, RequestState, StopPolicy, StopView
from engine.sampling.metadata import LATE, SamplerOutput
from engine.scheduler import Scheduler
from engine.sequence import Sequence, finish_reason, should_hold
from engine.sequence_group import Group
from engine.speculation.token_tree import ROOT, TokenTree


class OutputProcessor:
    """Turns what a step computed and sampled into tokens of sequences and into RequestOutputs.

    Args:
        groups: the live requests by id; a request that ends is removed.
        stop_policy: asked after each step whether a sample ends; None: only the request's own
            stop conditions count.
    """

    def __init__(
        self,
        groups: dict[str, Group],
        cache_manager: KVCacheManager,
        scheduler: Scheduler,
        preemptor: Preemptor,
        constraints: Constraints,
        adapters: LoraManager,
        metrics: EngineMetrics,
        totals: EngineTotals,
        *,
        eos_token_ids: frozenset[int],
        stop_policy: StopPolicy | None,
    ) -> None:
        self._groups = groups
        self._cache_manager = cache_manager
        self._scheduler = scheduler
        self._preemptor = preemptor
        self._constraints = constraints
        self._eos_token_ids = eos_token_ids
        self._stop_policy = stop_policy
        self._adapters = adapters
        self._metrics = metrics
        self._totals = totals
        self._now = 0.0
        self.beams = Beams(
            cache_manager,
            scheduler,
            eos_token_ids=eos_token_ids,
            end=self.end,
            count_output=self._count_output,
        )

    # -- a step

    def advance(
        self, sequence: Sequence, num_tokens: int, drawn: Values[SamplerOutput], now: float
    ) -> list[RequestOutput]:
        """Apply what a step computed and sampled for one sequence.

        Args:
            drawn: nothing if the step did not reach the sequence's last token; else one sampled
                token, or one for each sample of a prompt that forks here.
            now: seconds on the metrics' clock.
        """
        if sequence.state is RequestState.WAITING:
            sequence.move(RequestState.PREFILLING)
            self._metrics.on_first_scheduled(sequence.request.request_id)
        if drawn and sequence.group.is_forked:
            return [self.decode(sequence, num_tokens, drawn[0], now)]
        if drawn and drawn[0] is LATE:  # samples that part here share one mask
            return [self._sample_again(sequence, num_tokens)]
        error: EngineError | None = None
        for one in drawn:
            error = error or one.error
        if sequence.grammar is not None and sequence.grammar.error is not None:
            error = sequence.grammar.error  # the cause of an empty mask
        if error is not None:
            return [self.fail(sequence, error)]
        sequence.num_computed_tokens += num_tokens
        filled = self._cache_manager.cache_full_blocks(sequence)
        if not drawn:
            group = sequence.group
            if group.is_continued and sequence.num_pending_tokens == 0:
                try:
                    return self.resume(group, now, filled)
                except EngineError as problem:
                    return [self.fail(sequence, problem)]
            return [make_output(sequence, filled=filled)]
        outputs: list[RequestOutput] = []
        for sample, one in zip(self.fork(sequence.group), drawn, strict=True):
            outputs.append(self._take(sample, one, filled if sample is sequence else (), now))
            if outputs[-1].error is not None:
                return outputs  # it ended the others, too
        self._drop_unwanted(sequence.group)
        if sequence.request.request_id not in self._groups:
            outputs[-1] = outputs[-1]._replace(is_request_over=True)
        return outputs

    def decode(
        self, sequence: Sequence, num_tokens: int, drawn: SamplerOutput, now: float
    ) -> RequestOutput:
        """Apply one sampled token of a sample that has forked already or is alone, as `advance`
        does: most rows of most steps."""
        if drawn is LATE:
            return self._sample_again(sequence, num_tokens)
        error = drawn.error
        if sequence.grammar is not None:
            error = sequence.grammar.error or error  # the cause of an empty mask
        if error is not None:
            return self.fail(sequence, error)
        sequence.num_computed_tokens += num_tokens
        return self._take(sequence, drawn, self._cache_manager.cache_full_blocks(sequence), now)

    def _sample_again(self, sequence: Sequence, num_tokens: int) -> RequestOutput:
        """The grammar's mask was not ready in time, so nothing was sampled: the next step computes
        the sequence's last token again."""
        num_computed = self._cache_manager.num_computed_before_last(sequence, num_tokens)
        sequence.num_computed_tokens = num_computed
        return make_output(sequence, filled=self._cache_manager.cache_full_blocks(sequence))

    def decode_tree(
        self,
        sequence: Sequence,
        num_tokens: int,
        tree: TokenTree,
        drawn: Values[SamplerOutput],
        now: float,
    ) -> tuple[list[RequestOutput], int]:
        """Apply a step of a sample with draft tokens: accept the path through the tree that was
        sampled token by token, and the token after it. The caller must call
        `compact_accepted_kv` before the outputs leave the engine, and `free_draft_blocks` unless
        the next step's draft tokens reuse the blocks.

        Args: drawn: the token sampled after the sequence's last token, then after each node.
        Returns: its outputs, and the number of nodes accepted.
        """
        first_error = drawn[0].error if len(tree) else None
        if first_error is not None and (sequence.grammar is None or not sequence.grammar.error):
            # A draft token whose KV is no number spoils the sums of its neighbours: compute the
            # step again without draft tokens.
            sequence.takes_guesses = False
            self._cache_manager.discard_draft_blocks(sequence)
            return [make_output(sequence)], 0
        if drawn[0] is LATE:
            return [self._sample_again(sequence, num_tokens)], 0
        num_before = len(sequence.token_ids)
        taken: list[tuple[SamplerOutput, int]] = []  # and how many tokens there are with it
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
                    reason = self._accept(sequence, one)
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
        # The next step computes the last known token, also if it was a draft token.
        num_kept = min(len(path), len(sequence.token_ids) - num_before - 1)
        kept = path[:num_kept]
        self._cache_manager.keep_accepted(sequence.block_ids, sequence.num_computed_tokens, kept)
        sequence.num_computed_tokens += num_kept
        filled = self._cache_manager.cache_full_blocks(sequence)
        outputs = [self._finish_step(sequence, taken, num_before, reason, filled, now)]
        if error is not None:
            outputs.append(self.fail(sequence, error))
        return outputs, num_kept

    def compact_accepted_kv(self) -> None:
        """Move the KV of all accepted draft tokens of the step to their slots (see decode_tree)."""
        self._cache_manager.compact_accepted_kv()

    def free_draft_blocks(self, sequence: Sequence) -> None:
        """Free the blocks of a sequence's draft tokens (see decode_tree); it may have ended."""
        self._cache_manager.free_draft_blocks(sequence)

    def advance_beams(self, group: Group, logits: torch.Tensor, now: float) -> list[RequestOutput]:
        """Apply a step of all open beams of a request, each of which computed all its tokens; or
        the step that ended its prompt.

        Args:
            logits: [number of open beams, V], one row for each beam, in their order.
        """
        self._now = now
        filled: tuple[FilledBlock, ...] = ()
        for sequence in group.samples.values():
            if sequence.state is RequestState.WAITING:
                sequence.move(RequestState.PREFILLING)
                self._metrics.on_first_scheduled(group.request.request_id)
            sequence.num_computed_tokens = len(sequence.token_ids)
            filled += self._cache_manager.cache_full_blocks(sequence)
        try:
            return self.beams.advance(group, logits, filled)
        except EngineError as error:
            return [self.fail(next(iter(group.samples.values())), error)]

    def _count_output(self, event: RequestOutput) -> None:
        """Count a finished hypothesis of a beam search in the metrics."""
        name, rank = event.request_id, event.sample_index
        self._totals.num_output_tokens += len(event.token_ids)
        self._metrics.on_tokens(name, len(event.token_ids), sample_index=rank, now=self._now)
        if event.finish_reason is not None:
            self._metrics.on_finish(name, event.finish_reason, sample_index=rank)

    def fail(self, sequence: Sequence, error: EngineError) -> RequestOutput:
        """End a request and all its samples with an error of its own."""
        group = sequence.group
        for sample in group.samples.values():
            self._cache_manager.uncache(sample)
        event = make_output(sequence, error=error, is_request_over=True)
        self.end(group, RequestState.ABORTED, type(error).__name__)
        return event

    def _take(
        self, sequence: Sequence, drawn: SamplerOutput, filled: tuple[FilledBlock, ...], now: float
    ) -> RequestOutput:
        """Append one sampled token, and those that the grammar forces after it."""
        num_before = len(sequence.token_ids)
        try:
            reason = self._accept(sequence, drawn)
        except EngineError as error:
            return self.fail(sequence, error)
        taken = ((drawn, len(sequence.token_ids)),)
        return self._finish_step(sequence, taken, num_before, reason, filled, now)

    def _finish_step(
        self,
        sequence: Sequence,
        taken: Values[tuple[SamplerOutput, int]],
        num_before: int,
        reason: FinishReason | None,
        filled: tuple[FilledBlock, ...],
        now: float,
    ) -> RequestOutput:
        """Count the appended tokens, change the sample's state and make its output.

        Args:
            taken: each sampled token, and the number of the sample's tokens with it.
            num_before: the number of the sample's tokens before all of them.
            reason: why the sample ends; None: it goes on.
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
            sequence.move(RequestState.HOLDING)
        elif reason is not None:
            self._end_sample(sequence)
        elif sequence.state is RequestState.PREFILLING:
            sequence.move(RequestState.RUNNING)
        # Positional arguments: one is made for every row of every step, and by name it costs
        # three times as much.
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

    # -- tokens and stop conditions

    def _accept(self, sequence: Sequence, drawn: SamplerOutput) -> FinishReason | None:
        """Append a sampled token and those that the grammar forces after it, up to one that ends
        the sample. Returns: why it ends; None: it continues. Raises: EngineError from its
        grammar or the stop policy."""
        if sequence.grammar is None or self._stop_policy is not None:  # it sees every token
            reason = self._append(sequence, (drawn.token_id,))
        else:
            reason = self._append(sequence, self._constraints.retokenized(sequence, drawn.token_id))
            if reason is None:
                reason = self._append(sequence, self._constraints.forced(sequence))
        if reason is None and self._stop_policy is not None:
            reason = _ask_policy(sequence, self._stop_policy)
        return reason

    def _append(self, sequence: Sequence, token_ids: tuple[int, ...]) -> FinishReason | None:
        """Append tokens up to one that ends the sample. Returns: why it ends; None: it continues.
        Raises: EngineError from its grammar."""
        grammar = sequence.grammar
        for token_id in token_ids:
            if grammar is not None and not grammar.accept(token_id):
                raise grammar.error or IntegrityError(
                    f"{sequence.key}: token {token_id} was drawn against its grammar"
                )
            sequence.add_token(token_id)
            reason = finish_reason(
                sequence.request.sampling,
                token_id,
                len(sequence.token_ids) - sequence.num_prompt_tokens,
                sequence.group.max_output_tokens,
                self._eos_token_ids,
            )
            if reason is not None:
                return reason
        if grammar is not None and grammar.is_complete:
            return FinishReason.GRAMMAR
        return None

    def _is_over(self, group: Group) -> bool:
        """Whether every sample has finished or is HOLDING."""
        return all(sample.state is RequestState.HOLDING for sample in group.samples.values())

    # -- forks

    def fork(self, group: Group) -> list[Sequence]:
        """Make a sequence for each sample from the one that has computed the prompt."""
        sequence = group.prompt
        samples = [sequence]
        group.is_forked = True
        for index in range(1, group.num_rows):
            twin = self._cache_manager.fork(sequence, index)
            group.samples[index] = twin
            self._scheduler.add_fork(sequence, twin)
            samples.append(twin)
        return samples

    def resume(
        self, group: Group, now: float, filled: tuple[FilledBlock, ...] | None = None
    ) -> list[RequestOutput]:
        """Continue a request whose prompt is computed from the tokens or beam candidates that
        another engine has sampled.

        Args:
            filled: blocks filled by the step that computed the prompt's last token; None: no step
                of this engine computed it.
        Raises: EngineError.
        """
        sequence = group.prompt
        if not group.beam_start:
            outputs = [] if filled is None else [make_output(sequence, filled=filled)]
            if filled is None:
                self._scheduler.add(sequence)
            self._fork_outputs(group)
            return outputs
        if sequence.state is RequestState.WAITING:
            sequence.move(RequestState.PREFILLING)
            self._metrics.on_first_scheduled(group.request.request_id)
        self._now = now
        candidates, group.beam_start = group.beam_start, ()
        return self.beams.begin(group, candidates, filled or ())

    def _fork_outputs(self, group: Group) -> None:
        """Fork a request with the tokens that another engine has sampled; a sample that they end
        is over.

        Raises: EngineError if the request's grammar does not allow them.
        """
        outputs, group.first_outputs = group.first_outputs, ()
        for sample, token_ids in zip(self.fork(group), outputs, strict=True):
            if self._append(sample, token_ids) is not None:
                group.unwanted.add(sample.sample_index)
        if group.unwanted >= set(group.samples):  # the grammar ends them, which `start` cannot see
            raise InvalidRequest("outputs", "every sample has ended already")
        self._drop_unwanted(group)

    # -- ends

    def finish_sample(self, group: Group, sample_index: int) -> None:
        """End one sample because the client wants no more of it; the last one ends the request."""
        if not group.is_forked or group.request.beam is not None:
            group.unwanted.add(sample_index)
            if len(group.unwanted) == group.request.num_samples:
                self.end(group, RequestState.ABORTED, "aborted")
        elif set(group.samples) == {sample_index}:
            self.end(group, RequestState.ABORTED, "aborted")
        elif sample_index in group.samples:
            sample = group.samples[sample_index]
            sample.move(RequestState.ABORTED)
            self._drop_sample(sample)
            self._cache_manager.free_spare(group)

    def _drop_unwanted(self, group: Group) -> None:
        unwanted, group.unwanted = group.unwanted, set()
        for index in sorted(unwanted):
            if group.request.request_id in self._groups:
                self.finish_sample(group, index)

    def _end_sample(self, sequence: Sequence) -> None:
        group = sequence.group
        if len(group.samples) == 1:
            self.end(group, RequestState.FINISHED, "finished")
            return
        sequence.move(RequestState.FINISHED)
        self._drop_sample(sequence)
        self._cache_manager.free_spare(group)

    def _drop_sample(self, sequence: Sequence) -> None:
        """Free the sample's blocks, so that the tail of its chain is evicted first."""
        self._scheduler.remove(sequence)
        self._preemptor.forget(sequence)
        self._cache_manager.free(sequence)
        del sequence.group.samples[sequence.sample_index]

    def end(self, group: Group, state: RequestState, outcome: str) -> None:
        """End a request as FINISHED or ABORTED: free everything that it has and remove it.

        Args:
            outcome: label of the metrics: "finished", "moved", "aborted", or an error's name.
        """
        for sequence in list(group.samples.values()):
            sequence.move(state)
            self._drop_sample(sequence)
        self._cache_manager.free_spare(group)
        self._constraints.forget(group)
        self._adapters.release(group.request.adapter)
        del self._groups[group.request.request_id]
        self._metrics.on_end(group.request.request_id, outcome)


def _ask_policy(sequence: Sequence, policy: StopPolicy) -> FinishReason | None:
    request = sequence.request
    view = StopView(
        request.request_id,
        sequence.sample_index,
        request.prompt_token_ids,
        sequence.output_token_ids,
    )
    try:
        return FinishReason.POLICY if policy(view) else None
    except Exception as error:  # the policy is foreign code
        raise PolicyFailed(f"the stop policy raised {type(error).__name__}: {error}") from error


def _get_logprobs(taken: Values[tuple[SamplerOutput, int]]) -> tuple[PositionLogprobs, ...]:
    """The log probabilities of each sampled token that has some."""
    return tuple(one.logprobs for one, _ in taken if one.logprobs is not None)


def _make_traces(
    taken: Values[tuple[SamplerOutput, int]], token_ids: tuple[int, ...], num_before: int
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
