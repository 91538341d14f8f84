"""Attention of few tokens per sequence over the paged cache, for decode and for token trees: one
launch by splits of each sequence (attention_splits.py) or by equal shares of all
(attention_shares.py).

A launch may begin while the kernel before it ends (overlap.py): until it waits, a program reads its
sequence's length and blocks, and asks L2 for its first keys and values.

Invariant: graph-safe; no load depends on a table entry beyond a sequence's own. A Workspace serves
one launch at a time.
"""

from __future__ import annotations

import torch

from baton_kernels.block_rows import BlockRows, Tails
from baton_kernels.gpu.attention_plan import (
    Config,
    Rotation,
    Tree,
    Workspace,
    own_workspace,
    plan_launch,
)
from baton_kernels.gpu.attention_shares import launch_shares
from baton_kernels.gpu.attention_splits import launch_splits

__all__ = ["Config", "Rotation", "Tree", "Workspace", "launch", "own_workspace"]


def launch(
    query: torch.Tensor,
    rows: BlockRows,
    block_tables: torch.Tensor,
    ends: torch.Tensor,
    out: torch.Tensor,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    tails: Tails | None = None,
    tree: Tree | None = None,
    max_num_nodes: int = 1,
    num_splits: int | None = None,
    exact: bool = False,
    workspace: Workspace | None = None,
    config: Config | None = None,
    rotation: Rotation | None = None,
    is_early: bool = False,
) -> None:
    """Attention of a batch; arguments are checked by the doors (attention.py).

    Args:
        ends: [B] int32; cached positions, where `tree`.
        max_num_nodes: no sequence has more.
        rotation: `query` is [B, (H + 2 K), D] before rotation, `ends` are positions (-1: padding),
            and the newest tokens' keys and values are written first. One part of the kernel.
        is_early: block_tables and ends were written by no kernel of the step.
        config, num_splits: None: by attention_plan's tables.
    """
    group = out.shape[1] // rows.num_heads
    plan = plan_launch(
        rows, block_tables, ends.shape[0], group, max_num_nodes, query.dtype,
        window=window, exact=exact, is_tree=tree is not None, has_tails=tails is not None,
        config=config, num_splits=num_splits,
    )  # fmt: skip
    if plan.num_programs:
        launch_shares(
            query, rows, block_tables, ends, out, workspace, plan,
            scaling=scaling, softcap=softcap, sinks=sinks, rotation=rotation, is_early=is_early,
        )  # fmt: skip
        return
    launch_splits(
        query, rows, block_tables, ends, out, workspace, plan,
        scaling=scaling, window=window, softcap=softcap, sinks=sinks, tails=tails, tree=tree,
        exact=exact, rotation=rotation, is_early=is_early,
    )  # fmt: skip
