"""One sample of an answer as its client sees it: tokens in, messages out, and the last message's
account.

Joins the visible text with the ids, logprobs and traces that belong to it, and knows why the sample
ended: what the engine said, or a stop string, which only text can show. No I/O. One sample of one
request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from protos import common_pb2, inference_pb2
from tokens.text import OutputText, TextDelta
from tokens.tool_calls import ToolCallEnds

NO_TOOL_CALLS = ToolCallEnds()
_BY_STOP_TOKEN = (common_pb2.FINISH_REASON_EOS, common_pb2.FINISH_REASON_STOP_TOKEN)


class Answer:
    """See the module."""

    def __init__(
        self,
        request_id: str,
        output: OutputText,
        *,
        sample_index: int = 0,
        tool_call_ends: ToolCallEnds = NO_TOOL_CALLS,
    ) -> None:
        """`tool_call_ends`: what makes an end the end of a tool call."""
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
        """Whether the sample ended: by the engine's word or by a stop string."""
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
        """Add tokens from a worker; `reason` is set when they are the engine's last, with the
        `score` of a beam search's hypothesis.

        Returns: what became visible by them; may be empty.
        """
        self._logprobs.extend(logprobs)
        self._traces.extend(traces)
        self._score = score
        delta = self._output.feed(token_ids, ends_with_stop_token=reason in _BY_STOP_TOKEN)
        message = self._message(delta)
        if reason and not self._output.stop_string:
            rest = self._message(self._output.finish())
            message.text += rest.text  # MergeFrom would put it in the place of the other
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
        """`message` with what ends the sample."""
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
        """A message that shows nothing yet."""
        return self._message(TextDelta())

    def _message(self, delta: TextDelta) -> inference_pb2.GenerateResponse:
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
    """Whether a message is worth sending."""
    return bool(message.text or message.token_ids or message.prompt_logprobs)
