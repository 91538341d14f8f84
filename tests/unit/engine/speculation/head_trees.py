"""Trees of draft heads, and what the papers say of the heads' weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace as with_fields
from pathlib import Path

import pytest
import torch
from baton_kernels import gumbel_noise

from engine.config import EngineConfig
from engine.models.interface import LoadedModel
from engine.request import Sampling
from engine.speculation.config import SpeculationConfig
from engine.speculation.loader import load_heads
from engine.speculation.proposer import DraftTask
from engine.speculation.token_tree import ROOT, TokenTree
from tests.harness.published_heads import (
    VOCAB,
)

Scores = Callable[[tuple[int, ...]], torch.Tensor]
"""Scores of what follows a path: [V], noise included."""


def load_head(config: EngineConfig, model: LoadedModel, folder: Path, **fields: object) -> object:
    speculation = SpeculationConfig(draft_heads=(str(folder),), **fields)  # type: ignore[arg-type]
    (head,) = load_heads(with_fields(config, speculation=speculation), model)
    return head


def make_task(
    name: str, token_ids: Sequence[int], *, num_nodes: int, sampling: Sampling
) -> DraftTask:
    return DraftTask((name, 0), list(token_ids), 1, sampling, 0, num_nodes)


def noisy_scores(logits: torch.Tensor, task: DraftTask, ahead: int) -> torch.Tensor:
    """As plain decoding would compare them."""
    if task.sampling.temperature == 0.0:
        return logits
    keys = gumbel_noise.row_keys(
        [task.sampling.seed], [task.sample_index], [len(task.token_ids) + ahead]
    )
    found = gumbel_noise.gumbel(torch.from_numpy(keys)[:, None], torch.arange(VOCAB)[None])[0]
    return logits / task.sampling.temperature + found


def check_tree(tree: TokenTree, scores: Scores, widths: Sequence[int]) -> None:
    """Every node is one of the best of its parent, with the belief that its scores give it. Ties
    and rounding apart, by which another token may come first."""
    for parent in (ROOT, *range(len(tree))):
        children = tree.children.get(parent, {})
        if not children:
            continue
        path = tuple(tree.token_ids[node] for node in tree.path(parent))
        own = scores(path)
        assert len(children) <= widths[len(path)]
        worst = own.sort(descending=True).values[len(children) - 1]
        shares = own.softmax(0)
        above = 1.0 if parent == ROOT else tree.chances[parent]
        for token_id, node in children.items():
            assert own[token_id] >= worst - 1e-3
            assert tree.chances[node] == pytest.approx(above * float(shares[token_id]), abs=1e-4)
