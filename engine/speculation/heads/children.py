"""The best next tokens by a drafter's logits, chosen for the exact mode: by the scores that the
target's draw would compare, its noise included (baton_kernels/noise.py), so that both choose the
same token as often as their distributions allow; without noise where the request is greedy, or the
target draws with another (drafter.Task.is_drawn).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from baton_kernels import noise

from engine.speculation.drafter import Task

Children = list[tuple[int, float]]
"""(token id, the drafter's belief that it is drawn), best first."""


def best_children(
    logits: torch.Tensor,
    rows: Sequence[tuple[Task, int]],
    widths: Sequence[int],
    token_ids: torch.Tensor | None = None,
) -> list[Children]:
    """Of each row.

    Args:
        logits: [rows, V].
        rows: whose each is, and how many tokens lie between its sequence's newest and the draw.
        widths: how many children of each row are wanted.
        token_ids: [V] int64: the target's token of each logit; None: they are the same.
    """
    scores = _scores(logits, rows, token_ids)
    count = min(max(widths), scores.shape[-1])
    best = scores.topk(count, dim=-1)
    ids = best.indices if token_ids is None else token_ids[best.indices]
    shares = torch.softmax(scores, dim=-1).gather(-1, best.indices).nan_to_num(0.0)
    return [
        list(zip(own[:width], beliefs[:width], strict=True))
        for own, beliefs, width in zip(ids.tolist(), shares.tolist(), widths, strict=True)
    ]


def _scores(
    logits: torch.Tensor, rows: Sequence[tuple[Task, int]], token_ids: torch.Tensor | None
) -> torch.Tensor:
    """[rows, V] float32."""
    scores = logits.float().clone()
    temperatures = np.array([task.sampling.temperature for task, _ in rows])
    sampled = np.flatnonzero(temperatures > 0.0)
    if not len(sampled):
        return scores
    device = scores.device
    places = torch.from_numpy(sampled).to(device)
    heat = torch.from_numpy(temperatures[sampled]).to(device, torch.float32)[:, None]
    scores[places] /= heat
    coupled = [row for row in sampled.tolist() if not rows[row][0].is_drawn]
    if coupled:
        own = [rows[row] for row in coupled]
        keys = noise.row_keys(
            [task.sampling.seed for task, _ in own],
            [task.sample_index for task, _ in own],
            [len(task.token_ids) + ahead for task, ahead in own],
        )
        if token_ids is None:
            token_ids = torch.arange(scores.shape[-1], device=device)
        own_keys = torch.from_numpy(keys).to(device)[:, None]
        scores[torch.tensor(coupled, device=device)] += noise.gumbel(own_keys, token_ids[None])
    return scores
