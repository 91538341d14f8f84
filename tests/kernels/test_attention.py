"""decode_attention's kernel against plain torch in float64, over odd shapes, with whatever lies
outside of a sequence's own positions set to NaN. By splits: shares have a file of their own. And
rotate_and_attend, in one launch, against its two halves."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from baton_kernels import attention_plan
from baton_kernels.attention import decode_attention, decode_attention_reference, rotate_and_attend
from baton_kernels.attention_plan import Config, Plan, own_workspace
from baton_kernels.block_rows import BlockRows, Tails
from baton_kernels.kv_quantization import quantize
from baton_kernels.layer_ops import rotate_and_write
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.conftest import DEVICE, block_tables_for, error_of, poisoned, some

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2}
"""Relative, of the whole result: rounding of the weights and of the output."""


@pytest.fixture(autouse=True)
def splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """However few programs the device has room for."""
    monkeypatch.setattr("baton_kernels.attention_plan.suits_shares", lambda *_: False)


@dataclasses.dataclass(frozen=True)
class Shape:
    """Of a cache and its queries."""

    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    v_head_dim: int = 16
    block_size: int = 4
    is_latent: bool = False


def in_float64(rows: BlockRows) -> BlockRows:
    """The same numbers; a quantized cache as it is."""
    if rows.dtype:
        return rows
    values = None if rows.values is None else rows.values.double()
    return dataclasses.replace(rows, keys=rows.keys.double(), values=values)


def plan_of(
    rows: BlockRows, tables: torch.Tensor, num_sequences: int, num_kv_heads: int = 2, **options: Any
) -> Plan:
    given: dict[str, Any] = {"window": None, "exact": False, "is_tree": False, "config": None}
    given |= {"has_tails": False, "num_splits": None} | options
    num_nodes, dtype = given.pop("num_nodes", 1), given.pop("dtype", torch.float32)
    return attention_plan.plan_launch(
        rows, tables, num_sequences, num_kv_heads, num_nodes, dtype, **given
    )


class Cache:
    """Sequences of given lengths in a cache whose other slots are NaN."""

    def __init__(
        self, shape: Shape, ends: Sequence[int], dtype: torch.dtype, generator: torch.Generator
    ) -> None:
        self.shape, size = shape, shape.block_size
        num_each = [-(-end // size) for end in ends]
        num_blocks = sum(num_each) + 3
        self.tables = block_tables_for(num_each, num_blocks, generator)
        self.ends = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
        self.filled = torch.zeros(num_blocks, size, dtype=torch.bool, device=DEVICE)
        for index, end in enumerate(ends):
            for start in range(0, end, size):
                block = int(self.tables[index, start // size])
                self.filled[block, : min(size, end - start)] = True
        # Another layer's matrices lie between these: rows are not dense.
        self.step, self.gap = 2, 3
        num_rows = num_blocks * (shape.num_kv_heads * self.step + self.gap)
        is_filled = torch.zeros(num_rows, size, dtype=torch.bool, device=DEVICE)
        per_block = shape.num_kv_heads * self.step + self.gap
        for head in range(shape.num_kv_heads):
            is_filled[head * self.step :: per_block][:num_blocks] = self.filled

        def matrices(dim: int) -> torch.Tensor:
            numbers = torch.randn(num_rows, size, dim, generator=generator, device=DEVICE)
            return numbers.masked_fill(~is_filled[..., None], float("nan")).to(dtype)

        values = None if shape.is_latent else matrices(shape.v_head_dim)
        self.rows = BlockRows(
            matrices(shape.head_dim),
            values,
            shape.v_head_dim,
            shape.num_kv_heads,
            per_block,
            self.step,
        )
        # Queries as a slice of something wider, as they come out of a fused projection.
        wide = torch.randn(
            len(ends), shape.num_heads + 2, shape.head_dim, generator=generator, device=DEVICE
        )
        self.query = wide.to(dtype)[:, 1:-1]
        self.sinks = torch.randn(shape.num_heads, generator=generator, device=DEVICE).to(dtype)

    def quantized(self, dtype: str, num_scales: int) -> BlockRows:
        """The cache's numbers quantized; what was NaN is the greatest byte, with a scale of NaN."""
        found = {}
        for name, scales in (("keys", "k_scales"), ("values", "v_scales")):
            numbers = getattr(self.rows, name)
            if numbers is None:
                continue
            is_filled = ~numbers.isnan().any(-1)
            found[name], its = quantize(numbers.nan_to_num(0), dtype, num_scales, None)
            found[name] = torch.where(is_filled[..., None], found[name], 127)
            keep = is_filled if num_scales > 1 else is_filled.any(-1, keepdim=True)
            found[scales] = torch.where(keep, its, float("nan"))
        return dataclasses.replace(self.rows, dtype=dtype, **found)

    def truth(
        self, rows: BlockRows | None = None, tails: Tails | None = None, **options: Any
    ) -> torch.Tensor:
        """In float64, from the numbers as they are stored."""
        if tails is not None:
            tails = Tails(in_float64(tails.rows), tails.slots)
        rows = in_float64(rows or self.rows)
        return decode_attention_reference(
            self.query.double(), rows, self.tables, self.ends, tails=tails, **options
        )

    def kernel(self, rows: BlockRows | None = None, **options: Any) -> torch.Tensor:
        shape = (len(self.ends), self.shape.num_heads, self.shape.v_head_dim)
        out = poisoned(*shape, dtype=self.query.dtype)
        return decode_attention(
            self.query,
            rows or self.rows,
            self.tables,
            self.ends,
            out=out,
            backend="triton",
            **options,
        )


