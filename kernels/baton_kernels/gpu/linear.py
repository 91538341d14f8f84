"""Launches the kernels of gpu/one_row.py and gpu/skinny.py: which tile for which shape, the
workspace of split sums, and the arguments. Checked by the doors (linear.py, fp8_linear.py). Tiles
come from fixed tables, measured once: nothing is tuned at run time, so every worker and every run
computes the same bits.

Invariant: a launch takes counters that no other launch in flight has (a ring, far longer than what
can be in flight), and its last program leaves them zero. Engine thread only, per device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton

from baton_kernels.gpu.one_row import row_kernel
from baton_kernels.gpu.overlap import overlap_options
from baton_kernels.gpu.skinny import skinny_kernel

_NUM_COUNTERS = 1 << 20
PREFETCH_BYTES = 12 << 20
"""Of all programs together: a part of L2 (50 MB) that the kernel ahead can spare."""


@dataclass(frozen=True)
class Tile:
    """How one product is cut up."""

    block_m: int
    """Rows of x in a program; 0: the kernel for one row."""

    block_n: int
    """Rows of the weight in a program."""

    block_k: int
    """Columns that are read at a time."""

    split_k: int = 1
    """Programs that share one tile's K."""

    num_warps: int = 4
    num_stages: int = 4

    triggers_first: bool = True
    """The next kernel may start before this one has waited for the last."""

    splits_warps: bool = False
    """Each warp takes a part of block_k; else warps share block_n (16 rows each at least)."""

    num_parts: int = 1
    """Runs of columns that one program sums apart: split_k times num_parts decides the bits."""

    group_m: int = 1
    """Tiles along M that are neighbours on the device."""

    prefetch_bytes: int = PREFETCH_BYTES
    """Asked for ahead of the wait, by all programs together; 0: nothing."""

    @property
    def takes_norm(self) -> bool:
        """The kernel for one row norms it on the way; for more, a launch ahead is cheaper than what
        each program would repeat."""
        return self.block_m == 0


class _Counters:
    """One device's ring of zeroed counters."""

    def __init__(self, device: torch.device) -> None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("run one linear on this device before a graph is captured")
        self._ring = torch.zeros(_NUM_COUNTERS, dtype=torch.int32, device=device)
        self._next = 0

    def take(self, number: int) -> torch.Tensor:
        """`number` neighbours, all zero."""
        if number > _NUM_COUNTERS:
            raise ValueError(f"{number} tiles with split K, room for {_NUM_COUNTERS}")
        if self._next + number > _NUM_COUNTERS:
            self._next = 0
        first = self._next
        self._next += -(-number // 4) * 4  # pointers stay aligned to 16 bytes
        return self._ring[first : first + number]


@lru_cache(maxsize=16)
def _counters(device: torch.device) -> _Counters:
    return _Counters(device)


def launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    tile: Tile,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 0.0,
    x_scales: torch.Tensor | None = None,
    weight_scales: torch.Tensor | None = None,
    is_gated: bool = False,
) -> torch.Tensor:
    """One product. Shapes as the doors have them; scales float32, both or none; a norm for a tile
    of one row only."""
    num_rows, depth = x.shape
    width = weight.shape[0] // (2 if is_gated else 1)
    num_runs = tile.split_k * tile.num_parts
    num_steps = triton.cdiv(triton.cdiv(depth, tile.block_k), num_runs)
    flags = {
        "HAS_BIAS": bias is not None,
        "HAS_RESIDUAL": residual is not None,
        "IS_GATED": is_gated,
        "IS_EVEN_K": depth == num_runs * num_steps * tile.block_k,
        "NUM_STEPS": num_steps,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "NUM_STAGES": tile.num_stages,
        "TRIGGERS_FIRST": tile.triggers_first,
        "LINE": 128 // weight.element_size(),
        "num_warps": tile.num_warps,
        **overlap_options(x),
    }
    num_n_tiles = triton.cdiv(width, tile.block_n)
    if tile.block_m == 0:
        row_kernel[(num_n_tiles,)](
            x, weight, out, bias, residual, norm_weight, width, depth, weight.stride(0), norm_eps,
            HAS_NORM=norm_weight is not None,
            PREFETCH=_prefetch(tile, weight, depth - tile.block_k), **flags,
        )  # fmt: skip
        return out
    num_m_tiles = triton.cdiv(num_rows, tile.block_m)
    num_tiles = num_m_tiles * num_n_tiles
    partials = counters = None
    if tile.split_k > 1:
        size = tile.block_n * tile.block_m * (2 if is_gated else 1)
        partials = torch.empty(
            num_tiles * tile.split_k * size, dtype=torch.float32, device=x.device
        )
        counters = _counters(x.device).take(num_tiles)
    skinny_kernel[(num_tiles, tile.split_k)](
        x, weight, out, bias, residual, x_scales, weight_scales, partials, counters,
        num_rows, width, depth, x.stride(0), weight.stride(0), out.stride(0),
        residual.stride(0) if residual is not None else 0,
        HAS_SCALES=x_scales is not None, BLOCK_M=tile.block_m, GROUP_M=tile.group_m,
        PREFETCH=_prefetch(tile, weight, num_steps * tile.block_k),
        K_WARPS=tile.num_warps if tile.splits_warps else 1,
        SPLIT_K=tile.split_k, NUM_PARTS=tile.num_parts,
        UPCASTS=not x.is_cuda, PRECISION="ieee" if x.dtype == torch.float32 else "tf32", **flags,
    )  # fmt: skip
    return out


