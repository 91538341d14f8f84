"""Prefill attention over a paged cache: the Triton kernel gives what attention written out in
float64 gives, for ragged batches, prefixes, windows, caps and sinks; reads nothing that is not the
sequence's; and a row does not depend on its chunk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from baton_kernels import hopper_support
from baton_kernels.block_rows import BlockRows
from baton_kernels.prefill_attention import (
    prefill_attention,
    prefill_attention_reference,
)

from tests.kernels.conftest import ROUNDS, error_of, some

Tensors = Callable[..., torch.Tensor]
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 5e-3 if ROUNDS else 1.2e-2}
"""Relative, against float64."""


class Step:
    """A step over a paged cache: sequences of random keys and values, of which the last `count` are
    new. Slots of nobody hold NaN."""

    def __init__(
        self,
        spans: list[tuple[int, int]],
        randn: Tensors,
        block_tables: Tensors,
        *,
        num_heads: int = 4,
        num_kv_heads: int = 2,
        dim: int = 32,
        v_dim: int = 0,
        is_latent: bool = False,
        size: int = 4,
        has_records: bool = True,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        v_dim = v_dim or dim
        each = [-(-(start + count) // size) for start, count in spans]
        num_blocks = sum(each) + 3
        self.tables = block_tables(each, num_blocks)
        device = self.tables.device
        # A head's record in a block: keys, values, and what is another layer's. As the engine has
        # it, a row is a record; or a row is a matrix, and a head's are three apart.
        width = size * max(dim, v_dim)
        num_records = num_blocks * num_kv_heads
        step, stride = (1, 3 * width) if has_records else (3, width)
        flat = torch.full((num_records * 3 * width,), float("nan"), dtype=dtype, device=device)
        count = num_records * step - (step - 1)

        def part(offset: int, columns: int) -> torch.Tensor:
            return flat.as_strided((count, size, columns), (stride, columns, 1), offset * width)

        keys, values = part(0, dim), None if is_latent else part(1, v_dim)
        self.rows = BlockRows(keys, values, v_dim, num_kv_heads, num_kv_heads * step, step)
        self.spans = spans
        counts = [count for _, count in spans]
        self.firsts = [sum(counts[:index]) for index in range(len(counts) + 1)]
        total = self.firsts[-1]
        self.query = randn(total, num_heads, dim, dtype=dtype)
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        for index, (start, number) in enumerate(spans):
            k = randn(start + number, num_kv_heads, dim, dtype=dtype)
            v = (
                k[..., :v_dim]
                if is_latent
                else randn(start + number, num_kv_heads, v_dim, dtype=dtype)
            )
            for position in range(start + number):
                rows = self.rows.row_ids(
                    self.tables[index, position // size : position // size + 1]
                )
                keys[rows[:, 0], position % size] = k[position]
                if values is not None:
                    values[rows[:, 0], position % size] = v[position]
            self.keys.append(k.transpose(0, 1))
            self.values.append(v.transpose(0, 1))

    def run(self, out: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
        int32 = {"dtype": torch.int32, "device": self.query.device}
        given = {
            "max_query_len": max(count for _, count in self.spans),
            "max_end": max(start + count for start, count in self.spans),
            "scaling": 0.2,
            "backend": "triton",
        } | options
        return prefill_attention(
            self.query, self.rows, self.tables,
            torch.tensor(self.firsts, **int32),
            torch.tensor([start for start, _ in self.spans], **int32), out=out, **given,
        )  # fmt: skip

    def truth(self, **options: Any) -> torch.Tensor:
        """Float64."""
        found = [
            prefill_attention_reference(
                self.query[self.firsts[index] : self.firsts[index + 1]].double(),
                self.keys[index].double(),
                self.values[index].double(),
                start,
                **({"scaling": 0.2} | options),
            )
            for index, (start, count) in enumerate(self.spans)
            if count
        ]
        return torch.cat(found)


RAGGED = [(0, 9), (30, 21), (64, 1), (5, 0)]


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        (torch.float32, {}),
        (torch.bfloat16, {"size": 16}),
        (torch.bfloat16, {"num_heads": 7, "num_kv_heads": 1, "dim": 16, "has_records": False}),
        (torch.float32, {"num_heads": 3, "num_kv_heads": 3, "dim": 24, "size": 2}),
        (torch.bfloat16, {"dim": 48, "v_dim": 20, "size": 3}),
        (
            torch.bfloat16,
            {"num_heads": 5, "num_kv_heads": 1, "dim": 40, "v_dim": 32, "is_latent": True},
        ),
    ],
    ids=["gqa", "gqa bfloat16", "mqa", "mha", "two widths", "latents"],
)
def test_ragged_batch(
    shape: dict[str, Any],
    dtype: torch.dtype,
    randn: Tensors,
    block_tables: Tensors,
    poisoned: Tensors,
) -> None:
    """Fresh, after a prefix, one token, none: every row is written and right."""
    step = Step(RAGGED, randn, block_tables, dtype=dtype, **shape)
    out = poisoned(*step.query.shape[:2], step.rows.v_head_dim, dtype=dtype)
    assert step.run(out) is out
    assert error_of(out, step.truth()) < TOLERANCE[dtype]
    assert error_of(step.run(backend="reference"), step.truth()) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("options", "has_sinks"),
    [
        ({"window": 1}, True),
        ({"window": 10}, False),
        ({"window": 1000}, False),
        ({"softcap": 3.0}, False),
        ({}, True),
        ({"window": 33, "softcap": 0.5}, True),
    ],
    ids=str,
)
def test_windows_caps_and_sinks(
    options: dict[str, Any], has_sinks: bool, randn: Tensors, block_tables: Tensors
) -> None:
    step = Step([(30, 41), (0, 1)], randn, block_tables)
    if has_sinks:
        options = options | {"sinks": randn(4) * 3}
    assert error_of(step.run(**options), step.truth(**options)) < TOLERANCE[torch.float32]


def test_scores_beyond_the_range_of_exp(randn: Tensors, block_tables: Tensors) -> None:
    """Scores of some thousands: the softmax is of differences."""
    step = Step([(3, 20)], randn, block_tables)
    assert error_of(step.run(scaling=300.0), step.truth(scaling=300.0)) < 1e-3
    assert (
        error_of(step.run(scaling=300.0, softcap=9.0), step.truth(scaling=300.0, softcap=9.0))
        < 1e-3
    )


@pytest.mark.parametrize(
    ("dtype", "window"),
    some([(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, 21)]),
)
def test_a_row_does_not_depend_on_its_chunk(
    dtype: torch.dtype, window: int | None, randn: Tensors, block_tables: Tensors
) -> None:
    """A prompt at once, in two chunks, and token by token beside another: the same bits."""
    total = 50
    step = Step([(0, total)], randn, block_tables, dtype=dtype, size=16)
    whole = step.run(exact=True, window=window)
    for chunks in ([(0, 26), (26, 24)], [(0, 1), (1, 48), (49, 1)]):
        for start, count in chunks:
            some = Step([(3, 5), (start, count)], randn, block_tables, dtype=dtype, size=16)
            some.query[5:] = step.query[start : start + count]
            some.rows, some.tables[1] = step.rows, 0
            some.tables = torch.cat((step.tables, step.tables))
            part = some.run(exact=True, window=window)[5:]
            if ROUNDS:
                assert torch.equal(part, whole[start : start + count])
            else:  # numpy's products depend on where in a matrix a row stands
                assert error_of(part, whole[start : start + count]) < TOLERANCE[dtype]


def test_strided_input_and_output(randn: Tensors, block_tables: Tensors, poisoned: Tensors) -> None:
    """Queries and results as parts of wider rows."""
    step = Step([(6, 11)], randn, block_tables)
    truth = step.truth()
    wide = poisoned(11, 9, 32, dtype=torch.float32)
    wide[:, 2:6] = step.query
    step.query = wide[:, 2:6]
    out = poisoned(11, 6, 32, dtype=torch.float32)
    step.run(out[:, 1:5])
    assert error_of(out[:, 1:5], truth) < TOLERANCE[torch.float32]
    assert out[:, 0].isnan().all() and out[:, 5].isnan().all()


@pytest.mark.parametrize("has_records", [False, True])
def test_the_cache_is_one_matrix_of_tokens(
    has_records: bool, randn: Tensors, block_tables: Tensors
) -> None:
    """What Hopper's copies address: every token of every row, however rows lie."""
    step = Step([(0, 9), (5, 2)], randn, block_tables, dim=16, size=8, has_records=has_records)
    for matrices in (step.rows.keys, step.rows.values):
        assert matrices is not None
        num_rows, size, dim = matrices.shape
        pitch, num_tokens = hopper_support.token_matrix(matrices)
        tokens = matrices.as_strided((num_tokens, dim), (dim, 1), matrices.storage_offset())
        for row in range(num_rows):
            seen = tokens[row * pitch : row * pitch + size]
            assert torch.equal(seen.nan_to_num(7.0), matrices[row].nan_to_num(7.0))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="its instructions are a Hopper GPU's")
