"""TreeGraphs: the CUDA graphs of steps that verify draft tokens: every sequence has a few rows, one
if it has no draft tokens, each with logits.

A step is padded to one of a few shapes: a number of sequences and a number of rows in all; the
sequence of each row, and the rows that it attends to, are written by the host (tree_words.py) and
copied by the graph itself, since a separate copy would take the host longer than the graph's
launch. Padding has position -1 and belongs to no sequence: it writes no KV, and its results are not
read. A step that fits no shape is not computed here. It knows no requests. Invariant: a capture
writes no KV. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from baton_kernels.attention_plan import EXACT_ROWS, SPLIT_POSITIONS

from engine.batch import Batch
from engine.decoder.graph_set import GraphMemory, GraphSet
from engine.decoder.inputs import MixedInputs
from engine.decoder.row_table import aligned
from engine.decoder.tree_inputs import TreeInputs, as_lines
from engine.decoder.tree_words import TreeShape as TreeShape
from engine.decoder.tree_words import TreeWords
from engine.errors import IntegrityError

if TYPE_CHECKING:
    from engine.models.llama import LlamaConfig

Forward = Callable[[MixedInputs], torch.Tensor]
"""Computes logits [R, V] of a step, and writes the tokens' KV."""

_SEQUENCES = (1, 4, 16, 64, 256, 1024)
"""Numbers of sequences of shapes, for which attention is split; a step with fewer has programs that
return at once."""

_ROWS = (
    *(16, 24, 32, 40, 48, 64, 80, 96, 128, 192, 256, 320, 384),
    *(512, 576, 640, 768, 1024),
)
"""Numbers of rows of shapes. Products of up to 16 rows cost the same; of up to 64, each row more is
read from L2 once for every 64 rows of a weight, and attention is split for the number of nodes.
A step with more rows than the last is limited by the device, not the host, and its logits need
much memory."""


_MAX_EXACT_PART_BYTES = 64 << 20


MAX_COPIED_TABLES = 16384
"""Largest number of block table words (64 KiB) that a step's graph copies, missing sequences
included. A shape with more copies the tables of its sequences before the graph."""


