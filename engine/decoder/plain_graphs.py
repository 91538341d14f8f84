"""PlainGraphs: the CUDA graphs of plain steps: steps without draft tokens (step_graphs.py), steps
that verify draft tokens (tree_graphs.py), and, for a step with both, first its long chunks of
prompts and then the rest. A step is split only if no graph computes it as a whole. It knows no
requests. Engine thread only."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from engine.batch import Batch
from engine.decoder.graph_set import GraphMemory
from engine.decoder.step_graphs import StepGraphs, max_chunk_tokens
from engine.decoder.tree_graphs import TreeGraphs, max_exact_trees
from engine.kv.memory import KvMemory

if TYPE_CHECKING:
    from engine.models.llama import LlamaConfig, LlamaDecoder

logger = logging.getLogger(__name__)


class PlainGraphs:
    """The CUDA graphs of plain steps.

    Args: trees: the graphs that verify draft tokens; None: there is no speculation.
    Attributes: num_missed: number of steps with draft tokens that no graph computed.
    """

    def __init__(self, steps: StepGraphs, trees: TreeGraphs | None = None) -> None:
        self.num_missed = 0
        self._steps = steps
        self._trees = trees

    @property
    def num_shapes(self) -> int:
        """Number of graphs that `capture` makes: one for each shape."""
        return len(self._steps.shapes) + (0 if self._trees is None else len(self._trees.shapes))

    @property
    def num_words(self) -> int:
        """Largest number of int32 that a step of `run` copies to the device."""
        return self._steps.num_words

    def reserve(self) -> None:
        """Allocate the pinned memory of the largest step; called after `capture`."""
        self._steps.reserve()

    def capture(
        self,
        *,
        memory: GraphMemory | None = None,
        on_captured: Callable[[], None] | None = None,
    ) -> None:
        """Capture all graphs (GraphSet.capture)."""
        if self._trees is not None:
            self._trees.capture(memory=memory, on_captured=on_captured)
        self._steps.capture(memory=memory, on_captured=on_captured)

    def forget(self) -> None:
        """Free the graphs (GraphSet.forget)."""
        self._steps.forget()
        if self._trees is not None:
            self._trees.forget()

    def takes(self, batch: Batch) -> bool:
        """Whether `verify` or `run` computes the step with one graph. False for a step with draft
        tokens and long chunks, which may need two."""
        is_verifying = self._trees is not None and _verifies(batch)
        graphs = self._trees if is_verifying else self._steps
        return graphs is not None and graphs.shape_of(batch) is not None

    def verify(self, batch: Batch) -> torch.Tensor | None:
        """Compute a step that verifies draft tokens, if every sequence has few rows. Returns:
        logits [R, V], valid until the next step; None if no graph computes it."""
        if self._trees is None or not _verifies(batch):
            return None
        shape = self._trees.shape_of(batch)
        return None if shape is None else self._trees.run(shape, batch)

    @torch.inference_mode()
    def run(self, batch: Batch, drawn: torch.Tensor | None = None) -> torch.Tensor | None:
        """Compute a step that `verify` does not. Returns: logits [R, V] of its `draw_indices`,
        valid until the next step; None if no graph computes it.

        Args:
            batch: in the order of `singles_first`.
            drawn: tokens of the launch before, for fill_drawn; not with draft tokens.
        """
        if self._trees is not None and _verifies(batch):
            logits = self._run_both(self._trees, batch)
            if logits is None:
                self._miss(batch)
            return logits
        shape = self._steps.shape_of(batch)
        return None if shape is None else self._steps.run(shape, batch, drawn)

    def _run_both(self, trees: TreeGraphs, batch: Batch) -> torch.Tensor | None:
        is_long = [span.num_tokens > trees.max_num_nodes for span in batch.spans]
        if not any(is_long):  # a long sequence was cut, or nobody takes it
            shape = trees.shape_of(batch)
            return None if shape is None else trees.run(shape, batch)
        if any(span.branches for span, long in zip(batch.spans, is_long, strict=True) if long):
            return None
        if all(is_long):
            only = self._steps.shape_of(batch)
            return None if only is None else self._steps.run(only, batch)
        chunks, chunk_draws = part(batch, is_long)
        others, other_draws = part(batch, [not long for long in is_long])
        chunk_shape, shape = self._steps.shape_of(chunks), trees.shape_of(others)
        if chunk_shape is None or shape is None:
            return None
        found = (self._steps.run(chunk_shape, chunks), trees.run(shape, others))
        order = [0] * len(batch.draw_indices)
        for row, draw in enumerate((*chunk_draws, *other_draws)):
            order[draw] = row
        logits = torch.cat(found)
        return logits.index_select(0, torch.tensor(order).to(logits.device))

    def _miss(self, batch: Batch) -> None:
        if not self.num_missed:
            logger.warning(
                "guesses: a step of %d tokens of %d sequences fits no CUDA graph: it and others "
                "like it take longer. Less speculation.max_num_nodes, or fewer max_num_running",
                len(batch.token_ids),
                len(batch.spans),
            )
        self.num_missed += 1


def _verifies(batch: Batch) -> bool:
    """Return whether some sequence has several rows of logits, or a tree."""
    return len(batch.draw_indices) > len(batch.spans) or any(span.branches for span in batch.spans)


def part(batch: Batch, is_in: Sequence[bool]) -> tuple[Batch, list[int]]:
    """Return some of a step's spans as a step of their own, and the indices of its `draw_indices`
    in the whole step's.

    Args: is_in: whether each span is included.
    """
    ends = list(itertools.accumulate(span.num_tokens for span in batch.spans))
    token_ids: list[int] = []
    places: dict[int, int] = {}
    for span, end, taken in zip(batch.spans, ends, is_in, strict=True):
        if taken:
            rows = range(end - span.num_tokens, end)
            places.update(zip(rows, itertools.count(len(token_ids)), strict=False))
            token_ids += batch.token_ids[rows.start : rows.stop]
    draws = [at for at, row in enumerate(batch.draw_indices) if row in places]
    own = Batch(
        tuple(token_ids),
        tuple(itertools.compress(batch.spans, is_in)),
        tuple(places[batch.draw_indices[at]] for at in draws),
    )
    return own, draws


def make_plain_graphs(
    decoder: LlamaDecoder,
    memory: KvMemory,
    *,
    max_rows: int,
    max_tokens: int,
    context_window: int,
    max_num_nodes: int = 0,
) -> PlainGraphs | None:
    """Create the graphs of a decoder that is attached to `memory`, whose blocks store the compute
    dtype; None on CPU.

    Args:
        max_rows: largest number of sequences of a step.
        max_tokens: largest number of tokens of a step.
        max_num_nodes: largest number of draft tokens of one sequence in one step; 0: no
            speculation.
    """
    device, block_size = memory.cache.device, memory.layout.block_size
    if device.type != "cuda":
        return None
    most = min(max_tokens, max_chunk_tokens(num_multiplied(decoder.shape)))
    steps = StepGraphs(
        decoder.forward,
        max_singles=max_rows,
        max_tokens=most,
        context_window=context_window,
        block_size=block_size,
        device=device,
    )
    trees = None
    if max_num_nodes:
        max_trees = None
        if decoder.is_exact:
            max_trees = max_exact_trees(decoder.shape, 1 + max_num_nodes, context_window)
        trees = TreeGraphs(
            decoder.forward,
            max_sequences=max_rows,
            max_num_nodes=1 + max_num_nodes,
            max_rows=most,
            context_window=context_window,
            block_size=block_size,
            device=device,
            max_trees=max_trees,
        )
    return PlainGraphs(steps, trees)


def num_multiplied(shape: LlamaConfig) -> int:
    """Return the number of parameters that every token is multiplied with; the embedding and the LM
    head are used for few rows."""
    few = shape.vocab_size * shape.hidden_size
    return shape.num_parameters - few * (1 if shape.is_tied else 2)
