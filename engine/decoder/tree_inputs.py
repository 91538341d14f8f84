"""TreeInputs: the token trees of a step as tensors; and the splitting of a Batch into them. A node
is a token of a tree; its KV is written to the next slot, whatever its position is. A sequence of
one token, and a single path, are trees, too.

They know no weights and no KV. Pure; any thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from engine.batch import Batch, TokenSpan

_NODE_STEP = 16
"""Multiple to which rows of `visible` are padded, so that kernels compiled for one stride serve
many steps."""


@dataclass(frozen=True)
class TreeInputs:
    """The nodes of a step, which are its last rows, as arguments of
    baton_kernels.attention.tree_attention."""

    num_cached: torch.Tensor
    """[S] int32, the number of slots before each sequence's first node."""

    node_starts: torch.Tensor
    """[S + 1] int32, the first node of each sequence, counted from the first node of all, and the
    number of nodes."""

    depths: torch.Tensor
    """[N] int32, each node's position minus that of its sequence's first node."""

    visible: torch.Tensor
    """[N, W] bool, the nodes of its sequence that each node attends to."""

    max_num_nodes: int
    """Largest number of nodes of a sequence; at most W."""

    @property
    def num_nodes(self) -> int:
        """Number of rows, padding included."""
        return self.depths.shape[0]

    @property
    def num_sequences(self) -> int:
        """Number of sequences, missing ones of a padded step included."""
        return self.num_cached.shape[0]


class Topology(NamedTuple):
    """The relations between a span's tokens."""

    depths: NDArray[np.int32]
    """[n], the depth of each token; 0 for the first."""

    visible: NDArray[np.bool_]
    """[n, n], the tokens of the span that each token attends to, itself included."""


@lru_cache(maxsize=1024)
def topology(num_tokens: int, branches: tuple[int, ...]) -> Topology:
    """Return the topology of a span (`TokenSpan.branches`): cached, it must not be changed."""
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
    """Split every tree off into a span of its own that begins with the one token that all its nodes
    follow; the tokens before it become a chunk. A single path is a chunk, too."""
    if not any(span.branches for span in batch.spans):
        return batch
    spans: list[TokenSpan] = []
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
    """Return the width of `visible` for this number of nodes."""
    return -(-max_num_nodes // _NODE_STEP) * _NODE_STEP


def tree_parts(spans: Sequence[TokenSpan]) -> dict[str, NDArray[np.int32]]:
    """Build the tensors of TreeInputs as int32 arrays by name; `visible` as bytes, four to an
    int32.

    Args: spans: in the order of their rows.
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


def put_nodes(
    spans: Sequence[TokenSpan], depths: NDArray[np.int32], visible: NDArray[np.bool_]
) -> None:
    """Fill the first rows of `depths` [N] and `visible` [N, W], which must be False at first."""
    row = 0
    for span in spans:
        end = row + span.num_tokens
        own = topology(span.num_tokens, span.branches)
        depths[row:end] = own.depths
        visible[row:end, : span.num_tokens] = own.visible
        row = end


def as_lines(words: torch.Tensor, num_nodes: int) -> torch.Tensor:
    """Convert dense int32 words of bytes to `visible` [N, W]."""
    return words.reshape(-1).view(torch.uint8).view(torch.bool).view(num_nodes, -1)
