"""What a request must be like to be taken, and how much room it needs. Pure functions over values;
any thread.

The services check fields at the edge with better words; the engine checks again what would make it
compute nonsense.
"""

from __future__ import annotations

import math

from engine.errors import InvalidRequest, RequestTooLong
from engine.kv.layout import KvLayout
from engine.request import MAX_LOGPROBS, ModelInfo, Request, Sampling
from engine.sequence import HOLE, Sequence

MIN_TEMPERATURE = 1e-4
"""Least temperature above 0; the router's bound, too."""


def check_request(request: Request, model: ModelInfo) -> None:
    """Raises: InvalidRequest naming the field, RequestTooLong for a prompt without room for one
    output token."""
    prompt = request.prompt_token_ids
    if not prompt:
        raise InvalidRequest("prompt_token_ids", "empty")
    if min(prompt) < 0 or max(prompt) >= model.vocab_size:
        raise InvalidRequest("prompt_token_ids", f"an id outside [0, {model.vocab_size})")
    if len(prompt) >= model.context_window:
        raise RequestTooLong(
            "prompt_token_ids",
            f"{len(prompt)} tokens leave no room for output in a context window of "
            f"{model.context_window}",
        )
    if request.hold_after is not None and request.hold_after < 1:
        raise InvalidRequest("hold_after", f"{request.hold_after} is below 1")
    _check_sampling(request.sampling)


def _check_sampling(sampling: Sampling) -> None:
    checks = (
        ("max_tokens", sampling.max_tokens, sampling.max_tokens >= 1),
        ("min_tokens", sampling.min_tokens, sampling.min_tokens >= 0),
        (
            "temperature",
            sampling.temperature,
            # Below, float32 scores overflow; greedy is what is meant.
            sampling.temperature == 0
            or (math.isfinite(sampling.temperature) and sampling.temperature >= MIN_TEMPERATURE),
        ),
        ("top_p", sampling.top_p, 0 < sampling.top_p <= 1),
        ("top_k", sampling.top_k, sampling.top_k >= 0),
        ("min_p", sampling.min_p, 0 <= sampling.min_p <= 1),
        ("seed", sampling.seed, 0 <= sampling.seed < 1 << 64),
        ("logprobs", sampling.logprobs, 0 <= (sampling.logprobs or 0) <= MAX_LOGPROBS),
    )
    for name, value, is_valid in checks:
        if not is_valid:
            raise InvalidRequest(name, f"{value} is out of range")


def max_output_tokens(request: Request, context_window: int) -> int:
    """Output tokens after which the request ends for its length: max_tokens, or where prompt and
    output fill the window."""
    return min(request.sampling.max_tokens, context_window - len(request.prompt_token_ids))


def num_blocks(request: Request, num_output_tokens: int, layout: KvLayout) -> int:
    """Blocks for all tokens that the request may compute: the last token drawn is never computed.

    At most what one context window takes, which the cache always has.
    """
    num_drawn = num_output_tokens
    if request.hold_after is not None:
        num_drawn = min(num_drawn, request.hold_after)
    return layout.num_blocks_for(len(request.prompt_token_ids) + num_drawn - 1)


def check_start(
    sequence: Sequence,
    num_loaded_tokens: int,
    output_token_ids: tuple[int, ...],
    model: ModelInfo,
    block_size: int,
) -> None:
    """Raises: InvalidRequest naming what of `start`'s arguments does not fit the reservation."""
    if any(not 0 <= token_id < model.vocab_size for token_id in output_token_ids):
        raise InvalidRequest("output_token_ids", f"an id outside [0, {model.vocab_size})")
    limit = sequence.max_output_tokens
    if sequence.request.hold_after is not None:
        limit = min(limit, sequence.request.hold_after)
    if len(output_token_ids) >= limit:
        raise InvalidRequest(
            "output_token_ids", f"{len(output_token_ids)} tokens, but {limit} are all there may be"
        )
    num_tokens = sequence.num_prompt_tokens + len(output_token_ids)
    if not 0 <= num_loaded_tokens <= num_tokens:
        raise InvalidRequest(
            "num_loaded_tokens", f"{num_loaded_tokens} is outside [0, {num_tokens}]"
        )
    num_blocks_loaded = -(-num_loaded_tokens // block_size)
    if HOLE in sequence.block_ids[:num_blocks_loaded]:
        raise InvalidRequest(
            "num_loaded_tokens", f"{num_loaded_tokens} reaches into a block that was quarantined"
        )
