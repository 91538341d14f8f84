"""BlockRows says where a head's matrix lies, and refuses what does not fit together."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from baton_kernels.block_rows import BlockRows


def plain(**changes: Any) -> BlockRows:
    rows = torch.arange(6 * 2 * 4 * 8.0).view(6 * 2, 4, 8)
    fields = {
        "keys": rows,
        "values": rows + 0.5,
        "v_head_dim": 8,
        "num_heads": 2,
        "rows_per_block": 2,
        "head_step": 1,
    }
    return BlockRows(**(fields | changes))


def test_rows_of_a_head_in_a_block() -> None:
    rows = plain(rows_per_block=4, head_step=2)
    ids = rows.row_ids(torch.tensor([[2, 0]], dtype=torch.int32))
    assert ids.tolist() == [[[8, 0], [10, 2]]]
    assert (rows.block_size, rows.k_head_dim, rows.is_latent, rows.scales_per_row) == (
        4,
        8,
        False,
        0,
    )


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_heads": 0}, "num_heads"),
        ({"keys": torch.zeros(4, 8)}, "keys"),
        ({"keys": torch.zeros(12, 8, 4).transpose(1, 2)}, "keys"),
        ({"v_head_dim": 4}, "v_head_dim"),
        ({"values": None, "v_head_dim": 9}, "v_head_dim"),
        ({"values": torch.zeros(12, 2, 8)}, "block size"),
        ({"k_scales": torch.ones(12, 1)}, "k_scales"),
        ({"dtype": "int4"}, "int4"),
        ({"dtype": "int8"}, "int8"),
        ({"keys": torch.zeros(12, 4, 8, dtype=torch.int8)}, "dtype"),
    ],
)
def test_what_does_not_fit_is_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        plain(**changes)


def test_quantized_rows_need_their_scales() -> None:
    fields = dataclasses.asdict(plain()) | {
        "keys": torch.zeros(12, 4, 8, dtype=torch.int8),
        "values": torch.zeros(12, 4, 8, dtype=torch.int8),
        "dtype": "fp8_e4m3",
    }
    with pytest.raises(ValueError, match="k_scales"):
        BlockRows(**fields)
    with pytest.raises(ValueError, match="3 numbers"):
        BlockRows(**fields | {"k_scales": torch.ones(12, 3), "v_scales": torch.ones(12, 3)})
    for count in (1, 4):
        scales = torch.ones(12, count)
        built = BlockRows(**fields | {"k_scales": scales, "v_scales": scales})
        assert built.scales_per_row == count
