"""Repetition, presence and frequency penalties and logit bias, in this order, in float32:

    repetition   z / a where z > 0, else z * a     every token of prompt and output
    presence     z - b                             every token of the output
    frequency    z - c * count                     every token of the output
    bias         z + d                             the tokens it names

Sources: repetition, Keskar et al., CTRL (2019), section 4.1; presence and frequency, OpenAI's API
reference.

Only the logits of the tokens in question are touched: those of all rows are gathered, changed and
put back together. A row that asks for none of these has none among them. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from engine.sampling.history import TokenHistory
from engine.sampling.recipe import Row


def penalise(logits: torch.Tensor, rows: Sequence[Row]) -> None:
    """In place.

    Args:
        logits: [R, V] float32, contiguous.
        rows: R of them.
    """
    _repetition(logits, rows)
    _presence_and_frequency(logits, rows)
    _bias(logits, rows)


def history_of(row: Row) -> TokenHistory:
    """The row's history, which it must have."""
    assert row.draw.history is not None, "a Draw whose sampling needs a history has none"
    return row.draw.history


def _repetition(logits: torch.Tensor, rows: Sequence[Row]) -> None:
    chosen = [
        (local, history_of(row).seen_ids, row.draw.sampling.repetition_penalty)
        for local, row in enumerate(rows)
        if row.draw.sampling.repetition_penalty != 1.0
    ]
    if not chosen:
        return
    places, lengths = flat_places([(local, ids) for local, ids, _ in chosen], logits)
    penalties = _spread([penalty for _, _, penalty in chosen], lengths, logits.device)
    flat = logits.view(-1)
    values = flat.index_select(0, places)
    flat.index_copy_(0, places, torch.where(values > 0, values / penalties, values * penalties))


def _presence_and_frequency(logits: torch.Tensor, rows: Sequence[Row]) -> None:
    chosen = [
        (local, history_of(row), row.draw.sampling)
        for local, row in enumerate(rows)
        if row.draw.sampling.presence_penalty != 0.0 or row.draw.sampling.frequency_penalty != 0.0
    ]
    if not chosen:
        return
    places, lengths = flat_places([(local, past.output_ids) for local, past, _ in chosen], logits)
    device = logits.device
    presence = _spread([one.presence_penalty for _, _, one in chosen], lengths, device)
    frequency = _spread([one.frequency_penalty for _, _, one in chosen], lengths, device)
    counts = torch.from_numpy(np.concatenate([past.output_counts for _, past, _ in chosen]))
    flat = logits.view(-1)
    values = flat.index_select(0, places)
    values.sub_(presence).sub_(frequency * counts.to(device))
    flat.index_copy_(0, places, values)


def _bias(logits: torch.Tensor, rows: Sequence[Row]) -> None:
    chosen = [(local, row.recipe) for local, row in enumerate(rows) if len(row.recipe.bias_ids) > 0]
    if not chosen:
        return
    places, _ = flat_places([(local, recipe.bias_ids) for local, recipe in chosen], logits)
    values = torch.from_numpy(np.concatenate([recipe.bias_values for _, recipe in chosen]))
    flat = logits.view(-1)
    flat.index_copy_(0, places, flat.index_select(0, places) + values.to(logits.device))


def flat_places(
    chosen: Sequence[tuple[int, NDArray[np.int64]]], logits: torch.Tensor
) -> tuple[torch.Tensor, NDArray[np.int64]]:
    """Token ids by row -> (their places in logits.view(-1), how many each row has)."""
    num_tokens = logits.shape[-1]
    lengths = np.array([len(ids) for _, ids in chosen], dtype=np.int64)
    starts = np.array([local for local, _ in chosen], dtype=np.int64) * num_tokens
    all_ids = np.concatenate([ids for _, ids in chosen])
    assert all_ids.max(initial=0) < num_tokens, "an id without a logit: it would hit another row"
    return torch.from_numpy(all_ids + np.repeat(starts, lengths)).to(logits.device), lengths


def _spread(
    values: Sequence[float], lengths: NDArray[np.int64], device: torch.device
) -> torch.Tensor:
    """One value per row -> one per place."""
    spread = np.repeat(np.array(values, dtype=np.float32), lengths)
    return torch.from_numpy(spread).to(device)
