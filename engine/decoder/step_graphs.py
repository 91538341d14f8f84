"""StepGraphs: the CUDA graphs of plain steps of few tokens: prompts in small chunks, decodes that
are not launched ahead, and both together. Launched kernel by kernel, such a step takes the host
longer than the device.

A step is padded to one of a few shapes: a number of rows of one token, a number of rows of chunks,
and a fixed number of chunks. Padding has position -1: it writes no KV, and its results are not
read. A step that fits no shape is not computed here. It knows no requests. Invariant: a capture
writes no KV. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from engine.batch import Batch, TokenSpan
from engine.decoder.graph_set import GraphMemory, GraphSet
from engine.decoder.inputs import MixedInputs, fill_drawn
from engine.decoder.int32_arrays import int32s, table_of
from engine.decoder.pinned_step_buffer import PinnedTurns
from engine.decoder.row_table import aligned
from engine.errors import IntegrityError

Forward = Callable[[MixedInputs], torch.Tensor]
"""Computes logits [R, V] of a step, and writes the tokens' KV."""

Parts = dict[str, NDArray[np.int32]]

_SINGLES = (0, 8, 32, 64, 128, 256, 512, 1024)
_CHUNK_TOKENS = (
    *(0, 64, 128, 256, 384, 512, 768, 1024),
    *(1536, 2048, 3072, 4096, 6144, 8192),
)
"""Numbers of chunk rows that have shapes, up to the number at which the model is large enough that
they do not pay (`max_chunk_tokens`)."""

_MANY_TOKENS = 512
"""Number of chunk rows from which padding with a few rows costs little, so that only every other
number of singles has a shape; from twice as many, only none and all."""

_HOST_FLOPS = 15e12
"""Number of operations that the device computes while the host launches one step: 20 ms at 750
TFLOP/s. A larger step gains nothing from a graph, and loses by its padding. Measured: launches
take 12 to 33 ms per step."""

_NUM_CHUNKS = 16
"""Number of chunks of every shape with chunks: few prompts share a small step, and a missing chunk
costs programs that return at once."""

_MAX_CONTEXT_TOKENS = 16384
"""Largest number of tokens of a sequence in a step of a graph, since tables are copied whole."""


