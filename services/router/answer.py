"""One answer as its client sees it: tokens in, messages out, and the last message's account.

Joins the visible text with the ids and logprobs that belong to it, and knows why the answer ended:
what the engine said, or a stop string, which only text can show. No I/O. One request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from protos import common_pb2, inference_pb2
from tokens.text import OutputText, TextDelta

_BY_STOP_TOKEN = (common_pb2.FINISH_REASON_EOS, common_pb2.FINISH_REASON_STOP_TOKEN)


class Answer:
    """See the module."""

    def __init__(self, request_id: str, output: OutputText) -> None:
        self._request_id = request_id
        self._output = output
        self._logprobs: deque[common_pb2.TokenLogprobs] = deque()
        self._stop_token_id: int | None = None
        self.finish_reason: common_pb2.FinishReason = common_pb2.FINISH_REASON_UNSPECIFIED

    @property
    def is_over(self) -> bool:
        """Whether the answer ended: by the engine's word or by a stop string."""
        return self.finish_reason != common_pb2.FINISH_REASON_UNSPECIFIED

    def take(
        self,
        token_ids: Sequence[int],
        logprobs: Iterable[common_pb2.TokenLogprobs],
        *,
        reason: common_pb2.FinishReason = common_pb2.FINISH_REASON_UNSPECIFIED,
        stop_token_id: int | None = None,
    ) -> inference_pb2.GenerateResponse:
        """Add tokens from a worker; `reason` is set when they are the engine's last.

        Returns: what became visible by them; may be empty.
        """
        self._logprobs.extend(logprobs)
        delta = self._output.feed(token_ids, ends_with_stop_token=reason in _BY_STOP_TOKEN)
        message = self._message(delta)
        if reason and not self._output.stop_string:
            rest = self._message(self._output.finish())
            message.text += rest.text  # MergeFrom would put it in the place of the other
            message.token_ids.extend(rest.token_ids)
            message.logprobs.extend(rest.logprobs)
            self.finish_reason, self._stop_token_id = reason, stop_token_id
        if self._output.stop_string:
            self.finish_reason = common_pb2.FINISH_REASON_STOP_STRING
            self._stop_token_id = None
        return message

    def last(
        self,
        message: inference_pb2.GenerateResponse,
        *,
        num_prompt_tokens: int,
        provenance: common_pb2.Provenance,
        times: Iterable[tuple[str, float]],
        seed: int,
    ) -> inference_pb2.GenerateResponse:
        """`message` with the account that ends the answer."""
        message.finish_reason = self.finish_reason
        message.usage.num_prompt_tokens = num_prompt_tokens
        message.usage.num_output_tokens = self._output.num_tokens
        message.usage.num_cached_tokens = _num_cached_tokens(provenance)
        message.provenance.CopyFrom(provenance)
        message.times.extend(
            common_pb2.StageTime(stage=stage, seconds=seconds) for stage, seconds in times
        )
        message.seed = seed
        if self._stop_token_id is not None:
            message.stop_token_id = self._stop_token_id
        message.stop_string = self._output.stop_string or ""
        return message

    def empty(self) -> inference_pb2.GenerateResponse:
        """A message that shows nothing yet."""
        return self._message(TextDelta())

    def _message(self, delta: TextDelta) -> inference_pb2.GenerateResponse:
        num_logprobs = min(len(delta.token_ids), len(self._logprobs))
        return inference_pb2.GenerateResponse(
            request_id=self._request_id,
            text=delta.text,
            token_ids=delta.token_ids,
            logprobs=[self._logprobs.popleft() for _ in range(num_logprobs)],
        )


def shows_something(message: inference_pb2.GenerateResponse) -> bool:
    """Whether a message is worth sending."""
    return bool(message.text or message.token_ids)


def _num_cached_tokens(provenance: common_pb2.Provenance) -> int:
    """Prompt tokens that the prefill leg did not have to compute."""
    return sum(
        leg.num_tokens_local + sum(count.num_tokens for count in leg.from_store)
        for leg in provenance.legs
        if leg.role == "prefill"
    )
