"""Changes to a row's logits before a token is drawn: penalties, biases and masks.

Each touches only the tokens that it names, in place, in float32, each step rounded on its own: CPU
and CUDA get the same bits. Lists of ids are padded with -1 to one length, so that a captured graph
can have them.

Knows no requests. Invariant: a row's result depends on its own arguments only. No state; any
thread.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from baton_kernels.dispatch import Backend, runs_triton


class Penalties(NamedTuple):
    """Penalties of R rows, with N token slots each."""

    token_ids: torch.Tensor
    """Penalised tokens, [R, N] int32, none twice in a row; negative: no token."""

    counts: torch.Tensor
    """Count of each token in the output, [R, N] float32; 0: only `repetition` applies."""

    repetition: torch.Tensor
    """Repetition penalty, [R] float32: positive logits are divided by it, others multiplied. 1:
    off."""

    presence: torch.Tensor
    """Presence penalty, [R] float32, subtracted from the logit of each token that the output
    has."""

    frequency: torch.Tensor
    """Frequency penalty, [R] float32, subtracted once for each time that the output has the
    token."""


def penalise(logits: torch.Tensor, penalties: Penalties, *, backend: Backend = "auto") -> None:
    """Apply repetition, then presence, then frequency penalties in place.

    Args:
        logits: [R, V] float32, rows dense.
    Raises: ValueError naming what does not fit.
    Bytes moved: about 72 for each token (two sectors of logits, id, count). Sources: Keskar et al.,
        CTRL (2019), section 4.1; OpenAI's API reference.
    """
    _check_logits(logits, (torch.float32,))
    ids = _checked("token_ids", penalties.token_ids, torch.int32, (len(logits), None), logits)
    _checked("counts", penalties.counts, torch.float32, tuple(ids.shape), logits)
    for name in ("repetition", "presence", "frequency"):
        _checked(name, getattr(penalties, name), torch.float32, (len(logits),), logits)
    if not ids.numel():
        return
    if runs_triton(backend, logits):
        from baton_kernels import logit_ops_triton as gpu

        gpu.penalise(logits, penalties)
        return
    penalise_reference(logits, penalties)


def penalise_reference(logits: torch.Tensor, penalties: Penalties) -> None:
    """Apply `penalise` in plain torch; waits for the device to count the tokens."""
    flat, rows, entries, places = _places(logits, penalties.token_ids)
    counts = penalties.counts.view(-1).index_select(0, entries)
    repetition = penalties.repetition.index_select(0, rows)
    values = flat.index_select(0, places)
    values = torch.where(values > 0, values / repetition, values * repetition)
    less = values - penalties.presence.index_select(0, rows)
    less = less - penalties.frequency.index_select(0, rows) * counts
    flat.index_copy_(0, places, torch.where(counts > 0, less, values))


def _places(
    logits: torch.Tensor, token_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the logits as one row that shares their memory, and for each token in `token_ids` its
    row, its index in the flat `token_ids` and its index in the flat logits."""
    num_rows, num_tokens = logits.shape
    stride = logits.stride(0)
    flat = logits.as_strided(((num_rows - 1) * stride + num_tokens,), (1,))
    ids = token_ids.view(-1)
    entries = (ids >= 0).nonzero()[:, 0]
    rows = entries // token_ids.shape[1]
    return flat, rows, entries, ids.index_select(0, entries) + rows * stride


def add_bias(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    values: torch.Tensor,
    *,
    backend: Backend = "auto",
) -> None:
    """Add biases to the logits of single tokens, in place; -inf bans a token.

    Args:
        logits: [R, V] float32, rows dense.
        token_ids: [R, N] int32; negative: no token. A token that is named twice gets one of the
            two, unless both are -inf.
        values: [R, N] float32.
    Raises: ValueError naming what does not fit.
    """
    _check_logits(logits, (torch.float32,))
    _checked("token_ids", token_ids, torch.int32, (len(logits), None), logits)
    _checked("values", values, torch.float32, tuple(token_ids.shape), logits)
    if not token_ids.numel():
        return
    if runs_triton(backend, logits):
        from baton_kernels import logit_ops_triton as gpu

        gpu.add_bias(logits, token_ids, values)
        return
    add_bias_reference(logits, token_ids, values)


