"""Load balancing over several engines: which rank gets the next request. Pure functions of the
engines' loads."""

from __future__ import annotations

from collections.abc import Sequence

from engine_client.interface import Ask


def num_outstanding_tokens(ask: Ask, context_window: int) -> int:
    """Return the most tokens that an engine may have to compute for a request: its prompt once, and
    each sample's output."""
    num_prompt = len(ask.prompt_token_ids)
    num_output = min(ask.sampling.max_tokens, max(0, context_window - num_prompt))
    num_sequences = ask.num_samples if ask.beam is None else ask.beam.num_beams
    return num_prompt + num_sequences * num_output


def least_loaded(loads: Sequence[int | None]) -> int | None:
    """Return the rank with the fewest outstanding tokens, the lowest of equal ones (whose cache is
    the likeliest to be warm).

    Args:
        loads: outstanding tokens by rank; None for an engine that is not alive.
    Returns: None when none is alive.
    """
    alive = [rank for rank, load in enumerate(loads) if load is not None]
    return min(alive, key=lambda rank: (loads[rank], rank), default=None)