def close(out: torch.Tensor, truth: torch.Tensor, tolerance: float | None = None) -> None:
    assert error_of(out, truth) < (tolerance or TOLERANCE[out.dtype])


def lengths(seed: int, count: int, longest: int) -> list[int]:
    """Some short, one long, one padding."""
    draw = random.Random(seed)
    return [*(draw.randint(1, longest) for _ in range(count - 2)), 0, longest]


SHAPES = [
    Shape(),
    Shape(num_heads=6, num_kv_heads=1, head_dim=24, v_head_dim=40, block_size=16),
    Shape(num_heads=3, num_kv_heads=3, head_dim=8, v_head_dim=8, block_size=1),
    Shape(num_heads=20, num_kv_heads=1, head_dim=64, v_head_dim=32, block_size=6),
    Shape(num_heads=5, num_kv_heads=1, head_dim=36, v_head_dim=32, is_latent=True, block_size=8),
    Shape(num_heads=4, num_kv_heads=1, head_dim=20, v_head_dim=12, is_latent=True),
]


@pytest.mark.parametrize(
    ("shape", "dtype"), some(itertools.product(SHAPES, [torch.float32, torch.bfloat16])), ids=str
)
def test_kernel_is_reference(
    shape: Shape, dtype: torch.dtype, generator: torch.Generator, seed: int
) -> None:
    cache = Cache(shape, lengths(seed, 4, 150), dtype, generator)
    close(cache.kernel(scaling=0.3), cache.truth(scaling=0.3))


@pytest.mark.parametrize(
    "options",
    some(
        [
            {"num_splits": 1},
            {"num_splits": 3},
            {"num_splits": 9},
            {"window": 1},
            {"window": 70, "num_splits": 2},
            {"softcap": 2.0},
            {"exact": True},
            {"exact": True, "window": 33},
        ]
    ),
    ids=str,
)
def test_options(options: dict[str, Any], generator: torch.Generator, seed: int) -> None:
    cache = Cache(Shape(), lengths(seed, 3, 140), torch.float32, generator)
    its = {key: value for key, value in options.items() if key in ("window", "softcap")}
    close(cache.kernel(scaling=0.7, **options), cache.truth(scaling=0.7, **its))


