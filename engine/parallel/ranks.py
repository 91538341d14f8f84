"""Ranks: the Protocol of a decoder's communication with the ranks that compute the rest of the same
model; and OneRank, for a model that is not split. engine/parallel/distributed_ranks.py implements
it for several ranks.

All ranks make the same calls in the same order, with tensors of the same shapes; each device's
current stream orders its work. No call waits for the device. They know no model and no batch.
Engine thread (in other ranks: the main one).
"""

from __future__ import annotations

from typing import Protocol

import torch

from engine.parallel.rank_grid import SINGLE, RankPlace


class Ranks(Protocol):
    """Protocol of the communication with the other ranks. Every call raises RankFailed if another
    rank has ended or is too late."""

    @property
    def place(self) -> RankPlace:
        """The part of the model that this rank computes."""
        ...

    @property
    def rank(self) -> int:
        """Index among the ranks that share layers; only 0 adds residuals and biases to its part of
        a sum."""
        ...

    def add_up(self, partial: torch.Tensor) -> torch.Tensor:
        """Sum over the shares of this stage, in place: after the output and the down projection.

        Args: partial: [T, N] contiguous, of the model's dtype.
        Returns: `partial`, with the same bits at every share.
        """
        ...

    def join_columns(self, part: torch.Tensor) -> torch.Tensor:
        """Concatenate the shares' logits, of entries `place.part(V)` of the vocabulary each: [R, V
        / num_shares] -> [R, V] at every share of the last stage."""
        ...

    def receive(self, hidden: torch.Tensor) -> None:
        """Fill `hidden` [T, N] with the output of the stage before: hidden states with the residual
        added. Not called in the first stage."""
        ...

    def send(self, hidden: torch.Tensor) -> None:
        """Send `hidden` [T, N], contiguous, to the stage after; it must not change before the next
        call returns. Not called in the last stage."""
        ...

    def pass_tokens(self, token_ids: torch.Tensor) -> None:
        """Send `token_ids` [B] int32 of the last stage to the first one, in place; those of other
        stages are not changed. Called in every stage."""
        ...


class OneRank:
    """The Ranks of a model that one rank computes: sums and copies are the identity."""

    @property
    def place(self) -> RankPlace:
        return SINGLE

    @property
    def rank(self) -> int:
        return 0

    def add_up(self, partial: torch.Tensor) -> torch.Tensor:
        return partial

    def join_columns(self, part: torch.Tensor) -> torch.Tensor:
        return part

    def receive(self, hidden: torch.Tensor) -> None:
        raise AssertionError(f"one rank has no stage before it ({list(hidden.shape)})")

    def send(self, hidden: torch.Tensor) -> None:
        raise AssertionError(f"one rank has no stage after it ({list(hidden.shape)})")

    def pass_tokens(self, token_ids: torch.Tensor) -> None:
        """Do nothing: the tokens are here already."""
