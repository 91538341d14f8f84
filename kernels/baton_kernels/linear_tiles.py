"""Tile shapes of products of few rows: how a product is cut into programs, by its shape alone.

Fixed tables, measured on an H100 (`python -m benchmarks.kernels linear`): nothing is tuned at run
time, so every worker and every run computes the same bits. Uses no tensor. Pure functions with
cached results; any thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

PREFETCH_BYTES = 12 << 20
"""Bytes that all programs together prefetch: a part of L2 (50 MB) that the kernel ahead can
spare."""

_LINE_BYTES = 128

_LARGE = 1 << 28
"""Numbers of a weight that fills the device fifteen times over (an LM head's, from 17 rows on). In
us, on an H100, for [128256, 4096] by 17, 24, 33, 48 and 64 rows: 350, 352, 354, 357, 359 in tiles
of 128 rows of the weight, 355, 359, 362, 366, 378 in tiles of 64, 378 to 388 by the library."""

_LONG = 12
"""Steps of one program from which on the number of steps in flight matters. Guessed: 16 to 56 were
measured."""


@dataclass(frozen=True)
class Tile:
    """Tile sizes, split and pipeline depth of one product."""

    block_m: int
    """Rows of x per program; 0: the kernel for one row."""

    block_n: int
    """Rows of the weight per program."""

    block_k: int
    """Columns that are read per step."""

    split_k: int = 1
    """Number of programs that share the K of one tile."""

    num_warps: int = 4

    num_stages: int = 4
    """Number of steps in flight into shared memory; 1: no pipelining."""

    splits_warps: bool = False
    """Whether each warp takes a part of block_k; otherwise warps share block_n (at least 16 rows
    each)."""

    num_parts: int = 1
    """Number of runs of columns that one program sums separately: split_k times num_parts decides
    the bits."""

    group_m: int = 1
    """Number of tiles along M that run next to one another on the device."""

    prefetch_bytes: int = PREFETCH_BYTES
    """Bytes that all programs together prefetch before the wait for the kernel ahead; 0: none."""

    @property
    def is_row(self) -> bool:
        """Return whether the tile is for the kernel for one row of x."""
        return self.block_m == 0


@dataclass(frozen=True)
class Product:
    """Shape of one product. Hashed at every launch, so it has few fields."""

    num_rows: int
    height: int
    """Number of rows of the weight."""

    depth: int
    """K, the number of columns of x and of the weight."""

    element_bytes: int
    is_gated: bool

    @property
    def width(self) -> int:
        """Return N, the number of columns of the result."""
        return self.height // 2 if self.is_gated else self.height


class Cut(NamedTuple):
    """Launch grid, scratch size and compile-time constants of a tile applied to a product."""

    grid: tuple[int, ...]
    num_tiles: int

    num_partials: int
    """Number of float32 partial sums in the workspace; 0: none."""

    constants: dict[str, Any]
    """Compile-time constants of the kernel; read only."""


@lru_cache(maxsize=4096)
def cut(tile: Tile, product: Product) -> Cut:
    """Return the grid, scratch size and constants of a launch of `product` in tiles of `tile`."""
    num_runs = tile.split_k * tile.num_parts
    num_steps = ceil_div(ceil_div(product.depth, tile.block_k), num_runs)
    own_columns = num_steps * tile.block_k
    num_n_tiles = ceil_div(product.width, tile.block_n)
    constants = {
        "IS_GATED": product.is_gated,
        "IS_EVEN_K": product.depth == num_runs * own_columns,
        "NUM_STEPS": num_steps,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "NUM_STAGES": tile.num_stages,
        "LINE": _LINE_BYTES // product.element_bytes,
        "num_warps": tile.num_warps,
    }
    if tile.block_m == 0:  # the first columns are read into registers
        constants["PREFETCH"] = _prefetch(tile, product, product.depth - tile.block_k)
        return Cut((num_n_tiles,), num_n_tiles, 0, constants)
    constants |= {
        "PREFETCH": _prefetch(tile, product, own_columns),
        "BLOCK_M": tile.block_m,
        "GROUP_M": tile.group_m,
        "K_WARPS": tile.num_warps if tile.splits_warps else 1,
        "SPLIT_K": tile.split_k,
        "NUM_PARTS": tile.num_parts,
    }
    num_tiles = num_n_tiles * ceil_div(product.num_rows, tile.block_m)
    num_partials = 0
    if tile.split_k > 1:
        num_partials = num_tiles * tile.split_k * tile.block_n * tile.block_m
    return Cut(
        (num_tiles, tile.split_k),
        num_tiles,
        num_partials * (2 if product.is_gated else 1),
        constants,
    )


def _prefetch(tile: Tile, product: Product, depth: int) -> int:
    """Return how many elements of each weight row of a program are prefetched: a power of two, or 0
    where it would be less than a cache line."""
    room = tile.prefetch_bytes // (product.height * product.element_bytes * tile.split_k)
    number = min(room, depth)
    line = _LINE_BYTES // product.element_bytes
    return 1 << (number.bit_length() - 1) if number >= line else 0


@lru_cache(maxsize=4096)
def choose_tile(product: Product, *, exact: bool, forced: bool) -> Tile | None:
    """Choose the tile of a product; None: the library is faster. With `exact` every tile of one
    weight sums in the same order.

    Args:
        forced: a tile for any number of rows.
    """
    num_rows, width, depth = product.num_rows, product.width, product.depth
    if product.element_bytes == 4 and (exact or num_rows > 1):
        # No matrix unit: all of it is unrolled.
        return Tile(16, 32, 32, 1 if exact else split_for(width, 32, depth, 32), num_stages=2)
    if exact:
        return exact_tile(num_rows, width, depth)
    if not forced and num_rows > max_rows(product):
        return None
    if num_rows == 1:
        return row_tile(width, depth, product.is_gated)
    return skinny_tile(num_rows, width, depth, product.is_gated)


def takes_norm(tile: Tile, product: Product) -> bool:
    """Return whether the kernel applies the RMSNorm of x itself: the kernel for one row does,
    unless registers run out (SwiGLU of long rows). For more rows a separate launch is cheaper than
    each program repeating it."""
    return tile.is_row and not (product.is_gated and product.depth > 1024)


def max_rows(product: Product) -> int:
    """Return the most rows of x for which the Triton kernel is faster than the library: the larger
    the weight, the more."""
    num_weights = product.height * product.depth
    if num_weights > 1 << 24:
        return 64
    # Between 2^23 and 2^24 nothing was measured, and of 2^24 one that is cut into long programs.
    if num_weights < 1 << 24 or product.is_gated:
        return 16
    return 32 if _skinny_cut(product.width, product.depth).num_steps >= _LONG else 16


class _SkinnyCut(NamedTuple):
    split: int
    num_steps: int
    """Number of steps per program."""


def _skinny_cut(width: int, depth: int) -> _SkinnyCut:
    """Split K for 17 to 64 rows of x, in tiles of 64 rows of the weight and 128 columns."""
    split = split_for(width, 64, depth, 128, num_programs=96, most=4)
    return _SkinnyCut(split, ceil_div(ceil_div(depth, 128), split))


def row_tile(width: int, depth: int, is_gated: bool) -> Tile:
    """Choose the tile for one row of x."""
    if is_gated:
        return Tile(0, 4 if depth > 1024 else 8, 512, num_stages=1)
    return Tile(0, 2 if width <= 4096 and depth > 1024 else 4, 1024, num_stages=1)


def skinny_tile(num_rows: int, width: int, depth: int, is_gated: bool) -> Tile:
    """Choose the tile for few rows of x; up to 16 rows the exact tile, which costs nothing
    there."""
    if num_rows <= 16:
        return exact_tile(num_rows, width, depth)
    if not is_gated and width * depth > _LARGE:
        return Tile(64, 128, 128, 1, 8, 3)
    split, num_steps = _skinny_cut(width, depth)
    if num_rows <= 32 and num_steps >= _LONG:
        # Tiles of 64 rows leave room for fewer steps on their way. A layer of the 8B shape at 24
        # rows, in us, with one product so: qkv 122.1, o 121.7, gate_up 123.5, down 122.6 for 123.7
        # on an H200, 162.5, 165.4, 163.3, 163.5 for 164.7 on an H100.
        return Tile(32, 64, 128, split, num_stages=4 if is_gated else 5)
    # Of rows that are not there nothing is read.
    return Tile(64, 64, 128, split, num_stages=3 if num_steps < 8 else 4)


def exact_tile(num_rows: int, width: int, depth: int) -> Tile:
    """Choose the tile of exact mode: one matrix instruction (64 rows of the weight, 16 columns),
    one order of columns and one number of separately summed runs, however many rows x has."""
    num_runs = 1
    while num_runs < 8 and ceil_div(width, 64) * num_runs < 132 and depth % (256 * num_runs) == 0:
        num_runs *= 2
    if num_rows <= 64:
        # Triton begins a product of one step with the bias or the residual that follows it, which
        # is another order of sums: every tile takes one step, or every tile takes several.
        block_k = 64 if depth <= 128 else 128
        return Tile(16 if num_rows <= 16 else 64, 64, block_k, num_runs, num_stages=4)
    if num_rows <= 512:
        return Tile(128, 128, 64, num_runs, 8, 4, group_m=8, prefetch_bytes=0)
    if num_runs > 1:
        return Tile(128, 128, 64, 1, 8, 4, num_parts=num_runs, group_m=8, prefetch_bytes=0)
    return Tile(256, 128, 64, 1, 8, 4, group_m=8, prefetch_bytes=0)


def exact_gated_tile(num_rows: int, height: int, depth: int, element_bytes: int) -> Tile | None:
    """Choose the exact tile for SwiGLU in the launch of the product, with the order of sums of the
    product alone. None: there is no room."""
    if element_bytes == 4 or num_rows > 64:
        return None
    return exact_tile(num_rows, height, depth)


def split_for(
    width: int, block_n: int, depth: int, block_k: int, num_programs: int = 264, most: int = 8
) -> int:
    """Return the number of programs that split K, so that there are about `num_programs` in all
    with at least two steps each."""
    split = 1
    while (
        split < most
        and ceil_div(width, block_n) * split < num_programs
        and depth >= 2 * 2 * split * block_k
    ):
        split *= 2
    return split


def ceil_div(number: int, divisor: int) -> int:
    return -(-number // divisor)