def test_one_long_sequence_beside_short_ones(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No program has much more to do than the others, and the numbers are the same."""
    monkeypatch.setattr(attention_plan, "num_sms", lambda _: 4)
    monkeypatch.setattr(attention_plan, "LONG_POSITIONS", 128)
    monkeypatch.setattr(attention_plan, "SPAN_POSITIONS", 64)
    cache = Cache(Shape(), [5, 63, 64, 65, 0, 400, 33, 7], torch.float32, generator)
    config = dataclasses.replace(
        attention_plan.config_for(cache.rows, 2, torch.float32, False), min_split_positions=16
    )
    plan = plan_of(cache.rows, cache.tables, 8, config=config)
    assert plan.num_pairs >= 2 * attention_plan.num_sms(cache.tables.device)  # they fill the device
    assert plan.max_split <= 64 and plan.num_splits >= 400 / 64
    assert plan.num_equal < 400 / 64  # which is what the short ones are cut by
    made: list[torch.Tensor] = []
    new_empty = torch.Tensor.new_empty

    def poisonous(tensor: torch.Tensor, *sizes: int, **options: Any) -> torch.Tensor:
        found = new_empty(tensor, *sizes, **options)
        if len(sizes) > 1:
            made.append(found.fill_(float("nan")))
        return found

    monkeypatch.setattr(torch.Tensor, "new_empty", poisonous)
    close(cache.kernel(scaling=0.3, config=config), cache.truth(scaling=0.3))
    _, norms = made
    num_parts = (~norms[:, 0, 0].isnan()).view(8, 2, plan.num_splits).sum(2)
    # One split leaves no part.
    assert num_parts.tolist() == [[count] * 2 for count in (0, 0, 0, 2, 0, 7, 0, 0)]


@given(
    st.integers(1, 300), st.integers(1, 9000), st.integers(1, 132), st.integers(18, 27),
    st.sampled_from([None, 40, 5000]), st.booleans(), st.randoms(use_true_random=False),
)  # fmt: skip
def test_no_sequence_has_more_splits_than_there_is_room_for(
    num_sequences: int,
    num_blocks: int,
    num_sms: int,
    log_bytes: int,
    window: int | None,
    is_tree: bool,
    draw: random.Random,
) -> None:
    """On the device lengths are cut by the same rule (paged_walk_triton.py:extent)."""
    rows = Cache(Shape(), [1], torch.float32, torch.Generator(DEVICE)).rows
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_plan, "num_sms", lambda _: num_sms)
        patch.setattr(attention_plan, "_MAX_LONG_PART_BYTES", 1 << log_bytes)
        tables = torch.empty(1, num_blocks, device="meta")
        plan = plan_of(rows, tables, num_sequences, window=window, is_tree=is_tree)
    tile = plan.config.block_n
    for end in (num_blocks * 4, draw.randint(1, num_blocks * 4)):
        first = max(end - window, 0) // tile * tile if window is not None else 0
        wanted = max(plan.num_equal, math.ceil((end - first) / plan.max_split))
        num_tiles = math.ceil((end - first) / tile)
        span = max(math.ceil(num_tiles / wanted) * tile, plan.min_split)
        assert math.ceil((end - first) / span) <= plan.num_splits
    num_bytes = 4 * plan.num_pairs * plan.num_splits * plan.pitch * rows.v_head_dim
    assert plan.num_splits == 1 or num_bytes <= 1 << log_bytes


def test_many_wide_trees_are_not_cut_at_all() -> None:
    """Their parts take more room than there is, also when no sequence is cut."""
    cache = Cache(Shape(), [5], torch.float32, torch.Generator(DEVICE))
    plan = plan_of(cache.rows, cache.tables, 1 << 16, 4, num_nodes=64, is_tree=True)
    assert plan.num_splits == 1 and plan.merges == 0


@pytest.mark.parametrize("wanted", [1, 2, 5, 33])
@pytest.mark.parametrize("max_positions", [100, 4096, 4097, 8320, 30320, 131072])
def test_no_split_is_long_and_none_is_cut_that_was_short(wanted: int, max_positions: int) -> None:
    num_splits, max_split = attention_plan.cut_long(wanted, max_positions)
    assert num_splits * max_split >= max_positions and num_splits >= wanted
    if max_positions <= wanted * attention_plan.LONG_POSITIONS:
        assert (num_splits, max_split) == (wanted, max_positions)  # as for sequences that are alike
    else:
        assert max_split <= attention_plan.SPAN_POSITIONS


@pytest.mark.parametrize(
    ("block_size", "fields"),
    some(
        [
            (16, (4, 16, 1, 5)),
            (32, (16, 16, 1, 3)),
            (16, (8, 32, 2, 3)),
            (8, (4, 32, 2, 3)),
            (16, (4, 16, 2, 5, 128, 32, True)),
        ]
    ),
    ids=str,
)
def test_other_configs(
    block_size: int, fields: tuple[Any, ...], generator: torch.Generator, seed: int
) -> None:
    """A tile in one block, in two, in more; parts that a kernel of their own merges."""
    shape = Shape(num_heads=6, num_kv_heads=2, head_dim=32, v_head_dim=32, block_size=block_size)
    cache = Cache(shape, lengths(seed, 4, 150), torch.bfloat16, generator)
    for options in ({"num_splits": 4}, {"num_splits": 1, "window": 77}):
        its = {key: value for key, value in options.items() if key == "window"}
        out = cache.kernel(scaling=0.3, config=Config(*fields), **options)
        close(out, cache.truth(scaling=0.3, **its))


@pytest.mark.parametrize("num_splits", [1, 4])
def test_sinks(num_splits: int, generator: torch.Generator, seed: int) -> None:
    cache = Cache(Shape(), lengths(seed, 4, 130), torch.float32, generator)
    options: dict[str, Any] = {"scaling": 0.4, "sinks": cache.sinks, "softcap": 5.0, "window": 90}
    close(cache.kernel(num_splits=num_splits, **options), cache.truth(**options))


@pytest.mark.parametrize(
    ("shape", "dtype", "kv_dtype", "per_token"),
    some(
        (shape, dtype, kv_dtype, per_token)
        for shape, dtype in (
            (SHAPES[0], torch.bfloat16),
            (SHAPES[0], torch.float32),
            (SHAPES[4], torch.bfloat16),
        )
        for kv_dtype in ("int8", "fp8_e4m3")
        for per_token in (False, True)
    ),
    ids=str,
)
def test_quantized_cache(
    shape: Shape,
    dtype: torch.dtype,
    kv_dtype: str,
    per_token: bool,
    generator: torch.Generator,
    seed: int,
) -> None:
    cache = Cache(shape, lengths(seed, 4, 100), dtype, generator)
    rows = cache.quantized(kv_dtype, shape.block_size if per_token else 1)
    close(cache.kernel(rows, scaling=0.3), cache.truth(rows, scaling=0.3))


@pytest.mark.parametrize(
    ("shape", "num_splits"), some(itertools.product([SHAPES[0], SHAPES[4]], [1, 3])), ids=str
)
def test_tails(shape: Shape, num_splits: int, generator: torch.Generator, seed: int) -> None:
    """The newest token's block comes from its slot: what lies in its place quantized is NaN. A
    sequence without a slot is read quantized to its end."""
    ends = [*lengths(seed, 4, 90), 4 * shape.block_size, 1]
    cache = Cache(shape, ends, torch.float32, generator)
    slots = torch.tensor([3, 0, -1, 5, 2, 1], dtype=torch.int32, device=DEVICE)
    raw = Cache(shape, [shape.block_size] * 6, torch.float32, generator).rows
    tails = Tails(raw, slots)
    # Slot s is block s of `raw`, wherever its owner's end lies: beyond it, NaN.
    for matrices in (raw.keys, raw.values):
        if matrices is not None:
            matrices.nan_to_num_(0.5)
    for index, (slot, end) in enumerate(zip(slots.tolist(), ends, strict=True)):
        if slot < 0 or end == 0:
            continue
        used = (end - 1) % shape.block_size + 1
        ids = raw.row_ids(torch.tensor([slot], device=DEVICE))[:, 0]
        own = cache.rows.row_ids(cache.tables[index, (end - 1) // shape.block_size][None])[:, 0]
        for matrices, its in ((raw.keys, cache.rows.keys), (raw.values, cache.rows.values)):
            if matrices is not None and its is not None:
                matrices[ids, used:] = float("nan")
                its[own] = float("nan")
    rows = cache.quantized("int8", 1)
    options: dict[str, Any] = {"scaling": 0.3, "window": 50, "tails": tails}
    close(cache.kernel(rows, num_splits=num_splits, **options), cache.truth(rows, **options))


def test_only_padding(generator: torch.Generator) -> None:
    cache = Cache(Shape(), [0, 0], torch.float32, generator)
    assert torch.equal(cache.kernel(scaling=1.0), torch.zeros(2, 4, 16, device=DEVICE))


@pytest.mark.parametrize("window", [None, 300])
def test_exact_bits_depend_on_nothing_else(
    window: int | None, generator: torch.Generator, seed: int
) -> None:
    """Alone, among others, in a wider table, in other blocks."""
    end = 513 + random.Random(seed).randint(0, 60)
    options: dict[str, Any] = {"scaling": 0.3, "window": window, "exact": True}
    shape = Shape(num_heads=2, num_kv_heads=1, block_size=16)
    cache = Cache(shape, [end, 40, 600], torch.float32, generator)
    among = cache.kernel(**options)
    num_blocks = -(-end // 16)
    alone = decode_attention(
        cache.query[:1],
        cache.rows,
        cache.tables[:1, :num_blocks].contiguous(),
        cache.ends[:1],
        backend="triton",
        **options,
    )
    assert torch.equal(among[:1], alone)
    moved = Cache(shape, [end], torch.float32, generator)
    for target, source in (
        (moved.rows.keys, cache.rows.keys),
        (moved.rows.values, cache.rows.values),
    ):
        assert target is not None and source is not None
        target[moved.rows.row_ids(moved.tables)] = source[
            cache.rows.row_ids(cache.tables[:1, :num_blocks])
        ]
    moved.query = cache.query[:1]
    assert torch.equal(moved.kernel(**options), alone)


def test_large_addresses() -> None:
    """Rows beyond 2^31 elements: addresses are 64 bits wide."""
    if DEVICE != "cuda":
        pytest.skip("8 GB of cache: on a GPU only")
    count, size, dim = 1 << 20, 16, 128
    keys = torch.zeros(count, size, dim, dtype=torch.bfloat16, device=DEVICE)
    rows = BlockRows(keys, keys, dim, 1, 1, 1)
    keys[-1] = torch.randn(size, dim, device=DEVICE).bfloat16()
    tables = torch.tensor([[count - 1]], dtype=torch.int32, device=DEVICE)
    ends = torch.tensor([size], dtype=torch.int32, device=DEVICE)
    query = torch.randn(1, 4, dim, device=DEVICE).bfloat16()
    out = decode_attention(query, rows, tables, ends, scaling=0.1)
    truth = torch.softmax(query[0].double() @ keys[-1].double().T * 0.1, -1) @ keys[-1].double()
    close(out[0], truth)


@pytest.mark.parametrize("is_one_launch", [False, True])
def test_behind_the_kernel_that_writes(is_one_launch: bool) -> None:
    """In a graph, a launch begins before the one ahead has ended: what that one writes (the newest
    token's key and value, and the query) is seen nevertheless."""
    if DEVICE != "cuda":
        pytest.skip("overlapping launches: on a GPU only")
    batch, heads, kv_heads, dim, size, num_layers = 3, 8, 2, 64, 16, 24
    ends = torch.tensor([33, 200, 16], dtype=torch.int32, device=DEVICE)
    positions = ends - 1
    tables = torch.arange(3 * 13, device=DEVICE).int().view(3, 13)
    shape = (num_layers, 39 * kv_heads, size, dim)
    keys, values = (torch.randn(shape, device=DEVICE).bfloat16() for _ in range(2))
    layers = [
        BlockRows(keys[index], values[index], dim, kv_heads, kv_heads, 1)
        for index in range(num_layers)
    ]
    x = torch.randn(num_layers, batch, (heads + 2 * kv_heads) * dim, device=DEVICE).bfloat16()
    angles = torch.randn(200, dim // 2, device=DEVICE)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    out = poisoned(num_layers, batch, heads, dim, dtype=torch.bfloat16)

    def step() -> None:
        for index, rows in enumerate(layers):
            if is_one_launch:
                rotate_and_attend(
                    x[index], positions, cos_sin, rows, tables,
                    num_heads=heads, scaling=0.1, out=out[index],
                )  # fmt: skip
                continue
            query = rotate_and_write(x[index], positions, cos_sin, rows, tables, num_heads=heads)
            decode_attention(query, rows, tables, ends, scaling=0.1, out=out[index], num_splits=3)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(5):
        x.normal_()
        graph.replay()
        for index, rows in enumerate(layers):
            query = rotate_and_write(
                x[index], positions, cos_sin, rows, tables, num_heads=heads, backend="reference"
            )
            truth = decode_attention_reference(query, rows, tables, ends, scaling=0.1)
            close(out[index], truth.double())


def test_counters_are_left_at_zero(generator: torch.Generator, seed: int) -> None:
    """The next launch, or the graph's next replay, finds what this one found."""
    cache = Cache(Shape(), lengths(seed, 3, 180), torch.float32, generator)
    first = cache.kernel(scaling=0.3, num_splits=4)
    assert not own_workspace(cache.query.device).counters.any()
    assert torch.equal(first, cache.kernel(scaling=0.3, num_splits=4))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"query": torch.zeros(2, 5, 16)}, "heads"),
        ({"query": torch.zeros(2, 4, 8)}, "query"),
        ({"query": torch.zeros(2, 4, 16, dtype=torch.bfloat16)}, "query"),
        ({"ends": torch.zeros(2, dtype=torch.int64)}, "ends"),
        ({"block_tables": torch.zeros(3, 2, dtype=torch.int32)}, "block_tables"),
        ({"sinks": torch.zeros(3)}, "sinks"),
        ({"window": 0}, "window"),
        ({"softcap": 0.0}, "softcap"),
        ({"num_splits": 0}, "num_splits"),
        ({"out": torch.zeros(2, 4, 8)}, "out"),
        ({"backend": "cuda"}, "backend"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, Any], named: str) -> None:
    matrices = torch.zeros(4, 4, 16)
    arguments: dict[str, Any] = {
        "query": torch.zeros(2, 4, 16),
        "rows": BlockRows(matrices, matrices, 16, 2, 2, 1),
        "block_tables": torch.zeros(2, 2, dtype=torch.int32),
        "ends": torch.zeros(2, dtype=torch.int32),
        "scaling": 1.0,
    }
    with pytest.raises(ValueError, match=named):
        decode_attention(**(arguments | change))


def test_reference_reads_nothing_that_is_not_own(
    generator: torch.Generator, randn: Callable[..., torch.Tensor]
) -> None:
    cache = Cache(Shape(), [7, 0, 30], torch.float32, generator)
    out = decode_attention(
        cache.query, cache.rows, cache.tables, cache.ends, scaling=0.3, backend="reference"
    )
    close(out, cache.truth(scaling=0.3))
    assert not out[1].any()


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
def test_rotate_and_attend_in_one_launch_is_two(
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
def test_what_does_not_fit_into_one_launch_is_named(change: dict[str, Any], named: str) -> None:
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
