"""Assembly of a user's answer from an engine's news: text from token ids, stop strings, times.

It has no clock of its own: the caller passes the time at which news came. One thread at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from engine.outputs import PositionLogprobs, SampleTrace
from engine.request import FinishReason
from engine_client.interface import News
from process.rpc_errors import BatonError
from tokens.text import OutputText, TextDelta
from tokens.tokenizer import Tokenizer

STOP_STRING = "stop_string"
"""Finish reason of a sample whose text reached a stop string; engines do not report it."""


@dataclass(frozen=True)
class TokenUsage:
    """Token counts of one prompt and all its samples."""

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    """Number of prompt tokens found in the device's KV cache."""


@dataclass(frozen=True)
class RequestTimes:
    """Latencies of one prompt in seconds, as the caller saw them, queueing included."""

    ttft_s: float
    """Seconds from `submit` to the first token of any sample."""
    total_s: float
    """Seconds from `submit` to the last news."""
    itl_s: tuple[float, ...]
    """Seconds between the tokens of sample 0; tokens that came at once have a gap of 0."""

    @property
    def tpot_s(self) -> float:
        """Return the mean seconds between tokens; 0 for a single token."""
        return sum(self.itl_s) / len(self.itl_s) if self.itl_s else 0.0


@dataclass(frozen=True)
class Sample:
    """One output of a prompt."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    """Token ids that the text is made of, EOS or stop token included; none beyond a stop string."""
    finish_reason: str
    """Reason of the end: eos, stop_token, stop_string, length, grammar or policy."""
    stop_token_id: int | None = None
    stop_string: str = ""
    logprobs: tuple[PositionLogprobs, ...] | None = None
    """Log-probabilities of each output token, where requested."""
    traces: tuple[SampleTrace, ...] | None = None
    score: float | None = None
    """Score of a beam search hypothesis."""


@dataclass(frozen=True)
class Answer:
    """Result of one prompt: its samples, or the error that ended it."""

    prompt: str
    """Prompt text; empty for a prompt given as token ids."""
    prompt_token_ids: tuple[int, ...]
    samples: tuple[Sample, ...]
    seed: int
    """Seed that was used: with it, the same prompt and the same parameters give the same output
    again."""
    usage: TokenUsage
    times: RequestTimes
    error: BatonError | None = None
    """Error because of which there are no samples; set only where errors are returned instead of
    raised."""
    prompt_logprobs: tuple[PositionLogprobs, ...] | None = None
    """Log-probabilities of each prompt token, where requested; NaN for the first one, which has no
    token before it."""

    @property
    def text(self) -> str:
        """Return the text of the first sample."""
        return self.samples[0].text if self.samples else ""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Return the token ids of the first sample."""
        return self.samples[0].token_ids if self.samples else ()

    @property
    def finish_reason(self) -> str:
        """Return the finish reason of the first sample; "error" where there is none."""
        return self.samples[0].finish_reason if self.samples else "error"


class SampleBuilder:
    """Builder of one sample: call `take` until `is_over`, then `build`."""

    def __init__(self, index: int, output: OutputText | None) -> None:
        """Create an empty sample. `output` turns token ids into text; None makes no text (no
        tokenizer)."""
        self._index = index
        self._output = output
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[PositionLogprobs] = []
        self._traces: list[SampleTrace] = []
        self._finish_reason: FinishReason | None = None
        self._stop_token_id: int | None = None
        self._score: float | None = None

    @property
    def is_over(self) -> bool:
        """Return whether the sample was ended by the engine or by a stop string."""
        return self._finish_reason is not None or self._stop_string is not None

    @property
    def _stop_string(self) -> str | None:
        return None if self._output is None else self._output.stop_string

    def take(self, news: News) -> None:
        """Add news of this sample; news after its end are ignored."""
        if self.is_over:
            return
        self._logprobs += news.logprobs or ()
        self._traces += news.traces or ()
        self._score = news.score
        reason = news.finish_reason
        if self._output is None:
            self._token_ids += news.token_ids
        else:
            is_token = reason is not None and reason.is_token
            self._show(self._output.feed(news.token_ids, ends_with_stop_token=is_token))
            if reason is not None and self._stop_string is None:
                self._show(self._output.finish())
        if reason is not None and self._stop_string is None:
            self._finish_reason, self._stop_token_id = reason, news.stop_token_id

    def _show(self, delta: TextDelta) -> None:
        self._text.append(delta.text)
        self._token_ids += delta.token_ids

    def build(self) -> Sample:
        """Return the finished sample; it must be over."""
        assert self.is_over
        reason = STOP_STRING if self._finish_reason is None else self._finish_reason.value
        num_tokens = len(self._token_ids)
        return Sample(
            index=self._index,
            text="".join(self._text),
            token_ids=tuple(self._token_ids),
            finish_reason=reason,
            stop_token_id=self._stop_token_id,
            stop_string=self._stop_string or "",
            logprobs=tuple(self._logprobs[:num_tokens]) if self._logprobs else None,
            traces=tuple(self._traces[:num_tokens]) if self._traces else None,
            score=self._score,
        )


