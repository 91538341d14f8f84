"""Logits processors: penalties, bias and hard masks, which change logits in place and in float32.
They are steps 1 to 9 of the order that sampler.py documents.

    1 repetition penalty   z / a where z > 0, else z * a     every token of prompt and output
    2 presence penalty     z - b                             every token of the output
    3 frequency penalty    z - c * count                     every token of the output
    4 logit bias           z + d                             the tokens it names
    5 allowed ids, 8 grammar                                 packed bits, combined packed, spread
                                                             over the row in one pass
    6 bad words, 7 no-repeat n-gram, 9 min-tokens            single tokens become -inf

Hard masks (5 to 9) come before temperature and truncation, so that these apply to the remaining
tokens. They commute: each only removes tokens. Sources: repetition, Keskar et al.,
CTRL (2019), section 4.1; presence and frequency, OpenAI's API reference.

One path for CPU and CUDA, by baton_kernels/logit_ops.py; on CUDA nothing waits for the device.
Engine thread only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from baton_kernels import logit_ops
from baton_kernels.dispatch import Backend
from numpy.typing import NDArray

from engine.sampling.host_device_copies import bring
from engine.sampling.metadata import Row
from engine.sampling.token_history import TokenHistory

_NO_IDS: NDArray[np.int64] = np.empty(0, dtype=np.int64)
_NO_VALUES: NDArray[np.float32] = np.empty(0, dtype=np.float32)


def process(logits: torch.Tensor, rows: Sequence[Row], *, backend: Backend = "auto") -> None:
    """Apply penalties, bias and masks (steps 1 to 9) to the logits, in place.

    Args:
        logits: [R, V] float32, contiguous.
        rows: the request of each row, R of them.
    """
    _penalise(logits, rows, backend)
    _add_bias(logits, rows, backend)
    _apply_bits(logits, rows, backend)
    _ban(logits, rows)


def _penalise(logits: torch.Tensor, rows: Sequence[Row], backend: Backend) -> None:
    samplings = [row.request.sampling for row in rows]
    if any(one.repetition_penalty != 1.0 for one in samplings):
        seen = [
            _history_of(row).seen_ids if one.repetition_penalty != 1.0 else _NO_IDS
            for row, one in zip(rows, samplings, strict=True)
        ]
        off = [0.0] * len(rows)
        rates = [[one.repetition_penalty for one in samplings], off, off]
        _penalise_ids(logits, seen, [_NO_VALUES] * len(rows), rates, backend)
    counted = [one.presence_penalty != 0.0 or one.frequency_penalty != 0.0 for one in samplings]
    if any(counted):
        past = [_history_of(row) if on else None for row, on in zip(rows, counted, strict=True)]
        rates = [
            [1.0] * len(rows),
            [one.presence_penalty for one in samplings],
            [one.frequency_penalty for one in samplings],
        ]
        said = [_NO_IDS if one is None else one.output_ids for one in past]
        counts = [_NO_VALUES if one is None else one.output_counts for one in past]
        _penalise_ids(logits, said, counts, rates, backend)


def _penalise_ids(
    logits: torch.Tensor,
    ids: Sequence[NDArray[np.int64]],
    counts: Sequence[NDArray[np.float32]],
    rates: list[list[float]],
    backend: Backend,
) -> None:
    """Apply penalties to the token ids of each row. Args: rates: the repetition, presence and
    frequency penalties, each a list by row."""
    asked = bring(np.array(rates, dtype=np.float32), logits.device)
    penalties = logit_ops.Penalties(*_padded(ids, counts, logits), *asked)
    logit_ops.penalise(logits, penalties, backend=backend)


def _add_bias(logits: torch.Tensor, rows: Sequence[Row], backend: Backend) -> None:
    ids = [row.metadata.bias_ids for row in rows]
    if any(map(len, ids)):
        biases = _padded(ids, [row.metadata.bias_values for row in rows], logits)
        logit_ops.add_bias(logits, *biases, backend=backend)


def _padded(
    ids: Sequence[NDArray[np.int64]], values: Sequence[NDArray[np.float32]], logits: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad ids and values of R rows to one length N. Returns: [R, N] int32, padded with -1, and [R,
    N] float32, padded with 0, on the logits' device."""
    words = np.zeros((2, len(ids), max(map(len, ids))), dtype=np.int32)
    words[0] = -1
    floats = words[1].view(np.float32)
    for at, (own, numbers) in enumerate(zip(ids, values, strict=True)):
        words[0, at, : len(own)] = own
        floats[at, : len(numbers)] = numbers
    assert words[0].max(initial=0) < logits.shape[1], "an id without a logit: another row's"
    copied = bring(words, logits.device)
    return copied[0], copied[1].view(torch.float32)


def _apply_bits(logits: torch.Tensor, rows: Sequence[Row], backend: Backend) -> None:
    """Mask all tokens but those that both the grammar and the allowed ids permit."""
    masked = [
        local
        for local, row in enumerate(rows)
        if row.request.bitmask is not None or row.metadata.allowed_words is not None
    ]
    if not masked:
        return
    words = np.empty((len(masked), -(-logits.shape[-1] // 32)), dtype=np.int32)
    for line, local in zip(words, masked, strict=True):
        bitmask, allowed = rows[local].request.bitmask, rows[local].metadata.allowed_words
        line[:] = -1 if bitmask is None else bitmask.numpy()
        if allowed is not None:
            line[: len(allowed)] &= allowed
            line[len(allowed) :] = 0
    places = None
    if len(masked) < len(rows):
        places = bring(np.array(masked, dtype=np.int32), logits.device)
    logit_ops.apply_bitmask(logits, bring(words, logits.device), places, backend=backend)


def _ban(logits: torch.Tensor, rows: Sequence[Row]) -> None:
    """Mask single tokens: those of bad words and n-grams, and end tokens before `min_tokens`."""
    num_tokens = logits.shape[-1]
    places: list[int] = []
    for local, row in enumerate(rows):
        banned: list[int] = row.metadata.bad_ids.tolist()
        assert not banned or banned[-1] < num_tokens, "an id without a logit: another row's"
        if row.metadata.needs_history:
            banned += _history_of(row).banned_ids()
        if row.masks_ends:
            banned += row.request.end_token_ids
        first = local * num_tokens
        # A checkpoint may name an end token that its model has no logit for.
        places += [first + token_id for token_id in banned if token_id < num_tokens]
    if places:
        flat = bring(np.array(places, dtype=np.int64), logits.device)
        logits.view(-1).index_fill_(0, flat, -torch.inf)


def _history_of(row: Row) -> TokenHistory:
    """Return the row's history, which it must have."""
    assert row.request.history is not None, "a request whose sampling needs a history has none"
    return row.request.history
