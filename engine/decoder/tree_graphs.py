"""TreeGraphs: steps that verify guesses, as CUDA graphs: every sequence has a few rows of its own,
one where nothing was guessed for it, each with logits.

A step is padded to one of a few shapes: so many sequences, so many rows in all; which row is whose,
and what it sees, lies in tensors on the device. Rows of padding have position -1 and belong to no
sequence: they write no KV, and nothing reads theirs. A step that fits no shape is not taken. Knows
no requests. Invariant: a capture writes no KV. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from struct import pack_into
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from engine.batch import Batch, Span
from engine.decoder.graph_set import GraphMemory, GraphSet
from engine.decoder.inputs import MixedInputs
from engine.decoder.numbers import table_of
from engine.decoder.pinned_words import PinnedWords
from engine.decoder.rows import aligned
from engine.decoder.shape import DecoderShape
from engine.decoder.tree_inputs import TreeInputs, as_lines, put_nodes, width_of
from engine.errors import IntegrityError

Forward = Callable[[MixedInputs], torch.Tensor]
"""Logits [R, V] of a step; writes the tokens' KV."""

_SEQUENCES = (1, 4, 16, 64, 256, 1024)
"""What attention is split for: a step of fewer has programs that leave at once."""

_ROWS = (
    *(16, 24, 32, 40, 48, 64, 80, 96, 128, 192, 256, 320, 384),
    *(512, 576, 640, 768, 1024),
)
"""Products of up to 16 rows cost the same; of up to 64 each row more is read from L2 once for every
64 rows of a weight, and attention is cut for so many nodes. Steps of more rows than the last are
the device's time, not the host's, and their logits would take much memory."""


_MAX_EXACT_PART_BYTES = 64 << 20
_EXACT_ROWS, _SPLIT_POSITIONS = 64, 512
"""Of gpu/attention_tiles.py, which only a machine with Triton can import."""


class TreeShape(NamedTuple):
    """What a graph is captured for."""

    num_sequences: int
    num_rows: int


_MAX_COPIED_TABLES = 16384
"""Words (64 KiB) of tables that a step's graph copies, those of sequences that are not there
included: 3 us. Where a shape has more, as many as there are sequences are copied before it."""


class _Layout(NamedTuple):
    """Where a shape's step lies among the words: its parts one after the other, and the last of
    them ends where the tables of all shapes begin, so that one copy brings what a step has."""

    first: int
    parts: dict[str, slice]
    """By name: words, counted from the first."""


