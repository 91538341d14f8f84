"""LoRA adapters of one linear layer, for rows of several adapters in one batch: `out[row] +=
(x[row] @ A[slot].T) @ B[slot]`.

LoraRows says which rows belong to which slot, in tiles of rows of one slot each; it is built once
for a step and serves all its layers. Rows without an adapter are neither read nor written. Source
of the grouping: Punica, arXiv:2310.18547, section 4. Knows no adapter file and no model. Invariant:
a row's result does not depend on the other rows. No state; any thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from baton_kernels.dispatch import Backend, runs_triton

TILE_ROWS = 16
"""Rows per tile: the row count of one matrix instruction."""

NO_SLOT = -1


@dataclass(frozen=True)
class LoraRows:
    """Rows of a step grouped by adapter slot. Both tensors are on the device of the step."""

    row_ids: torch.Tensor
    """Rows of x and out, [tiles, TILE_ROWS] int32, none twice; -1: no row."""

    slots: torch.Tensor
    """Adapter slot of all rows of each tile, [tiles] int32; -1: an empty tile."""

    def __post_init__(self) -> None:
        num_tiles = self.slots.shape[0] if self.slots.ndim == 1 else -1
        if self.row_ids.shape != (num_tiles, TILE_ROWS) or not self.row_ids.is_contiguous():
            raise ValueError(f"row_ids is {tuple(self.row_ids.shape)}: [tiles, {TILE_ROWS}], dense")
        if self.row_ids.dtype != torch.int32 or self.slots.dtype != torch.int32:
            raise ValueError("row_ids and slots are int32")


def tiles_of(slots: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Group rows into tiles of one slot each. Returns: (slot, its rows) of each tile that is not
    empty.

    Args:
        slots: adapter slot of each row; negative: no adapter.
    """
    by_slot: dict[int, list[int]] = {}
    for row, slot in enumerate(slots):
        if slot >= 0:
            by_slot.setdefault(slot, []).append(row)
    return [
        (slot, rows[first : first + TILE_ROWS])
        for slot, rows in by_slot.items()
        for first in range(0, len(rows), TILE_ROWS)
    ]


def most_tiles(num_rows: int, num_slots: int) -> int:
    """Return the most tiles that `num_rows` rows can need when each has one of `num_slots` slots or
    none."""
    num_first = min(num_rows, num_slots)
    return num_first + (num_rows - num_first) // TILE_ROWS


def group_rows(
    slots: Sequence[int], device: torch.device | str, num_tiles: int | None = None
) -> LoraRows:
    """Group the rows of a step by adapter slot, in their order, on `device`.

    Args:
        slots: adapter slot of each row; negative: no adapter.
        num_tiles: number of tiles, the rest of them empty (CUDA graphs are captured with a fixed
            number); None: as many as are needed.
    Raises: ValueError where the rows need more tiles.
    """
    tiles = tiles_of(slots)
    count = len(tiles) if num_tiles is None else num_tiles
    if len(tiles) > count:
        raise ValueError(f"num_tiles is {count}: the rows need {len(tiles)}")
    tiles += [(NO_SLOT, [])] * (count - len(tiles))
    row_ids = [rows + [-1] * (TILE_ROWS - len(rows)) for _, rows in tiles]
    return LoraRows(
        torch.tensor(row_ids, dtype=torch.int32).view(count, TILE_ROWS).to(device),
        torch.tensor([slot for slot, _ in tiles], dtype=torch.int32).to(device),
    )


def add_lora(
    out: torch.Tensor,
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    rows: LoraRows,
    *,
    backend: Backend = "auto",
) -> torch.Tensor:
    """Add the adapters' output for `x` to `out`, in place.

    Args:
        out: [M, N], x's dtype, rows dense (a part of wider rows will do).
        x: [M, K], bfloat16 or float32, rows dense.
        a: [S, R, K], x's dtype: the first factor of each slot, zeros beyond its own rank.
        b: [S, R, N], x's dtype: the second, with the adapter's scale in it.
        rows: slots below S.
    Returns: out.
    Raises: ValueError naming what does not fit.
    """
    _check(out, x, a, b, rows)
    if rows.slots.shape[0] == 0:
        return out
    if not runs_triton(backend, x):
        return add_lora_reference(out, x, a, b, rows)
    from baton_kernels import lora_triton

    return lora_triton.add_lora(out, x, a, b, rows.row_ids, rows.slots)


def add_lora_reference(
    out: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, rows: LoraRows
) -> torch.Tensor:
    """Compute `add_lora` in plain torch. The sum is rounded once, when it is added."""
    for slot, row_ids in zip(rows.slots.tolist(), rows.row_ids.long(), strict=True):
        if slot < 0:
            continue
        own = row_ids[row_ids >= 0]
        wide = out.dtype if out.dtype == torch.float64 else torch.float32
        delta = (x[own].to(wide) @ a[slot].to(wide).t()) @ b[slot].to(wide)
        out[own] = (out[own].to(wide) + delta).to(out.dtype)
    return out


def _check(
    out: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, rows: LoraRows
) -> None:
    if x.dtype not in (torch.bfloat16, torch.float32, torch.float64):
        raise ValueError(f"x is {x.dtype}: bfloat16 and float32 are computed")
    if x.ndim != 2 or x.stride(1) != 1:
        raise ValueError(f"x is {tuple(x.shape)}: [M, K] with dense rows expected")
    if out.ndim != 2 or out.shape[0] != x.shape[0] or out.stride(1) != 1:
        raise ValueError(f"out is {tuple(out.shape)}: [{x.shape[0]}, N] with dense rows expected")
    if a.ndim != 3 or a.shape[2] != x.shape[1] or not a.is_contiguous():
        raise ValueError(f"a is {tuple(a.shape)}: [S, R, {x.shape[1]}], dense, expected")
    if b.shape != (*a.shape[:2], out.shape[1]) or not b.is_contiguous():
        raise ValueError(f"b is {tuple(b.shape)}: {(*a.shape[:2], out.shape[1])}, dense, expected")
    for name, tensor in (("out", out), ("a", a), ("b", b)):
        if tensor.dtype != x.dtype or tensor.device != x.device:
            raise ValueError(f"{name} is {tensor.dtype} on {tensor.device}, x {x.dtype}")
    if rows.slots.device != x.device or rows.row_ids.device != x.device:
        raise ValueError(f"rows are on {rows.slots.device}, x on {x.device}")