def _prefetch(tile: Tile, weight: torch.Tensor, depth: int) -> int:
    """Elements of each row of a program's weights that are asked for ahead: a power of two, 0 where
    it would be less than a line."""
    room = tile.prefetch_bytes // (weight.shape[0] * weight.element_size() * tile.split_k)
    number = min(room, depth)
    line = 128 // weight.element_size()
    return 1 << (number.bit_length() - 1) if number >= line else 0


def choose_tile(
    x: torch.Tensor, weight: torch.Tensor, is_gated: bool, *, exact: bool, forced: bool
) -> Tile | None:
    """None: the library is faster. With `exact` every tile of one weight sums in the same order.

    Args:
        forced: a tile for any number of rows.
    """
    num_rows, depth = x.shape
    width = weight.shape[0] // (2 if is_gated else 1)
    if exact:
        return exact_tile(num_rows, width, depth, is_gated)
    if num_rows > MAX_ROWS and not forced:
        return None
    if x.dtype == torch.float32 and num_rows > 1:  # no matrix unit: all of it is unrolled
        return Tile(
            8 if num_rows <= 8 else 16, 32, 32, split_for(width, 32, depth, 32), num_stages=2
        )
    return skinny_tile(num_rows, width, depth, is_gated)


MAX_ROWS = 64


def skinny_tile(num_rows: int, width: int, depth: int, is_gated: bool) -> Tile:
    """By shape class. Measured on an H100 over the shapes of an 8B and a 0.6B model."""
    if num_rows == 1:
        if is_gated:
            return Tile(0, 4 if depth > 1024 else 8, 512, num_stages=1)
        return Tile(0, 2 if width <= 4096 and depth > 1024 else 4, 1024, num_stages=1)
    block_m = min(64, max(8, triton.next_power_of_2(num_rows)))
    num_programs, most = {8: (384, 8), 16: (384, 8), 32: (256, 4), 64: (128, 4)}[block_m]
    split = split_for(width, 64, depth, 128, num_programs, most)
    num_steps = triton.cdiv(triton.cdiv(depth, 128), split)
    stages = 3 if is_gated else 5 if block_m <= 16 else 4
    return Tile(block_m, 64, 128, split, num_stages=max(2, min(stages, num_steps)))


def exact_tile(num_rows: int, width: int, depth: int, is_gated: bool) -> Tile:
    """Whatever the rows: one matrix instruction (64 rows of the weight, 16 columns), one order of
    columns, one split."""
    num_runs = 1
    while (
        num_runs < 8 and triton.cdiv(width, 64) * num_runs < 132 and depth % (256 * num_runs) == 0
    ):
        num_runs *= 2
    if num_rows <= 16:
        return Tile(16, 64, 128, num_runs, num_stages=4)
    if num_rows <= 64:
        return Tile(64, 64, 128, num_runs, num_stages=4)
    if is_gated:
        return Tile(64, 128, 64, 1, 8, 4, num_parts=num_runs, group_m=16)
    if num_runs > 1:
        return Tile(128, 128, 64, 1, 8, 4, num_parts=num_runs, group_m=8)
    return Tile(256, 128, 64, 1, 8, 3, group_m=8)


def split_for(
    width: int, block_n: int, depth: int, block_k: int, num_programs: int = 264, most: int = 8
) -> int:
    """So that there are enough programs for the device, each with two steps at least."""
    split = 1
    while (
        split < most
        and triton.cdiv(width, block_n) * split < num_programs
        and depth >= 2 * 2 * split * block_k
    ):
        split *= 2
    return split
