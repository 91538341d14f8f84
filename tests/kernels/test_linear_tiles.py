"""Which tile each product of the measured shapes gets: an entry of a table that is never taken, or
taken by others than it was measured for, gives right numbers slowly."""

from __future__ import annotations

import itertools

import pytest
from baton_kernels.linear_tiles import Product, Tile, choose_tile, cut

QKV = (6144, 4096, False)
OUTPUT = (4096, 4096, False)
GATE_UP = (28672, 4096, True)
DOWN = (4096, 14336, False)
HEAD = (128256, 4096, False)
SHARED_BYTES = 227 << 10
"""Of one program, on an H100."""


def chosen(shape: tuple[int, int, bool], num_rows: int) -> Tile | None:
    height, depth, is_gated = shape
    return choose_tile(Product(num_rows, height, depth, 2, is_gated), exact=False, forced=False)


@pytest.mark.parametrize(
    ("shape", "few", "more"),
    [
        (QKV, (32, 64, 5), (64, 64, 4)),
        (OUTPUT, (32, 64, 5), None),
        (GATE_UP, (32, 64, 4), (64, 64, 4)),
        (DOWN, (32, 64, 5), (64, 64, 4)),
        (HEAD, (64, 128, 3), (64, 128, 3)),
    ],
    ids=["qkv", "output", "gate_up", "down", "head"],
)
def test_products_of_the_8b_shape(
    shape: tuple[int, int, bool], few: tuple[int, ...], more: tuple[int, ...] | None
) -> None:
    for num_rows in range(2, 65):
        tile = chosen(shape, num_rows)
        if num_rows <= 16:
            assert tile is not None and tile.block_m == 16
            continue
        wanted = few if num_rows <= 32 else more
        assert (tile and (tile.block_m, tile.block_n, tile.num_stages)) == wanted, num_rows
    assert chosen(shape, 65) is None


@pytest.mark.parametrize("shape", [(16384, 1024, False), (4096, 4096, True), (2048, 4096, False)])
def test_the_library_has_what_was_not_measured(shape: tuple[int, int, bool]) -> None:
    """As many numbers as the 8B shape's output projection, or fewer, in short programs or gated."""
    assert chosen(shape, 16) is not None
    assert chosen(shape, 17) is None


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("height", [64, 200, 1024, 4096, 6144, 28672, 128256])
@pytest.mark.parametrize("depth", [64, 1000, 4096, 6200, 14336])
def test_what_is_on_its_way_fits(height: int, depth: int, is_gated: bool) -> None:
    """Steps of both operands, of bfloat16, are in shared memory at once."""
    for num_rows, exact in itertools.product((1, 2, 16, 17, 32, 33, 64), (False, True)):
        product = Product(num_rows, height, depth, 2, is_gated)
        tile = choose_tile(product, exact=exact, forced=True)
        assert tile is not None
        rows = tile.block_n * (2 if is_gated else 1) + tile.block_m
        assert tile.num_stages * tile.block_k * rows * 2 <= SHARED_BYTES or tile.is_row
        assert cut(tile, product).num_tiles > 0
