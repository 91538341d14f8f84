"""Rows of several adapters in one batch, against float64: who has none keeps every bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from baton_kernels.lora import (
    TILE_ROWS,
    LoraRows,
    add_lora,
    add_lora_reference,
    group_rows,
    most_tiles,
    tiles_of,
)

from tests.kernels.conftest import DEVICE, PRODUCT_TOLERANCE, error_of, some

Randn = Callable[..., torch.Tensor]


@pytest.mark.parametrize(("dtype", "tolerance"), PRODUCT_TOLERANCE.items(), ids=str)
@pytest.mark.parametrize(
    ("num_rows", "width", "depth", "rank", "num_slots"),
    some(
        [
            *((1, 40, 96, 8, 1), (5, 130, 1100, 16, 3), (70, 257, 72, 20, 2)),
            (33, 64, 2048, 64, 8),
            (3, 40, 70, 192, 2),  # query, key and value of rank 64
        ]
    ),
)
def test_equals_float64(
    num_rows: int,
    width: int,
    depth: int,
    rank: int,
    num_slots: int,
    dtype: torch.dtype,
    tolerance: float,
    randn: Randn,
    seed: int,
) -> None:
    x = randn(num_rows, depth + 8, dtype=dtype)[:, :depth]
    wider = randn(num_rows, width + 3, dtype=dtype)
    before, out = wider.clone(), wider[:, :width]
    a = randn(num_slots, rank, depth, dtype=dtype) / depth**0.5
    b = randn(num_slots, rank, width, dtype=dtype)
    a[0, rank // 2 :], b[0, rank // 2 :] = 0, 0  # an adapter of half the rank
    chosen = random.Random(seed)
    slots = [chosen.randrange(-1, num_slots) for _ in range(num_rows - 1)] + [num_slots - 1]
    rows = group_rows(slots, DEVICE, num_tiles=num_rows + 2)

    truth = before[:, :width].double()
    add_lora_reference(truth, x.double(), a.double(), b.double(), rows)
    assert add_lora(out, x, a, b, rows, backend="triton") is out
    assert error_of(out, truth) < tolerance
    without = torch.tensor([slot < 0 for slot in slots], device=DEVICE)
    assert torch.equal(wider[without], before[without])
    assert torch.equal(wider[:, width:], before[:, width:]), "written beside the output"

    reference = add_lora(before[:, :width].clone(), x, a, b, rows, backend="reference")
    assert error_of(reference, truth) < tolerance


def test_a_row_does_not_depend_on_the_others(randn: Randn) -> None:
    x, out = randn(40, 256, dtype=torch.bfloat16), randn(40, 96, dtype=torch.bfloat16)
    a, b = randn(3, 16, 256, dtype=torch.bfloat16), randn(3, 16, 96, dtype=torch.bfloat16)
    slots = [row % 4 - 1 for row in range(40)]
    whole = add_lora(out.clone(), x, a, b, group_rows(slots, DEVICE), backend="triton")
    for row in (0, 1, 7, 39):
        alone = out[row : row + 1].clone()
        add_lora(alone, x[row : row + 1], a, b, group_rows(slots[row : row + 1], DEVICE),
                 backend="triton")  # fmt: skip
        assert torch.equal(alone[0], whole[row])


def test_rows_are_grouped_by_slot_in_their_order() -> None:
    rows = group_rows([2, -1, 0, 2, 2] + [0] * TILE_ROWS, DEVICE, num_tiles=4)
    assert rows.slots.tolist() == [2, 0, 0, -1]
    first, second, third, last = rows.row_ids.tolist()
    assert first == [0, 3, 4] + [-1] * (TILE_ROWS - 3)
    assert second + third == [2, *range(5, 5 + TILE_ROWS)] + [-1] * (TILE_ROWS - 1)
    assert last == [-1] * TILE_ROWS
    with pytest.raises(ValueError, match="num_tiles"):
        group_rows([0, 1], DEVICE, num_tiles=1)


def test_as_many_tiles_as_rows_can_come_to(seed: int) -> None:
    chosen = random.Random(seed)
    for _ in range(300):
        num_rows, num_slots = chosen.randint(1, 80), chosen.randint(1, 9)
        slots = [chosen.randrange(-1, num_slots) for _ in range(num_rows)]
        assert len(tiles_of(slots)) <= most_tiles(num_rows, num_slots)
        worst = [min(row, num_slots - 1) for row in range(num_rows)]
        assert len(tiles_of(worst)) == most_tiles(num_rows, num_slots)


def test_no_adapter_in_the_step(randn: Randn) -> None:
    out = randn(2, 8)
    before = out.clone()
    for rows in (group_rows([-1, -1], DEVICE), group_rows([], DEVICE, num_tiles=2)):
        add_lora(out, randn(2, 16), randn(1, 4, 16), randn(1, 4, 8), rows, backend="triton")
        assert torch.equal(out, before)


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("x", {"x": torch.ones(2, 16, dtype=torch.float16)}),
        ("x", {"x": torch.ones(16, 2).t()}),
        ("out", {"out": torch.ones(3, 8)}),
        ("out", {"out": torch.ones(2, 8, dtype=torch.bfloat16)}),
        ("a", {"a": torch.ones(1, 4, 15)}),
        ("b", {"b": torch.ones(1, 3, 8)}),
    ],
)
def test_what_does_not_fit_is_named(name: str, kwargs: dict[str, Any]) -> None:
    given: dict[str, Any] = {
        "out": torch.ones(2, 8),
        "x": torch.ones(2, 16),
        "a": torch.ones(1, 4, 16),
        "b": torch.ones(1, 4, 8),
        "rows": group_rows([0, 0], "cpu"),
    }
    with pytest.raises(ValueError, match=name):
        add_lora(**(given | kwargs))
    with pytest.raises(ValueError, match="row_ids"):
        LoraRows(torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, dtype=torch.int32))
