"""Log probabilities: of the model's own distribution (before any processor) for those who asked,
and of the processed one for traces. Natural logarithms, float32. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.outputs import TokenLogprobs
from engine.sampling import dense


def raw_logprobs(
    logits: torch.Tensor, rows: Sequence[int], token_ids: Sequence[int], counts: Sequence[int]
) -> list[TokenLogprobs]:
    """For each of L rows the chosen token's log probability and the best, ties by lowest id.

    Args:
        logits: [R, V], read only.
        rows, token_ids, counts: L each; counts[i] of the best of logits[rows[i]] are wanted.
    """
    size = dense.rows_per_pass(logits)
    results: list[TokenLogprobs] = []
    for start in range(0, len(rows), size):
        part = slice(start, start + size)
        index = torch.tensor(rows[part], device=logits.device)
        logprobs = torch.log_softmax(logits.index_select(0, index).float(), dim=-1)
        chosen = torch.tensor(token_ids[part], device=logits.device)
        own = logprobs.gather(1, chosen[:, None])[:, 0].tolist()
        tops = _top(logprobs, counts[part])
        for token_id, value, top in zip(token_ids[part], own, tops, strict=True):
            results.append(TokenLogprobs(token_id, value, top))
    return results


def _top(logprobs: torch.Tensor, counts: Sequence[int]) -> list[tuple[tuple[int, float], ...]]:
    """The counts[i] best of each row, best first, the lowest id first among equals."""
    num_tokens = logprobs.shape[-1]
    wanted = [min(count, num_tokens) for count in counts]
    most = max(wanted)
    if most == 0:
        return [()] * len(wanted)
    values = dense.largest(logprobs, most)
    last = torch.tensor([max(count, 1) - 1 for count in wanted], device=logprobs.device)
    edges = values.gather(1, last[:, None])[:, 0]
    places = dense.at_least(logprobs, edges)
    found = logprobs.view(-1).index_select(0, places).cpu().numpy()
    row_of, id_of = np.divmod(places.cpu().numpy(), num_tokens)
    order = np.lexsort((id_of, -found, row_of))
    starts = np.searchsorted(row_of, np.arange(len(wanted)))
    tops: list[tuple[tuple[int, float], ...]] = []
    for start, count in zip(starts.tolist(), wanted, strict=True):
        own = order[start : start + count]
        tops.append(tuple(zip(id_of[own].tolist(), found[own].tolist(), strict=True)))
    return tops


def processed_logprobs(
    processed: torch.Tensor, floors: torch.Tensor, token_ids: Sequence[int]
) -> tuple[list[float], list[int]]:
    """(log probability of each row's token, size of its support) among what reaches its floor.

    Args:
        processed: [R, V] float32, the logits after every processor but truncation.
        floors: [R] float32, the threshold of truncation or -inf.
    """
    least = floors.clamp(min=torch.finfo(torch.float32).min)  # what is masked is -inf
    is_kept = processed >= least[:, None]
    sizes = is_kept.sum(dim=-1).tolist()
    kept = torch.where(is_kept, processed, -torch.inf)
    chosen = torch.tensor(token_ids, device=processed.device)
    values = torch.log_softmax(kept, dim=-1).gather(1, chosen[:, None])[:, 0].tolist()
    return values, sizes