def add_bias_reference(logits: torch.Tensor, token_ids: torch.Tensor, values: torch.Tensor) -> None:
    """Apply `add_bias` in plain torch; waits for the device to count the tokens."""
    flat, _, entries, places = _places(logits, token_ids)
    biased = flat.index_select(0, places) + values.view(-1).index_select(0, entries)
    flat.index_copy_(0, places, biased)


def apply_bitmask(
    logits: torch.Tensor,
    words: torch.Tensor,
    rows: torch.Tensor | None = None,
    *,
    backend: Backend = "auto",
) -> None:
    """Set logits to -inf, in place, where the token's bit is not set.

    Args:
        logits: [R, V] float32 or bfloat16, rows dense.
        words: [G, ceil(V / 32)] int32, bit i of word w is of token 32 * w + i.
        rows: [G] int32: row of the logits that each bitmask belongs to, none twice; negative: none.
            None: G is R, in order.
    Raises: ValueError naming what does not fit.
    Bytes moved: G * V / 8, and the logits that are masked.
    """
    _check_logits(logits, (torch.float32, torch.bfloat16))
    num_words = -(-logits.shape[1] // 32)
    num_masks = len(logits) if rows is None else None
    _checked("words", words, torch.int32, (num_masks, num_words), logits)
    if rows is not None:
        _checked("rows", rows, torch.int32, (len(words),), logits)
    if not len(words):
        return
    if runs_triton(backend, logits):
        from baton_kernels import logit_ops_triton as gpu

        gpu.apply_bitmask(logits, words, rows)
    elif backend == "auto" and logits.device.type == "cpu":
        _apply_bitmask_on_cpu(logits, words, rows)
    else:
        apply_bitmask_reference(logits, words, rows)


def apply_bitmask_reference(
    logits: torch.Tensor, words: torch.Tensor, rows: torch.Tensor | None = None
) -> None:
    """Apply `apply_bitmask` in plain torch; waits for the device to find the rows."""
    bits = (words[:, :, None] >> torch.arange(32, device=words.device, dtype=torch.int32)) & 1
    is_out = bits.view(len(words), -1)[:, : logits.shape[1]] == 0
    if rows is None:
        logits.masked_fill_(is_out, -torch.inf)
        return
    used = (rows >= 0).nonzero()[:, 0]
    index = rows[used].long()
    logits[index] = logits[index].masked_fill(is_out[used], -torch.inf)


def _apply_bitmask_on_cpu(
    logits: torch.Tensor, words: torch.Tensor, rows: torch.Tensor | None
) -> None:
    """Apply bitmasks on CPU, eight logits per byte by a lookup table: several times faster than a
    select by a boolean mask."""
    most = _most_of_byte(logits.dtype).index_select(0, words.view(torch.uint8).view(-1).int())
    most = most.view(len(words), -1)[:, : logits.shape[1]]
    if rows is None:
        torch.minimum(logits, most, out=logits)
        return
    used = (rows >= 0).nonzero()[:, 0]
    index = rows.index_select(0, used).long()
    own = torch.minimum(logits.index_select(0, index), most.index_select(0, used))
    logits.index_copy_(0, index, own)


@functools.lru_cache
def _most_of_byte(dtype: torch.dtype) -> torch.Tensor:
    """Build the lookup table [256, 8] of upper bounds of logits: infinity where bit i of the byte
    is set, else -infinity."""
    bits = (torch.arange(256)[:, None] >> torch.arange(8)) & 1
    return torch.where(bits == 1, torch.inf, -torch.inf).to(dtype)


def _check_logits(logits: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if logits.dtype not in dtypes:
        raise ValueError(f"logits: one of {dtypes}, not {logits.dtype}")
    if logits.dim() != 2 or (logits.shape[1] > 1 and logits.stride(1) != 1):
        raise ValueError(f"logits: [R, V], rows dense, not {logits.shape} {logits.stride()}")


def _checked(
    name: str,
    tensor: torch.Tensor,
    dtype: torch.dtype,
    shape: tuple[int | None, ...],
    logits: torch.Tensor,
) -> torch.Tensor:
    fits = tensor.dim() == len(shape) and all(
        wanted in (None, size) for wanted, size in zip(shape, tensor.shape, strict=True)
    )
    if tensor.dtype != dtype or not fits or not tensor.is_contiguous():
        raise ValueError(
            f"{name}: contiguous {dtype} {shape}, not {tensor.dtype} {tuple(tensor.shape)}"
        )
    if tensor.device != logits.device:
        raise ValueError(f"{name}: on {tensor.device}, logits on {logits.device}")
    return tensor
