"""The chain of linear layers that a decode step runs, with weights of all layers, far more than L2
holds; timed in a CUDA graph. What benchmarks of linear layers are made of.

A launch alone, or many equal ones, would mislead: in a chain of its own kind a kernel fills its
neighbour's gaps as it never does between others (seen: a tile 15 % faster that way was slower in
the step).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from baton_kernels.gpu import linear as gpu
from baton_kernels.gpu.tiles import Product, Tile, choose_tile, takes_norm
from baton_kernels.half_norm import HalfNorm
from baton_kernels.layer_ops import rms_norm, silu_mul


@dataclass(frozen=True)
class Shape:
    """One linear layer."""

    name: str
    width: int
    depth: int
    is_gated: bool = False
    has_norm: bool = False
    has_residual: bool = False

    @property
    def weight_shape(self) -> tuple[int, int]:
        return self.width * (2 if self.is_gated else 1), self.depth

    @property
    def num_bytes(self) -> int:
        return 2 * self.weight_shape[0] * self.depth

    def extras(self, norm: torch.Tensor, residual: torch.Tensor) -> dict[str, Any]:
        """What a decoder asks of this layer."""
        return {
            "residual": residual if self.has_residual else None,
            "norm_weight": norm if self.has_norm else None,
            "activation": "silu_mul" if self.is_gated else None,
        }


def model_shapes(
    name: str, hidden: int, qkv: int, attended: int, inner: int, vocab: int
) -> list[Shape]:
    return [
        Shape(f"{name} qkv", qkv, hidden, has_norm=True),
        Shape(f"{name} o", hidden, attended, has_residual=True),
        Shape(f"{name} gate_up", inner, hidden, is_gated=True, has_norm=True),
        Shape(f"{name} down", hidden, inner, has_residual=True),
        Shape(f"{name} head", vocab, hidden, has_norm=True),
    ]


MODELS = {
    "8B": (32, model_shapes("8B", 4096, 6144, 4096, 14336, 128256)),
    "0.6B": (28, model_shapes("0.6B", 1024, 4096, 2048, 3072, 151936)),
}


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


class Pool:
    """Random weights, handed out as views one after another, round and round."""

    def __init__(self, num_bytes: int) -> None:
        self.numbers = torch.empty(num_bytes // 2, dtype=torch.bfloat16, device="cuda")
        for part in self.numbers.split(1 << 28):
            part.normal_(std=0.02)
        self._next = 0

    def take(self, height: int, depth: int) -> torch.Tensor:
        size = height * depth
        if self._next + size > self.numbers.numel():
            self._next = 0
        first = self._next
        self._next += size
        return self.numbers[first : first + size].view(height, depth)


def seconds_of(chain: Callable[[], None], num_replays: int = 3) -> float:
    """Median seconds of one replay of the chain as a CUDA graph."""
    chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    graph.replay()
    times = []
    for _ in range(num_replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return sorted(times)[len(times) // 2]


def default_tile(shape: Shape, num_rows: int) -> Tile | None:
    """What `linear` takes; None: the library."""
    product = Product(num_rows, shape.weight_shape[0], shape.depth, 2, shape.is_gated)
    return choose_tile(product, exact=False, forced=False)


class Chain:
    """Some layers of one decode step, norms half done between products where tiles can, each launch
    with a tile that can be replaced."""

    def __init__(self, pool: Pool, model: str, num_rows: int, num_layers: int = 8) -> None:
        self.shapes = MODELS[model][1][:-1]
        self.num_layers, self._num_rows = num_layers, num_rows
        self._weights = {
            shape: [pool.take(*shape.weight_shape) for _ in range(self.num_layers)]
            for shape in self.shapes
        }
        self._inputs = {
            shape: torch.randn(num_rows, shape.depth, device="cuda").bfloat16()
            for shape in self.shapes
        }
        self._norms = {
            shape: torch.rand(shape.depth, device="cuda").bfloat16() for shape in self.shapes
        }
        self._outs = {
            shape: torch.randn(num_rows, shape.width, device="cuda").bfloat16()
            for shape in self.shapes
        }

    def _halves(self, tiles: dict[Shape, Tile | None]) -> dict[Shape, HalfNorm]:
        """By who takes it: o's result is gate_up's input, down's is the next qkv's."""
        qkv, o, gate_up, down = self.shapes
        halves = {}
        for maker, taker in ((o, gate_up), (down, qkv)):
            first, second = tiles[maker], tiles[taker]
            if first is None or second is None or first.is_row or second.is_row:
                continue
            scaled = torch.zeros_like(self._outs[maker])
            runs = -(-maker.width // first.block_n)
            squares = torch.ones(runs, self._num_rows, device="cuda")
            halves[taker] = HalfNorm(self._norms[taker], 1e-6, scaled, squares)
        return halves

    def seconds(self, replaced: Shape | None, way: Way | None, *, halves: bool = True) -> float:
        """Of one layer, with `replaced` done that way and the others as `linear` does them."""
        tiles = {shape: default_tile(shape, self._num_rows) for shape in self.shapes}
        if replaced is not None and way is not None:
            tiles[replaced] = way.tile
        ways = {shape: Way(tile) for shape, tile in tiles.items()}
        if self._num_rows == 1:
            for shape in self.shapes:
                product = Product(1, shape.weight_shape[0], shape.depth, 2, shape.is_gated)
                tile = tiles[shape]
                fuses = shape.has_norm and tile is not None and takes_norm(tile, product)
                ways[shape] = Way(tile, fuses_norm=fuses)
            if replaced is not None and way is not None:
                ways[replaced] = way
        takes = self._halves(tiles) if halves else {}
        qkv, o, gate_up, down = self.shapes
        leaves = {o: takes.get(gate_up), down: takes.get(qkv)}

        def chain() -> None:
            for index in range(self.num_layers):
                for shape in self.shapes:
                    x, out, norm = self._inputs[shape], self._outs[shape], self._norms[shape]
                    launch_way(
                        x, self._weights[shape][index], out, norm, shape, ways[shape],
                        takes.get(shape), leaves.get(shape),
                    )  # fmt: skip

        return seconds_of(chain, num_replays=5) / self.num_layers


@dataclass(frozen=True)
class Way:
    """One way to do a linear layer."""

    tile: Tile | None
    """None: the library."""

    fuses_norm: bool = False

    def __str__(self) -> str:
        tile = self.tile
        if tile is None:
            return "library"
        cut = [tile.block_m] if tile.block_m else []
        cut += [tile.block_n, tile.block_k, tile.split_k, tile.num_warps, tile.num_stages]
        text = ",".join(map(str, cut)) + ("w" if tile.splits_warps else "")
        text += "" if tile.prefetch_bytes else " none ahead"
        return text + (" norm" if self.fuses_norm else "")


def launch_way(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    norm: torch.Tensor,
    shape: Shape,
    way: Way,
    half_norm: HalfNorm | None = None,
    leaves: HalfNorm | None = None,
) -> None:
    if shape.has_norm and not way.fuses_norm and half_norm is None:
        x = rms_norm(x, norm, 1e-6)
    if way.tile is not None:
        gpu.launch(
            x,
            weight,
            out,
            way.tile,
            residual=out if shape.has_residual else None,
            norm_weight=norm if shape.has_norm and way.fuses_norm else None,
            norm_eps=1e-6,
            half_norm=half_norm,
            leaves=leaves,
            is_gated=shape.is_gated,
        )
    elif shape.is_gated:
        silu_mul(torch.mm(x, weight.t()), out=out)
    elif shape.has_residual:
        torch.addmm(out, x, weight.t(), out=out)
    else:
        torch.mm(x, weight.t(), out=out)