@dataclass(frozen=True)
class Prompt:
    """A prompt as token ids, with the text it came from."""

    text: str
    token_ids: tuple[int, ...]
    context_ids: tuple[int, ...]
    """Token ids before the output that its text continues; empty after a chat template."""


class AnswerBuilder:
    """Builder of one answer: call `take` until `is_over`, then `build`."""

    def __init__(
        self,
        prompt: Prompt,
        *,
        num_samples: int,
        seed: int,
        submitted_s: float,
        tokenizer: Tokenizer | None,
        stop: Sequence[str] = (),
        include_stop_text: bool = False,
        skip_special_tokens: bool = True,
        at: str = "",
    ) -> None:
        """Create an empty answer of `num_samples` samples. `at` is put before the field name of an
        error (`prompts[3].`)."""
        self._prompt = prompt
        self._at = at
        self._seed = seed
        self._submitted_s = submitted_s
        self._samples = [
            SampleBuilder(
                index,
                None
                if tokenizer is None
                else OutputText(
                    tokenizer,
                    stop=stop,
                    include_stop_text=include_stop_text,
                    skip_special_tokens=skip_special_tokens,
                    context_ids=prompt.context_ids,
                ),
            )
            for index in range(num_samples)
        ]
        self._num_cached_tokens = 0
        self._prompt_logprobs: tuple[PositionLogprobs, ...] = ()
        self._first_s: float | None = None
        self._last_s = submitted_s
        self._token_times_s: list[float] = []
        self._error: BatonError | None = None

    @property
    def error(self) -> BatonError | None:
        """Return the error that ended the prompt; None if it did not fail."""
        return self._error

    @property
    def num_prompt_tokens(self) -> int:
        """Return the number of tokens of the prompt."""
        return len(self._prompt.token_ids)

    @property
    def is_over(self) -> bool:
        """Return whether every sample has ended or the prompt failed."""
        return self._error is not None or all(sample.is_over for sample in self._samples)

    def is_sample_over(self, index: int) -> bool:
        """Return whether this sample has ended; its text may end before its tokens do."""
        return self._samples[index].is_over

    def take(self, news: News, now_s: float) -> int:
        """Add news that came at `now_s` seconds. Returns: the number of output tokens in them."""
        if self.is_over:
            return 0
        self._last_s = now_s
        if news.failure is not None:
            self._error = news.failure.to_error(at=self._at)
            return 0
        if news.token_ids and self._first_s is None:
            self._first_s = now_s
        if news.sample_index == 0:
            self._token_times_s += [now_s] * len(news.token_ids)
        self._num_cached_tokens = news.num_cached_tokens
        self._prompt_logprobs += news.prompt_logprobs
        self._samples[news.sample_index].take(news)
        return len(news.token_ids)

    def build(self) -> Answer:
        """Return the finished answer; it must be over."""
        failed = self._error is not None
        samples = () if failed else tuple(sample.build() for sample in self._samples)
        first_s = self._last_s if self._first_s is None else self._first_s
        return Answer(
            prompt=self._prompt.text,
            prompt_token_ids=self._prompt.token_ids,
            samples=samples,
            seed=self._seed,
            usage=TokenUsage(
                len(self._prompt.token_ids),
                sum(len(sample.token_ids) for sample in samples),
                self._num_cached_tokens,
            ),
            times=RequestTimes(
                first_s - self._submitted_s,
                self._last_s - self._submitted_s,
                tuple(after - before for before, after in itertools.pairwise(self._token_times_s)),
            ),
            error=self._error,
            prompt_logprobs=tuple(self._prompt_logprobs) or None,
        )
