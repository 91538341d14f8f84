"""The Triton kernel of baton_kernels/step_rows.py: one launch for the tokens and the tables."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 512


def begin_step(
    given: torch.Tensor,
    sources: torch.Tensor,
    drawn: torch.Tensor,
    token_ids: torch.Tensor,
    changes: torch.Tensor,
    num_changes: torch.Tensor,
    block_tables: torch.Tensor,
    vocab_size: int,
) -> None:
    """See the door; arguments are checked there. The first programs write tokens, the others
    changes: no program of one kind reads what one of the other kind writes."""
    num_rows = given.shape[0]
    num_token_programs = triton.cdiv(num_rows, _BLOCK)
    num_change_programs = triton.cdiv(changes.shape[0], _BLOCK)
    _begin_step[(num_token_programs + num_change_programs,)](
        given,
        sources,
        drawn,
        token_ids,
        changes,
        num_changes,
        block_tables,
        num_rows,
        vocab_size,
        num_token_programs,
        BLOCK=_BLOCK,
        num_warps=4,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _begin_step(  # type: ignore[no-untyped-def]
    given_ptr,
    sources_ptr,
    drawn_ptr,
    token_ids_ptr,
    changes_ptr,
    num_changes_ptr,
    tables_ptr,
    num_rows,
    vocab_size,
    num_token_programs,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    if program < num_token_programs:
        rows = program * BLOCK + lanes
        is_row = rows < num_rows
        source = tl.load(sources_ptr + rows, mask=is_row, other=-1)
        token = tl.load(given_ptr + rows, mask=is_row, other=0)
        is_drawn = is_row & (source >= 0)
        taken = tl.load(drawn_ptr + source, mask=is_drawn, other=0)
        taken = tl.minimum(tl.maximum(taken, 0), vocab_size - 1)
        tl.store(token_ids_ptr + rows, tl.where(is_drawn, taken, token), mask=is_row)
    else:
        places = (program - num_token_programs) * BLOCK + lanes
        is_change = places < tl.load(num_changes_ptr)
        index = tl.load(changes_ptr + 2 * places, mask=is_change, other=0)
        block_id = tl.load(changes_ptr + 2 * places + 1, mask=is_change, other=0)
        tl.store(tables_ptr + index.to(tl.int64), block_id, mask=is_change)
