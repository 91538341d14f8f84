"""Log probabilities of tokens: those of the model's own distribution (before any processor) for
requests with `logprobs`, and those of the processed distribution for traces. Natural logarithms,
float32.

They are queued on the logits' device and read later; on CUDA nothing waits for the device before
that. Pure; engine thread only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from engine.outputs import PositionLogprobs
from engine.sampling.host_device_copies import Fetched, bring

_CPU_PASS = 1 << 20
"""Number of elements that a pass over a group of rows covers on CPU, so that they stay in cache;
guessed."""
_DEVICE_PASS = 1 << 26
"""Number of elements of a pass on other devices, which bounds the memory of its float32 and int64
arrays."""
_KEYS_PASS = 1 << 23
"""Number of elements whose int64 keys are computed at once: they need several times the memory of a
pass."""


def rows_per_pass(logits: torch.Tensor) -> int:
    """Return the number of rows of `logits` to process at once."""
    size = _CPU_PASS if logits.device.type == "cpu" else _DEVICE_PASS
    return max(1, size // logits.shape[-1])


class PendingLogprobs:
    """Queued log probabilities: those of L rows' tokens, and the best ones of each row.

    Args:
        logits: [R, V], read only; later work in the device's queue may overwrite them.
        rows: indices of L rows.
        token_ids: [L] int64 on the logits' device.
        counts: the number of best log probabilities wanted of each of the L rows.
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

    def result(self) -> list[PositionLogprobs]:
        """Wait for the log probabilities. Returns: for each row that of its token, and the best
        ones, the lowest id first among equals."""
        if not self._parts:
            return []
        words = np.concatenate([part.wait() for part in self._parts])
        values = words[:, : 1 + self._most].view(np.float32).tolist()
        ids = words[:, 1 + self._most :].tolist()
        return [
            PositionLogprobs(
                token_id, own[0], tuple(zip(best[:count], own[1 : 1 + count], strict=True))
            )
            for token_id, own, best, count in zip(
                self._token_ids.wait().tolist(), values, ids, self._counts, strict=True
            )
        ]


def raw_logprobs(
    logits: torch.Tensor, rows: Sequence[int], token_ids: Sequence[int], counts: Sequence[int]
) -> list[PositionLogprobs]:
    """Compute log probabilities of the model's own distribution, before any processor: that of each
    row's token, and the `counts[i]` greatest of the row (the lowest id first among equals). Waits
    for the device; PendingLogprobs does not.

    Args:
        logits: [R, V], read only.
        rows: indices of L rows.
        token_ids: the token of each of them.
        counts: the number of best log probabilities wanted of each.
    """
    chosen = bring(np.array(token_ids, dtype=np.int64), logits.device)
    return PendingLogprobs(logits, rows, chosen, counts).result()


def best_of(logprobs: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `count` greatest values of each row and their ids, [L, count] float32 and int32,
    in descending order, the lowest id first among equals. Results of a row with a NaN are
    undefined.

    Args: logprobs: [L, V] float32.
    """
    if count == 0:
        nothing = logprobs.new_empty(len(logprobs), 0)
        return nothing, nothing.int()
    if logprobs.device.type == "cpu":
        return _best_on_cpu(logprobs.numpy(), count)
    return _best_by_keys(logprobs, count)


def _best_by_keys(logprobs: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `best_of` without waiting for the device, by topk of int64 keys of value and id, of
    which no two are equal."""
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
    """Compute `best_of` with numpy, whose partition is several times faster than torch's topk on
    CPU."""
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
    """Compute the log probability of each row's token among the tokens whose logit reaches the
    row's floor, and the number of these tokens (the support size): [R] float32 and int32.

    Args:
        processed: [R, V] float32, the logits after every processor but truncation.
        floors: [R] float32, the threshold of truncation, or -inf.
        token_ids: [R] int64.
    """
    least = floors.clamp(min=torch.finfo(torch.float32).min)  # what is masked is -inf
    is_kept = processed >= least[:, None]
    kept = torch.where(is_kept, processed, -torch.inf)
    values = torch.log_softmax(kept, dim=-1).gather(1, token_ids[:, None])[:, 0]
    return values, is_kept.sum(dim=-1, dtype=torch.int32)
