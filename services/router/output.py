"""AnswerOutput: the output of one request, which turns tokens from workers into messages to the
client, sample by sample, and tells later workers what has been drawn.

`SampleOutput` is one sample as its client sees it. It joins the visible text with the token ids,
logprobs and traces that belong to it, and knows why the sample ended: the engine's finish reason,
or a stop string, which only text can show.

`AnswerOutput` holds the samples of a request. A token that came counts as drawn whether it is shown
or held back, and a later worker goes on after it. Invariants: the drawn tokens of a sample are
those that its SampleOutput was given, in order; tokens past the sample's end are drawn, too, but
are given to no SampleOutput. A token that was reported stands: when a later prefill worker draws
another token in its place, the later one's tokens for that sample are ignored.

No I/O, no clock. One asyncio loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from process.rpc_errors import Internal
from protos import common_pb2, decode_pb2, inference_pb2, prefill_pb2
from services.router.worker_client import SampleNews, num_first_messages
from tokens.text import OutputText, TextDelta
from tokens.tool_calls import ToolCallEnds

NO_TOOL_CALLS = ToolCallEnds()
_BY_STOP_TOKEN = (common_pb2.FINISH_REASON_EOS, common_pb2.FINISH_REASON_STOP_TOKEN)


class SampleOutput:
    """One sample of an answer: takes tokens, returns messages, and builds the last message."""

    def __init__(
        self,
        request_id: str,
        output: OutputText,
        *,
        sample_index: int = 0,
        tool_call_ends: ToolCallEnds = NO_TOOL_CALLS,
    ) -> None:
        """tool_call_ends: stop tokens and stop strings whose finish reason is "tool call"."""
        self.sample_index = sample_index
        self._tool_call_ends = tool_call_ends
        self._request_id = request_id
        self._output = output
        self._logprobs: deque[common_pb2.TokenLogprobs] = deque()
        self._traces: deque[common_pb2.StepTrace] = deque()
        self._score: float | None = None
        self._stop_token_id: int | None = None
        self.finish_reason: common_pb2.FinishReason = common_pb2.FINISH_REASON_UNSPECIFIED

    @property
    def is_over(self) -> bool:
        """Whether the sample has ended, by the engine's finish reason or by a stop string."""
        return self.finish_reason != common_pb2.FINISH_REASON_UNSPECIFIED

    def take(
        self,
        token_ids: Sequence[int],
        logprobs: Iterable[common_pb2.TokenLogprobs],
        *,
        traces: Iterable[common_pb2.StepTrace] = (),
        reason: common_pb2.FinishReason = common_pb2.FINISH_REASON_UNSPECIFIED,
        stop_token_id: int | None = None,
        score: float | None = None,
    ) -> inference_pb2.GenerateResponse:
        """Add tokens from a worker.

        Args:
            reason: set when they are the engine's last tokens.
            score: of a beam search's hypothesis.
        Returns: what became visible; may be empty.
        """
        self._logprobs.extend(logprobs)
        self._traces.extend(traces)
        self._score = score
        delta = self._output.feed(token_ids, ends_with_stop_token=reason in _BY_STOP_TOKEN)
        message = self._message(delta)
        if reason and not self._output.stop_string:
            rest = self._message(self._output.finish())
            message.text += rest.text  # MergeFrom would overwrite the text
            message.token_ids.extend(rest.token_ids)
            message.logprobs.extend(rest.logprobs)
            message.traces.extend(rest.traces)
            self.finish_reason, self._stop_token_id = reason, stop_token_id
            if reason in _BY_STOP_TOKEN and stop_token_id in self._tool_call_ends.token_ids:
                self.finish_reason = common_pb2.FINISH_REASON_TOOL_CALL
        if self._output.stop_string:
            self.finish_reason = common_pb2.FINISH_REASON_STOP_STRING
            self._stop_token_id = None
            if self._output.stop_string in self._tool_call_ends.strings:
                self.finish_reason = common_pb2.FINISH_REASON_TOOL_CALL
        return message

    def last(
        self,
        message: inference_pb2.GenerateResponse,
        *,
        num_prompt_tokens: int,
        num_cached_tokens: int,
        seed: int,
    ) -> inference_pb2.GenerateResponse:
        """Return `message` with the fields that end the sample: finish reason, usage, seed, score,
        stop."""
        message.finish_reason = self.finish_reason
        message.usage.num_prompt_tokens = num_prompt_tokens
        message.usage.num_output_tokens = self._output.num_tokens
        message.usage.num_cached_tokens = num_cached_tokens
        message.seed = seed
        if self._score is not None:
            message.score = self._score
        if self._stop_token_id is not None:
            message.stop_token_id = self._stop_token_id
        message.stop_string = self._output.stop_string or ""
        return message

    def empty(self) -> inference_pb2.GenerateResponse:
        """Return a message that shows nothing."""
        return self._message(TextDelta())

    def _message(self, delta: TextDelta) -> inference_pb2.GenerateResponse:
        """Make a message of visible text and ids, with the logprobs and traces of those ids."""
        num_tokens = len(delta.token_ids)
        return inference_pb2.GenerateResponse(
            request_id=self._request_id,
            sample_index=self.sample_index,
            text=delta.text,
            token_ids=delta.token_ids,
            logprobs=[
                self._logprobs.popleft() for _ in range(min(num_tokens, len(self._logprobs)))
            ],
            traces=[self._traces.popleft() for _ in range(min(num_tokens, len(self._traces)))],
        )


