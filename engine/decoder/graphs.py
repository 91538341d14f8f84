"""DecodeStep: one decode step on the device, from the rows in the host's image to sampled tokens.
DecodeGraphs: the same, captured as CUDA graphs by number of rows, width of the block tables,
kind of sampling and, if rows may have adapters, with and without them.

A step's inputs and outputs are tensors that are allocated once. They know no requests and no tables
of the host. Invariant: a capture runs without rows (positions -1), so that it writes no KV. Engine
thread only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from baton_kernels.decode_step_rows import HEADER_WORDS, NUM_BUFFERS, begin_step, end_step
from baton_kernels.lora import TILE_ROWS, LoraRows, most_tiles
from baton_kernels.sampling import DrawnTokens, Needs, SamplingRows, draw_tokens

from engine.decoder.graph_set import GraphMemory, GraphSet
from engine.decoder.inputs import DecodeInputs
from engine.decoder.row_table import Image, Words
from engine.sampling.host_device_copies import bring

Decode = Callable[[DecodeInputs], torch.Tensor]
"""Computes logits [B, V] of a step of one token per row, and writes the tokens' KV."""

DrawRows = Callable[[torch.Tensor, SamplingRows, Needs, DrawnTokens], None]
"""Samples rows: (logits, rows, needs, out) -> None, with the results in `out`. Ranks without logits
receive the tokens."""

FIRST_WIDTH_TOKENS = 4096
_WIDTH_FACTOR = 8
"""Ratio of successive table widths: 4096 tokens, 32768, and so on. Programs of a kernel beyond a
row's end return at once, so that finer steps would gain almost nothing and need a graph for each
number of rows."""

_NEEDS: tuple[Needs, ...] = ("truncated", "greedy")
"""The kinds of sampling that have graphs of their own: a greedy step costs almost nothing compared
to one that samples."""


class DecodeStep:
    """One decode step on the device.

    Steps are numbered, from 0 at start and after `begin_anew`; step s reads its image from buffer s
    % 2 and writes its results to output buffer s % 2.

    Attributes:
        images: [2, words] int32, pinned with CUDA: the images of steps
            (engine/decoder/row_table.py), which the host writes.
        outputs: [2, HEADER_WORDS + 2 max_rows] int32, pinned: the number of the step, the sampled
            tokens, and the bits of the greatest raw logits (float32).
    """

    def __init__(
        self,
        decode: Decode,
        image: Image,
        *,
        table_width: int,
        vocab_size: int,
        device: torch.device,
        draw: DrawRows | None = None,
    ) -> None:
        self._decode = decode
        self._draw = draw or _draw
        self._vocab_size = vocab_size
        self._image = image
        num_rows, is_cuda = image.max_rows, device.type == "cuda"
        num_outputs = HEADER_WORDS + 2 * num_rows
        self.images = torch.zeros(
            NUM_BUFFERS, image.num_words, dtype=torch.int32, pin_memory=is_cuda
        )
        self.outputs = torch.zeros(NUM_BUFFERS, num_outputs, dtype=torch.int32, pin_memory=is_cuda)
        self._number = torch.zeros(1, dtype=torch.int32, device=device)
        self._words = torch.zeros(image.first_change, dtype=torch.int32, device=device)
        self._tokens_and_bests = torch.zeros(2, num_rows, dtype=torch.int32, device=device)
        token_ids, bests = self._tokens_and_bests
        self._drawn = DrawnTokens(token_ids, bests.view(torch.float32))
        self._token_ids = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self._block_tables = torch.zeros(num_rows, table_width, dtype=torch.int32, device=device)
        self._positions = self._field("positions")
        self._tiles = self._field("tiles").view(-1, TILE_ROWS)
        self._tile_slots = self._field("tile_slots")
        self._sampling = SamplingRows(
            temperature=self._field("temperature"),
            seed_keys=self._field("seed_keys"),
            positions=self._field("draw_positions"),
            top_k=self._field("top_k"),
            top_p=self._field("top_p"),
            min_p=self._field("min_p"),
        )

    def _field(self, name: str) -> torch.Tensor:
        place, dtype = self._image.field(name)
        return self._words[place].view(getattr(torch, dtype))

    @property
    def last_drawn(self) -> torch.Tensor:
        """The tokens that the last step sampled, by place, [max_rows] int32; the next step reads
        them."""
        return self._drawn.token_ids

    def begin_anew(self) -> None:
        """Number the next step 0. Not while a step is under way."""
        self._number.zero_()

    def apply(self, changes: Words) -> None:
        """Apply changes of the block tables for which an image has no room: [C, 2]."""
        brought = bring(changes, self._words.device)
        self._block_tables.view(-1).index_copy_(0, brought[:, 0].long(), brought[:, 1].contiguous())

    @property
    def takes_adapters(self) -> bool:
        """Whether rows may have adapters."""
        return self._image.num_slots > 0

    def compute(
        self, num_rows: int, num_blocks: int, needs: Needs, has_adapters: bool = False
    ) -> None:
        """Compute the next step, whose image must stay in its buffer until the step is done.

        Args:
            num_rows: number of places that are read, empty ones included.
            num_blocks: number of columns of the block tables that are read.
            needs: the most demanding kind of sampling of the rows.
            has_adapters: False: no row has an adapter.
        """
        token_ids = self._token_ids[:num_rows]
        begin_step(
            self.images,
            self._number,
            self._tokens_and_bests,
            self._words,
            token_ids,
            self._block_tables,
            layout=self._image.layout,
            vocab_size=self._vocab_size,
        )
        logits = self._decode(
            DecodeInputs(
                token_ids,
                self._positions[:num_rows],
                self._block_tables[:num_rows, :num_blocks],
                self._adapted(num_rows) if has_adapters else None,
            )
        )
        self._draw(
            logits,
            SamplingRows(*(field[:num_rows] for field in self._sampling)),
            needs,
            DrawnTokens(*(each[:num_rows] for each in self._drawn)),
        )
        end_step(self._tokens_and_bests, self._number, self.outputs)

    def _adapted(self, num_rows: int) -> LoraRows:
        num_tiles = most_tiles(num_rows, self._image.num_slots)
        return LoraRows(self._tiles[:num_tiles], self._tile_slots[:num_tiles])


