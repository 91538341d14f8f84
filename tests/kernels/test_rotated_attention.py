"""rotate_and_attend in one launch against its two halves in plain torch: output and cache."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from baton_kernels import attention_plan
from baton_kernels.attention import decode_attention, rotate_and_attend
from baton_kernels.layer_ops import rotate_and_write
from baton_kernels.paged_kv import BlockRows

from tests.kernels.conftest import DEVICE, poisoned, some
from tests.kernels.test_attention import Cache, Shape, close


def copied(rows: BlockRows) -> BlockRows:
    assert rows.values is not None
    return dataclasses.replace(rows, keys=rows.keys.clone(), values=rows.values.clone())


@pytest.mark.parametrize(
    ("dtype", "shares"),
    [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True)],
    ids=["float32", "bfloat16", "float32 by shares"],
)
@pytest.mark.parametrize(
    ("shape", "norms", "window"),
    some(
        [
            (Shape(), False, None),
            (
                Shape(num_heads=5, num_kv_heads=1, head_dim=32, v_head_dim=32, block_size=16),
                True,
                30,
            ),
            (
                Shape(num_heads=2, num_kv_heads=2, head_dim=64, v_head_dim=64, block_size=1),
                True,
                None,
            ),
            (Shape(num_heads=34, num_kv_heads=2), True, None),  # two launches
            (Shape(head_dim=24, v_head_dim=24), False, None),  # two launches
        ]
    ),
    ids=str,
)
def test_one_launch_is_two(
    shape: Shape,
    norms: bool,
    window: int | None,
    dtype: torch.dtype,
    shares: bool,
    generator: torch.Generator,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention_plan, "suits_shares", lambda *_: shares)
    draw = random.Random(seed)
    ends = [draw.randint(1, 120), 0, shape.block_size + 1, 1, draw.randint(64, 70)]
    cache = Cache(shape, ends, dtype, generator)
    dim, num_kv_heads = shape.head_dim, shape.num_kv_heads
    positions = torch.tensor(ends, dtype=torch.int32, device=DEVICE) - 1
    # The newest token's slot is NaN until it is written.
    for index, end in enumerate(ends):
        if end:
            block = cache.tables[index, (end - 1) // shape.block_size][None]
            ids = cache.rows.row_ids(block)[:, 0]
            for matrices in (cache.rows.keys, cache.rows.values):
                assert matrices is not None
                matrices[ids, (end - 1) % shape.block_size] = float("nan")

    def randn(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator, device=DEVICE)

    qkv = randn(len(ends), (shape.num_heads + 2 * num_kv_heads) * dim).to(dtype)
    angles = randn(128, dim // 2)
    options: dict[str, Any] = {"num_heads": shape.num_heads}
    if norms:
        options |= {name: randn(dim).to(dtype) for name in ("q_norm", "k_norm")}
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    theirs, ours = copied(cache.rows), copied(cache.rows)
    query = rotate_and_write(
        qkv, positions, cos_sin, theirs, cache.tables, backend="reference", **options
    )
    truth = decode_attention(
        query, theirs, cache.tables, positions + 1, scaling=0.3, window=window, backend="reference"
    )
    out = poisoned(len(ends), shape.num_heads, dim, dtype=dtype)
    rotate_and_attend(
        qkv, positions, cos_sin, ours, cache.tables,
        scaling=0.3, window=window, out=out, backend="triton", **options,
    )  # fmt: skip
    close(out, truth.double(), 3e-2 if dtype == torch.bfloat16 else None)
    for got, want in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
        assert got is not None and want is not None
        assert torch.equal(got.isnan(), want.isnan())
        close(got.nan_to_num(0), want.nan_to_num(0).double())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"qkv": torch.zeros(2, 100)}, "qkv"),
        ({"positions": torch.zeros(3, dtype=torch.int32)}, "positions"),
        ({"cos_sin": torch.zeros(9, 8)}, "cos_sin"),
        ({"block_tables": torch.zeros(1, 2, dtype=torch.int32)}, "block_tables"),
        ({"q_norm": torch.zeros(16)}, "k_norm"),
        ({"q_norm": torch.zeros(8), "k_norm": torch.zeros(8)}, "q_norm"),
        ({"out": torch.zeros(2, 4, 8)}, "out"),
        ({"sinks": torch.zeros(2)}, "sinks"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, Any], named: str) -> None:
    matrices = torch.zeros(4, 4, 16)
    arguments: dict[str, Any] = {
        "qkv": torch.zeros(2, 8 * 16),
        "positions": torch.zeros(2, dtype=torch.int32),
        "cos_sin": torch.zeros(9, 16),
        "rows": BlockRows(matrices, matrices, 16, 2, 2, 1),
        "block_tables": torch.zeros(2, 2, dtype=torch.int32),
        "num_heads": 4,
        "scaling": 1.0,
        "backend": "triton",
    }
    with pytest.raises(ValueError, match=named):
        rotate_and_attend(**(arguments | change))
