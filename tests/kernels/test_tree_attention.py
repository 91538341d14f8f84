"""tree_attention's kernel: against plain torch, against a decode of every node's own path, and
against causal attention where a tree is a chain."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from baton_kernels.attention import decode_attention, tree_attention, tree_attention_reference
from baton_kernels.block_rows import BlockRows
from baton_kernels.layer_ops import rotate_and_write

from tests.kernels.conftest import DEVICE, poisoned, some
from tests.kernels.test_attention import SHAPES, Cache, Shape, close, in_float64

BYTES = torch.zeros(4, 4, 16, dtype=torch.int8)
QUANTIZED = BlockRows(BYTES, BYTES, 16, 2, 2, 1, torch.ones(4, 1), torch.ones(4, 1), "int8")


def random_tree(draw: random.Random, num_nodes: int) -> list[int]:
    """Parents of nodes that are numbered depth first; -1: the root."""
    parents, path = [-1], [0]
    for node in range(1, num_nodes):
        del path[draw.randint(1, len(path)) :]
        parents.append(path[-1])
        path.append(node)
    return parents


class Trees:
    """Trees over cached positions: the scratch slots of a sequence follow its cached ones."""

    def __init__(
        self,
        shape: Shape,
        num_cached: Sequence[int],
        num_nodes: Sequence[int],
        dtype: torch.dtype,
        generator: torch.Generator,
        draw: random.Random,
    ) -> None:
        ends = [a + b for a, b in zip(num_cached, num_nodes, strict=True)]
        self.cache = Cache(shape, ends, dtype, generator)
        self.num_cached = torch.tensor(num_cached, dtype=torch.int32, device=DEVICE)
        starts = [sum(num_nodes[:index]) for index in range(len(num_nodes) + 1)]
        self.node_starts = torch.tensor(starts, dtype=torch.int32, device=DEVICE)
        total, self.width = starts[-1] + 2, max(num_nodes) + 1  # two rows of nobody
        self.max_num_nodes = max(num_nodes)
        self.paths: list[list[int]] = []
        depths = torch.full((total,), 10**6, dtype=torch.int32)
        # What no node of the sequence stands behind may be either.
        visible = torch.rand(total, self.width) < 0.5
        for first, count in zip(starts, num_nodes, strict=False):
            parents = random_tree(draw, count) if count else []
            paths: list[list[int]] = []
            for node, parent in enumerate(parents):
                path = [*(paths[parent] if parent >= 0 else []), node]
                paths.append(path)
                depths[first + node] = len(path) - 1
                visible[first + node, :count] = False
                visible[first + node, path] = True
            self.paths += paths
        self.depths, self.visible = depths.to(DEVICE), visible.to(DEVICE)
        heads = torch.randn(
            total, shape.num_heads, shape.head_dim, generator=generator, device=DEVICE
        )
        self.query = heads.to(dtype)

    def arguments(self) -> tuple[torch.Tensor, ...]:
        return self.cache.tables, self.num_cached, self.node_starts, self.depths, self.visible

    def kernel(self, **options: Any) -> torch.Tensor:
        shape = self.cache.shape
        out = poisoned(len(self.query), shape.num_heads, shape.v_head_dim, dtype=self.query.dtype)
        tree_attention(
            self.query, self.cache.rows, *self.arguments(),
            max_num_nodes=self.max_num_nodes, out=out, backend="triton", **options,
        )  # fmt: skip
        assert out[-2:].isnan().all(), "rows of nobody are not written"
        return out[:-2]

    def truth(self, **options: Any) -> torch.Tensor:
        found = tree_attention_reference(
            self.query.double(), in_float64(self.cache.rows), *self.arguments(), **options
        )
        return found[:-2]


@pytest.mark.parametrize(
    ("shape", "dtype"),
    some(itertools.product([SHAPES[0], SHAPES[1], SHAPES[4]], [torch.float32, torch.bfloat16])),
    ids=str,
)
def test_kernel_is_reference(
    shape: Shape, dtype: torch.dtype, generator: torch.Generator, seed: int
) -> None:
    draw = random.Random(seed)
    cached = [draw.randint(1, 150), 0, draw.randint(1, 20), 70]
    trees = Trees(shape, cached, [draw.randint(2, 13), 5, 0, 1], dtype, generator, draw)
    close(trees.kernel(scaling=0.3), trees.truth(scaling=0.3))


@pytest.mark.parametrize(
    "options", [{"window": 9}, {"softcap": 2.0, "sinks": True}, {"num_splits": 1}], ids=str
)
def test_options(options: dict[str, Any], generator: torch.Generator, seed: int) -> None:
    draw = random.Random(seed)
    trees = Trees(Shape(), [90, 6, 0], [7, 1, 12], torch.float32, generator, draw)
    its: dict[str, Any] = {"scaling": 0.5} | options
    if "sinks" in its:
        its["sinks"] = trees.cache.sinks
    truth = trees.truth(**{key: value for key, value in its.items() if key != "num_splits"})
    close(trees.kernel(**its), truth)


@pytest.mark.parametrize(("num_nodes", "num_padded"), some([(17, 24), (33, 40), (33, 64)]))
def test_many_nodes_in_a_launch_for_more(
    num_nodes: int, num_padded: int, generator: torch.Generator, seed: int
) -> None:
    """More than a program's rows, the last program's few, and programs without any; as a graph that
    was captured for so many nodes launches it."""
    draw = random.Random(seed)
    cached = [draw.randint(130, 200), draw.randint(0, 9)]
    shape = Shape(num_heads=8)
    trees = Trees(shape, cached, [num_nodes, 2], torch.bfloat16, generator, draw)
    trees.visible = torch.nn.functional.pad(trees.visible, (0, num_padded - num_nodes))
    trees.max_num_nodes = num_padded
    close(trees.kernel(scaling=0.3), trees.truth(scaling=0.3))


@pytest.mark.parametrize("window", [None, 20])
def test_a_node_is_the_newest_token_of_its_path(
    window: int | None, generator: torch.Generator, seed: int
) -> None:
    """Every node alone, its ancestors moved behind the cached positions: a decode."""
    draw = random.Random(seed)
    cached, size = 30, 4
    trees = Trees(Shape(), [cached], [9], torch.float32, generator, draw)
    out = trees.kernel(scaling=0.3, window=window)
    rows, table = trees.cache.rows, trees.cache.tables[0]

    def of_positions(matrices: torch.Tensor, positions: list[int]) -> torch.Tensor:
        ids = rows.row_ids(table[torch.tensor(positions, device=DEVICE) // size][None])[0]  # [K, S]
        slots = torch.tensor(positions, device=DEVICE) % size
        return matrices[ids, slots].transpose(0, 1)  # [S, K, D]

    assert rows.values is not None
    for node, path in enumerate(trees.paths):
        positions = [*range(cached), *(cached + ancestor for ancestor in path)]
        keys = of_positions(rows.keys, positions).transpose(0, 1).contiguous()
        values = of_positions(rows.values, positions).transpose(0, 1).contiguous()
        alone = decode_attention(
            trees.query[node][None],
            BlockRows(keys, values, 16, 2, 2, 1),  # one block as long as the sequence
            torch.zeros(1, 1, dtype=torch.int32, device=DEVICE),
            torch.tensor([len(positions)], dtype=torch.int32, device=DEVICE),
            scaling=0.3,
            window=window,
            backend="reference",
        )
        close(out[node][None], alone.double())


def test_behind_the_kernel_that_writes_nodes(generator: torch.Generator) -> None:
    """In a graph, a launch begins before the one ahead has ended: what that one writes (the nodes'
    keys and values, and the queries) is seen nevertheless."""
    if DEVICE != "cuda":
        pytest.skip("overlapping launches: on a GPU only")
    heads, kv_heads, dim, size, num_layers = 8, 2, 64, 16, 24
    counts, cached = [33, 0, 5], [200, 3, 60]
    options: dict[str, Any] = {"dtype": torch.int32, "device": DEVICE}
    starts = torch.tensor([0, 33, 33, 38], **options)
    num_cached = torch.tensor(cached, **options)
    depths = torch.cat([torch.arange(count, **options) for count in counts])
    sequence_ids = torch.repeat_interleave(torch.arange(3), torch.tensor(counts)).to(**options)
    positions = num_cached[sequence_ids] + depths
    visible = torch.ones(38, 48, dtype=torch.bool, device=DEVICE).tril()
    visible[33:] = torch.ones(5, 48, dtype=torch.bool, device=DEVICE).tril()
    tables = torch.arange(45, **options).view(3, 15)
    shape = (num_layers, 45 * kv_heads, size, dim)
    keys, values = (torch.randn(shape, generator=generator, device=DEVICE) for _ in range(2))
    layers = [
        BlockRows(key.bfloat16(), value.bfloat16(), dim, kv_heads, kv_heads, 1)
        for key, value in zip(keys, values, strict=True)
    ]
    x = torch.randn(num_layers, 38, (heads + 2 * kv_heads) * dim, device=DEVICE).bfloat16()
    angles = torch.randn(300, dim // 2, device=DEVICE)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    out = poisoned(num_layers, 38, heads, dim, dtype=torch.bfloat16)

    def step() -> None:
        for index, rows in enumerate(layers):
            query = rotate_and_write(
                x[index], positions, cos_sin, rows, tables, sequence_ids,
                num_heads=heads, backend="triton",
            )  # fmt: skip
            tree_attention(
                query, rows, tables, num_cached, starts, depths, visible,
                max_num_nodes=40, scaling=0.1, out=out[index], backend="triton", is_early=True,
            )  # fmt: skip

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(5):
        x.normal_()
        graph.replay()
        for index, rows in enumerate(layers):
            query = rotate_and_write(
                x[index], positions, cos_sin, rows, tables, sequence_ids,
                num_heads=heads, backend="reference",
            )  # fmt: skip
            truth = tree_attention_reference(
                query, rows, tables, num_cached, starts, depths, visible, scaling=0.1
            )
            close(out[index], truth.double())


def test_what_a_node_does_not_see_cannot_reach_it(generator: torch.Generator, seed: int) -> None:
    """Other branches' keys and values change; a node's bits do not."""
    trees = Trees(Shape(), [21], [11], torch.float32, generator, random.Random(seed))
    before = trees.kernel(scaling=0.3)
    rows, node = trees.cache.rows, 7
    assert rows.values is not None
    for other in set(range(11)) - set(trees.paths[node]):
        block = trees.cache.tables[0, (21 + other) // 4][None]
        ids = rows.row_ids(block)[:, 0]
        rows.keys[ids, (21 + other) % 4] = 99.0
        rows.values[ids, (21 + other) % 4] = -99.0
    after = trees.kernel(scaling=0.3)
    assert torch.equal(before[node], after[node])
    assert not torch.equal(before, after)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"node_starts": torch.zeros(2, dtype=torch.int32)}, "node_starts"),
        ({"depths": torch.zeros(5, dtype=torch.int32)}, "depths"),
        ({"visible": torch.zeros(6, 4)}, "visible"),
        ({"max_num_nodes": 5}, "max_num_nodes"),
        ({"num_cached": torch.zeros(2)}, "num_cached"),
        ({"rows": QUANTIZED}, "quantized"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, Any], named: str) -> None:
    matrices = torch.zeros(4, 4, 16)
    arguments: dict[str, Any] = {
        "query": torch.zeros(6, 4, 16),
        "rows": BlockRows(matrices, matrices, 16, 2, 2, 1),
        "block_tables": torch.zeros(2, 2, dtype=torch.int32),
        "num_cached": torch.zeros(2, dtype=torch.int32),
        "node_starts": torch.tensor([0, 3, 6], dtype=torch.int32),
        "depths": torch.zeros(6, dtype=torch.int32),
        "visible": torch.zeros(6, 4, dtype=torch.bool),
        "max_num_nodes": 4,
        "scaling": 1.0,
    }
    with pytest.raises(ValueError, match=named):
        tree_attention(**(arguments | change))
