"""Device-side beginning and end of a decode step: begin_step reads the step's rows from host
memory, and end_step writes the drawn tokens there.

This leaves no copy between two steps: where one engine copies and another computes, each waits for
the other some microseconds. The host writes the image of a step into one of two buffers while the
previous step may still read the other; a counter on the device selects the buffer, so that one CUDA
graph serves both. A token that the previous step drew does not go through the host, and only
changed entries of the block tables are copied.

Knows no requests: the caller knows which row belongs to which request. Invariant: graph-safe;
nothing here waits. No state; any thread.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from baton_kernels.dispatch import Backend, runs_triton

NUM_BUFFERS = 2
LAST_NUMBER = (1 << 30) - 1
"""Greatest step number; the next step is number 0 again. Odd, so that the two buffers keep
alternating."""
HEADER_WORDS = 16
"""Words in front of an image (the first is its number of changes) and of an output (the first is
the number of its step)."""


class ImageLayout(NamedTuple):
    """Word offsets within an image: a header, fields of each row, and changes of the block
    tables."""

    given: int
    """Offset in words of the tokens that the host knows."""

    sources: int
    """Offset in words of the rows in the previous step from which each token comes; -1: from the
    host."""

    first_change: int
    """Offset in words where the fields end and the changes begin, pairs of (flat index into the
    tables, block id)."""


def begin_step(
    images: torch.Tensor,
    number: torch.Tensor,
    drawn: torch.Tensor,
    words: torch.Tensor,
    token_ids: torch.Tensor,
    block_tables: torch.Tensor,
    *,
    layout: ImageLayout,
    vocab_size: int,
    backend: Backend = "auto",
) -> None:
    """Read a step's rows from its image: write `words`, `token_ids` and the changed entries of
    `block_tables`.

    Args:
        images: [2, W] int32, on the device or pinned; that of step s is images[s % 2]. Its first
            word says how many changes there are.
        number: [1] int32: s.
        drawn: [2, R] int32: in row 0 what the step before drew, row by row. Clamped into [0,
            vocab_size), so that the draw of a row whose logits were not finite is harmless until it
            is thrown away.
        words: [layout.first_change] int32, written: the image without its changes.
        token_ids: [B] int32, written.
        block_tables: [R, n] int32, written; no entry is changed twice in one image.
    Raises: ValueError naming the argument that does not fit.
    Bytes moved: 8 layout.first_change + 16 B + 12 per change.
    """
    _check_host("images", images, number)
    _check_on(number, {"number": number, "drawn": drawn, "words": words})
    _check_on(number, {"token_ids": token_ids, "block_tables": block_tables})
    if number.shape != (1,):
        raise ValueError(f"number: [1], not {tuple(number.shape)}")
    if words.shape != (layout.first_change,) or images.shape[1] < layout.first_change:
        raise ValueError(f"words: [{layout.first_change}], not {tuple(words.shape)}")
    if drawn.dim() != 2 or drawn.shape[0] != 2:
        raise ValueError(f"drawn: [2, R], not {tuple(drawn.shape)}")
    if token_ids.dim() != 1 or token_ids.shape[0] > drawn.shape[1]:
        raise ValueError(f"token_ids: at most {drawn.shape[1]}, not {tuple(token_ids.shape)}")
    if block_tables.dim() != 2:
        raise ValueError(f"block_tables: [R, n], not {tuple(block_tables.shape)}")
    if runs_triton(backend, number):
        from baton_kernels import decode_step_rows_triton

        decode_step_rows_triton.begin_step(
            images, number, drawn, words, token_ids, block_tables, layout, vocab_size
        )
        return
    begin_step_reference(
        images,
        number,
        drawn,
        words,
        token_ids,
        block_tables,
        layout=layout,
        vocab_size=vocab_size,
    )


def begin_step_reference(
    images: torch.Tensor,
    number: torch.Tensor,
    drawn: torch.Tensor,
    words: torch.Tensor,
    token_ids: torch.Tensor,
    block_tables: torch.Tensor,
    *,
    layout: ImageLayout,
    vocab_size: int,
) -> None:
    """Read a step's rows as `begin_step` does, in plain torch; waits for the device."""
    image = images[int(number) % NUM_BUFFERS].to(words.device)
    words.copy_(image[: layout.first_change])
    num_rows, num_changes = token_ids.shape[0], int(image[0])
    given = image[layout.given : layout.given + num_rows]
    sources = image[layout.sources : layout.sources + num_rows]
    taken = drawn[0, sources.clamp(min=0).long()].clamp(0, vocab_size - 1)
    token_ids.copy_(torch.where(sources >= 0, taken, given))
    changes = image[layout.first_change : layout.first_change + 2 * num_changes].view(-1, 2)
    block_tables.view(-1)[changes[:, 0].long()] = changes[:, 1]


def end_step(
    drawn: torch.Tensor, number: torch.Tensor, outputs: torch.Tensor, *, backend: Backend = "auto"
) -> None:
    """Write a step's drawn tokens where the host reads them, and advance the step number.

    Args:
        drawn: [2, R] int32: tokens, and the bits of the best values.
        number: [1] int32: s; becomes `next_number(s)`.
        outputs: [2, HEADER_WORDS + 2 R] int32, on the device or pinned; outputs[s % 2] is written:
            s, and `drawn`.
    Raises: ValueError naming the argument that does not fit.
    Bytes moved: 16 R.
    """
    _check_host("outputs", outputs, number)
    _check_on(number, {"number": number, "drawn": drawn})
    if drawn.dim() != 2 or outputs.shape[1] != HEADER_WORDS + drawn.numel():
        raise ValueError(f"outputs: {tuple(outputs.shape)} for drawn {tuple(drawn.shape)}")
    if runs_triton(backend, number):
        from baton_kernels import decode_step_rows_triton

        decode_step_rows_triton.end_step(drawn, number, outputs)
        return
    end_step_reference(drawn, number, outputs)


def end_step_reference(drawn: torch.Tensor, number: torch.Tensor, outputs: torch.Tensor) -> None:
    """Write drawn tokens as `end_step` does, in plain torch; waits for the device."""
    output = outputs[int(number) % NUM_BUFFERS]
    output[HEADER_WORDS:] = drawn.view(-1)
    output[0] = number[0]
    number.copy_((number + 1) & LAST_NUMBER)


def next_number(number: int) -> int:
    """Return the number of the next step."""
    return (number + 1) & LAST_NUMBER


def _check_host(name: str, buffers: torch.Tensor, number: torch.Tensor) -> None:
    """Check that `buffers` are two dense buffers that the device can reach. Raises: ValueError
    naming `name`."""
    if buffers.dtype != torch.int32 or buffers.dim() != 2 or not buffers.is_contiguous():
        raise ValueError(f"{name}: [2, words] int32, not {buffers.dtype} {tuple(buffers.shape)}")
    if buffers.shape[0] != NUM_BUFFERS:
        raise ValueError(f"{name}: {NUM_BUFFERS} of them, not {buffers.shape[0]}")
    if buffers.device != number.device and not buffers.is_pinned():
        raise ValueError(f"{name}: on {buffers.device}, not pinned, and number on {number.device}")


def _check_on(number: torch.Tensor, named: dict[str, torch.Tensor]) -> None:
    for name, tensor in named.items():
        if tensor.dtype != torch.int32 or not tensor.is_contiguous():
            raise ValueError(f"{name}: contiguous int32, not {tensor.dtype} {tensor.stride()}")
        if tensor.device != number.device:
            raise ValueError(f"{name}: on {tensor.device}, number on {number.device}")
