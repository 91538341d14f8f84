"""DecodeInputs and MixedInputs: the integers of one forward pass as tensors on the device, made
from a Batch by one packed copy.

A row of a step is a token; a sequence is one span of the step, or a part of it (tree_inputs.py).
They know no weights and no KV. Invariant: entries of a block table beyond a sequence's own blocks
are valid block ids that are never used; a position of -1 is a row that writes no KV. Engine thread
only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from baton_kernels.lora import LoraRows

from engine.batch import Batch, TokenSpan
from engine.decoder.int32_arrays import int32s, table_of
from engine.decoder.tree_inputs import TreeInputs, as_lines, cut_trunks, tree_parts

_ALIGNMENT = 16
"""Number of int32 (64 bytes) to which each part of the packed copy is aligned, so that kernels
compiled for aligned pointers serve every step."""
_TABLE_STEP = 16
"""Multiple to which the width of block tables is padded, so that kernels compiled for one stride
serve many steps."""


@dataclass(frozen=True)
class DecodeInputs:
    """A step of one token for each sequence. Row i is sequence i's."""

    token_ids: torch.Tensor
    """[B] int32, the tokens."""

    positions: torch.Tensor
    """[B] int32, the position of each token; -1: padding, which reads and writes no KV."""

    block_tables: torch.Tensor
    """[B, n] int32, the blocks of each sequence."""

    adapted: LoraRows | None = None
    """The rows that have adapters, by slot; None: no row has one."""

    @property
    def num_rows(self) -> int:
        return self.token_ids.shape[0]


@dataclass(frozen=True)
class MixedInputs:
    """A step of any number of tokens for each sequence. Sequences of one token (singles) come
    first, so that they are attended together; then chunks; then token trees."""

    token_ids: torch.Tensor
    """[T] int32, sequence after sequence."""

    positions: torch.Tensor
    """[T] int32, the position of each token; -1: it writes no KV (a warm-up)."""

    sequence_ids: torch.Tensor
    """[T] int32, the sequence of each row."""

    block_tables: torch.Tensor
    """[B, n] int32, the blocks of all sequences."""

    ends: torch.Tensor
    """[num_singles] int32, the number of tokens of each single's sequence, with this step's; 0: a
    warm-up's."""

    query_starts: torch.Tensor
    """[C + 1] int32, the first row of each chunk, counted from the first chunk's, and the number of
    their rows."""

    starts: torch.Tensor
    """[C] int32, the number of cached tokens of each chunk's sequence before this step."""

    draw_indices: torch.Tensor | None
    """[R] int32, the rows whose logits are computed, in their order; None: all rows."""

    num_singles: int

    max_query_len: int
    """Largest number of tokens of one chunk; 0 without chunks."""

    max_end: int
    """Upper bound of the number of tokens of one chunk's sequence; 0 without chunks."""

    slots: torch.Tensor | None = None
    """[T] int32, the slot of each row's KV in its sequence; None: equal to its position, as without
    trees."""

    trees: TreeInputs | None = None
    """The token trees, which are the last rows and the last sequences; None without trees."""

    logits: torch.Tensor | None = None
    """[R, V], a buffer that the LM head's product may use for its result; None: none."""

    @property
    def num_rows(self) -> int:
        return self.token_ids.shape[0]

    @property
    def num_draws(self) -> int:
        return self.num_rows if self.draw_indices is None else self.draw_indices.shape[0]

    @property
    def num_nodes(self) -> int:
        """Number of rows of trees."""
        return 0 if self.trees is None else self.trees.num_nodes

    @property
    def num_trees(self) -> int:
        """Number of sequences that are trees."""
        return 0 if self.trees is None else self.trees.num_sequences


def singles_first(batch: Batch) -> Batch:
    """Reorder a step: spans of one token first, then chunks, then trees, each split from the tokens
    before it (`cut_trunks`). `draw_indices` keep their order, and may not be ascending then."""
    batch = cut_trunks(batch)
    counts = _column(span.num_tokens for span in batch.spans)
    kinds = (counts > 1) + _column(len(span.branches) > 0 for span in batch.spans)
    order = np.argsort(kinds, kind="stable")
    if (order[:-1] < order[1:]).all():
        return batch
    firsts = _begins(counts)
    # Row by row of the new order: where the row was.
    rows = np.arange(counts.sum()) + np.repeat(
        firsts[order] - _begins(counts[order]), counts[order]
    )
    places = np.empty_like(rows)
    places[rows] = np.arange(len(rows))
    return replace(
        batch,
        token_ids=tuple(_column(batch.token_ids)[rows].tolist()),
        spans=tuple(batch.spans[index] for index in order),
        draw_indices=tuple(places[_column(batch.draw_indices)].tolist()),
    )