@pytest.mark.parametrize(
    "shape",
    [
        {"num_heads": 8, "num_kv_heads": 2, "dim": 128, "size": 16},
        {"num_heads": 14, "num_kv_heads": 2, "dim": 64, "size": 16, "has_records": False},
        {"num_heads": 4, "num_kv_heads": 4, "dim": 128, "size": 128},
        {"num_heads": 6, "num_kv_heads": 2, "dim": 64, "size": 8},
    ],
    ids=str,
)
def test_hopper(
    shape: dict[str, Any], randn: Tensors, block_tables: Tensors, poisoned: Tensors
) -> None:
    """One token and many, fresh and after a prefix, tiles that end in a sequence's middle; slots of
    nobody hold NaN."""
    spans = [(0, 700), (300, 1), (1000, 260), (0, 128), (127, 129), (5, 0), (0, 3)]
    step = Step(spans, randn, block_tables, dtype=torch.bfloat16, **shape)
    if not hopper_support.can_run(step.query, step.rows):
        pytest.skip("another GPU")
    out = poisoned(*step.query.shape, dtype=torch.bfloat16)
    step.run(out, backend="auto")
    assert error_of(out, step.truth()) < TOLERANCE[torch.bfloat16]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="its instructions are a Hopper GPU's")
def test_hopper_gives_a_row_the_same_bits_in_every_chunk(
    randn: Tensors, block_tables: Tensors
) -> None:
    total = 413
    shape: dict[str, Any] = {"num_heads": 8, "num_kv_heads": 2, "dim": 128, "size": 16}
    step = Step([(0, total)], randn, block_tables, dtype=torch.bfloat16, **shape)
    if not hopper_support.can_run(step.query, step.rows):
        pytest.skip("another GPU")
    whole = step.run(backend="auto")
    for chunks in ([(0, 200), (200, 213)], [(0, 1), (1, 411), (412, 1)], [(0, 128), (128, 285)]):
        for start, count in chunks:
            some = Step(
                [(3, 5), (start, count)], randn, block_tables, dtype=torch.bfloat16, **shape
            )
            some.query[5:] = step.query[start : start + count]
            some.rows, some.tables = step.rows, torch.cat((step.tables, step.tables))
            part = some.run(backend="auto")[5:]
            assert torch.equal(part, whole[start : start + count])


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"query": torch.zeros(3, 4, 16)}, "query"),
        ({"query": torch.zeros(3, 4, 32, dtype=torch.bfloat16)}, "cache"),
        ({"query": torch.zeros(3, 3, 32)}, "heads"),
        ({"block_tables": torch.zeros(2, 1, dtype=torch.int32)}, "block_tables"),
        ({"block_tables": torch.zeros(1, 1)}, "block_tables"),
        ({"starts": torch.zeros(1)}, "starts"),
        ({"query_starts": torch.zeros(1, dtype=torch.int32)}, "query_starts"),
        ({"sinks": torch.zeros(2)}, "sinks"),
        ({"out": torch.zeros(3, 4, 16)}, "out"),
        (
            {
                "rows": BlockRows(
                    torch.zeros(4, 4, 32, dtype=torch.int8), None, 32, 2, 2, 1,
                    torch.ones(4, 1), None, "int8",
                )
            },
            "int8",
        ),
    ],
)  # fmt: skip
def test_refuses(changes: dict[str, Any], named: str) -> None:
    rows = BlockRows(torch.zeros(4, 4, 32), torch.zeros(4, 4, 32), 32, 2, 2, 1)
    given: dict[str, Any] = {
        "query": torch.zeros(3, 4, 32),
        "rows": rows,
        "block_tables": torch.zeros(1, 1, dtype=torch.int32),
        "query_starts": torch.tensor([0, 3], dtype=torch.int32),
        "starts": torch.zeros(1, dtype=torch.int32),
        "max_query_len": 3,
        "max_end": 3,
        "scaling": 1.0,
    }
    assert prefill_attention(**given).shape == (3, 4, 32)
    with pytest.raises(ValueError, match=named):
        prefill_attention(**given | changes)
