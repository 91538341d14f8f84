"""Every layer, head, block and rank has one place; degrees that a model cannot be split by are
refused by name; and a step cut into pieces is the step."""

from __future__ import annotations

import os
import random

import pytest
import torch

from engine.batch import Batch, TokenSpan, warm_up
from engine.errors import LoadError
from engine.kv.layout import KvLayout, LayerKv, layout_of
from engine.kv.memory import KvMemory
from engine.parallel.messages import Change
from engine.parallel.microbatches import pieces
from engine.parallel.rank_grid import SINGLE, Grid, check_degrees
from engine.parallel.rank_memory import RankMemory, map_file, runs


@pytest.mark.parametrize("grid", [Grid(1, 1), Grid(2, 1), Grid(1, 3), Grid(2, 2), Grid(4, 2)])
def test_every_layer_and_column_has_one_rank(grid: Grid, seed: int) -> None:
    num_layers = grid.num_stages + random.Random(seed).randrange(20)
    places = [grid.place(rank) for rank in range(grid.num_ranks)]
    assert len(set(places)) == grid.num_ranks
    assert [grid.rank(place.stage, place.share) for place in places] == list(range(grid.num_ranks))
    cells = sorted(
        (layer, head)
        for place in places
        for layer in place.layers(num_layers)
        for head in place.part(8)
    )
    assert cells == [(layer, head) for layer in range(num_layers) for head in range(8)]
    sizes = {len(place.layers(num_layers)) for place in places}
    assert max(sizes) - min(sizes) <= 1
    last = next(place for place in places if place.is_last)
    assert len(last.layers(num_layers)) == min(sizes)


def test_the_engine_has_the_logits() -> None:
    assert all(Grid(n, m).place(0).is_last for n in (1, 2, 4) for m in (1, 2, 3))
    assert Grid(1, 1).place(0) == SINGLE
    assert Grid(2, 2).name(3) == "rank 3 (stage 0, share 1)"


def _check(grid: Grid, **sizes: int) -> None:
    fields = {
        "num_layers": 4, "num_heads": 8, "num_kv_heads": 4, "intermediate_size": 96,
        "vocab_size": 260,
    }  # fmt: skip
    check_degrees(grid, name="some/model", **fields | sizes)


@pytest.mark.parametrize(
    ("grid", "sizes", "what", "most"),
    [
        (Grid(3, 1), {}, "3 does not divide the 8 attention heads", "1 or 2"),
        (Grid(8, 1), {}, "8 does not divide the 4 key-value heads", "1 or 2 or 4"),
        (
            Grid(4, 1),
            {"intermediate_size": 98},
            "4 does not divide the 98 columns of the MLP",
            "1 or 2",
        ),
        (
            Grid(2, 2),
            {"vocab_size": 261},
            "2 does not divide the 261 tokens in its vocabulary",
            "1",
        ),
    ],
)
def test_wrong_degrees_are_refused_by_name(
    grid: Grid, sizes: dict[str, int], what: str, most: str
) -> None:
    with pytest.raises(LoadError) as caught:
        _check(grid, **sizes)
    assert str(caught.value) == f"tensor_parallel: {what} of some/model; set it to {most}"


def test_more_stages_than_layers_are_refused_by_name() -> None:
    with pytest.raises(LoadError) as caught:
        _check(Grid(1, 5))
    message = "pipeline_parallel: 5 stages, but some/model has 4 layers; set it to at most 4"
    assert str(caught.value) == message


@pytest.mark.parametrize("grid", [Grid(1, 1), Grid(4, 1), Grid(1, 4), Grid(2, 3)])
def test_right_degrees_are_not_refused(grid: Grid) -> None:
    _check(grid)


# -- each byte of a block is one rank's


PLAIN = KvLayout.plain(num_layers=5, num_kv_heads=4, head_dim=16, block_size=4, dtype="bfloat16")
MIXED = layout_of(
    (LayerKv(4, 16, 4, 16), LayerKv(8, 8, 8, 24), LayerKv(4, 8, 4, 8), LayerKv(4, 16, 4, 16)),
    block_size=4,
    dtype="float32",
)
QUANTIZED = layout_of(
    (LayerKv(4, 16, 4, 16),) * 3,
    block_size=4, dtype="float32", kv_dtype="int8", scale="token_head",
)  # fmt: skip
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
    file = os.memfd_create("cache")
    one = map_file(PLAIN, 6, file)
    other = KvMemory(PLAIN, 6, shared_file=file)
    os.close(file)
    assert int(one.cache.count_nonzero()) == 0
    rng = random.Random(seed)
    block = rng.randrange(6)
    one.cache[block].fill_(rng.uniform(1.0, 2.0))
    assert torch.equal(other.cache, one.cache) and int(other.cache[block].count_nonzero()) > 0


# -- a step cut into pieces


def _cells(batch: Batch) -> list[tuple[int, int, tuple[int, ...], bool]]:
    """(token, position, blocks, is drawn from) of every token."""
    spans = [span for span in batch.spans for _ in range(span.num_tokens)]
    return [
        (token, position, span.block_ids, index in batch.draw_indices)
        for index, (token, position, span) in enumerate(
            zip(batch.token_ids, batch.positions, spans, strict=True)
        )
    ]


def test_pieces_are_the_step(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(50):
        spans = tuple(
            TokenSpan(
                rng.randrange(20), rng.choice([1, 1, rng.randrange(1, 40)]), (index, 50 + index)
            )
            for index in range(rng.randrange(1, 8))
        )
        num_tokens = sum(span.num_tokens for span in spans)
        draws = tuple(index for index in range(num_tokens) if rng.random() < 0.3)
        batch = Batch(tuple(rng.randrange(100) for _ in range(num_tokens)), spans, draws)
        num_pieces, min_tokens = rng.randrange(1, 5), rng.randrange(1, 30)
        found = pieces(batch, num_pieces, min_tokens)
        assert [cell for piece in found for cell in _cells(piece)] == _cells(batch)
        sizes = [len(piece.token_ids) for piece in found]
        assert len(found) <= num_pieces and max(sizes) - min(sizes) <= 1
        assert len(found) == max(1, min(num_pieces, num_tokens // min_tokens))
        assert len(found) == 1 or min(sizes) >= min_tokens


def test_a_warm_up_is_not_cut() -> None:
    """It keeps no KV that a second piece could find."""
    assert pieces(warm_up(100), 4, 1) == [warm_up(100)]
