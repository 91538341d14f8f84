"""Outputs of a step: a RequestOutput for each sample that took part, with its new tokens, how they
were sampled, and the KV blocks that they filled.

Plain frozen values without torch or RPC; any thread may read them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from engine.errors import EngineError
from engine.request import FinishReason
from engine.sequence import Sequence


class FilledBlock(NamedTuple):
    """A full block that this engine computed. Its bytes do not change any more and are safe to read
    until the request's blocks are released. A named tuple, because a step with prompts makes
    hundreds of them."""

    index: int  # type: ignore[assignment]  # hides tuple.index, which has no caller
    """Place in the request: tokens [index * block_size, (index + 1) * block_size)."""

    block_id: int
    chain_hash: bytes


@dataclass(frozen=True)
class PositionLogprobs:
    """Natural logarithms of probabilities under the model's own distribution (before temperature
    and filters)."""

    token_id: int
    logprob: float

    top: tuple[tuple[int, float], ...]
    """The k best as (token id, logprob), best first."""


@dataclass(frozen=True)
class SampleTrace:
    """A record of the sampling of one token: enough to sample it again and to explain the
    result."""

    position: int
    """The token's position; 0 is the prompt's first token."""
    token_id: int
    raw_logprob: float
    """Log probability under the model's own distribution."""
    processed_logprob: float
    """Log probability under the distribution that was sampled, after all processors; for an
    argmax, after penalties and masks."""
    top: tuple[tuple[int, float], ...]
    """The best of the model's own distribution as (token id, raw log probability)."""
    support_size: int
    """Number of tokens that could have been sampled; for an argmax, those that no mask removed."""
    processors: tuple[str, ...]
    """The processors that were applied, in order, by name and parameter ("top_p=0.9")."""
    rng_key: int | None
    """Key of the Gumbel noise (baton_kernels/gumbel_noise.py). None: an argmax, without noise."""
    is_forced: bool = False
    """The grammar allowed no other token, so it was not sampled at all (jump-forward). Its log
    probabilities and support are those of the token before it, or NaN."""


class RequestOutput(NamedTuple):
    """The result of one step for one sample of one request. A named tuple, because every step makes
    hundreds of them: they cost a fifth of a dataclass."""

    request_id: str

    token_ids: tuple[int, ...]
    """New output tokens: none after a chunk that ends before the prompt's last token, else one;
    more if the grammar forced some or draft tokens were accepted."""

    logprobs: tuple[PositionLogprobs, ...] | None
    """One per new token if the request asks for them, else None."""

    filled: tuple[FilledBlock, ...]
    """Full blocks computed in this step, in order."""

    num_computed_tokens: int
    """Tokens whose KV is in the request's blocks now."""

    finish_reason: FinishReason | None
    """Set in the last output that has tokens. A request with `hold_after` is HOLDING then, any
    other FINISHED."""

    stop_token_id: int | None
    """The EOS or stop token that ended the sample; it is in `token_ids`, too."""

    error: EngineError | None
    """The request was ABORTED by an error of its own, all its samples with it; `token_ids` is
    empty."""

    sample_index: int = 0
    """Index of the sample in its request: 0 to num_samples - 1."""

    traces: tuple[SampleTrace, ...] | None = None
    """One per new token if the request asks for them, else None."""

    is_request_over: bool = False
    """No further output of this request follows: every sample has finished or is HOLDING, or there
    was an error."""

    score: float | None = None
    """Beam search: the score of this hypothesis, whose rank is `sample_index`."""

    beam_start: tuple[tuple[int, float], ...] = ()
    """Beam search with `hold_after`: the prompt's best candidates (beam_search.num_candidates of
    them) as (token id, raw log probability), for `start` of the engine that continues the request.
    `token_ids` is empty then."""

    embedding: tuple[float, ...] | None = None
    """If the request asks for it: the hidden state of the prompt's last token after the model's
    last norm, scaled to length 1. Comes with the first token."""

    prompt_logprobs: tuple[PositionLogprobs, ...] | None = None
    """If the request asks for them: those of the prompt's next tokens, in order; all of them have
    come with the first output token. The prompt's first token has NaN and no best tokens, because
    no token comes before it."""


@dataclass(frozen=True)
class StepOutput:
    """The result of one step. `events` has one RequestOutput for each sample that took part."""

    events: tuple[RequestOutput, ...]
    num_scheduled_tokens: int
    num_free_blocks: int
    """Free and cached-but-evictable blocks: those that `reserve` can take."""

    num_running: int
    """PREFILLING and RUNNING requests after the step."""

    num_waiting: int
    """WAITING requests, and those that wait for blocks, bytes or a grammar."""

    step: int
    """The step's number, from 1."""

    began_s: float = field(default=0.0, compare=False)
    ended_s: float = field(default=0.0, compare=False)
    """Seconds on the engine's clock. Not compared: two steps with the same results are equal."""


def make_output(
    sequence: Sequence,
    *,
    filled: tuple[FilledBlock, ...] = (),
    error: EngineError | None = None,
    is_request_over: bool = False,
) -> RequestOutput:
    """The output of a step that gave `sequence` no token."""
    return RequestOutput(
        request_id=sequence.request.request_id,
        token_ids=(),
        logprobs=None,
        filled=filled,
        num_computed_tokens=sequence.num_computed_tokens,
        finish_reason=None,
        stop_token_id=None,
        error=error,
        sample_index=sequence.sample_index,
        is_request_over=is_request_over,
    )