def shows_something(message: inference_pb2.GenerateResponse) -> bool:
    """Return whether a message has content that is worth sending."""
    return bool(message.text or message.token_ids or message.prompt_logprobs)


class AnswerOutput:
    """All samples of one request, and what was drawn of each."""

    def __init__(
        self,
        answers: Sequence[SampleOutput],
        sampling: common_pb2.SamplingParams,
        *,
        num_scored_tokens: int = 0,
    ) -> None:
        """answers: the samples, by index.
        num_scored_tokens: prompt tokens of which log probabilities were asked for."""
        self._answers = answers
        self._sampling = sampling
        self._drawn: list[list[int]] = [[] for _ in answers]
        self._firsts: set[int] = set()
        self._beam_start: Sequence[common_pb2.BeamCandidate] = ()
        self._num_told = 0
        self._num_scored_tokens = num_scored_tokens
        # Prompt tokens whose log probabilities were shown, and came in the current prefill call.
        self._num_prompt_shown = self._num_prompt_came = 0
        self._said: set[int] = set()
        self.num_drawn_otherwise = 0
        """First tokens that a later prefill worker drew differently from what was reported."""

    @property
    def is_over(self) -> bool:
        """Whether every sample has ended."""
        return all(answer.is_over for answer in self._answers)

    @property
    def has_drawn(self) -> bool:
        """Whether any token of any sample has come."""
        return any(self._drawn)

    @property
    def has_all_firsts(self) -> bool:
        """Whether the prefill worker has drawn everything it was asked for: a token of every
        sample, or the first candidates of a beam search."""
        return len(self._firsts) == num_first_messages(self._sampling)

    @property
    def drawn(self) -> Sequence[int]:
        """Drawn tokens of the first sample."""
        return self._drawn[0]

    @property
    def is_alone(self) -> bool:
        """Whether there is a single sample, and it is not a beam search."""
        return len(self._answers) == 1 and not self._sampling.HasField("beam")

    @property
    def can_go_on(self) -> bool:
        """Whether another worker could continue all samples. A beam search compares its beams at
        one worker: once a hypothesis is shown it cannot be continued elsewhere; before that it
        starts anew."""
        return not (self._sampling.HasField("beam") and self.has_drawn)

    @property
    def may_skip_prefill(self) -> bool:
        """Whether a decode worker could continue without a prefill worker. It could not draw the
        first token of some samples while other samples have theirs."""
        return all(self._drawn) or not self.has_drawn

    def begin_prefill(self) -> None:
        """Prepare for a call to a prefill worker, which draws after the tokens that it is told."""
        self._firsts = set()
        self._num_told = len(self._drawn[0]) if self.is_alone else 0

    @property
    def told_to_prefill(self) -> Sequence[int]:
        """Output tokens that the prefill worker gets as context in the current call. None when
        there are several samples, because only the prompt is common to them: the worker draws all
        first tokens again, and only the missing ones are used."""
        return self._drawn[0][: self._num_told]

    def begin_prompt(self) -> bool:
        """Prepare for the prompt's log probabilities of another prefill call. Returns: whether some
        are still missing."""
        self._num_prompt_came = 0
        return self._num_prompt_shown < self._num_scored_tokens

    def take_prompt(
        self, logprobs: Sequence[common_pb2.TokenLogprobs]
    ) -> Sequence[common_pb2.TokenLogprobs]:
        """Take log probabilities of the prompt's next tokens in this call. Returns: those that no
        earlier call gave.

        Raises: Internal when more come than the prompt has tokens.
        """
        num_known = max(0, self._num_prompt_shown - self._num_prompt_came)
        self._num_prompt_came += len(logprobs)
        new = logprobs[num_known:]
        self._num_prompt_shown += len(new)
        if self._num_prompt_shown > self._num_scored_tokens:
            raise Internal("the prefill worker told more of the prompt than was asked for")
        return new

    def ended(self) -> Iterator[SampleOutput]:
        """Return the samples that are over and whose last message was not sent, in order."""
        return (
            answer
            for answer in self._answers
            if answer.is_over and answer.sample_index not in self._said
        )

    def say_ended(self, answer: SampleOutput) -> None:
        """Record that the last message of a sample is sent."""
        self._said.add(answer.sample_index)

    def take_first(self, first: prefill_pb2.PrefillReply) -> inference_pb2.GenerateResponse | None:
        """Take a sample's first tokens of this call. Returns: what they make visible; None: nothing
        new.

        A prefill worker whose kernels depend on the batch may draw another token than the worker
        before it. The token that was reported stands, and decode goes on after it: the handle
        covers only the prompt, so it fits any token after it.

        Raises: Internal when the worker drew a sample that was not asked for, or left out log
            probabilities of the prompt.
        """
        if self._num_prompt_shown < self._num_scored_tokens:
            raise Internal(
                f"the prefill worker told log probabilities of {self._num_prompt_shown} of "
                f"{self._num_scored_tokens} prompt tokens"
            )
        index = first.sample_index
        if index >= len(self._answers):
            raise Internal(f"the prefill worker drew sample {index} of {len(self._answers)}")
        if first.beam_start:
            self._firsts.add(index)
            self._beam_start = first.beam_start
            return None  # hypotheses come at the end
        known = self._drawn[index][self._num_told :][: len(first.token_ids)]
        self._firsts.add(index)
        if list(first.token_ids[: len(known)]) != known:
            self.num_drawn_otherwise += 1
            return None  # tokens drawn after a different one are of no use either
        num_known = len(known)
        if num_known == len(first.token_ids):
            return None
        self._drawn[index] += first.token_ids[num_known:]
        return self._answers[index].take(
            first.token_ids[num_known:],
            first.logprobs[num_known:],
            traces=first.traces[num_known:],
            reason=first.finish_reason,
            stop_token_id=first.stop_token_id if first.HasField("stop_token_id") else None,
        )

    def handover(self, *, computes_prompt: bool = False) -> decode_pb2.GenerateFromHandle:
        """Return the command from which a decode worker goes on, without the KV handle.

        Args: computes_prompt: the worker computes the prompt itself and needs no handle.
        """
        command = decode_pb2.GenerateFromHandle(computes_prompt=computes_prompt)
        if self._sampling.HasField("beam"):
            command.beam_start.extend(self._beam_start)
        elif len(self._answers) == 1:
            command.output_token_ids.extend(self._drawn[0])
        else:
            for answer, drawn in zip(self._answers, self._drawn, strict=True):
                command.outputs.add(token_ids=drawn, is_over=answer.is_over)
        return command

    def check_sent(self, num_tokens: Sequence[int]) -> None:
        """Compare the number of tokens that a decode worker says it sent of each sample, including
        those it was told of, with those that came.

        Raises: Internal when they differ: a token was lost, or came twice.
        """
        came = [len(drawn) for drawn in self._drawn]
        if self._sampling.HasField("beam"):
            came, num_tokens = [sum(came)], [sum(num_tokens)]
        if list(num_tokens) != came:
            raise Internal(f"a decode worker sent {list(num_tokens)} tokens, and {came} came")

    def take(self, news: SampleNews) -> tuple[SampleOutput, inference_pb2.GenerateResponse] | None:
        """Take what the decode worker drew for one sample. Returns: the sample and what became
        visible; None for tokens past the sample's end.

        Raises: Internal for a sample that was not asked for.
        """
        if news.sample_index >= len(self._answers):
            raise Internal(f"the decode worker drew sample {news.sample_index}")
        self._drawn[news.sample_index] += news.token_ids
        answer = self._answers[news.sample_index]
        if answer.is_over:
            return None
        message = answer.take(
            news.token_ids,
            news.logprobs,
            traces=news.traces,
            reason=news.reason,
            stop_token_id=news.stop_token_id,
            score=news.score,
        )
        return answer, message
