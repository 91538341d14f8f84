"""What a user gets for a prompt, and how it is put together from news: text made from token ids,
stop strings found, times taken.

No clock of its own: whoever has news says when they came. One thread at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from engine.outputs import SampleTrace, TokenLogprobs
from engine.request import FinishReason
from engine_client.base import News
from process.errors import BatonError
from tokens.text import OutputText, TextDelta
from tokens.tokenizer import Tokenizer

STOP_STRING = "stop_string"
"""The finish reason that only text can show."""


@dataclass(frozen=True)
class Usage:
    """Token counts of one prompt and all its samples."""

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    """Prompt tokens that were found in the device cache."""


@dataclass(frozen=True)
class RequestTimes:
    """Seconds, as the caller saw them: the wait in the engine's line is in them."""

    ttft_s: float
    """From `submit` to the first token of any sample."""
    total_s: float
    """From `submit` to the last news."""
    itl_s: tuple[float, ...]
    """Gaps between the tokens of sample 0; tokens that came at once have a gap of 0."""

    @property
    def tpot_s(self) -> float:
        """Mean gap; 0 for a single token."""
        return sum(self.itl_s) / len(self.itl_s) if self.itl_s else 0.0


@dataclass(frozen=True)
class Sample:
    """One output of a prompt."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    """What the text is made of, EOS or stop token included; nothing beyond a stop string."""
    finish_reason: str
    """eos, stop_token, stop_string, length, grammar or policy."""
    stop_token_id: int | None = None
    stop_string: str = ""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One per token, where asked for."""
    traces: tuple[SampleTrace, ...] | None = None
    score: float | None = None
    """Of a hypothesis of beam search."""


@dataclass(frozen=True)
class Answer:
    """What came of one prompt."""

    prompt: str
    """As text; empty for one that was given as token ids."""
    prompt_token_ids: tuple[int, ...]
    samples: tuple[Sample, ...]
    seed: int
    """With it and the same prompt and parameters the same output comes again."""
    usage: Usage
    times: RequestTimes
    error: BatonError | None = None
    """Why there are no samples; only where errors were asked to be returned."""
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    """One per token of the prompt, where asked for; NaN for the first, which nothing is before."""

    @property
    def text(self) -> str:
        """Of the first sample."""
        return self.samples[0].text if self.samples else ""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Of the first sample."""
        return self.samples[0].token_ids if self.samples else ()

    @property
    def finish_reason(self) -> str:
        """Of the first sample; "error" where there is none."""
        return self.samples[0].finish_reason if self.samples else "error"


class SampleBuilder:
    """One sample in the making. Life: `take` until `is_over`, then `build`."""

    def __init__(self, index: int, output: OutputText | None) -> None:
        """`output`: None makes no text (no tokenizer)."""
        self._index = index
        self._output = output
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._traces: list[SampleTrace] = []
        self._finish_reason: FinishReason | None = None
        self._stop_token_id: int | None = None
        self._score: float | None = None

    @property
    def is_over(self) -> bool:
        """Ended by the engine's word or by a stop string."""
        return self._finish_reason is not None or self._stop_string is not None

    @property
    def _stop_string(self) -> str | None:
        return None if self._output is None else self._output.stop_string

    def take(self, news: News) -> None:
        """Add news of this sample; those after its end are dropped."""
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
        """The sample, which must be over."""
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
    """A prompt as an engine takes it."""

    text: str
    token_ids: tuple[int, ...]
    context_ids: tuple[int, ...]
    """Those that the output's text continues: none after a chat template."""


class AnswerBuilder:
    """One answer in the making. Life: `take` until `is_over`, then `build`."""

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
        """`at`: what stands before the field of an error (`prompts[3].`)."""
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
        self._prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        self._first_s: float | None = None
        self._last_s = submitted_s
        self._token_times_s: list[float] = []
        self._error: BatonError | None = None

    @property
    def error(self) -> BatonError | None:
        """Why it failed."""
        return self._error

    @property
    def num_prompt_tokens(self) -> int:
        """Of its prompt."""
        return len(self._prompt.token_ids)

    @property
    def is_over(self) -> bool:
        """Every sample has ended, or it failed."""
        return self._error is not None or all(sample.is_over for sample in self._samples)

    def is_sample_over(self, index: int) -> bool:
        """Whether this one has ended; its text may before its tokens do."""
        return self._samples[index].is_over

    def take(self, news: News, now_s: float) -> int:
        """Add news that came at `now_s`. Returns: how many tokens they brought."""
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
        """The answer, which must be over."""
        failed = self._error is not None
        samples = () if failed else tuple(sample.build() for sample in self._samples)
        first_s = self._last_s if self._first_s is None else self._first_s
        return Answer(
            prompt=self._prompt.text,
            prompt_token_ids=self._prompt.token_ids,
            samples=samples,
            seed=self._seed,
            usage=Usage(
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
