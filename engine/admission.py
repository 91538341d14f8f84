"""What a request must be like to be taken, and how much room it needs. Pure functions over values;
any thread.

The services check fields at the edge with better words; the engine checks again what would make it
compute nonsense.
"""

from __future__ import annotations

from collections.abc import Sequence as Values

from engine.beam import check_beams
from engine.config import EngineConfig
from engine.errors import InvalidRequest, RequestTooLong
from engine.group import Group, num_rows
from engine.kv.layout import KvLayout
from engine.request import MAX_LOGPROBS, ModelInfo, Request
from engine.sampling.check import check_sampling
from engine.sequence import HOLE, finish_reason

MAX_SAMPLES = 128
"""Samples of one request. Guessed: more is a second request."""


def check_request(request: Request, model: ModelInfo) -> None:
    """Raises: InvalidRequest naming the field, RequestTooLong for a prompt without room for one
    output token."""
    prompt = request.prompt_token_ids
    if not prompt:
        raise InvalidRequest("prompt_token_ids", "empty")
    least, greatest = request.token_id_range
    if least < 0 or greatest >= model.vocab_size:
        raise InvalidRequest("prompt_token_ids", f"an id outside [0, {model.vocab_size})")
    if len(prompt) >= model.context_window:
        raise RequestTooLong(
            "prompt_token_ids",
            f"{len(prompt)} tokens leave no room for output in a context window of "
            f"{model.context_window}",
        )
    if request.hold_after is not None and request.hold_after < 1:
        raise InvalidRequest("hold_after", f"{request.hold_after} is below 1")
    if not 1 <= request.num_samples <= MAX_SAMPLES:
        raise InvalidRequest("num_samples", f"{request.num_samples} is outside [1, {MAX_SAMPLES}]")
    if request.wants_embedding and not model.gives_embeddings:
        raise InvalidRequest("wants_embedding", "this model gives none, as it is loaded")
    if request.wants_embedding and (request.num_samples > 1 or request.beam is not None):
        raise InvalidRequest("wants_embedding", "goes with one sample, drawn without beams")
    if not 0 <= (request.prompt_logprobs or 0) <= MAX_LOGPROBS:
        raise InvalidRequest("prompt_logprobs", f"must be from 0 to {MAX_LOGPROBS}")
    if request.prompt_logprobs is not None and request.beam is not None:
        raise InvalidRequest("prompt_logprobs", "does not go with a beam search")
    check_sampling(request.sampling, model.vocab_size)
    check_beams(request, model.vocab_size, frozenset(model.eos_token_ids))


def check_hashes(request: Request, block_size: int) -> None:
    """Raises: InvalidRequest for hashes of more blocks than the prompt fills."""
    num_full = len(request.prompt_token_ids) // block_size
    if len(request.prompt_hashes) > num_full:
        raise InvalidRequest(
            "prompt_hashes", f"{len(request.prompt_hashes)} of {num_full} full blocks"
        )


def check_room(
    request: Request,
    config: EngineConfig,
    layout: KvLayout,
    *,
    context_window: int,
    num_blocks: int,
) -> None:
    """Raises: InvalidRequest or RequestTooLong for what could never run in this engine, however
    empty it is."""
    field = "num_samples" if request.beam is None else "beam.num_beams"
    rows = num_rows(request)
    if rows > config.max_num_running:
        raise InvalidRequest(
            field,
            f"{rows} are more than the {config.max_num_running} that run at once (max_num_running)",
        )
    if not is_whole(request, config):
        return  # its samples can run one after another, and each of them fits
    num_full = len(request.prompt_token_ids) // layout.block_size
    num_own = num_own_blocks(request, max_output_tokens(request, context_window), layout)
    num_needed = num_full + rows * num_own
    if num_needed > num_blocks:
        raise RequestTooLong(
            field,
            f"{rows} of them need {num_needed} blocks together, there are {num_blocks}",
        )


