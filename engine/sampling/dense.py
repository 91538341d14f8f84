"""The few passes over whole [rows, vocabulary] arrays that the pipeline is made of.

On CPU most go through numpy, on the same memory: its argmax, partition, sort and compare use vector
instructions where torch's do not (for 256 rows of 4,096: 0.06 against 0.6 ms for an argmax, 1.9
against 150 ms for a sort). Both give the same values, and where ids are given the same ids.

A row's result never depends on the other rows, to the last bit: sums are taken in an order that is
the row's own (torch's plain sum over one row differs from the same row's in a batch).

Knows no parameters. Pure, except where a docstring says in place.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from baton_kernels.logit_ops import apply_bitmask
from numpy.typing import NDArray

_CPU_PASS = 1 << 20
"""Elements that the passes over a group of rows should touch, so that they stay in cache. A
guess."""
_DEVICE_PASS = 1 << 26
"""The same where memory, not cache, is the limit: some arrays of this many float32 or int64."""
_SUM_CHUNK = 256


def rows_per_pass(logits: torch.Tensor) -> int:
    """How many of its rows to work on at once."""
    size = _CPU_PASS if logits.device.type == "cpu" else _DEVICE_PASS
    return max(1, size // logits.shape[-1])


def best(logits: torch.Tensor) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """[R, V] on CPU -> each row's largest value and its lowest id. NaN is larger than all."""
    if logits.dtype == torch.float32:
        return _best_on_cpu(logits)
    size = rows_per_pass(logits)
    starts = range(0, len(logits), size)
    parts = [_best_on_cpu(logits[start : start + size].float()) for start in starts]
    return np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])


def _best_on_cpu(logits: torch.Tensor) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    array = logits.numpy()
    ids = array.argmax(axis=1)
    return array[np.arange(len(array)), ids], ids


def largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """[R, V] float32 -> [R, count], each row's `count` largest values, descending."""
    if values.device.type != "cpu":
        if count == values.shape[-1]:
            return values.sort(dim=-1, descending=True).values
        return values.topk(count, dim=-1).values
    array = values.numpy()
    if count < array.shape[1]:
        array = np.partition(array, array.shape[1] - count, axis=1)[:, -count:]
    return torch.from_numpy(np.sort(array, axis=1)[:, ::-1].copy())


def at_least(values: torch.Tensor, floors: torch.Tensor) -> torch.Tensor:
    """[R, V] and [R] float32 -> int64, ascending: the flat places r * V + i with values[r, i] >=
    floors[r]."""
    if values.device.type != "cpu":
        return (values >= floors[:, None]).view(-1).nonzero()[:, 0]
    return torch.from_numpy(np.flatnonzero(values.numpy() >= floors.numpy()[:, None]))


def row_sums(values: torch.Tensor) -> torch.Tensor:
    """[R, V] float32 -> [R] float64, summed in chunks of a fixed size and place."""
    doubles = values.double()
    num_whole = values.shape[-1] // _SUM_CHUNK * _SUM_CHUNK
    whole = doubles[:, :num_whole].reshape(len(values), -1, _SUM_CHUNK).sum(dim=-1)
    rest = doubles[:, num_whole:].sum(dim=-1, keepdim=True)
    return torch.cat([whole, rest], dim=-1).sum(dim=-1)


def add_mask(logits: torch.Tensor, rows: list[int], words: NDArray[np.int32]) -> None:
    """In place: -inf where a row's bit is not set.

    Args:
        logits: [R, V] float32.
        rows: G of its rows, no row twice.
        words: [G, ceil(V / 32)], bit i of word w is of token 32 * w + i.
    """
    device = logits.device
    if device.type != "cpu":
        index = torch.tensor(rows, dtype=torch.int32, device=device)
        apply_bitmask(logits, torch.from_numpy(words).to(device), index)
        return
    as_bytes = torch.from_numpy(words.view(np.uint8).reshape(-1))
    # Eight scores per byte by table: several times faster than a select by a mask of bits.
    scores = _scores_of_byte().index_select(0, as_bytes.int()).view(len(rows), -1)
    scores = scores[:, : logits.shape[-1]]
    if len(rows) == len(logits):
        logits.add_(scores)
    else:
        logits.index_add_(0, torch.tensor(rows), scores)


@functools.lru_cache
def _scores_of_byte() -> torch.Tensor:
    """[256, 8] float32: 0 where bit i of the byte is set, else -inf."""
    bits = (torch.arange(256)[:, None] >> torch.arange(8)) & 1
    return torch.where(bits == 1, 0.0, -torch.inf)
