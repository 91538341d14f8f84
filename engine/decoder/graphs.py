"""DecodeStep: one decode step on the device, from the rows that the host brought to drawn tokens:
take tokens, embed, layers, logits, draw. DecodeGraphs: the same, captured as CUDA graphs by number
of rows, by width of the block tables, by kind of draw and, where rows may have adapters, with and
without.

All that a step reads and leaves lies in tensors that are made once. Knows no requests and no host
tables. Invariant: a capture runs with no row (positions -1), so it writes no KV. Engine thread
only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from baton_kernels.lora import TILE_ROWS, LoraRows, most_tiles
from baton_kernels.sampling import DrawnTokens, Needs, SamplingRows, draw_tokens
from baton_kernels.step_rows import HEADER_WORDS, NUM_BUFFERS, begin_step, end_step

from engine.decoder.graph_set import GraphMemory, GraphSet
from engine.decoder.inputs import DecodeInputs
from engine.decoder.rows import Image, Words
from engine.sampling.copies import bring

Decode = Callable[[DecodeInputs], torch.Tensor]
"""Logits [B, V] of a step of one token a row; writes the tokens' KV."""

DrawRows = Callable[[torch.Tensor, SamplingRows, Needs, DrawnTokens], None]
"""(logits, rows, needs, out): leaves in `out` what rows draw; ranks without logits are told."""

FIRST_WIDTH_TOKENS = 4096
_WIDTH_FACTOR = 8
"""Tables are read up to 4096 tokens, 32768, and so on: the programs of a kernel beyond a row's end
leave at once, so finer steps would buy next to nothing and cost a graph for each number of rows."""

_NEEDS: tuple[Needs, ...] = ("truncated", "greedy")
"""Draws that have graphs of their own: a launch that truncates nothing is nearly free beside one
that draws."""


class DecodeStep:
    """See the module. Steps are numbered, from 0 or from `begin_anew` on; step s finds its image in
    buffer s % 2 and leaves its draws there.

    Attributes:
        images: [2, words] int32, pinned where there is a device: for the images of steps
            (engine/decoder/rows.py), which the host writes.
        outputs: [2, HEADER_WORDS + 2 max_rows] int32, pinned: the number of the step; then the
            tokens drawn, and the bits of the best raw logits (float32).
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
        """[max_rows] int32: what the last step drew, by place, where the next one finds it."""
        return self._drawn.token_ids

    def begin_anew(self) -> None:
        """The next step is number 0. Not while one is under way."""
        self._number.zero_()

    def apply(self, changes: Words) -> None:
        """Changes of the tables that an image has no room for: [C, 2]."""
        brought = bring(changes, self._words.device)
        self._block_tables.view(-1).index_copy_(0, brought[:, 0].long(), brought[:, 1].contiguous())

    @property
    def takes_adapters(self) -> bool:
        """Rows may have adapters."""
        return self._image.num_slots > 0

    def compute(
        self, num_rows: int, num_blocks: int, needs: Needs, has_adapters: bool = False
    ) -> None:
        """The next step: its image is in its buffer, and stays there until the step is over.

        Args:
            num_rows: of the fields that are read, those without a row included.
            num_blocks: of the tables' width that is read.
            needs: the most that a row's draw asks for.
            has_adapters: False: no row has one.
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
    """Numbers of rows that have a graph, ascending: 1, 2, 4, 8, then steps of about an eighth."""
    buckets = [size for size in (1, 2, 4, 8) if size < max_rows]
    size = 16
    while size < max_rows:
        buckets.append(size)
        size += 8 if size < 64 else 16 if size < 256 else 32
    return [*buckets, max_rows]


def width_buckets(
    table_width: int, block_size: int, first_tokens: int = FIRST_WIDTH_TOKENS
) -> list[int]:
    """Widths of the tables, in blocks, that have a graph, ascending; the first is of so many
    tokens."""
    buckets: list[int] = []
    width = -(-first_tokens // block_size)
    while width < table_width:
        buckets.append(width)
        width *= _WIDTH_FACTOR
    return [*buckets, table_width]


class Bucket(NamedTuple):
    """What one graph was captured for."""

    num_rows: int
    num_blocks: int
    needs: Needs
    has_adapters: bool = False


class DecodeGraphs:
    """See the module.

    Args:
        uses_graphs: False: every step is launched kernel by kernel, as on CPU.
        first_width_tokens: that the narrowest tables have room for.
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
    def buckets(self) -> list[Bucket]:
        """Large to small."""
        return [
            Bucket(num_rows, width, needs, has_adapters)
            for width in reversed(self._width_buckets)
            for num_rows in reversed(self._row_buckets)
            for needs in _NEEDS
            for has_adapters in ((True, False) if self._step.takes_adapters else (False,))
        ]

    @property
    def num_shapes(self) -> int:
        """Graphs that `capture` makes."""
        return len(self.buckets)

    def _compute(self, bucket: Bucket) -> None:
        self._step.compute(*bucket)

    @torch.inference_mode()
    def capture(
        self,
        *,
        memory: GraphMemory | None = None,
        on_captured: Callable[[], None] | None = None,
    ) -> None:
        """Every bucket: see GraphSet. Writes no KV where both images are of no rows."""
        self._graphs.capture(self.buckets, memory=memory, on_captured=on_captured)

    def forget(self) -> None:
        """See GraphSet."""
        self._graphs.forget()

    def run(self, num_rows: int, num_blocks: int, needs: Needs, has_adapters: bool = False) -> None:
        """The step, on the current stream, for at least so many rows and so wide tables."""
        self._graphs.run(
            Bucket(
                next(size for size in self._row_buckets if size >= num_rows),
                next(width for width in self._width_buckets if width >= num_blocks),
                "greedy" if needs == "greedy" else "truncated",
                has_adapters,
            )
        )
