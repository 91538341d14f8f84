"""TreeInputs: the part of a step in which tokens see their own branch alone, as tensors; and how a
Batch is cut for it.

A node is a token of such a sequence; its key and value lie in the next slot, whatever its position
is. A sequence of one token, and one path, are trees, too. Knows no weights and no KV. Pure; any
thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from engine.batch import Batch, Span

_NODE_STEP = 16
"""Lines of `visible` are padded to a multiple: kernels compiled for one stride serve many."""


@dataclass(frozen=True)
class TreeInputs:
    """The last rows of a step: its nodes. See baton_kernels.attention.tree_attention."""

    num_cached: torch.Tensor
    """[S] int32: slots before each sequence's first node."""

    node_starts: torch.Tensor
    """[S + 1] int32: where each one's nodes begin, counted from the first node."""

    depths: torch.Tensor
    """[N] int32: of each node's position from its sequence's first one's."""

    visible: torch.Tensor
    """[N, W] bool: which nodes of its sequence each sees."""

    max_num_nodes: int
    """No sequence has more; at most W."""

    @property
    def num_nodes(self) -> int:
        """Rows, those of padding included."""
        return self.depths.shape[0]

    @property
    def num_sequences(self) -> int:
        """Those that are not there included."""
        return self.num_cached.shape[0]


class Topology(NamedTuple):
    """What a span's tokens are to one another."""

    depths: NDArray[np.int32]
    """[n], 0 for the first token."""

    visible: NDArray[np.bool_]
    """[n, n]: row i: which tokens of the span its token i sees, itself included."""


@lru_cache(maxsize=1024)
def topology(num_tokens: int, branches: tuple[int, ...]) -> Topology:
    """Of a span (`Span.branches`). Not to be written to: it is remembered."""
    trunk = num_tokens - len(branches)
    depths = np.arange(num_tokens, dtype=np.int32)
    visible = np.tri(num_tokens, dtype=np.bool_)
    for node, parent in enumerate(branches, trunk):
        above = trunk + parent
        depths[node] = depths[above] + 1
        visible[node] = visible[above]
        visible[node, node] = True
    return Topology(depths, visible)


def cut_trunks(batch: Batch) -> Batch:
    """The same rows, with every tree a span of its own that begins with the one token which all its
    nodes follow: what lies before it is a chunk like any other. One path is a chunk, too."""
    if not any(span.branches for span in batch.spans):
        return batch
    spans: list[Span] = []
    for span in batch.spans:
        trunk = span.num_tokens - len(span.branches)
        if not span.is_tree:
            spans.append(span._replace(branches=()))
        elif trunk == 1:
            spans.append(span)
        else:
            first = span.start + trunk - 1
            spans.append(span._replace(num_tokens=trunk - 1, branches=()))
            spans.append(span._replace(start=first, num_tokens=1 + len(span.branches)))
    return replace(batch, spans=tuple(spans))


def width_of(max_num_nodes: int) -> int:
    """Of the lines of `visible`."""
    return -(-max_num_nodes // _NODE_STEP) * _NODE_STEP


def tree_parts(spans: Sequence[Span]) -> dict[str, NDArray[np.int32]]:
    """The tensors of TreeInputs, int32, by name; `visible` as bytes, four to a number.

    Args:
        spans: in the order of their rows.
    """
    counts = [span.num_tokens for span in spans]
    width = width_of(max(counts, default=1))
    depths = np.empty(sum(counts), dtype=np.int32)
    visible = np.zeros((len(depths), width), dtype=np.bool_)
    put_nodes(spans, depths, visible)
    node_starts = np.zeros(len(spans) + 1, dtype=np.int32)
    np.cumsum(counts, out=node_starts[1:])
    return {
        "num_cached": np.array([span.start for span in spans], dtype=np.int32),
        "node_starts": node_starts,
        "depths": depths,
        "visible": visible.view(np.int32),
    }


def put_nodes(spans: Sequence[Span], depths: NDArray[np.int32], visible: NDArray[np.bool_]) -> None:
    """Fill the first rows of `depths` [N] and `visible` [N, W], which is False."""
    row = 0
    for span in spans:
        end = row + span.num_tokens
        own = topology(span.num_tokens, span.branches)
        depths[row:end] = own.depths
        visible[row:end, : span.num_tokens] = own.visible
        row = end


def as_lines(words: torch.Tensor, num_nodes: int) -> torch.Tensor:
    """`visible` [N, W] of its bytes: int32, dense."""
    return words.reshape(-1).view(torch.uint8).view(torch.bool).view(num_nodes, -1)
