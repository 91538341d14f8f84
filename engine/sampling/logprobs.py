"""Log probabilities: of the model's own distribution (before any processor) for requests that ask,
and of the processed one for traces. Natural logarithms, float32.

They are queued on the logits' device and read later; on CUDA nothing waits for the device before
that. Pure; engine thread only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from engine.outputs import TokenLogprobs
from engine.sampling.copies import Fetched, bring

_CPU_PASS = 1 << 20
"""Elements that the passes over a group of rows should touch, so that they stay in cache. A
guess."""
_DEVICE_PASS = 1 << 26
"""The same where memory, not cache, is the limit: some arrays of this many float32 or int64."""
_KEYS_PASS = 1 << 23
"""Elements whose int64 keys are made at once: they take several times the memory of a pass."""


def rows_per_pass(logits: torch.Tensor) -> int:
    """How many of its rows to work on at once."""
    size = _CPU_PASS if logits.device.type == "cpu" else _DEVICE_PASS
    return max(1, size // logits.shape[-1])


class PendingLogprobs:
    """Log probabilities of L rows' tokens that are queued, and the best of each row.

    Args:
        logits: [R, V], read only; may be overwritten by what is queued later.
        rows: L rows of them.
        token_ids: [L] int64 on the logits' device.
        counts: L; how many of the best of each row are wanted.
    """

    def __init__(
        self,
        logits: torch.Tensor,
        rows: Sequence[int],
        token_ids: torch.Tensor,
        counts: Sequence[int],
    ) -> None:
        self._counts = [min(count, logits.shape[-1]) for count in counts]
        self._most = max(self._counts, default=0)
        self._token_ids = Fetched(token_ids)
        self._parts: list[Fetched] = []
        index = bring(np.array(rows, dtype=np.int64), logits.device)
        size = rows_per_pass(logits)
        for start in range(0, len(rows), size):
            part = slice(start, start + size)
            logprobs = torch.log_softmax(logits.index_select(0, index[part]).float(), dim=-1)
            values, ids = best_of(logprobs, self._most)
            own = logprobs.gather(1, token_ids[part, None])
            floats = torch.cat([own, values], dim=1)
            self._parts.append(Fetched(torch.cat([floats.view(torch.int32), ids], dim=1)))

    def result(self) -> list[TokenLogprobs]:
        """Wait for them: each token's own, and the best with ties by lowest id."""
        if not self._parts:
            return []
        words = np.concatenate([part.wait() for part in self._parts])
        values = words[:, : 1 + self._most].view(np.float32).tolist()
        ids = words[:, 1 + self._most :].tolist()
        return [
            TokenLogprobs(
                token_id, own[0], tuple(zip(best[:count], own[1 : 1 + count], strict=True))
            )
            for token_id, own, best, count in zip(
                self._token_ids.wait().tolist(), values, ids, self._counts, strict=True
            )
        ]


def raw_logprobs(
    logits: torch.Tensor, rows: Sequence[int], token_ids: Sequence[int], counts: Sequence[int]
) -> list[TokenLogprobs]:
    """For each of L rows the chosen token's log probability and the best, ties by lowest id.

    Args:
        logits: [R, V], read only.
        rows, token_ids, counts: L each; counts[i] of the best of logits[rows[i]] are wanted.
    """
    chosen = bring(np.array(token_ids, dtype=np.int64), logits.device)
    return PendingLogprobs(logits, rows, chosen, counts).result()


def best_of(logprobs: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` best of each row: [L, count] float32 and int32 ids, best first, the lowest id
    first among equals. Of a row with a NaN anything.

    Args:
        logprobs: [L, V] float32.
    """
    if count == 0:
        nothing = logprobs.new_empty(len(logprobs), 0)
        return nothing, nothing.int()
    if logprobs.device.type == "cpu":
        return _best_on_cpu(logprobs.numpy(), count)
    return _best_by_keys(logprobs, count)


def _best_by_keys(logprobs: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`best_of` without a wait for the device. No two keys are equal, so topk has no ties."""
    last, size = logprobs.shape[-1] - 1, max(1, _KEYS_PASS // logprobs.shape[-1])
    from_last = last - torch.arange(last + 1, device=logprobs.device)
    found = []
    for start in range(0, len(logprobs), size):
        part = logprobs[start : start + size] + 0.0  # of the two zeros only one is left
        bits = part.view(torch.int32)
        keys = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
        keys.bitwise_left_shift_(32).bitwise_or_(from_last)
        found.append(last - (keys.topk(count, dim=-1).values & 0xFFFFFFFF))
    ids = torch.cat(found)
    return logprobs.gather(1, ids), ids.int()


def _best_on_cpu(logprobs: NDArray[np.float32], count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`best_of` by numpy, whose partition is several times faster than torch's topk."""
    num_rows, num_tokens = logprobs.shape
    edges = np.partition(logprobs, num_tokens - count, axis=1)[:, num_tokens - count, None]
    places = np.flatnonzero((logprobs >= edges) | np.isnan(edges))
    row_of, id_of = np.divmod(places, num_tokens)
    found = logprobs.reshape(-1)[places]
    order = np.lexsort((id_of, -found, row_of))
    starts = np.searchsorted(row_of, np.arange(num_rows))
    picked = order[starts[:, None] + np.arange(count)]
    return torch.from_numpy(found[picked]), torch.from_numpy(id_of[picked].astype(np.int32))


def processed_logprobs(
    processed: torch.Tensor, floors: torch.Tensor, token_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """[R] float32 and int32: the log probability of each row's token, and the size of its support,
    among what reaches its floor.

    Args:
        processed: [R, V] float32, the logits after every processor but truncation.
        floors: [R] float32, the threshold of truncation or -inf.
        token_ids: [R] int64.
    """
    least = floors.clamp(min=torch.finfo(torch.float32).min)  # what is masked is -inf
    is_kept = processed >= least[:, None]
    kept = torch.where(is_kept, processed, -torch.inf)
    values = torch.log_softmax(kept, dim=-1).gather(1, token_ids[:, None])[:, 0]
    return values, is_kept.sum(dim=-1, dtype=torch.int32)