def is_whole(request: Request, config: EngineConfig) -> bool:
    """Whether all blocks that it may ever need are taken before it begins, and it is never
    preempted: as configured, and always if others read its blocks (`hold_after`) or all its beams
    must take part in each step."""
    is_bound = request.hold_after is not None or request.beam is not None
    return is_bound or config.preemption == "never"


def max_output_tokens(request: Request, context_window: int) -> int:
    """Output tokens after which the request ends for its length: max_tokens, or where prompt and
    output fill the window."""
    return min(request.sampling.max_tokens, context_window - len(request.prompt_token_ids))


def num_own_blocks(request: Request, num_output_tokens: int, layout: KvLayout) -> int:
    """Blocks that one sample may need after the prompt's full ones: the last token drawn is never
    computed."""
    num_drawn = num_output_tokens
    if request.hold_after is not None:
        num_drawn = min(num_drawn, request.hold_after)
    num_prompt = len(request.prompt_token_ids)
    return layout.num_blocks_for(num_prompt + num_drawn - 1) - num_prompt // layout.block_size


def check_start(
    group: Group,
    num_loaded_tokens: int,
    outputs: Values[Values[int]],
    model: ModelInfo,
    block_size: int,
) -> tuple[tuple[int, ...], ...]:
    """Raises: InvalidRequest naming what of `start`'s arguments does not fit the reservation.

    Returns: the outputs, one per sample, or none at all.
    """
    drawn = tuple(tuple(token_ids) for token_ids in outputs)
    if any(drawn) and group.request.beam is not None:
        raise InvalidRequest("outputs", "a beam search goes on from beam_start")
    if not any(drawn):
        drawn = ()
    elif len(drawn) != group.num_rows or not all(drawn):
        raise InvalidRequest(
            "outputs", f"{group.num_rows} samples need as many outputs, or none, not {drawn}"
        )
    if any(not 0 <= token_id < model.vocab_size for one in drawn for token_id in one):
        raise InvalidRequest("outputs", f"an id outside [0, {model.vocab_size})")
    limit = group.max_output_tokens
    if group.request.hold_after is not None:
        limit = min(limit, group.request.hold_after)
    _check_not_over(group, drawn, limit, frozenset(model.eos_token_ids))
    num_tokens = group.prompt.num_prompt_tokens
    if group.num_rows == 1 and drawn:
        num_tokens += len(drawn[0])  # of several samples only the prompt's KV can be loaded
    num_tokens = min(num_tokens, len(group.prompt.block_ids) * block_size)
    if not 0 <= num_loaded_tokens <= num_tokens:
        raise InvalidRequest(
            "num_loaded_tokens", f"{num_loaded_tokens} is outside [0, {num_tokens}]"
        )
    if num_loaded_tokens and group.prompt.is_scored:
        raise InvalidRequest(
            "num_loaded_tokens", "prompt_logprobs need each token's logits; load nothing"
        )
    num_blocks_loaded = -(-num_loaded_tokens // block_size)
    if HOLE in group.prompt.block_ids[:num_blocks_loaded]:
        raise InvalidRequest(
            "num_loaded_tokens", f"{num_loaded_tokens} reaches into a block that was quarantined"
        )
    return drawn


def _check_not_over(
    group: Group, outputs: Values[tuple[int, ...]], limit: int, eos_token_ids: frozenset[int]
) -> None:
    """One sample must be left to draw; one alone is not looked at for how it ended, since whoever
    hands it over knows."""
    if outputs and min(map(len, outputs)) >= limit:
        num_tokens = min(map(len, outputs))
        raise InvalidRequest("outputs", f"{num_tokens} tokens, but {limit} are all there may be")
    if len(outputs) < 2:
        return
    hold_after = group.request.hold_after
    if hold_after is not None and max(map(len, outputs)) >= hold_after:
        raise InvalidRequest(
            "outputs", f"a sample has {max(map(len, outputs))} tokens; all hold after {hold_after}"
        )
    ended = [
        finish_reason(group.request.sampling, one[-1], len(one), limit, eos_token_ids)
        for one in outputs
    ]
    if None not in ended:
        raise InvalidRequest("outputs", "every sample has ended already")
