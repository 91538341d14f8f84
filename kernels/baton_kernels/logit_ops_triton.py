"""Triton kernels of `baton_kernels.logit_ops`, and their launchers. logit_ops.py checks the
arguments.

One program per row and some hundred of its tokens; each token is one program's. Graph-safe. No
state; any thread.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from baton_kernels import logit_ops as door
from baton_kernels.gumbel_noise_triton import EXACT

_TOKENS = 256
_WORDS = 64
"""Words of a bitmask per program: 2048 tokens."""


def penalise(logits: torch.Tensor, penalties: door.Penalties) -> None:
    """Launch `logit_ops.penalise`: apply repetition, presence and frequency penalties to logits [R,
    V] in place."""
    num_rows, num_places = penalties.token_ids.shape
    _penalise[(triton.cdiv(num_places, _TOKENS), num_rows)](
        logits, *penalties, num_places, logits.stride(0), TOKENS=_TOKENS, num_warps=4, **EXACT
    )


def add_bias(logits: torch.Tensor, token_ids: torch.Tensor, values: torch.Tensor) -> None:
    """Launch `logit_ops.add_bias`: add values [R, N] to the logits of token_ids [R, N] in place."""
    num_rows, num_places = token_ids.shape
    _add_bias[(triton.cdiv(num_places, _TOKENS), num_rows)](
        logits, token_ids, values, num_places, logits.stride(0), TOKENS=_TOKENS, num_warps=4
    )


def apply_bitmask(logits: torch.Tensor, words: torch.Tensor, rows: torch.Tensor | None) -> None:
    """Launch `logit_ops.apply_bitmask`: set logits to -inf in place where a token's bit is not
    set."""
    num_masks, num_words = words.shape
    _apply_bitmask[(triton.cdiv(num_words, _WORDS), num_masks)](
        logits, words, words if rows is None else rows, logits.shape[1], num_words,
        logits.stride(0), IN_ORDER=rows is None, WORDS=_WORDS, num_warps=4,
    )  # fmt: skip


@triton.jit
def _penalise(
    logits, token_ids, counts, repetitions, presences, frequencies, num_places, stride,
    TOKENS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    places = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    is_place = places < num_places
    ids = tl.load(token_ids + row * num_places + places, mask=is_place, other=-1)
    is_token = ids >= 0
    count = tl.load(counts + row * num_places + places, mask=is_place, other=0.0)
    repetition = tl.load(repetitions + row)
    values = tl.load(logits + row * stride + ids, mask=is_token, other=0.0)
    values = tl.where(values > 0.0, tl.div_rn(values, repetition), values * repetition)
    less = values - tl.load(presences + row)
    less = less - tl.load(frequencies + row) * count
    values = tl.where(count > 0.0, less, values)
    tl.store(logits + row * stride + ids, values, mask=is_token)


@triton.jit
def _add_bias(logits, token_ids, biases, num_places, stride, TOKENS: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    places = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    is_place = places < num_places
    ids = tl.load(token_ids + row * num_places + places, mask=is_place, other=-1)
    is_token = ids >= 0
    bias = tl.load(biases + row * num_places + places, mask=is_place, other=0.0)
    values = tl.load(logits + row * stride + ids, mask=is_token, other=0.0)
    tl.store(logits + row * stride + ids, values + bias, mask=is_token)


@triton.jit
def _apply_bitmask(
    logits, words, rows, num_tokens, num_words, stride, IN_ORDER: tl.constexpr, WORDS: tl.constexpr
):  # fmt: skip
    mask_index = tl.program_id(1).to(tl.int64)
    row = mask_index
    if not IN_ORDER:
        row = tl.load(rows + mask_index).to(tl.int64)
    if row >= 0:
        places = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
        bits = tl.load(words + mask_index * num_words + places, mask=places < num_words, other=-1)
        lanes = tl.arange(0, 32)
        is_out = ((bits[:, None] >> lanes[None, :]) & 1) == 0
        ids = places[:, None] * 32 + lanes[None, :]
        tl.store(logits + row * stride + ids, -float("inf"), mask=is_out & (ids < num_tokens))
