"""Norms, SwiGLU and rotate-and-write: the Triton kernels give what plain torch gives, write all of
what they shall and nothing else, and refuse what does not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from baton_kernels import layer_ops
from baton_kernels.block_rows import BlockRows

from tests.kernels.conftest import ROUNDS, error_of

Tensors = Callable[..., torch.Tensor]
DTYPES = (torch.float32, torch.bfloat16)
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 3e-3 if ROUNDS else 8e-3}
"""Relative, against float64: one rounding to bfloat16 is at most 2^-8, one cut 2^-7."""


def wide(x: torch.Tensor, gap: int = 3) -> torch.Tensor:
    """The same numbers with a stride between rows that is not their length."""
    padded = x.new_full((x.shape[0], x.shape[1] + gap), float("nan"))
    padded[:, : x.shape[1]] = x
    return padded[:, : x.shape[1]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "num_columns"), [(5, 100), (3, 1024), (1, 3000)])
def test_rms_norm(
    num_rows: int, num_columns: int, dtype: torch.dtype, randn: Tensors, poisoned: Tensors
) -> None:
    x = wide(randn(num_rows, num_columns, dtype=dtype) * 3)
    weight = randn(num_columns, dtype=dtype)
    out = wide(poisoned(num_rows, num_columns, dtype=dtype), 8)
    result = layer_ops.rms_norm(x, weight, 1e-5, out=out, backend="triton")
    numbers = x.double()
    truth = numbers / (numbers.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    assert result is out
    assert error_of(out, truth) < TOLERANCE[dtype]
    reference = layer_ops.rms_norm(x, weight, 1e-5, backend="reference")
    assert error_of(reference, truth) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "width"), [(4, 70), (1, 1500)])
def test_silu_mul(
    num_rows: int, width: int, dtype: torch.dtype, randn: Tensors, poisoned: Tensors
) -> None:
    gate_up = wide(randn(num_rows, 2 * width, dtype=dtype) * 4)
    gate_up[0, 0] = -200.0  # exp overflows: the product is 0, not NaN
    out = poisoned(num_rows, width, dtype=dtype)
    layer_ops.silu_mul(gate_up, out=out, backend="triton")
    gate, up = gate_up.double().chunk(2, dim=1)
    assert error_of(out, torch.nn.functional.silu(gate) * up) < TOLERANCE[dtype]


class Cache:
    """Two layers' keys and values with the heads of a block outermost, as the engine lays them."""

    def __init__(
        self, num_blocks: int, num_heads: int, size: int, dim: int, dtype: torch.dtype, device: str
    ) -> None:
        shape = (num_blocks, num_heads, 2, 2, size, dim)
        self.numbers = torch.full(shape, 7.0, dtype=dtype, device=device)
        flat = self.numbers.view(-1)
        step = size * dim

        def part(offset: int) -> torch.Tensor:
            count = num_blocks * num_heads * 4 - 3
            return flat.as_strided((count, size, dim), (step, dim, 1), offset * step)

        self.rows = BlockRows(part(2), part(3), dim, num_heads, num_heads * 4, 4)

    def token(self, block: int, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Layer 1's keys and values, each [K, D]."""
        return self.numbers[block, :, 1, 0, slot], self.numbers[block, :, 1, 1, slot]


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "dim", "size", "dtype", "norms", "ids"),
    [
        (8, 2, 64, 16, torch.bfloat16, True, False),
        (8, 2, 64, 16, torch.float32, False, True),
        (3, 1, 24, 4, torch.float32, True, True),
        (5, 5, 16, 1, torch.bfloat16, False, False),
    ],
)
def test_rotate_and_write(
    num_heads: int,
    num_kv_heads: int,
    dim: int,
    size: int,
    dtype: torch.dtype,
    norms: bool,
    ids: bool,
    randn: Tensors,
    poisoned: Tensors,
    block_tables: Tensors,
    device: str,
) -> None:
    """Every output is written, the cache holds exactly the new tokens, padding writes nothing."""
    positions = torch.tensor([0, 5, -1, 13, 6], dtype=torch.int32, device=device)
    sequences = [1, 0, 1, 2, 0] if ids else [0, 1, 2, 3, 4]
    tables = block_tables([14 // size + 1] * 5, 5 * (14 // size + 1) + 2)
    cache = Cache(5 * (14 // size + 1) + 2, num_kv_heads, size, dim, dtype, device)
    qkv = wide(randn(5, (num_heads + 2 * num_kv_heads) * dim, dtype=dtype), 16)
    qkv[2] = float("nan")  # padding: its numbers are nobody's
    angles = randn(16, dim // 2)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    options: dict[str, Any] = {"num_heads": num_heads, "norm_eps": 1e-5}
    if norms:
        options |= {"q_norm": randn(dim, dtype=dtype), "k_norm": randn(dim, dtype=dtype)}
    sequence_ids = torch.tensor(sequences, dtype=torch.int32, device=device) if ids else None
    places = positions.tolist()
    if ids:  # as a token tree's nodes: the second one's position is not its slot
        places = [0, 4, -1, 13, 5]
        slots = torch.tensor([0, 4, 99, 13, 5], dtype=torch.int32, device=device)
        written = {"slots": slots}
    else:
        written = {}
    out = {
        "out_q": poisoned(5, num_heads, dim, dtype=dtype),
        "out_k": poisoned(5, num_kv_heads, dim, dtype=dtype),
        "out_v": poisoned(5, num_kv_heads, dim, dtype=dtype),
    }
    layer_ops.rotate_and_write(
        qkv,
        positions,
        cos_sin,
        cache.rows,
        tables,
        sequence_ids,
        **options,
        **out,
        **written,
        backend="triton",
    )
    exact = layer_ops.rotate_reference(qkv.double(), positions, cos_sin, **options)
    for (name, result), truth in zip(out.items(), exact, strict=True):
        assert error_of(result, truth) < TOLERANCE[dtype], name
        assert not result[2].any(), "padding is zero"
    expected = Cache(len(cache.numbers), num_kv_heads, size, dim, dtype, device)
    for token, sequence in enumerate(sequences):
        slot = places[token]
        if slot < 0:
            continue
        keys, values = expected.token(int(tables[sequence, slot // size]), slot % size)
        keys.copy_(out["out_k"][token])
        values.copy_(out["out_v"][token])
    assert torch.equal(cache.numbers, expected.numbers)

    other = Cache(len(cache.numbers), num_kv_heads, size, dim, dtype, device)
    result = layer_ops.rotate_and_write(
        qkv, positions, cos_sin, other.rows, tables, sequence_ids, **options, **written,
        backend="reference",
    )  # fmt: skip
    assert error_of(result, exact[0]) < TOLERANCE[dtype]
    assert error_of(other.numbers, cache.numbers) < TOLERANCE[dtype]


def test_rotation_turns_pairs_by_the_angle(device: str) -> None:
    """One pair, a quarter turn: (1, 0) becomes (0, 1); values stay."""
    qkv = torch.tensor([[1.0, 0.0, 1.0, 0.0, 1.0, 0.0]], device=device)
    cos_sin = torch.tensor([[1.0, 0.0], [0.0, 1.0]], device=device)
    positions = torch.ones(1, dtype=torch.int32, device=device)
    key, value = torch.empty(1, 1, 2, device=device), torch.empty(1, 1, 2, device=device)
    query = layer_ops.rotate_and_write(
        qkv, positions, cos_sin, None, None, num_heads=1, out_k=key, backend="triton"
    )
    layer_ops.rotate_and_write(
        qkv, positions, cos_sin, None, None, num_heads=1, out_v=value, backend="triton"
    )
    assert query.tolist() == key.tolist() == [[[0.0, 1.0]]]
    assert value.tolist() == [[[1.0, 0.0]]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_number_of_rows(
    dtype: torch.dtype, randn: Tensors, device: str
) -> None:
    """Bit for bit: rows alone, among some, and among many."""
    count, width = 130 if ROUNDS else 5, 320  # on a GPU, rows enough for the other config, too
    x = randn(count, width, dtype=dtype)
    weight, norm = randn(width, dtype=dtype), randn(64, dtype=dtype)
    angles = randn(count, 32)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    positions = torch.arange(count, dtype=torch.int32, device=device)

    def all_of(first: int, end: int) -> list[torch.Tensor]:
        some = slice(first, end)
        rotated = layer_ops.rotate_and_write(
            x[some], positions[some], cos_sin, None, None, num_heads=3, q_norm=norm, k_norm=norm,
            backend="triton",
        )  # fmt: skip
        return [
            layer_ops.rms_norm(x[some], weight, 1e-5, backend="triton"),
            layer_ops.silu_mul(x[some], backend="triton"),
            rotated,
        ]

    together = all_of(0, count)
    for first, end in ((0, 1), (2, 4), (count - 1, count)):
        for whole, alone in zip(together, all_of(first, end), strict=True):
            assert torch.equal(whole[first:end], alone)


def test_no_rows_is_no_error(device: str) -> None:
    x = torch.empty(0, 8, device=device)
    weight = torch.ones(8, device=device)
    assert layer_ops.rms_norm(x, weight, 1e-5, backend="triton").shape == (0, 8)
    assert layer_ops.silu_mul(x, backend="triton").shape == (0, 4)


def _rotation(**changes: Any) -> dict[str, Any]:
    rows = BlockRows(torch.zeros(4, 2, 4), torch.zeros(4, 2, 4), 4, 1, 1, 1)
    return {
        "qkv": torch.zeros(2, 12),
        "positions": torch.zeros(2, dtype=torch.int32),
        "cos_sin": torch.zeros(8, 4),
        "rows": rows,
        "block_tables": torch.zeros(2, 1, dtype=torch.int32),
        "num_heads": 1,
    } | changes


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"qkv": torch.zeros(2, 13)}, "qkv"),
        ({"qkv": torch.zeros(12, 2).t()}, "qkv"),
        ({"num_heads": 2}, "qkv"),
        ({"positions": torch.zeros(2, dtype=torch.int64)}, "positions"),
        ({"positions": torch.zeros(3, dtype=torch.int32)}, "positions"),
        ({"sequence_ids": torch.zeros(1, dtype=torch.int32)}, "sequence_ids"),
        ({"cos_sin": torch.zeros(8, 4, dtype=torch.bfloat16)}, "cos_sin"),
        ({"block_tables": None}, "block_tables"),
        ({"block_tables": torch.zeros(1, 1, dtype=torch.int32)}, "block_tables"),
        ({"block_tables": torch.zeros(2, 1)}, "block_tables"),
        ({"q_norm": torch.ones(4)}, "k_norm"),
        ({"q_norm": torch.ones(3), "k_norm": torch.ones(4)}, "q_norm"),
        ({"out_q": torch.zeros(2, 2, 4)}, "out_q"),
        ({"out_k": torch.zeros(2, 2, 4)}, "out_k"),
        ({"out_v": torch.zeros(2, 1, 4, dtype=torch.bfloat16)}, "out_v"),
        ({"rows": BlockRows(torch.zeros(4, 2, 4), None, 4, 1, 1, 1)}, "latents"),
        (
            {"rows": BlockRows(torch.zeros(4, 2, 4), torch.zeros(4, 2, 4), 4, 2, 2, 1)},
            "kv heads",
        ),
        ({"backend": "cuda"}, "cuda"),
    ],
)
def test_rotate_refuses(changes: dict[str, Any], named: str) -> None:
    layer_ops.rotate_and_write(**_rotation())
    with pytest.raises(ValueError, match=named):
        layer_ops.rotate_and_write(**_rotation(**changes))


def test_norms_and_silu_refuse() -> None:
    x = torch.zeros(2, 8)
    with pytest.raises(ValueError, match="weight"):
        layer_ops.rms_norm(x, torch.ones(4), 1e-5)
    with pytest.raises(ValueError, match="out"):
        layer_ops.rms_norm(x, torch.ones(8), 1e-5, out=torch.zeros(2, 8, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="two halves"):
        layer_ops.silu_mul(torch.zeros(2, 7))
