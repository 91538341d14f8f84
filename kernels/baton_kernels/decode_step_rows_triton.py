"""Triton kernels of `baton_kernels.decode_step_rows`, and their launchers: one launch each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from baton_kernels.decode_step_rows import HEADER_WORDS, LAST_NUMBER, ImageLayout

_BLOCK = 512


def begin_step(
    images: torch.Tensor,
    number: torch.Tensor,
    drawn: torch.Tensor,
    words: torch.Tensor,
    token_ids: torch.Tensor,
    block_tables: torch.Tensor,
    layout: ImageLayout,
    vocab_size: int,
) -> None:
    """Launch `step_rows.begin_step`, which has checked the arguments. Programs are of three kinds:
    tokens, fields and changes; none reads what another writes."""
    num_rows, num_words = token_ids.shape[0], images.shape[1]
    num_token_programs = triton.cdiv(num_rows, _BLOCK)
    num_field_programs = triton.cdiv(layout.first_change, _BLOCK)
    num_change_programs = triton.cdiv((num_words - layout.first_change) // 2, _BLOCK)
    _begin_step[(num_token_programs + num_field_programs + num_change_programs,)](
        images,
        number,
        drawn,
        words,
        token_ids,
        block_tables,
        num_rows,
        num_words,
        layout.given,
        layout.sources,
        layout.first_change,
        vocab_size,
        num_token_programs,
        num_field_programs,
        BLOCK=_BLOCK,
        num_warps=4,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _begin_step(  # type: ignore[no-untyped-def]
    images_ptr,
    number_ptr,
    drawn_ptr,
    words_ptr,
    token_ids_ptr,
    tables_ptr,
    num_rows,
    num_words,
    given,
    sources,
    first_change,
    vocab_size,
    num_token_programs,
    num_field_programs,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    image = images_ptr + (tl.load(number_ptr) & 1) * num_words
    if program < num_token_programs:
        rows = program * BLOCK + lanes
        is_row = rows < num_rows
        source = tl.load(image + sources + rows, mask=is_row, other=-1)
        token = tl.load(image + given + rows, mask=is_row, other=0)
        is_drawn = is_row & (source >= 0)
        taken = tl.load(drawn_ptr + source, mask=is_drawn, other=0)
        taken = tl.minimum(tl.maximum(taken, 0), vocab_size - 1)
        tl.store(token_ids_ptr + rows, tl.where(is_drawn, taken, token), mask=is_row)
    elif program < num_token_programs + num_field_programs:
        places = (program - num_token_programs) * BLOCK + lanes
        is_field = places < first_change
        tl.store(words_ptr + places, tl.load(image + places, mask=is_field, other=0), mask=is_field)
    else:
        first = (program - num_token_programs - num_field_programs) * BLOCK
        num_changes = tl.load(image)
        if first < num_changes:
            places = first + lanes
            is_change = places < num_changes
            pairs = image + first_change + 2 * places
            index = tl.load(pairs, mask=is_change, other=0)
            block_id = tl.load(pairs + 1, mask=is_change, other=0)
            tl.store(tables_ptr + index.to(tl.int64), block_id, mask=is_change)


def end_step(drawn: torch.Tensor, number: torch.Tensor, outputs: torch.Tensor) -> None:
    """Launch `step_rows.end_step`, which has checked the arguments. One warp, so that the step
    number is not advanced while another program still reads it."""
    _end_step[(1,)](
        drawn,
        number,
        outputs,
        drawn.numel(),
        outputs.shape[1],
        HEADER=HEADER_WORDS,
        LAST=LAST_NUMBER,
        BLOCK=_BLOCK,
        num_warps=1,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _end_step(  # type: ignore[no-untyped-def]
    drawn_ptr,
    number_ptr,
    outputs_ptr,
    num_drawn,
    num_words,
    HEADER: tl.constexpr,
    LAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    number = tl.load(number_ptr)
    output = outputs_ptr + (number & 1) * num_words
    for first in range(0, num_drawn, BLOCK):
        places = first + tl.arange(0, BLOCK)
        is_drawn = places < num_drawn
        tl.store(
            output + HEADER + places,
            tl.load(drawn_ptr + places, mask=is_drawn, other=0),
            mask=is_drawn,
        )
    tl.store(output, number)
    tl.store(number_ptr, (number + 1) & LAST)