def _draw(logits: torch.Tensor, rows: SamplingRows, needs: Needs, out: DrawnTokens) -> None:
    draw_tokens(logits, rows, needs=needs, out=out)


def row_buckets(max_rows: int) -> list[int]:
    """Return the numbers of rows that have a graph, ascending: 1, 2, 4, 8, then steps of about an
    eighth."""
    buckets = [size for size in (1, 2, 4, 8) if size < max_rows]
    size = 16
    while size < max_rows:
        buckets.append(size)
        size += 8 if size < 64 else 16 if size < 256 else 32
    return [*buckets, max_rows]


def width_buckets(
    table_width: int, block_size: int, first_tokens: int = FIRST_WIDTH_TOKENS
) -> list[int]:
    """Return the widths of block tables, in blocks, that have a graph, ascending; the first has
    room for `first_tokens` tokens."""
    buckets: list[int] = []
    width = -(-first_tokens // block_size)
    while width < table_width:
        buckets.append(width)
        width *= _WIDTH_FACTOR
    return [*buckets, table_width]


class GraphShape(NamedTuple):
    """The shape that one graph is captured for."""

    num_rows: int
    num_blocks: int
    needs: Needs
    has_adapters: bool = False


class DecodeGraphs:
    """The CUDA graphs of a DecodeStep.

    Args:
        uses_graphs: False: every step is launched kernel by kernel, as on CPU.
        first_width_tokens: number of tokens for which the narrowest tables have room.
    """

    def __init__(
        self,
        step: DecodeStep,
        *,
        max_rows: int,
        table_width: int,
        block_size: int,
        uses_graphs: bool,
        first_width_tokens: int = FIRST_WIDTH_TOKENS,
    ) -> None:
        self._step = step
        self._row_buckets = row_buckets(max_rows)
        self._width_buckets = width_buckets(table_width, block_size, first_width_tokens)
        self._graphs = GraphSet(self._compute, uses_graphs=uses_graphs)

    @property
    def buckets(self) -> list[GraphShape]:
        """Return all shapes, from large to small."""
        return [
            GraphShape(num_rows, width, needs, has_adapters)
            for width in reversed(self._width_buckets)
            for num_rows in reversed(self._row_buckets)
            for needs in _NEEDS
            for has_adapters in ((True, False) if self._step.takes_adapters else (False,))
        ]

    @property
    def num_shapes(self) -> int:
        """Number of graphs that `capture` makes."""
        return len(self.buckets)

    def _compute(self, bucket: GraphShape) -> None:
        self._step.compute(*bucket)

    @torch.inference_mode()
    def capture(
        self,
        *,
        memory: GraphMemory | None = None,
        on_captured: Callable[[], None] | None = None,
    ) -> None:
        """Capture every shape (GraphSet.capture). Writes no KV if both images have no rows."""
        self._graphs.capture(self.buckets, memory=memory, on_captured=on_captured)

    def forget(self) -> None:
        """Free the graphs (GraphSet.forget)."""
        self._graphs.forget()

    def run(self, num_rows: int, num_blocks: int, needs: Needs, has_adapters: bool = False) -> None:
        """Compute the step on the current stream, with the smallest shape for these numbers of rows
        and blocks."""
        self._graphs.run(
            GraphShape(
                next(size for size in self._row_buckets if size >= num_rows),
                next(width for width in self._width_buckets if width >= num_blocks),
                "greedy" if needs == "greedy" else "truncated",
                has_adapters,
            )
        )
