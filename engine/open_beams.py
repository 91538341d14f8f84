"""Beams: runs beam search on the engine's sequences. The search itself is pure
(engine/beam_search.py); here its open beams are a group's samples, in its order, and a beam that
is continued twice is forked.

Life of a beam request: its prompt is computed like any other; the prompt's row of logits begins the
search, or becomes the `beam_start` of the engine that continues the request (`hold_after`), which
begins the search with it. Then all open beams take part in every step without outputs; when the
search is over, each of the best hypotheses has one output.

Such a group `is_whole`: blocks of a dropped beam become spare again, so that no beam ever lacks a
block. Blocks of outputs are not inserted into the prefix cache. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from engine import beam_search
from engine.beam_search import BeamState, BeamStep, Candidates
from engine.errors import InvalidRequest
from engine.grammar_constraints import end_token_ids
from engine.kv.cache_manager import KVCacheManager
from engine.outputs import FilledBlock, RequestOutput
from engine.request import FinishReason, Request, RequestState, Sampling
from engine.scheduler import Scheduler
from engine.sequence import Sequence as Sample
from engine.sequence_group import Group

_PLAIN = Sampling(max_tokens=1)
_ALLOWED = frozenset({"max_tokens", "stop_token_ids", "ignore_eos", "seed", "sample_index"})
"""Fields of Sampling that affect a beam search; the others must have their defaults."""


def check_beams(request: Request, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
    """Check the fields of a beam search request. Raises: InvalidRequest naming a field that a beam
    search does not support."""
    if request.beam is None:
        return
    for name in Sampling.__dataclass_fields__:
        if name not in _ALLOWED and getattr(request.sampling, name) != getattr(_PLAIN, name):
            raise InvalidRequest(name, "is not for beam search, which draws nothing; leave it out")
    if request.hold_after not in (None, 1):
        raise InvalidRequest("hold_after", "a beam search holds after its prompt (1) or never")
    ends = end_token_ids(request.sampling, eos_token_ids)
    beam_search.check_beam(request.beam, request.num_samples, vocab_size, len(ends))


class Beams:
    """Runs beam search for groups of sequences: each open beam is a sample, and a beam that is
    continued twice is forked.

    Args:
        end: ends a group, as OutputProcessor.end does.
        count_output: counts the output of a finished hypothesis in the metrics.
    """

    def __init__(
        self,
        cache_manager: KVCacheManager,
        scheduler: Scheduler,
        *,
        eos_token_ids: frozenset[int],
        end: Callable[[Group, RequestState, str], None],
        count_output: Callable[[RequestOutput], None],
    ) -> None:
        self._cache_manager = cache_manager
        self._scheduler = scheduler
        self._eos_token_ids = eos_token_ids
        self._end = end
        self._count_output = count_output

    def check_start(self, group: Group, candidates: Candidates, vocab_size: int) -> Candidates:
        """Check the candidates that an earlier engine passed to `start`. Raises: InvalidRequest."""
        if not candidates:
            return ()
        if group.request.beam is None:
            raise InvalidRequest("beam_start", "is for beam search only")
        state = self._new_state(group)
        wanted = beam_search.num_candidates(state.beam.num_beams, len(state.end_token_ids))
        if len(candidates) != wanted:
            raise InvalidRequest("beam_start", f"{len(candidates)} candidates, not {wanted}")
        if any(not 0 <= token_id < vocab_size for token_id, _ in candidates):
            raise InvalidRequest("beam_start", f"an id outside [0, {vocab_size})")
        if any(not logprob <= 0.0 for _, logprob in candidates):  # also NaN
            raise InvalidRequest("beam_start", "a log probability above 0")
        return tuple((token_id, float(logprob)) for token_id, logprob in candidates)

    def begin(
        self, group: Group, candidates: Candidates, filled: tuple[FilledBlock, ...] = ()
    ) -> list[RequestOutput]:
        """Begin the search from the prompt's candidates, once the prompt is computed. Raises:
        InvalidLogits."""
        state = self._new_state(group)
        return self._follow(group, beam_search.begin(state, candidates), filled)

    def advance(
        self, group: Group, logits: torch.Tensor, filled: tuple[FilledBlock, ...]
    ) -> list[RequestOutput]:
        """Continue the search with the logits of all open beams.

        Args: logits: [number of open beams, V] in the model's dtype.
        Raises: InvalidLogits.
        """
        logprobs = torch.log_softmax(logits.float(), dim=-1)
        state = group.beam_state
        if state is not None:
            return self._follow(group, beam_search.step(state, logprobs), filled)
        state = self._new_state(group)
        wanted = beam_search.num_candidates(state.beam.num_beams, len(state.end_token_ids))
        candidates = beam_search.first_candidates(logprobs[0], wanted)
        if group.request.hold_after is None:
            return self._follow(group, beam_search.begin(state, candidates), filled)
        sample = group.prompt
        self._scheduler.remove(sample)
        sample.move(RequestState.HOLDING)
        return [_event(sample, (), filled, beam_start=candidates, is_request_over=True)]

    def _new_state(self, group: Group) -> BeamState:
        request = group.request
        if request.beam is None:
            raise AssertionError("a search without a beam")
        ends = end_token_ids(request.sampling, self._eos_token_ids)
        return beam_search.start(request.beam, ends, group.max_output_tokens)

    def _follow(
        self, group: Group, step: BeamStep, filled: tuple[FilledBlock, ...]
    ) -> list[RequestOutput]:
        """Make the group's samples the new open beams, or end the group."""
        group.beam_state = step.state
        if step.state.is_over:
            return self._report(group, step.state, filled)
        old = dict(group.samples)
        events = [_event(old[0], (), filled)] if filled else []
        for sample in old.values():
            self._scheduler.remove(sample)
        new: list[Sample] = []
        for index, parent in enumerate(step.parents):
            is_first = parent not in step.parents[:index]
            sample = old[parent] if is_first else self._cache_manager.fork(old[parent], index)
            new.append(sample)
        for index in old.keys() - set(step.parents):
            self._cache_manager.free_to_spare(old[index])
        group.samples = {}
        for index, (sample, token_id) in enumerate(zip(new, step.token_ids, strict=True)):
            sample.sample_index, sample.key = index, (group.request.request_id, index)
            sample.add_token(token_id)
            if sample.state is RequestState.PREFILLING:
                sample.move(RequestState.RUNNING)
            group.samples[index] = sample
        group.is_forked = True
        for sample in new:
            self._scheduler.add_running(sample)
        return events

    def _report(
        self, group: Group, state: BeamState, filled: tuple[FilledBlock, ...]
    ) -> list[RequestOutput]:
        best = state.finished[: group.request.num_samples]
        sample = next(iter(group.samples.values()))
        events = [
            _event(
                sample,
                one.token_ids,
                filled if rank == 0 else (),
                sample_index=rank,
                score=one.score,
                finish_reason=self._reason(group, one.token_ids[-1]),
                is_request_over=rank == len(best) - 1,
            )
            for rank, one in enumerate(best)
        ]
        for event in events:
            self._count_output(event)
        self._end(group, RequestState.FINISHED, "finished")
        return events

    def _reason(self, group: Group, token_id: int) -> FinishReason:
        sampling = group.request.sampling
        if token_id in self._eos_token_ids and not sampling.ignore_eos:
            return FinishReason.EOS
        return (
            FinishReason.STOP_TOKEN if token_id in sampling.stop_token_ids else FinishReason.LENGTH
        )


def _event(
    sample: Sample,
    token_ids: Sequence[int],
    filled: tuple[FilledBlock, ...],
    *,
    sample_index: int = 0,
    score: float | None = None,
    finish_reason: FinishReason | None = None,
    beam_start: Candidates = (),
    is_request_over: bool = False,
) -> RequestOutput:
    is_token = finish_reason is not None and finish_reason.is_token
    return RequestOutput(
        request_id=sample.request.request_id,
        token_ids=tuple(token_ids),
        logprobs=None,
        filled=filled,
        num_computed_tokens=sample.num_computed_tokens,
        finish_reason=finish_reason,
        stop_token_id=token_ids[-1] if is_token else None,
        error=None,
        sample_index=sample_index,
        is_request_over=is_request_over,
        score=score,
        beam_start=beam_start,
    )