class TreeGraphs:
    """The CUDA graphs of steps that verify draft tokens.

    Args:
        forward: the decoder's forward pass.
        max_sequences: largest number of sequences of a step.
        max_num_nodes: largest number of rows of one sequence, its last token included.
        max_rows: largest number of rows of a step.
        max_trees: shapes of more sequences are attended as chunks and accept no tree (with the same
            bits for exact models); None: all shapes accept trees.
        uses_graphs: False: padded steps are launched kernel by kernel.
        max_copied_tables: largest number of table entries that a graph itself copies.
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
        max_copied_tables: int = MAX_COPIED_TABLES,
    ) -> None:
        self._forward = forward
        self._max_trees = max_trees
        self._max_copied_tables = max_copied_tables
        self._is_cuda = device.type == "cuda"
        self.max_num_nodes = max_num_nodes
        self.shapes = tree_shapes(max_sequences, max_num_nodes, max_rows)
        self._smallest: dict[tuple[int, int, bool], TreeShape | None] = {}
        """The smallest shape of a step, by number of sequences, number of rows, and whether it has
        no trees where that matters."""
        self._asked: tuple[Batch, TreeShape | None] | None = None
        """The batch and result of the last `shape_of`, which is called three times for each step
        while the device may be waiting."""
        self._block_size = block_size
        self._table_width = aligned(-(-context_window // block_size))
        self._host = TreeWords(
            self.shapes,
            max_num_nodes=max_num_nodes,
            table_width=self._table_width,
            device=device,
        )
        self._words = torch.zeros_like(self._host.pinned.words, device=device)
        self._graphs = GraphSet(self._compute, uses_graphs=uses_graphs and self._is_cuda)
        self._logits: torch.Tensor | None = None  # of all shapes: kept apart they would be many

    @torch.inference_mode()
    def capture(
        self,
        *,
        memory: GraphMemory | None = None,
        on_captured: Callable[[], None] | None = None,
    ) -> None:
        """Capture all graphs (GraphSet.capture)."""
        if not self.shapes:
            return
        self._graphs.capture(self._blank_shapes(), memory=memory, on_captured=on_captured)

    def _blank_shapes(self) -> Iterator[TreeShape]:
        """Iterate over the shapes; for each, a step without rows is written to its place."""
        for shape in self.shapes:
            self._host.blank(shape)
            yield shape
            if self._is_cuda:  # its run has read them
                torch.cuda.current_stream(self._words.device).synchronize()

    def forget(self) -> None:
        """Free the graphs (GraphSet.forget)."""
        self._graphs.forget()

    def shape_of(self, batch: Batch) -> TreeShape | None:
        """Return the smallest shape that a step fits; None if there is none."""
        if self._logits is None:  # nothing is captured yet
            return None
        if self._asked is None or self._asked[0] is not batch:
            self._asked = batch, self._find_shape(batch)
        return self._asked[1]

    def _find_shape(self, batch: Batch) -> TreeShape | None:
        for span in batch.spans:
            if not 0 < len(span.block_ids) <= self._table_width or span.adapter:
                return None
            if span.num_tokens > self.max_num_nodes:
                return None
        num_sequences, num_rows = len(batch.spans), len(batch.token_ids)
        takes_chunks = self._max_trees is None or not any(span.is_tree for span in batch.spans)
        size = num_sequences, num_rows, takes_chunks
        if size not in self._smallest:
            self._smallest[size] = self._smallest_of(*size)
        return self._smallest[size]

    def _smallest_of(
        self, num_sequences: int, num_rows: int, takes_chunks: bool
    ) -> TreeShape | None:
        for shape in reversed(self.shapes):
            if shape.num_rows >= num_rows and shape.num_sequences >= num_sequences:
                if takes_chunks or not self._is_of_chunks(shape):
                    return shape
        return None

    def run(self, shape: TreeShape, batch: Batch) -> torch.Tensor:
        """Compute a step. Returns: logits [R, V] of its `draw_indices`, valid until the next step.

        Args: shape: `shape_of` the batch.
        """
        self._host.put(shape, batch)
        if not self._copies_tables(shape):
            with torch.inference_mode():
                first = self._host.first_table
                self._copy(first, first + len(batch.spans) * self._table_width)
        self._graphs.run(shape)
        self._host.pinned.on_read()
        if self._logits is None:
            raise IntegrityError("a step that was not captured")
        draws = batch.draw_indices
        if draws == tuple(range(len(draws))):
            return self._logits[: len(draws)]
        rows = torch.tensor(draws, dtype=torch.int32, pin_memory=self._is_cuda)
        return self._logits.index_select(0, rows.to(self._logits.device, non_blocking=True))

    def _copies_tables(self, shape: TreeShape) -> bool:
        return shape.num_sequences * self._table_width <= self._max_copied_tables

    def _copy(self, first: int, end: int) -> None:
        """Copy words [first, end) from the host."""
        self._words[first:end].copy_(self._host.pinned.words[first:end], non_blocking=True)

    def _is_of_chunks(self, shape: TreeShape) -> bool:
        return self._max_trees is not None and shape.num_sequences > self._max_trees

    def _compute(self, shape: TreeShape) -> None:
        layout, first_table = self._host.layouts[shape], self._host.first_table
        num_copied = shape.num_sequences * self._table_width if self._copies_tables(shape) else 0
        self._copy(layout.first, first_table + num_copied)
        parts = {name: self._words[part] for name, part in layout.parts.items()}
        none = parts["num_cached"][:0]
        tables = self._words[first_table:].view(-1, self._table_width)
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
                logits=None if self._logits is None else self._logits[: shape.num_rows],
            )
        )
        if self._logits is None:  # not within a capture: a run goes before it
            self._logits = logits.new_empty(self.shapes[0].num_rows, logits.shape[1])
        if logits.data_ptr() != self._logits.data_ptr():
            self._logits[: len(logits)].copy_(logits)


def tree_shapes(max_sequences: int, max_num_nodes: int, max_rows: int) -> list[TreeShape]:
    """Return all shapes to capture, the largest first: for each number of sequences the numbers of
    rows that no smaller one has and that it can have."""
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


def max_exact_trees(shape: LlamaConfig, max_num_nodes: int, context_window: int) -> int:
    """Return the largest number of sequences of an exact step whose partial results
    (attention_plan.py: one for every 512 positions of a sequence) fit into
    `_MAX_EXACT_PART_BYTES`."""
    num_programs = -(-shape.num_heads // shape.num_kv_heads * max_num_nodes // EXACT_ROWS)
    num_splits = -(-context_window // SPLIT_POSITIONS)
    tile_bytes = EXACT_ROWS * shape.head_dim * 4
    return _MAX_EXACT_PART_BYTES // (shape.num_kv_heads * num_programs * num_splits * tile_bytes)


def reserved_bytes(
    max_rows: int, *, vocab_size: int, hidden_size: int, intermediate_size: int, element_bytes: int
) -> int:
    """Return an upper bound of the device memory of graphs of `max_rows` rows: twice their logits,
    and the activations between two layers and within one."""
    num_rows = min(max_rows, _ROWS[-1])
    numbers = 2 * vocab_size + 4 * hidden_size + 4 * intermediate_size
    return num_rows * numbers * element_bytes
