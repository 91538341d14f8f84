"""Exact mode: a token's attention has the same bits as a decode, in a chunk of any length, after
any prefix, and as a node of a tree."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from baton_kernels import attention_plan, attention_triton, prefill_attention_triton
from baton_kernels.attention import decode_attention, decode_attention_reference, tree_attention

from tests.kernels.conftest import DEVICE, poisoned, some
from tests.kernels.test_attention import Cache, Shape, close, in_float64, plan_of


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def in_chunks(cache: Cache, query: torch.Tensor, cuts: list[int], **options: Any) -> torch.Tensor:
    """Queries of positions cuts[0] .. cuts[-1] of sequence 0, chunk by chunk."""
    out = poisoned(*query.shape[:2], cache.shape.v_head_dim, dtype=query.dtype)
    for start, end in itertools.pairwise(cuts):
        part = slice(start - cuts[0], end - cuts[0])
        prefill_attention_triton.exact_prefill_attention(
            query[part], cache.rows, cache.tables[:1], ints(0, end - start), ints(start),
            out[part], max_query_len=end - start, **options,
        )  # fmt: skip
    return out


@pytest.mark.parametrize(
    ("options", "dtype"),
    some(
        [
            ({}, torch.float32),
            ({}, torch.bfloat16),
            ({"window": 300, "softcap": 3.0}, torch.float32),
            ({"sinks": True}, torch.bfloat16),
        ]
    ),
    ids=str,
)
def test_decode_is_chunk(
    options: dict[str, Any], dtype: torch.dtype, generator: torch.Generator, seed: int
) -> None:
    draw = random.Random(seed)
    end, first = 515 + draw.randint(0, 20), 490
    cache = Cache(Shape(num_heads=3, num_kv_heads=1, block_size=16), [end], dtype, generator)
    given: dict[str, Any] = {"scaling": 0.3} | options
    if "sinks" in options:
        given["sinks"] = cache.sinks
    query = torch.randn(end - first, 3, 16, generator=generator, device=DEVICE).to(dtype)
    whole = in_chunks(cache, query, [first, end], **given)
    cut = draw.randint(first + 1, end - 1)
    assert torch.equal(in_chunks(cache, query, [first, cut, end], **given), whole)
    for position in (511, 512, cut):
        single = query[position - first][None]
        decoded = decode_attention(
            single, cache.rows, cache.tables, ints(position + 1), exact=True, backend="triton",
            **given,
        )  # fmt: skip
        assert torch.equal(decoded[0], whole[position - first]), position
        truth = decode_attention_reference(
            single.double(), in_float64(cache.rows), cache.tables, ints(position + 1), **given
        )
        close(decoded, truth)


def test_a_chunk_in_a_batch(generator: torch.Generator, seed: int) -> None:
    """Chunks of several sequences at once, one of them empty, are those of each alone."""
    draw = random.Random(seed)
    ends = [70 + draw.randint(0, 30), 20, 33]
    lengths = [40, 0, 33]
    cache = Cache(Shape(), ends, torch.float32, generator)
    query = torch.randn(sum(lengths), 4, 16, generator=generator, device=DEVICE)
    out = poisoned(sum(lengths), 4, 16, dtype=torch.float32)
    starts = [end - length for end, length in zip(ends, lengths, strict=True)]
    prefill_attention_triton.exact_prefill_attention(
        query, cache.rows, cache.tables, ints(0, 40, 40, 73), ints(*starts), out,
        max_query_len=40, scaling=0.3,
    )  # fmt: skip
    alone = in_chunks(cache, query[:40], [starts[0], ends[0]], scaling=0.3)
    assert torch.equal(out[:40], alone)
    assert not out.isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_chain_of_nodes_is_a_chunk(dtype: torch.dtype, generator: torch.Generator) -> None:
    cached, nodes = 505, 12
    cache = Cache(Shape(block_size=16), [cached + nodes], dtype, generator)
    query = torch.randn(nodes, 4, 16, generator=generator, device=DEVICE).to(dtype)
    chunk = in_chunks(cache, query, [cached, cached + nodes], scaling=0.3)
    visible = torch.ones(nodes, nodes, device=DEVICE).tril().bool()
    tree = tree_attention(
        query, cache.rows, cache.tables, ints(cached), ints(0, nodes), ints(*range(nodes)), visible,
        max_num_nodes=nodes, scaling=0.3, exact=True, backend="triton",
    )  # fmt: skip
    assert torch.equal(tree, chunk)


@pytest.mark.parametrize(
    ("what", "dtype"),
    some(itertools.product(["_SERIAL_SHARE", "MAX_PART_BYTES"], [torch.float32, torch.bfloat16])),
    ids=str,
)
def test_one_after_the_other_where_sequences_fill_the_device_or_parts_would_be_too_large(
    what: str, dtype: torch.dtype, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bits as with parts, and padding gives zeros."""
    merges: list[bool] = []
    launched = attention_triton.launch_splits

    def launch(*args: Any, **options: Any) -> None:
        plan = next(one for one in args if isinstance(one, attention_plan.Plan))
        merges.append(plan.num_splits > 1)
        launched(*args, **options)

    monkeypatch.setattr(attention_triton, "launch_splits", launch)
    monkeypatch.setattr(attention_plan, "_SERIAL_SHARE", 1e9)
    cache = Cache(Shape(block_size=16), [1100, 0, 17, 512], dtype, generator)
    for options in ({"window": 520}, {}):
        with_parts = cache.kernel(scaling=0.3, exact=True, **options)
        with monkeypatch.context() as changed:
            changed.setattr(attention_plan, what, 0)
            assert torch.equal(cache.kernel(scaling=0.3, exact=True, **options), with_parts)
        assert not with_parts[1].any()
    assert merges == [True, False, True, False]


@pytest.mark.parametrize(("num_positions", "is_serial"), [(4096, True), (4112, False)])
def test_a_sequence_that_may_be_long_is_cut(
    num_positions: int, is_serial: bool, generator: torch.Generator
) -> None:
    """However many sequences there are: the others would wait for its one program."""
    rows = Cache(Shape(block_size=16), [16], torch.bfloat16, generator).rows
    tables = torch.zeros(512, num_positions // 16, dtype=torch.int32, device=DEVICE)
    plan = plan_of(rows, tables, 512, dtype=torch.bfloat16, exact=True)
    assert plan.is_serial == is_serial == (plan.num_splits == 1)
