"""Hard masks: what must not be drawn becomes -inf, before temperature and truncation, so that these
share out the mass among what is left.

    allowed ids, grammar        packed bits, combined packed, spread over the row in one pass
    bad words, no-repeat n-gram, end tokens below min_tokens     single places

They commute: each only ever takes tokens away. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.sampling import dense
from engine.sampling.penalties import flat_places, history_of
from engine.sampling.recipe import Row


def mask(logits: torch.Tensor, rows: Sequence[Row]) -> None:
    """In place.

    Args:
        logits: [R, V] float32, contiguous.
        rows: R of them.
    """
    _mask_by_bits(logits, rows)
    always = [
        (local, row.recipe.bad_ids) for local, row in enumerate(rows) if len(row.recipe.bad_ids)
    ]
    if always:
        places, _ = flat_places(always, logits)
        logits.view(-1).index_fill_(0, places, -torch.inf)
    now = _banned_places(rows, logits.shape[-1])
    if now:
        logits.view(-1).index_fill_(0, torch.tensor(now, device=logits.device), -torch.inf)


def _mask_by_bits(logits: torch.Tensor, rows: Sequence[Row]) -> None:
    """Only what is set in the bits of the grammar and of the allowed ids stays."""
    chosen = [
        local
        for local, row in enumerate(rows)
        if row.draw.bitmask is not None or row.recipe.allowed_words is not None
    ]
    if not chosen:
        return
    words = np.empty((len(chosen), -(-logits.shape[-1] // 32)), dtype=np.int32)
    for line, local in zip(words, chosen, strict=True):
        bitmask, allowed = rows[local].draw.bitmask, rows[local].recipe.allowed_words
        line[:] = -1 if bitmask is None else bitmask.numpy()
        if allowed is not None:
            line[: len(allowed)] &= allowed
            line[len(allowed) :] = 0
    dense.add_mask(logits, chosen, words)


def _banned_places(rows: Sequence[Row], num_tokens: int) -> list[int]:
    """Places in the flat logits of what this step bans token by token; may name one twice."""
    places: list[int] = []
    for local, row in enumerate(rows):
        banned: list[int] = []
        if row.recipe.needs_history:
            banned += history_of(row).banned_ids()
        if row.masks_ends:
            banned += row.draw.end_token_ids
        first = local * num_tokens
        # A checkpoint may name an end token that its model has no logit for.
        places += [first + token_id for token_id in banned if token_id < num_tokens]
    return places