class StepShape(NamedTuple):
    """The shape that a graph is captured for."""

    num_singles: int
    num_chunk_tokens: int

    @property
    def num_chunks(self) -> int:
        return _NUM_CHUNKS if self.num_chunk_tokens else 0

    @property
    def num_rows(self) -> int:
        return self.num_singles + self.num_chunk_tokens

    @property
    def num_sequences(self) -> int:
        return self.num_singles + self.num_chunks

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of each part of MixedInputs but the tables."""
        return {
            "token_ids": self.num_rows,
            "positions": self.num_rows,
            "sequence_ids": self.num_rows,
            "ends": self.num_singles,
            "query_starts": self.num_chunks + 1,
            "starts": self.num_chunks,
            "draw_indices": self.num_sequences,
        }


class StepGraphs:
    """The CUDA graphs of small plain steps.

    Args:
        forward: the decoder's forward pass.
        max_singles: largest number of sequences of a step.
        max_tokens: largest number of tokens of chunks in a step.
        uses_graphs: False: padded steps are launched kernel by kernel.
    """

    def __init__(
        self,
        forward: Forward,
        *,
        max_singles: int,
        max_tokens: int,
        context_window: int,
        block_size: int,
        device: torch.device,
        uses_graphs: bool = True,
    ) -> None:
        self._forward = forward
        self._is_cuda = device.type == "cuda"
        self._table_width = aligned(-(-min(context_window, _MAX_CONTEXT_TOKENS) // block_size))
        self._max_end = self._table_width * block_size
        self.shapes = step_shapes(max_singles, max_tokens)
        # Each part begins at the same word in every shape, so that nothing of one shape's step is
        # taken for another part of another's.
        self._firsts: dict[str, int] = {}
        num_words = 0
        for name in self.shapes[0].sizes:
            self._firsts[name] = num_words
            num_words += aligned(max(shape.sizes[name] for shape in self.shapes))
        self._first_table = num_words
        num_words += max(shape.num_sequences for shape in self.shapes) * self._table_width
        self._words = torch.zeros(num_words, dtype=torch.int32, device=device)
        self._pinned = PinnedTurns(device)
        self._graphs = GraphSet(self._compute, uses_graphs=uses_graphs and self._is_cuda)
        self._logits: torch.Tensor | None = None  # of all shapes: kept apart they would be many

    @property
    def num_words(self) -> int:
        """Largest number of int32 that a step copies to the device."""
        return len(self._words)

    def reserve(self) -> None:
        """Allocate the pinned memory of the largest step now, since allocation makes the host wait
        for the device."""
        self._pinned.reserve(self.num_words)

    @torch.inference_mode()
    def capture(
        self,
        *,
        memory: GraphMemory | None = None,
        on_captured: Callable[[], None] | None = None,
    ) -> None:
        """Capture all graphs (GraphSet.capture)."""
        self._words.zero_()
        self._part(self._words, "positions", self.shapes[0]).fill_(-1)
        self._graphs.capture(self.shapes, memory=memory, on_captured=on_captured)

    def forget(self) -> None:
        """Free the graphs (GraphSet.forget)."""
        self._graphs.forget()

    def shape_of(self, batch: Batch) -> StepShape | None:
        """Return the smallest shape that a step fits; None if there is none.

        Args: batch: spans of one token first (`singles_first`).
        """
        if self._logits is None:  # nothing is captured yet
            return None
        num_singles = sum(span.num_tokens == 1 for span in batch.spans)
        num_chunk_tokens = len(batch.token_ids) - num_singles
        num_chunks = len(batch.spans) - num_singles
        for span in batch.spans:
            if not 0 < len(span.block_ids) <= self._table_width or span.adapter:
                return None
        fitting = [
            shape
            for shape in self.shapes
            if shape.num_singles >= num_singles
            and shape.num_chunk_tokens >= num_chunk_tokens
            and shape.num_chunks >= num_chunks
            and shape.num_sequences >= len(batch.draw_indices)
        ]
        return min(fitting, key=lambda shape: shape.num_rows, default=None)

    @torch.inference_mode()
    def run(
        self, shape: StepShape, batch: Batch, drawn: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute a step. Returns: logits [R, V] of its `draw_indices`, valid until the next step.

        Args:
            shape: `shape_of` the batch.
            drawn: tokens of the launch before, for fill_drawn; None: all token ids are valid.
        """
        words = self._put(shape, batch)
        self._pinned.send(self._words[: len(words)])
        if drawn is not None:
            fill_drawn(self._part(self._words, "token_ids", shape), drawn)
        self._graphs.run(shape)
        if self._logits is None:
            raise IntegrityError("a step that was not captured")
        return self._logits[: len(batch.draw_indices)]

    def _part(self, words: torch.Tensor, name: str, shape: StepShape) -> torch.Tensor:
        first = self._firsts[name]
        return words[first : first + shape.sizes[name]]

    def _tables(self, words: torch.Tensor, shape: StepShape) -> torch.Tensor:
        """Return the block tables in `words`, [sequences, width]."""
        end = self._first_table + shape.num_sequences * self._table_width
        return words[self._first_table : end].view(shape.num_sequences, self._table_width)

    def _put(self, shape: StepShape, batch: Batch) -> NDArray[np.int32]:
        """Write the padded step into pinned memory. Returns: its words."""
        words = self._pinned.begin(self._first_table + shape.num_sequences * self._table_width)
        parts: Parts = {
            name: words[self._firsts[name] :][:size] for name, size in shape.sizes.items()
        }
        tables = words[self._first_table :].reshape(shape.num_sequences, self._table_width)
        num_singles = sum(span.num_tokens == 1 for span in batch.spans)
        singles, chunks = batch.spans[:num_singles], batch.spans[num_singles:]
        parts["positions"][:] = -1
        token_ids = int32s(batch.token_ids)
        parts["token_ids"][:num_singles] = token_ids[:num_singles]
        _put_singles(parts, singles)
        if shape.num_chunks:
            _put_chunks(parts, chunks, token_ids[num_singles:], shape.num_singles)
        for first, spans in ((0, singles), (shape.num_singles, chunks)):
            for row, span in enumerate(spans, first):
                tables[row, : len(span.block_ids)] = table_of(span.block_ids)
        gap = shape.num_singles - num_singles
        rows = int32s(batch.draw_indices)
        parts["draw_indices"][: len(rows)] = np.where(rows < num_singles, rows, rows + gap)
        return words

    def _compute(self, shape: StepShape) -> None:
        logits = self._forward(
            MixedInputs(
                **{name: self._part(self._words, name, shape) for name in shape.sizes},
                block_tables=self._tables(self._words, shape),
                num_singles=shape.num_singles,
                max_query_len=shape.num_chunk_tokens,
                max_end=self._max_end if shape.num_chunks else 0,
                slots=None,
                trees=None,
            )
        )
        if self._logits is None:  # not within a capture: a run goes before it
            most = max(shape.num_sequences for shape in self.shapes)
            self._logits = logits.new_empty(most, logits.shape[1])
        self._logits[: len(logits)].copy_(logits)


def _put_singles(parts: Parts, singles: Sequence[TokenSpan]) -> None:
    starts = [span.start for span in singles]
    parts["positions"][: len(singles)] = starts
    parts["sequence_ids"][: len(singles)] = range(len(singles))
    parts["ends"][: len(singles)] = starts
    parts["ends"][: len(singles)] += 1


def _put_chunks(
    parts: Parts, chunks: Sequence[TokenSpan], token_ids: NDArray[np.int32], first_row: int
) -> None:
    """Write the rows of chunks, from `first_row` on, and their sequences. Missing chunks begin and
    end after the last one."""
    parts["token_ids"][first_row : first_row + len(token_ids)] = token_ids
    row = first_row
    for index, span in enumerate(chunks):
        end = row + span.num_tokens
        parts["positions"][row:end] = np.arange(span.start, span.end)
        parts["sequence_ids"][row:end] = first_row + index
        parts["starts"][index] = span.start
        parts["query_starts"][index + 1] = end - first_row
        row = end
    parts["query_starts"][len(chunks) + 1 :] = len(token_ids)


def max_chunk_tokens(num_parameters: int) -> int:
    """Return the number of tokens of a step that the host launches slower than the device computes.

    Args: num_parameters: number of parameters that every token is multiplied with.
    """
    return int(_HOST_FLOPS / (2 * num_parameters)) // 64 * 64


def step_shapes(max_singles: int, max_tokens: int) -> list[StepShape]:
    """Return all shapes to capture, the largest first."""
    singles = sorted({min(count, max_singles) for count in _SINGLES})
    tokens = sorted({min(count, max_tokens) for count in _CHUNK_TOKENS})
    shapes = []
    for num_tokens in tokens:
        beside = singles
        if num_tokens > 2 * _MANY_TOKENS:
            beside = singles[:1] + singles[-1:]
        elif num_tokens > _MANY_TOKENS:
            beside = sorted({*singles[::2], singles[-1]})
        shapes += [StepShape(count, num_tokens) for count in beside if count or num_tokens]
    return sorted(shapes, key=lambda shape: shape.num_rows, reverse=True)
