"""TreeWords: a step that verifies draft tokens as int32 words: the layout of its parts, padded to
one of a few shapes, and their writing by the host (pinned_words.py) while the device waits.

Words that steps of one form share (the same number of tokens and the same parents in each sequence)
are written for the first of them only. Tables come last and begin at the same word in every shape;
those of missing sequences contain valid but unused entries. It knows no graphs. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from engine.batch import Batch, TokenSpan
from engine.decoder.int32_arrays import table_of
from engine.decoder.pinned_step_buffer import PinnedWords
from engine.decoder.row_table import aligned
from engine.decoder.tree_inputs import put_nodes, width_of

Ints = NDArray[np.int32]


class TreeShape(NamedTuple):
    """The shape that a step is padded to."""

    num_sequences: int
    num_rows: int


class Layout(NamedTuple):
    """The layout of a shape's words: its parts one after the other, ending where the tables of all
    shapes begin, so that one copy contains the whole step."""

    first: int
    parts: dict[str, slice]
    """The words of each part, by name."""


class _Form(NamedTuple):
    """The words that steps of one form share, and the places of the others."""

    counts: Ints
    """[S], the number of tokens of each sequence."""
    depths: Ints
    """[N], each token's position minus that of its sequence's first token."""
    places: Ints
    """[N], each token's slot minus that of its sequence's first token."""
    tokens: Struct
    token_ids: memoryview
    positions: Ints
    slots: Ints
    """[N], the slots, written in each step."""
    num_cached: Ints
    """[S], the numbers of cached tokens, written in each step."""
    tables: Ints
    """[S, W], the block tables, written if they changed."""
    block_ids: list[tuple[int, ...]]
    """[S], the block ids in the tables: if a step's are the same objects as the last one's, writing
    is skipped, which takes longer than the comparison."""


class TreeWords:
    """Writes steps that verify draft tokens into pinned words.

    Args:
        max_num_nodes: largest number of rows of one sequence.
        table_width: largest number of blocks of one sequence.
    Attributes:
        pinned: the words.
        first_table: index of the first word of the tables.
    """

    def __init__(
        self,
        shapes: Sequence[TreeShape],
        *,
        max_num_nodes: int,
        table_width: int,
        device: torch.device,
    ) -> None:
        self._line = width_of(max_num_nodes)
        self._table_width = table_width
        sizes = {shape: self._sizes(shape) for shape in shapes}
        widths = [sum(map(aligned, own.values())) for own in sizes.values()]
        self.first_table = max(widths, default=0)
        self.layouts = {shape: self._layout(own) for shape, own in sizes.items()}
        most = max((shape.num_sequences for shape in shapes), default=0)
        self.pinned = PinnedWords(self.first_table + most * table_width, device)
        self._form: _Form | None = None  # of what `pinned` keeps

    def _sizes(self, shape: TreeShape) -> dict[str, int]:
        """Return the number of words of each part but the tables."""
        num_sequences, num_rows = shape
        return {
            "token_ids": num_rows,
            "positions": num_rows,
            "slots": num_rows,
            "sequence_ids": num_rows,
            "depths": num_rows,
            "num_cached": num_sequences,
            "node_starts": num_sequences + 1,
            "visible": num_rows * self._line // 4,
        }

    def _layout(self, sizes: dict[str, int]) -> Layout:
        first = at = self.first_table - sum(map(aligned, sizes.values()))
        parts: dict[str, slice] = {}
        for name, size in sizes.items():
            parts[name] = slice(at, at + size)
            at += aligned(size)
        return Layout(first, parts)

    def blank(self, shape: TreeShape) -> None:
        """Write a step without rows."""
        self.pinned.begin(0, len(self.pinned.words))  # the next step finds no form of before
        self.pinned.words[self.layouts[shape].parts["positions"]] = -1

    def put(self, shape: TreeShape, batch: Batch) -> None:
        """Write a step. Args: shape: a shape that it fits."""
        spans = batch.spans
        form = shape, [(span.num_tokens, span.branches) for span in spans]
        first = self.layouts[shape].first
        self.pinned.begin(first, self.first_table + len(spans) * self._table_width - first, form)
        own = self._form
        if own is None or not self.pinned.is_kept:
            own = self._form = self._put_form(shape, spans)
        own.tokens.pack_into(own.token_ids, 0, *batch.token_ids)
        starts: int | Ints
        if len(spans) == 1:
            starts = own.num_cached[0] = spans[0].start
        else:
            own.num_cached[:] = [span.start for span in spans]
            starts = own.num_cached.repeat(own.counts)
        np.add(own.depths, starts, out=own.positions)
        np.add(own.places, starts, out=own.slots)
        for index, span in enumerate(spans):
            if own.block_ids[index] != span.block_ids:
                own.tables[index, : len(span.block_ids)] = table_of(span.block_ids)
                own.block_ids[index] = span.block_ids

    def _put_form(self, shape: TreeShape, spans: Sequence[TokenSpan]) -> _Form:
        """Write the words that steps of this form share into zeroed words."""
        words = self.pinned.words.numpy()
        parts = {name: words[part] for name, part in self.layouts[shape].parts.items()}
        counts = np.array([span.num_tokens for span in spans], dtype=np.int32)
        ends = counts.cumsum(dtype=np.int32)
        num_rows = int(ends[-1])
        numbers = np.arange(num_rows, dtype=np.int32)
        lines = parts["visible"].view(np.bool_)[: num_rows * self._line]
        put_nodes(spans, parts["depths"], lines.reshape(num_rows, self._line))
        parts["positions"][num_rows:] = -1
        parts["sequence_ids"][:num_rows] = numbers[: len(spans)].repeat(counts)
        parts["node_starts"][1:] = num_rows
        parts["node_starts"][1 : len(spans) + 1] = ends
        tables = words[self.first_table :][: len(spans) * self._table_width]
        return _Form(
            counts=counts,
            depths=parts["depths"][:num_rows],
            places=numbers - (ends - counts).repeat(counts),
            tokens=Struct(f"={num_rows}i"),
            token_ids=parts["token_ids"][:num_rows].data,
            positions=parts["positions"][:num_rows],
            slots=parts["slots"][:num_rows],
            num_cached=parts["num_cached"][: len(spans)],
            tables=tables.reshape(len(spans), self._table_width),
            block_ids=[()] * len(spans),
        )
