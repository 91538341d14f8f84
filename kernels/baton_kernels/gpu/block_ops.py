"""The Triton kernel of `baton_kernels.block_ops`, and its launcher. Arguments were checked there.

One kernel: rows of one matrix over rows of another, each side by its own list of rows or in order.
Bytes move as the widest integers that addresses and lengths allow. No state; any thread.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_CHUNK_BYTES = 16384
"""Of one program: a block of a few MB keeps every multiprocessor busy by itself."""


@triton.jit(
    do_not_specialize=["source_id_stride", "target_id_stride"],
    do_not_specialize_on_alignment=["source_ids", "target_ids"],
)  # type: ignore[untyped-decorator]
def _move(  # type: ignore[no-untyped-def]
    source, source_ids, target, target_ids, num_columns,
    source_stride, target_stride, source_id_stride, target_id_stride,
    BLOCK: tl.constexpr, HAS_SOURCE: tl.constexpr, HAS_SOURCE_IDS: tl.constexpr,
    HAS_TARGET_IDS: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(1).to(tl.int64)
    from_row = index
    to_row = index
    if HAS_SOURCE_IDS:
        from_row = tl.load(source_ids + index * source_id_stride).to(tl.int64)
    if HAS_TARGET_IDS:
        to_row = tl.load(target_ids + index * target_id_stride).to(tl.int64)
    if (from_row < 0) | (to_row < 0):
        return
    column = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = column < num_columns
    numbers = tl.zeros((BLOCK,), target.dtype.element_ty)
    if HAS_SOURCE:
        numbers = tl.load(source + from_row * source_stride + column, mask=mask)
    tl.store(target + to_row * target_stride + column, numbers, mask=mask)


def move(
    source: torch.Tensor | None,
    source_ids: torch.Tensor | None,
    target: torch.Tensor,
    target_ids: torch.Tensor | None,
    *,
    config: tuple[int, int] | None = None,
) -> None:
    """Rows of `source` (None: zeros) over rows of `target`. No ids: row after row; a negative one
    on either side: skipped.

    Args:
        config: (bytes per program, warps); for measuring.
    """
    ids = source_ids if source_ids is not None else target_ids
    if ids is None or ids.shape[0] == 0 or target.shape[1] == 0:
        return
    wide_target = _widest(target, source)
    wide_source = wide_target if source is None else source.view(wide_target.dtype)
    num_bytes, num_warps = config or (_CHUNK_BYTES, 8)
    num_columns = wide_target.shape[1]
    block = num_bytes // wide_target.element_size()
    _move[(triton.cdiv(num_columns, block), ids.shape[0])](
        wide_source, source_ids if source_ids is not None else ids, wide_target,
        target_ids if target_ids is not None else ids, num_columns, wide_source.stride(0),
        wide_target.stride(0), source_ids.stride(0) if source_ids is not None else 0,
        target_ids.stride(0) if target_ids is not None else 0, BLOCK=block,
        HAS_SOURCE=source is not None, HAS_SOURCE_IDS=source_ids is not None,
        HAS_TARGET_IDS=target_ids is not None, num_warps=num_warps,
    )  # fmt: skip


def _widest(target: torch.Tensor, source: torch.Tensor | None) -> torch.Tensor:
    """The target as integers, as wide as both sides' addresses, lengths and strides allow."""
    sides = [target] if source is None else [target, source]
    for dtype in (torch.int64, torch.int32, torch.int16, torch.uint8):
        width = dtype.itemsize
        numbers = [
            number
            for x in sides
            for number in (
                x.data_ptr(),
                x.shape[1] * x.element_size(),
                x.stride(0) * x.element_size(),
            )
        ]
        if all(number % width == 0 for number in numbers):
            return target.view(dtype)
    raise AssertionError("every number is a multiple of 1")
