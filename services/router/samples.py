"""The samples of one request: their answers, the first token of each, and what decode is told of
them.

Joins what the two workers say with what clients see, sample by sample. No I/O, no clock. One
request.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from process.errors import Internal
from protos import common_pb2, decode_pb2, inference_pb2, prefill_pb2
from services.router.answer import Answer
from services.router.decode_leg import SampleNews
from services.router.prefill_client import num_first_messages


class Samples:
    """See the module."""

    def __init__(self, answers: Sequence[Answer], sampling: common_pb2.SamplingParams) -> None:
        """`answers`: of each sample, in their order."""
        self._answers = answers
        self._sampling = sampling
        self._firsts: dict[int, prefill_pb2.PrefillReply] = {}

    @property
    def is_over(self) -> bool:
        """Whether every sample has ended."""
        return all(answer.is_over for answer in self._answers)

    @property
    def has_all_firsts(self) -> bool:
        """Whether every sample has its first token (a beam search: its first candidates)."""
        return len(self._firsts) == num_first_messages(self._sampling)

    def ended(self) -> Iterator[Answer]:
        """Those that are over, in their order."""
        return (answer for answer in self._answers if answer.is_over)

    def take_first(self, first: prefill_pb2.PrefillReply) -> inference_pb2.GenerateResponse | None:
        """A sample's first token. Returns: what it makes visible; None: nothing new.

        Raises: Internal when the worker drew a sample that was not asked for, or another token
            than one before it, which was lost with other samples unshown.
        """
        index = first.sample_index
        if index >= len(self._answers):
            raise Internal(f"the prefill worker drew sample {index} of {len(self._answers)}")
        earlier = self._firsts.get(index)
        if earlier is not None:
            if list(earlier.token_ids) != list(first.token_ids):
                raise Internal("two prefill workers drew different first tokens")
            return None
        self._firsts[index] = first
        if first.beam_start:
            return None  # hypotheses come at the end
        return self._answers[index].take(
            first.token_ids,
            first.logprobs,
            traces=first.traces,
            reason=first.finish_reason,
            stop_token_id=first.stop_token_id if first.HasField("stop_token_id") else None,
        )

    def handover(self) -> decode_pb2.GenerateFromHandle:
        """What the decode worker goes on from, but for the handle."""
        command = decode_pb2.GenerateFromHandle()
        firsts = [self._firsts[index] for index in sorted(self._firsts)]
        if self._sampling.HasField("beam"):
            command.beam_start.extend(firsts[0].beam_start)
        elif len(firsts) == 1:
            command.output_token_ids.extend(firsts[0].token_ids)
        else:
            for answer, first in zip(self._answers, firsts, strict=True):
                command.outputs.add(token_ids=first.token_ids, is_over=answer.is_over)
        return command

    def take(self, news: SampleNews) -> tuple[Answer, inference_pb2.GenerateResponse] | None:
        """What the decode worker drew for one sample. Returns: its answer and what became visible;
        None for what overshot the answer's end.

        Raises: Internal for a sample that was not asked for.
        """
        if news.sample_index >= len(self._answers):
            raise Internal(f"the decode worker drew sample {news.sample_index}")
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
