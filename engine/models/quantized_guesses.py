"""SpanGuesses: what the guessed tokens of a span see of a quantized cache.

A guess sees what any token at its position would on its own path: earlier blocks as quantized, its
own as computed. A block that a path fills has other numbers on each path, so each such version is
quantized beside the cache, and seen by what hangs on the guess that fills it. Nothing is stored of
a guess but its numbers, in slots of its own (engine/kv/tails.py).

Columns behind those of the tokens before: the guesses themselves, then the versions, `size` each.
"""

from __future__ import annotations

import numpy as np
import torch

from engine.batch import Span


class SpanGuesses:
    """See the module. For one span and one forward pass.

    Args:
        first_computed: position of the first token whose numbers are known as computed: of a
            block's first.
    """

    def __init__(self, span: Span, size: int, first_computed: int, device: torch.device) -> None:
        self.num_nodes = len(span.branches)
        self._device = device
        parents = span.branches
        is_path = np.eye(self.num_nodes, dtype=bool)  # [node, itself or what is above it]
        for node, parent in enumerate(parents):
            if parent >= 0:
                is_path[node] |= is_path[parent]
        positions = np.array(span.positions[-self.num_nodes :])
        blocks = positions // size
        has_children = np.isin(np.arange(self.num_nodes), parents)
        fillers = np.flatnonzero((positions % size == size - 1) & has_children)
        sees_nodes = is_path & (blocks[:, None] == blocks[None, :])
        sees_versions = (is_path & ~np.eye(self.num_nodes, dtype=bool))[:, fillers].repeat(size, 1)
        self._sees = np.concatenate((sees_nodes, sees_versions), axis=1)
        inside = (blocks[fillers] * size)[:, None] + np.arange(size)  # [versions, P] positions
        self._positions = np.concatenate((positions, inside.reshape(-1)))
        trunk_end = span.end - self.num_nodes
        # Where the numbers of a version's tokens lie among those that are known as computed.
        places = inside - first_computed
        for row, filler in enumerate(fillers):
            own = np.flatnonzero(sees_nodes[filler])
            places[row, positions[own] % size] = trunk_end - first_computed + own
        self.num_versions = len(fillers)
        self._places = torch.from_numpy(places.reshape(-1)).to(device)

    def versions(self, computed: torch.Tensor) -> torch.Tensor:
        """[K, S, D] from `first_computed` on, the guesses the last -> [K, versions, P, D]."""
        num_heads, _, dim = computed.shape
        picked = computed.index_select(1, self._places)
        return picked.view(num_heads, self.num_versions, -1, dim)

    def visible(self, num_tokens: int, window: int | None, positions: torch.Tensor) -> torch.Tensor:
        """[T, N + versions * P] bool: which of the columns each token of the span sees.

        Args:
            num_tokens: of the span, T.
            positions: [T] of its tokens.
        """
        visible = torch.zeros(
            (num_tokens, self._sees.shape[1]), dtype=torch.bool, device=self._device
        )
        visible[num_tokens - self.num_nodes :] = torch.from_numpy(self._sees).to(self._device)
        if window is not None:
            columns = torch.from_numpy(self._positions).to(self._device)
            visible &= columns[None, :] > positions[:, None] - window
        return visible
