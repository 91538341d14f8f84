"""What came of a step: an event for each sample that took part, with its tokens, how they were
drawn, and the blocks that it filled. Plain frozen values: no torch, no RPC. Any thread may read
them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from engine.errors import EngineError
from engine.request import FinishReason


class FilledBlock(NamedTuple):
    """A full block that this engine computed. It changes no more; safe to read until the request's
    blocks are released. Some hundred are made in a step with prompts, hence no dataclass."""

    index: int  # type: ignore[assignment]  # in place of tuple's method, which nobody asks for
    """Place in the request: tokens [index * block_size, (index + 1) * block_size)."""

    block_id: int
    chain_hash: bytes


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural-log probabilities under the model's own distribution (before temperature and
    filters)."""

    token_id: int
    logprob: float

    top: tuple[tuple[int, float], ...]
    """The k best as (token id, logprob), best first."""


@dataclass(frozen=True)
class StepTrace:
    """How one token came to be: enough to draw it again and to see why it was drawn."""

    position: int
    """The place that the token takes; 0 is the prompt's first token."""
    token_id: int
    raw_logprob: float
    """Under the model's own distribution."""
    processed_logprob: float
    """Under the distribution that was drawn from, after all processors; for an argmax, after
    penalties and masks."""
    top: tuple[tuple[int, float], ...]
    """The best of the model's own distribution as (token id, raw log probability)."""
    support_size: int
    """Tokens that could have been drawn; for an argmax, those that no mask took."""
    processors: tuple[str, ...]
    """Those that were applied, in their order, by name and parameter ("top_p=0.9")."""
    rng_key: int | None
    """Of the noise (engine/noise.py, row_key). None: no noise, the argmax."""
    is_forced: bool = False
    """The grammar allowed nothing else: not drawn at all (jump-forward); its log probabilities and
    support are of the token before it, or NaN."""


class RequestEvent(NamedTuple):
    """What one step did for one sample of one request. A named tuple: hundreds are made in every
    step, at a fifth of a dataclass' price."""

    request_id: str

    token_ids: tuple[int, ...]
    """New output tokens: none after a chunk that does not reach the last token, else one; more
    where the grammar forced some."""

    logprobs: tuple[TokenLogprobs, ...] | None
    """One per new token where asked for, else None."""

    filled: tuple[FilledBlock, ...]
    """Full blocks computed in this step, in order."""

    num_computed_tokens: int
    """Tokens whose KV is in the request's blocks now."""

    finish_reason: FinishReason | None
    """Set in the last event that has tokens. A request with `hold_after` is HOLDING then, any other
    FINISHED."""

    stop_token_id: int | None
    """The EOS or stop token that ended it; it is in `token_ids` too."""

    error: EngineError | None
    """The request was ABORTED by an error of its own, all its samples with it; `token_ids` is
    empty."""

    sample_index: int = 0
    """Which of the request's samples: 0 to num_samples - 1."""

    traces: tuple[StepTrace, ...] | None = None
    """One per new token where asked for, else None."""

    is_request_over: bool = False
    """No further event of this request will come: every sample has finished or holds, or there was
    an error."""

    score: float | None = None
    """Beam search: of this hypothesis; its place among them is `sample_index`."""

    beam_start: tuple[tuple[int, float], ...] = ()
    """Beam search with `hold_after`: the prompt's best (beam_search.num_candidates of them) as
    (token id, raw log probability), for `start` of the leg that goes on. There are no tokens
    then."""

    embedding: tuple[float, ...] | None = None
    """Where asked for: the hidden state of the prompt's last token, after the model's last norm,
    at length 1. With the first token."""

    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    """Where asked for: of the prompt's next tokens, in order; all of them by the first output
    token. Of its first one, which nothing comes before, NaN and no best ones."""


@dataclass(frozen=True)
class StepOutput:
    """What one step did. `events` has one entry per sample of a request that took part."""

    events: tuple[RequestEvent, ...]
    num_scheduled_tokens: int
    num_free_blocks: int
    """Free and cached-but-evictable blocks: what `reserve` can take."""

    num_running: int
    """PREFILLING and RUNNING requests after the step."""

    num_waiting: int
    """WAITING requests, and those that wait for blocks, bytes or a grammar."""

    step: int
    """Counts from 1."""

    began_s: float = field(default=0.0, compare=False)
    ended_s: float = field(default=0.0, compare=False)
    """On the engine's clock; what it did is the same whenever."""
