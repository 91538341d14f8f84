"""begin_step: what a decode step does on the device before its first layer: each row's token, which
may be the one that the step before drew, and the entries of the block tables that changed.

So that no token takes the way over the host, and no table is copied whole. Knows no requests: which
row is whose is the caller's knowledge. Invariant: graph-safe; the number of changes is read on the
device. No state; any thread.
"""

from __future__ import annotations

import torch

from baton_kernels.dispatch import Backend, runs_triton


def begin_step(
    given: torch.Tensor,
    sources: torch.Tensor,
    drawn: torch.Tensor,
    token_ids: torch.Tensor,
    changes: torch.Tensor,
    num_changes: torch.Tensor,
    block_tables: torch.Tensor,
    *,
    vocab_size: int,
    backend: Backend = "auto",
) -> None:
    """Write `token_ids` and the changed entries of `block_tables`.

    Args:
        given: [B] int32: tokens that the host knows.
        sources: [B] int32: the row of `drawn` that has this row's token; -1: `given` has it.
        drawn: [R] int32: what the step before drew, row by row. Clamped into [0, vocab_size), so
            that the draw of a row whose logits were not finite is harmless until it is thrown away.
        token_ids: [B] int32, written; not `drawn`.
        changes: [C, 2] int32: (flat index into `block_tables`, block id), no index twice.
        num_changes: [1] int32, at most C: how many of them hold.
        block_tables: [R, n] int32, contiguous, written.
    Raises: ValueError naming the argument that does not fit.
    Bytes moved: 16 B + 12 num_changes. Source: ours.
    """
    _check(given, sources, drawn, token_ids, changes, num_changes, block_tables)
    if runs_triton(backend, given):
        from baton_kernels.gpu import step_rows

        step_rows.begin_step(
            given, sources, drawn, token_ids, changes, num_changes, block_tables, vocab_size
        )
        return
    begin_step_reference(
        given,
        sources,
        drawn,
        token_ids,
        changes,
        num_changes,
        block_tables,
        vocab_size=vocab_size,
    )


def begin_step_reference(
    given: torch.Tensor,
    sources: torch.Tensor,
    drawn: torch.Tensor,
    token_ids: torch.Tensor,
    changes: torch.Tensor,
    num_changes: torch.Tensor,
    block_tables: torch.Tensor,
    *,
    vocab_size: int,
) -> None:
    """`begin_step` in plain torch; waits for `num_changes`."""
    taken = drawn[sources.clamp(min=0).long()].clamp(0, vocab_size - 1)
    token_ids.copy_(torch.where(sources >= 0, taken, given))
    count = int(num_changes)
    block_tables.view(-1)[changes[:count, 0].long()] = changes[:count, 1]


def _check(
    given: torch.Tensor,
    sources: torch.Tensor,
    drawn: torch.Tensor,
    token_ids: torch.Tensor,
    changes: torch.Tensor,
    num_changes: torch.Tensor,
    block_tables: torch.Tensor,
) -> None:
    named = {
        "given": given,
        "sources": sources,
        "drawn": drawn,
        "token_ids": token_ids,
        "changes": changes,
        "num_changes": num_changes,
        "block_tables": block_tables,
    }
    for name, tensor in named.items():
        if tensor.dtype != torch.int32 or not tensor.is_contiguous():
            raise ValueError(f"{name}: contiguous int32, not {tensor.dtype} {tensor.stride()}")
        if tensor.device != given.device:
            raise ValueError(f"{name}: on {tensor.device}, given on {given.device}")
    if given.dim() != 1 or sources.shape != given.shape or token_ids.shape != given.shape:
        raise ValueError(
            f"given, sources and token_ids are [B]: {tuple(given.shape)}, "
            f"{tuple(sources.shape)}, {tuple(token_ids.shape)}"
        )
    if drawn.dim() != 1 or drawn.data_ptr() == token_ids.data_ptr():
        raise ValueError("drawn: [R], and not token_ids")
    if changes.dim() != 2 or changes.shape[1] != 2:
        raise ValueError(f"changes: [C, 2], not {tuple(changes.shape)}")
    if num_changes.shape != (1,):
        raise ValueError(f"num_changes: [1], not {tuple(num_changes.shape)}")
    if block_tables.dim() != 2:
        raise ValueError(f"block_tables: [R, n], not {tuple(block_tables.shape)}")
