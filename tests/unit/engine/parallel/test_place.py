"""Every layer, head and rank has one place; degrees that a model cannot be split by are refused by
name."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from engine.errors import LoadError
from engine.parallel.rank_grid import SINGLE, Grid, check_degrees


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


@dataclass(frozen=True)
class _Sizes:
    num_layers: int = 4
    num_heads: int = 8
    num_kv_heads: int = 4
    intermediate_size: int = 96
    vocab_size: int = 260


def _check(grid: Grid, sizes: _Sizes) -> None:
    check_degrees(
        grid,
        name="some/model",
        num_layers=sizes.num_layers,
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        intermediate_size=sizes.intermediate_size,
        vocab_size=sizes.vocab_size,
    )


@pytest.mark.parametrize(
    ("grid", "sizes", "message"),
    [
        (
            Grid(1, 5),
            _Sizes(),
            "pipeline_parallel: 5 stages, but some/model has 4 layers; set it to at most 4",
        ),
        (
            Grid(3, 1),
            _Sizes(),
            "tensor_parallel: 3 does not divide the 8 attention heads of some/model; "
            "set it to 1 or 2",
        ),
        (
            Grid(8, 1),
            _Sizes(),
            "tensor_parallel: 8 does not divide the 4 key-value heads of some/model; "
            "set it to 1 or 2 or 4",
        ),
        (
            Grid(4, 1),
            _Sizes(intermediate_size=98),
            "tensor_parallel: 4 does not divide the 98 columns of the MLP of some/model; "
            "set it to 1 or 2",
        ),
        (
            Grid(2, 2),
            _Sizes(vocab_size=261),
            "tensor_parallel: 2 does not divide the 261 tokens in its vocabulary of some/model; "
            "set it to 1",
        ),
    ],
)
def test_wrong_degrees_are_refused_by_name(grid: Grid, sizes: _Sizes, message: str) -> None:
    with pytest.raises(LoadError) as caught:
        _check(grid, sizes)
    assert str(caught.value) == message


@pytest.mark.parametrize("grid", [Grid(1, 1), Grid(4, 1), Grid(1, 4), Grid(2, 3)])
def test_right_degrees_are_not_refused(grid: Grid) -> None:
    _check(grid, _Sizes())