class TreeGraphs:
    """See the module.

    Args:
        forward: the decoder's.
        max_sequences: most sequences of a step.
        max_num_nodes: most rows of one sequence in a step that is taken, its last token included.
        max_rows: most rows of a step that is taken.
        max_trees: shapes of more sequences are attended as chunks, and take no tree (the same
            bits where every bit is promised); None: all shapes take trees.
        uses_graphs: False: padded steps are launched kernel by kernel.
    """

    def __init__(
        self,
        forward: Forward,
        *,
        max_sequences: int,
        max_num_nodes: int,
        max_rows: int,
        context_window: int,
        block_size: int,
        device: torch.device,
        max_trees: int | None = None,
        uses_graphs: bool = True,
    ) -> None:
        self._forward = forward
        self._max_trees = max_trees
        self._is_cuda = device.type == "cuda"
        self.max_num_nodes = max_num_nodes
        self.shapes = tree_shapes(max_sequences, max_num_nodes, max_rows)
        self._line = width_of(max_num_nodes)
        self._block_size = block_size
        self._table_width = aligned(-(-context_window // block_size))
        # The tables begin at the same word in every shape, and come last: what lies in those of
        # sequences that are not there was some sequence's.
        widths = [sum(map(aligned, self._sizes(shape).values())) for shape in self.shapes]
        self._first_table = max(widths, default=0)
        self._layouts = {shape: self._layout(self._sizes(shape)) for shape in self.shapes}
        most = max((shape.num_sequences for shape in self.shapes), default=0)
        num_words = self._first_table + most * self._table_width
        self._words = torch.zeros(num_words, dtype=torch.int32, device=device)
        self._pinned = PinnedWords(num_words, device)
        most_rows = max((shape.num_rows for shape in self.shapes), default=0)
        self._numbers = np.arange(most_rows, dtype=np.int32)
        self._graphs = GraphSet(self._compute, uses_graphs=uses_graphs and self._is_cuda)
        self._logits: torch.Tensor | None = None  # of all shapes: kept apart they would be many

    def _sizes(self, shape: TreeShape) -> dict[str, int]:
        """Words of each part but the tables."""
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

    def _layout(self, sizes: dict[str, int]) -> _Layout:
        parts: dict[str, slice] = {}
        at = 0
        for name, size in sizes.items():
            parts[name] = slice(at, at + size)
            at += aligned(size)
        return _Layout(self._first_table - at, parts)

    @torch.inference_mode()
    def capture(
        self,
        *,
        memory: GraphMemory | None = None,
        on_captured: Callable[[], None] | None = None,
    ) -> None:
        """See GraphSet."""
        if not self.shapes:
            return
        self._graphs.capture(self._blank_shapes(), memory=memory, on_captured=on_captured)

    def _blank_shapes(self) -> Iterator[TreeShape]:
        """Each when a step without rows lies where its own are looked for."""
        for shape in self.shapes:
            layout = self._layouts[shape]
            self._pinned.words[layout.first :][layout.parts["positions"]] = -1
            yield shape
            if self._is_cuda:  # its run has read them
                torch.cuda.current_stream(self._words.device).synchronize()
            self._pinned.words.zero_()

    def forget(self) -> None:
        """See GraphSet."""
        self._graphs.forget()

    def shape_of(self, batch: Batch) -> TreeShape | None:
        """The smallest shape that a step fits; None: it is not taken."""
        if self._logits is None:  # nothing is captured yet
            return None
        for span in batch.spans:
            if not 0 < len(span.block_ids) <= self._table_width or span.adapter:
                return None
            if span.num_tokens > self.max_num_nodes:
                return None
        num_sequences, num_rows = len(batch.spans), len(batch.token_ids)
        takes_chunks = self._max_trees is None or not any(span.is_tree for span in batch.spans)
        for shape in reversed(self.shapes):  # the smallest first
            if shape.num_rows >= num_rows and shape.num_sequences >= num_sequences:
                if takes_chunks or not self._is_of_chunks(shape):
                    return shape
        return None

    def run(self, shape: TreeShape, batch: Batch) -> torch.Tensor:
        """Logits [R, V] of the step's draws; they hold until the next step.

        Args:
            shape: `shape_of` the batch.
        """
        self._put(shape, batch)
        if not self._copies_tables(shape):
            self._copy(self._first_table, len(batch.spans) * self._table_width)
        self._graphs.run(shape)
        self._pinned.on_read()
        if self._logits is None:
            raise IntegrityError("a step that was not captured")
        draws = batch.draw_indices
        if not draws or draws[-1] == len(draws) - 1:  # they ascend: every row's, up to there
            return self._logits[: len(draws)]
        rows = torch.tensor(draws, dtype=torch.int32, pin_memory=self._is_cuda)
        return self._logits.index_select(0, rows.to(self._logits.device, non_blocking=True))

    def _part(self, name: str, shape: TreeShape) -> torch.Tensor:
        layout = self._layouts[shape]
        return self._words[layout.first :][layout.parts[name]]

    def _copies_tables(self, shape: TreeShape) -> bool:
        return shape.num_sequences * self._table_width <= _MAX_COPIED_TABLES

    def _copy(self, first: int, num_words: int) -> None:
        """From the host."""
        here = slice(first, first + num_words)
        self._words[here].copy_(self._pinned.words[here], non_blocking=True)

    def _put(self, shape: TreeShape, batch: Batch) -> None:
        """Write the padded step where it is copied from."""
        spans, num_rows = batch.spans, len(batch.token_ids)
        layout, width = self._layouts[shape], self._table_width
        tables = self._first_table - layout.first
        form = shape, [(span.num_tokens, span.branches) for span in spans]
        host = self._pinned.begin(layout.first, tables + len(spans) * width, form)
        token_ids, positions, slots, sequence_ids, depths, num_cached, node_starts, visible = (
            layout.parts.values()
        )
        if not self._pinned.is_kept:
            self._put_form(
                spans,
                host[positions],
                host[sequence_ids],
                host[depths],
                host[node_starts],
                host[visible],
            )
        pack_into(f"={num_rows}i", host, 4 * token_ids.start, *batch.token_ids)
        own_positions, own_slots = host[positions][:num_rows], host[slots][:num_rows]
        own_depths, numbers = host[depths][:num_rows], self._numbers[:num_rows]
        if len(spans) == 1:  # a third of numpy's calls
            start = spans[0].start
            host[num_cached.start] = start
            np.add(own_depths, start, out=own_positions)
            np.add(numbers, start, out=own_slots)
        else:
            counts = np.array([span.num_tokens for span in spans], dtype=np.int32)
            starts = np.array([span.start for span in spans], dtype=np.int32)
            host[num_cached][: len(spans)] = starts
            np.add(own_depths, starts.repeat(counts), out=own_positions)
            np.add(numbers, (starts - counts.cumsum() + counts).repeat(counts), out=own_slots)
        for span in spans:
            host[tables : tables + len(span.block_ids)] = table_of(span.block_ids)
            tables += width

    def _put_form(
        self,
        spans: Sequence[Span],
        positions: NDArray[np.int32],
        sequence_ids: NDArray[np.int32],
        depths: NDArray[np.int32],
        node_starts: NDArray[np.int32],
        visible: NDArray[np.int32],
    ) -> None:
        """What steps of one form share, wherever their sequences stand: into words that are 0."""
        counts = np.array([span.num_tokens for span in spans], dtype=np.int32)
        num_rows = int(counts.sum())
        lines = visible.view(np.bool_)[: num_rows * self._line]
        put_nodes(spans, depths, lines.reshape(num_rows, self._line))
        positions[num_rows:] = -1
        sequence_ids[:num_rows] = self._numbers[: len(spans)].repeat(counts)
        node_starts[1:] = num_rows
        node_starts[1 : len(spans) + 1] = counts.cumsum()

    def _is_of_chunks(self, shape: TreeShape) -> bool:
        return self._max_trees is not None and shape.num_sequences > self._max_trees

    def _compute(self, shape: TreeShape) -> None:
        first, num_words = self._layouts[shape].first, self._first_table
        if self._copies_tables(shape):
            num_words += shape.num_sequences * self._table_width
        self._copy(first, num_words - first)
        parts = {name: self._part(name, shape) for name in self._layouts[shape].parts}
        none = parts["num_cached"][:0]
        tables = self._words[self._first_table :].view(-1, self._table_width)
        num_nodes = min(self.max_num_nodes, shape.num_rows)
        is_of_chunks = self._is_of_chunks(shape)
        trees = None
        if not is_of_chunks:
            visible = as_lines(parts["visible"], shape.num_rows)
            trees = TreeInputs(
                parts["num_cached"], parts["node_starts"], parts["depths"], visible, num_nodes
            )
        logits = self._forward(
            MixedInputs(
                token_ids=parts["token_ids"],
                positions=parts["positions"],
                sequence_ids=parts["sequence_ids"],
                block_tables=tables[: shape.num_sequences],
                ends=none,
                query_starts=parts["node_starts"] if is_of_chunks else none,
                starts=parts["num_cached"] if is_of_chunks else none,
                draw_indices=None,
                num_singles=0,
                max_query_len=num_nodes if is_of_chunks else 0,
                max_end=self._table_width * self._block_size if is_of_chunks else 0,
                slots=parts["slots"],
                trees=trees,
            )
        )
        if self._logits is None:  # not within a capture: a run goes before it
            self._logits = logits.new_empty(self.shapes[0].num_rows, logits.shape[1])
        self._logits[: len(logits)].copy_(logits)


def tree_shapes(max_sequences: int, max_num_nodes: int, max_rows: int) -> list[TreeShape]:
    """What is captured, the largest first: for each number of sequences those numbers of rows that
    no smaller one has and that it can come to."""
    shapes: list[TreeShape] = []
    fewer = 0
    rows = sorted({min(count, max_rows) for count in _ROWS})
    for num_sequences in sorted({min(count, max_sequences) for count in _SEQUENCES}):
        before = 0
        for num_rows in rows:
            if num_rows > fewer and before < num_sequences * max_num_nodes:
                shapes.append(TreeShape(num_sequences, num_rows))
            before = num_rows
        fewer = num_sequences
    return sorted(shapes, key=lambda shape: (shape.num_rows, shape.num_sequences), reverse=True)


def max_exact_trees(shape: DecoderShape, max_num_nodes: int, context_window: int) -> int:
    """Sequences of an exact step up to which its parts (gpu/attention_plan.py: one for every 512
    positions that a sequence may have) fit into `_MAX_EXACT_PART_BYTES`."""
    num_programs = -(-shape.num_heads // shape.num_kv_heads * max_num_nodes // _EXACT_ROWS)
    num_splits = -(-context_window // _SPLIT_POSITIONS)
    tile_bytes = _EXACT_ROWS * shape.head_dim * 4
    return _MAX_EXACT_PART_BYTES // (shape.num_kv_heads * num_programs * num_splits * tile_bytes)


def reserved_bytes(
    max_rows: int, *, vocab_size: int, hidden_size: int, intermediate_size: int, element_bytes: int
) -> int:
    """What graphs of so many rows take on the device, at most: their logits twice (once where they
    are computed), and what lies between two layers and within one."""
    num_rows = min(max_rows, _ROWS[-1])
    numbers = 2 * vocab_size + 4 * hidden_size + 4 * intermediate_size
    return num_rows * numbers * element_bytes
