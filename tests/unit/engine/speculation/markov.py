"""MarkovModel: a LoadedModel whose next token depends on the last two, by a table, read from the KV
blocks as FakeModel's, and which keeps hidden states for draft heads; and Tally: whether tokens are
distributed as they should be."""

from __future__ import annotations

import math
from collections.abc import Hashable

import numpy as np
import torch
from numpy.typing import NDArray

from engine.batch import Batch
from engine.models.interface import Ends
from engine.testing.fake_model import FakeModel

Table = NDArray[np.float64]
"""[V, V], a distribution for each `context`."""

HIDDEN_SIZE = 8


def context(before: int, last: int, vocab_size: int) -> int:
    """What the next token depends on; after one token, that one twice."""
    return (before + last) % vocab_size


class MarkovModel(FakeModel):
    """See the module.

    Args:
        table: with no zeros.
    """

    def __init__(self, table: Table, *, context_window: int = 256) -> None:
        super().__init__(vocab_size=len(table), context_window=context_window, block_size=8)
        self.table = table
        self._logits_of = torch.from_numpy(np.log(table).astype(np.float32))
        numbers = torch.Generator().manual_seed(1)
        self._hidden_of = torch.randn(len(table), HIDDEN_SIZE, generator=numbers)
        self._embedding = torch.randn(len(table), HIDDEN_SIZE, generator=numbers)

    @property
    def ends(self) -> Ends:
        return Ends(
            HIDDEN_SIZE,
            embed=lambda token_ids: self._embedding[token_ids],
            head=lambda hidden: hidden @ self._hidden_of.T,
        )

    def forward(self, batch: Batch) -> torch.Tensor:
        self.num_forwards += 1
        kept = self._cells().numpy()  # [N, 2, P]: ids, positions
        size = self.layout.block_size
        wanted = set(batch.draw_indices)
        if batch.wants_every_hidden:
            wanted = set(range(len(batch.token_ids)))
        contexts: dict[int, int] = {}
        first = 0
        for span in batch.spans:
            where = [
                (span.block_ids[slot // size], slot % size) for slot in range(span.start, span.end)
            ]
            own = range(first, first + span.num_tokens)
            for (block_id, slot), index in zip(where, own, strict=True):
                kept[block_id, 0, slot] = batch.token_ids[index]
            for index in own:
                if index in wanted:
                    seen = [
                        int(kept[span.block_ids[slot // size], 0, slot % size])
                        for slot in span.slots_seen(index - first)[-2:]
                    ]
                    contexts[index] = context(seen[0], seen[-1], len(self.table))
            first += span.num_tokens
        drawn = [contexts[index] for index in batch.draw_indices]
        self.kept_hidden = self._hidden_of[drawn] if batch.wants_hidden else None
        self.kept_every_hidden = None
        if batch.wants_every_hidden:
            self.kept_every_hidden = self._hidden_of[[contexts[index] for index in sorted(wanted)]]
        return self._logits_of[drawn]


def random_table(rng: np.random.Generator, vocab_size: int, spread: float) -> Table:
    """Each distribution is Dirichlet's, mixed with the uniform one.

    Args:
        spread: the smaller, the more uneven.
    """
    drawn = rng.dirichlet(np.full(vocab_size, spread), vocab_size)
    return 0.85 * drawn + 0.15 / vocab_size


class Tally:
    """Tokens against the distributions that they should have been drawn from, which may differ from
    one to the next: in each group, what came less what was expected, in units of its covariance,
    sums up to a chi-square (a martingale's central limit: a distribution may depend on all that
    came before)."""

    def __init__(self, vocab_size: int) -> None:
        self._size = vocab_size
        self._off: dict[Hashable, NDArray[np.float64]] = {}
        self._covariance: dict[Hashable, NDArray[np.float64]] = {}
        self.num_tokens = 0

    def add(self, group: Hashable, token_id: int, expected: NDArray[np.float64]) -> None:
        """One token."""
        assert expected[token_id] > 0.0, "a token that cannot be drawn"
        if group not in self._off:
            self._off[group] = np.zeros(self._size)
            self._covariance[group] = np.zeros((self._size, self._size))
        self._off[group] -= expected
        self._off[group][token_id] += 1.0
        self._covariance[group] += np.diag(expected) - np.outer(expected, expected)
        self.num_tokens += 1

    def likelihood(self) -> float:
        """Of tokens at least as far off, if all is well (Wilson and Hilferty, 1931). Only what is
        spread enough to be normal counts: directions with a variance of 8 and more."""
        statistic, freedom = 0.0, 0
        for group, off in self._off.items():
            variances, directions = np.linalg.eigh(self._covariance[group])
            is_spread = variances >= 8.0
            along = (directions.T @ off)[is_spread]
            statistic += float((along * along / variances[is_spread]).sum())
            freedom += int(is_spread.sum())
        assert freedom > 0, "too few tokens to say anything"
        cube = (statistic / freedom) ** (1 / 3)
        z = (cube - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
        return 0.5 * math.erfc(z / math.sqrt(2))
