"""Of every block each byte is one rank's, a share is one run, and the views of a share of a whole
cache are those of a cache of its own."""

from __future__ import annotations

import random

import pytest
import torch

from engine.kv.layout import KvLayout, LayerKv, layout_of
from engine.kv.memory import KvMemory
from engine.parallel.messages import Change
from engine.parallel.rank_grid import Grid
from engine.parallel.rank_memory import RankMemory, runs

PLAIN = KvLayout.plain(num_layers=5, num_kv_heads=4, head_dim=16, block_size=4, dtype="bfloat16")
MIXED = layout_of(
    (LayerKv(4, 16, 4, 16), LayerKv(8, 8, 8, 24), LayerKv(4, 8, 4, 8), LayerKv(4, 16, 4, 16)),
    block_size=4,
    dtype="float32",
)
QUANTIZED = layout_of(
    (LayerKv(4, 16, 4, 16),) * 3,
    block_size=4,
    dtype="float32",
    kv_dtype="int8",
    scale="token_head",
)
LAYOUTS = {"plain": PLAIN, "mixed": MIXED, "quantized": QUANTIZED}
GRIDS = [Grid(1, 1), Grid(2, 1), Grid(4, 1), Grid(1, 2), Grid(2, 2)]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_byte_of_a_block_is_one_ranks(name: str, grid: Grid) -> None:
    layout = LAYOUTS[name]
    owners = bytearray(layout.block_bytes)
    for rank in range(grid.num_ranks):
        place = grid.place(rank)
        seen = bytearray(place.layout(layout).block_bytes)
        for block_offset, record_offset, num_bytes in runs(layout, place):
            for at in range(num_bytes):
                owners[block_offset + at] += 1
                seen[record_offset + at] += 1
        assert set(seen) == {1}
    assert set(owners) == {1}


def test_a_share_of_all_layers_is_one_run() -> None:
    for num_shares in (1, 2, 4):
        for rank in range(num_shares):
            (run,) = runs(PLAIN, Grid(num_shares, 1).place(rank))
            assert run == (rank * run.num_bytes, 0, PLAIN.block_bytes // num_shares)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_share_of_whole_blocks_reads_as_a_cache_of_its_own(
    name: str, grid: Grid, seed: int
) -> None:
    layout = LAYOUTS[name]
    whole = KvMemory(layout, 3)
    whole.host_view[:] = torch.randint(
        0, 250, whole.host_view.shape, generator=torch.Generator().manual_seed(seed)
    ).numpy()
    for rank in range(grid.num_ranks):
        place = grid.place(rank)
        own = RankMemory(layout, place, 3, "cpu")
        for block_offset, record_offset, num_bytes in runs(layout, place):
            own.host_view[:, record_offset : record_offset + num_bytes] = whole.host_view[
                :, block_offset : block_offset + num_bytes
            ]
        layers = place.layers(layout.num_layers)
        ours = own.layer_views()
        theirs = whole.layer_views(layers, place.share, place.num_shares)
        assert len(ours) == len(theirs) == len(layers)
        for one, other, layer in zip(ours, theirs, layers, strict=True):
            num_heads = layout.layers[layer].num_k_heads // grid.num_shares
            assert one.heads.num_heads == other.heads.num_heads == num_heads
            for kind in ("keys", "values", "k_scales", "v_scales"):
                mine, yours = getattr(one, kind), getattr(other, kind)
                assert (mine is None) == (yours is None)
                if mine is None:
                    continue
                for block in range(3):
                    for head in range(num_heads):
                        row = block * one.heads.rows_per_block + head * one.heads.head_step
                        its_row = block * other.heads.rows_per_block + head * other.heads.head_step
                        a, b = mine[row].view(torch.uint8), yours[its_row].view(torch.uint8)
                        assert torch.equal(a, b)


def test_what_changes_is_noted_for_the_other_ranks(seed: int) -> None:
    """Their caches are their own: they clear and copy the same blocks."""
    noted: list[Change] = []
    place = Grid(2, 1).place(1)
    memory = RankMemory(PLAIN, place, 4, "cpu", on_change=noted.append)
    memory.cache.normal_()
    memory.copy(2, 0)
    memory.clear(2)
    assert noted == [Change(0, 2), Change(2)]
    assert not memory.is_whole and memory.layout is PLAIN
    assert int(memory.cache[2].count_nonzero()) == 0 and int(memory.cache[0].count_nonzero()) > 0


def test_ranks_map_one_file(tmp_path: object, seed: int) -> None:
    """What one writes, the others read; a fresh file reads as zeros."""
    import os

    from engine.parallel.rank_memory import map_file

    file = os.memfd_create("cache")
    one = map_file(PLAIN, 6, file)
    other = KvMemory(PLAIN, 6, shared_file=file)
    os.close(file)
    assert int(one.cache.count_nonzero()) == 0
    rng = random.Random(seed)
    block = rng.randrange(6)
    one.cache[block].fill_(rng.uniform(1.0, 2.0))
    assert torch.equal(other.cache, one.cache) and int(other.cache[block].count_nonzero()) > 0