def attending_inputs(
    batch: Batch, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the inputs of a step with another attention than the kernels': token ids [T],
    positions [T] (-1 in a warm-up, which may be longer than any request), and `draw_indices`
    [R]; int32."""
    positions = [
        position
        for span in batch.spans
        for position in (span.positions if span.block_ids else [-1] * span.num_tokens)
    ]
    parts = {"token_ids": batch.token_ids, "positions": positions, "draws": batch.draw_indices}
    brought = _copy({name: _column(values) for name, values in parts.items()}, device)
    return brought["token_ids"], brought["positions"], brought["draws"]


def mixed_inputs(
    batch: Batch, device: torch.device, drawn: torch.Tensor | None = None
) -> MixedInputs:
    """Build the tensors of a step.

    Args:
        batch: spans of one token first, trees last (`singles_first`).
        drawn: tokens of the launch before, for fill_drawn; None: all token ids are valid.
    Raises: ValueError for a batch in another order.
    """
    spans = batch.spans
    counts = _column(span.num_tokens for span in spans)
    starts = _column(span.start for span in spans)
    num_singles = int((counts == 1).sum())
    if not (counts[:num_singles] == 1).all():
        raise ValueError("batch: its spans of one token do not come first")
    trees = [span for span in spans if span.branches]
    num_chunks = len(spans) - num_singles - len(trees)
    if any(span.branches for span in spans[: len(spans) - len(trees)]):
        raise ValueError("batch: its trees do not come last")
    firsts = np.zeros(len(spans) + 1, dtype=np.int32)
    np.cumsum(counts, out=firsts[1:])
    sequence_ids = np.repeat(np.arange(len(spans), dtype=np.int32), counts)
    positions = np.arange(len(sequence_ids), dtype=np.int32) + (starts - firsts[:-1])[sequence_ids]
    is_warm_up = _column(not span.block_ids for span in spans).astype(bool)
    positions[is_warm_up[sequence_ids]] = -1
    parts = {
        "token_ids": int32s(batch.token_ids),
        "positions": positions,
        "sequence_ids": sequence_ids,
        "block_tables": _table(spans),
        "ends": positions[:num_singles] + 1,
        "query_starts": firsts[num_singles : num_singles + num_chunks + 1] - num_singles,
        "starts": starts[num_singles : num_singles + num_chunks],
        "draw_indices": _column(batch.draw_indices),
    }
    chunks = spans[num_singles : num_singles + num_chunks]
    if trees:
        of_trees = tree_parts(trees)
        parts["slots"] = positions.copy()
        first_node = len(positions) - len(of_trees["depths"])
        roots = np.repeat(of_trees["num_cached"], counts[num_singles + num_chunks :])
        positions[first_node:] = roots + of_trees["depths"]
        parts |= of_trees
    brought = _copy(parts, device)
    if drawn is not None:
        fill_drawn(brought["token_ids"], drawn)
    found = None
    if trees:
        num_cached, node_starts, depths, visible = (brought.pop(name) for name in of_trees)
        found = TreeInputs(
            num_cached,
            node_starts,
            depths,
            as_lines(visible, len(depths)),
            max(span.num_tokens for span in trees),
        )
    return MixedInputs(
        **brought,
        trees=found,
        num_singles=num_singles,
        max_query_len=max((span.num_tokens for span in chunks), default=0),
        max_end=max((span.end for span in chunks), default=0),
    )


def fill_drawn(token_ids: torch.Tensor, drawn: torch.Tensor) -> None:
    """Replace placeholders by tokens of the launch before, in place, without waiting.

    Args:
        token_ids: [T] int32; -1 - i is the placeholder of drawn[i].
        drawn: [R] int32, on the same device.
    """
    places = (-1 - token_ids).clamp_(min=0)
    token_ids.copy_(torch.where(token_ids < 0, drawn.index_select(0, places), token_ids))


def _begins(counts: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """Return the start of each of several consecutive runs of these lengths."""
    return np.cumsum(counts) - counts


def _column(values: Iterable[int]) -> npt.NDArray[np.int32]:
    return np.fromiter(values, dtype=np.int32)


def _table(spans: Sequence[TokenSpan]) -> npt.NDArray[np.int32]:
    """Build the block table [B, n], with 0 after a span's last block. It is wide enough for a
    warm-up's tokens, whose entries kernels read."""
    width = max((len(span.block_ids) or span.num_tokens for span in spans), default=0)
    width = max(1, -(-width // _TABLE_STEP)) * _TABLE_STEP
    table = np.zeros((len(spans), width), dtype=np.int32)
    for row, span in zip(table, spans, strict=True):
        row[: len(span.block_ids)] = table_of(span.block_ids)
    return table


def _copy(parts: dict[str, npt.NDArray[np.int32]], device: torch.device) -> dict[str, torch.Tensor]:
    """Copy all parts to the device at once, from pinned memory with CUDA."""
    firsts: dict[str, int] = {}
    total = 0
    for name, part in parts.items():
        firsts[name] = total
        total += -(-part.size // _ALIGNMENT) * _ALIGNMENT
    is_cuda = device.type == "cuda"
    host = torch.empty(total, dtype=torch.int32, pin_memory=is_cuda)
    view = host.numpy()
    for name, part in parts.items():
        view[firsts[name] : firsts[name] + part.size] = part.reshape(-1)
    packed = host.to(device, non_blocking=True) if is_cuda else host
    return {
        name: packed[firsts[name] : firsts[name] + part.size].view(part.shape)
        for name, part in parts.items()
    }
